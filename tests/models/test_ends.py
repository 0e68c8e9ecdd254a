"""Several ids may end a text, whatever the method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.beam_search import beam_search
from tests.models import tiny

ENDS = (2, 5, 6)


@pytest.mark.parametrize("method", ["greedy", "sample"])
def test_a_text_goes_on_to_the_first_of_its_ends(method):
  model = tiny.create("decoder")
  variables = tiny.initialized(model)
  prompt = np.arange(1, 7, dtype=np.int32)[:, None]
  call = {"prompt": prompt, "max_length": 9, "bos_id": 1, "method": method}
  if method == "sample":
    call |= {"rng": jax.random.key(1), "temperature": 3.0}
  endless = np.asarray(models.generate(model, variables, eos_id=-1, **call)[0])
  for ends in (ENDS, [2, 5, 6], np.array(ENDS), 5, np.int32(5)):
    tokens, _ = models.generate(model, variables, eos_id=ends, **call)
    for row, free in zip(np.asarray(tokens), endless, strict=True):
      places = np.flatnonzero(np.isin(free, ends))
      length = 1 + places[0] if places.size else 9
      np.testing.assert_array_equal(row[:length], free[:length])
      assert not row[length:].any()
  # Otherwise nothing was tried.
  assert {*ENDS} & {*endless.ravel().tolist()}


def _plain(log_probs, beam_size, longest, alpha):
  """Beam search in lists; the last token alone says what comes next."""

  def penalised(score, length):
    return score / ((5 + length) / 6) ** alpha

  alive, finished = [(0.0, [0])], []
  for _ in range(longest):
    candidates = sorted(
      (
        (score + log_prob, [*ids, token])
        for score, ids in alive
        for token, log_prob in enumerate(log_probs[ids[-1]])
      ),
      reverse=True,
    )
    for score, ids in candidates[:beam_size]:
      if ids[-1] in ENDS:
        finished.append((penalised(score, len(ids) - 1), ids))
    alive = [c for c in candidates if c[1][-1] not in ENDS][:beam_size]
    if len(finished) >= beam_size:
      break
  if finished:
    return max(finished)
  score, ids = alive[0]
  return penalised(score, longest), ids


@pytest.mark.parametrize("beam_size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_beams_that_end_by_several_ids_leave_as_many_that_go_on(
  beam_size, seed
):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(7, 7))
  # At first one id goes on, and then all ends come before the next that does, which
  # leads to an end that is nearly sure.
  logits[0, [3, 2, 5, 6, 4]] = 2.0, 1.9, 1.8, 1.7, 1.6
  logits[4, 2] = 9.0
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  table = jnp.asarray(logits, jnp.float32)
  tokens, scores = beam_search(
    lambda cache, ids: (table[ids], cache),
    table[:1],
    {},
    jnp.float32(2.0),
    beam_size=beam_size,
    max_length=4,
    eos_ids=ENDS,
    pad_id=0,
  )
  score, ids = _plain(log_probs, beam_size, 4, 2.0)
  assert tokens[0].tolist() == ids[1:] + [0] * (5 - len(ids))
  assert scores[0] == pytest.approx(score, rel=1e-5)
