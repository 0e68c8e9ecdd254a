"""Decoding: equal to the forward pass, to brute force and to its own limits."""

import functools
import itertools

import chex
import jax
import numpy as np
import pytest

import models
from models import decoding
from models.beam_search import beam_search
from tests.models import tiny
from tests.refusals import assert_refused

BOS, EOS = 1, 2
IDS = {"bos_id": BOS, "eos_id": EOS}


@pytest.mark.parametrize(
  ("name", "across", "choices"),
  [
    # One of each kind, with each way of telling positions.
    ("dense", "dense", {"norm": "post", "num_layers": 2}),
    ("flash", "flash", {"position": "t5", "num_kv_heads": 1}),
    *(
      ("sliding_window", "dense", {"position": position, "num_kv_heads": 1})
      for position in ("shaw", "disentangled")
    ),
    ("performer", "linear", {"position": "rotary", "num_kv_heads": 1}),
    ("lsh", "linformer", {"position": "learned"}),
    ("latent", "additive", {"position": "none"}),
    pytest.param(
      "dense", "performer", {"position": "alibi"}, marks=pytest.mark.thorough
    ),
  ],
)
def test_decoding_equals_forward(name, across, choices):
  """Also where cross-attention has no cache of its own."""
  model = tiny.create(
    decoder_attention=tiny.attention(name),
    cross_attention=tiny.attention(across),
    **choices,
  )
  variables, batch = tiny.initialized(model), tiny.batch()
  np.testing.assert_allclose(
    tiny.step_by_step(model, variables, batch),
    tiny.forward(model, variables, batch),
    atol=1e-5,
  )


@pytest.fixture(scope="module")
def translator():
  """An untied model: at its start a tied one likes to repeat its input."""
  model = tiny.create(tie_embeddings=False)
  variables = tiny.initialized(model)
  # Larger logits, so that hypotheses differ clearly.
  params = dict(variables["params"])
  params["output_embedding"] = jax.tree.map(
    lambda table: 2.0 * table, params["output_embedding"]
  )
  return model, {**variables, "params": params}


def log_probs(model, variables, source, sequences):
  """`[B, T, V]` log-probabilities after each prefix of `sequences`."""
  batch = {"source": source, "inputs": np.asarray(sequences, np.int32)}
  return np.asarray(jax.nn.log_softmax(tiny.forward(model, variables, batch)))


def test_greedy_takes_the_likeliest_token(translator):
  model, variables = translator
  source = tiny.batch(batch_size=4)["source"]
  tokens, scores = models.generate(
    model, variables, source=source, max_length=8, **IDS
  )
  tokens = np.asarray(tokens)
  inputs = np.concatenate([np.full((4, 1), BOS), tokens[:, :-1]], axis=1)
  expected = log_probs(model, variables, source, inputs)
  for row in range(4):
    ends = np.flatnonzero(tokens[row] == EOS)
    length = ends[0] + 1 if ends.size else 8
    best = expected[row, :length].argmax(-1)
    np.testing.assert_array_equal(tokens[row, :length], best)
    assert not tokens[row, length:].any()
    np.testing.assert_allclose(
      scores[row], expected[row, :length].max(-1).sum(), atol=1e-4
    )


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_a_model_of_float64_generates(method):
  """Its logits are float64, and scores stay float32."""
  with jax.enable_x64(True):
    model = tiny.create("decoder", dtype="float64", param_dtype="float64")
    variables = tiny.initialized(model)
    call = {} if method != "sample" else {"rng": jax.random.key(0)}
    tokens, scores = models.generate(
      model, variables, max_length=5, method=method, **call, **IDS
    )
  assert tokens.shape[1] == 5
  assert scores.dtype == np.float32
  assert np.isfinite(scores).all()


def test_limits_of_the_other_methods_are_greedy(translator):
  model, variables = translator
  call = {"source": tiny.batch(batch_size=4)["source"], "max_length": 8, **IDS}
  greedy = models.generate(model, variables, **call)
  key = jax.random.key(0)
  for limit in (
    {"method": "beam", "beam_size": 1, "length_penalty": 0.0},
    {"method": "sample", "temperature": 1e-6, "rng": key},
    {"method": "sample", "top_k": 1, "rng": key},
  ):
    got = models.generate(model, variables, **call, **limit)
    np.testing.assert_array_equal(got.tokens, greedy.tokens)
    np.testing.assert_allclose(got.scores, greedy.scores, atol=1e-4)


def test_samples_follow_the_distribution(translator):
  model, variables = translator
  draws, temperature, top_k = 4000, 1.7, 3
  source = np.repeat(tiny.batch(batch_size=1)["source"], draws, axis=0)
  sample = {"method": "sample", "temperature": temperature, "top_k": top_k}
  sample |= {"rng": jax.random.key(5), "max_length": 1, **IDS}
  got = models.generate(model, variables, source=source, **sample)
  counts = np.bincount(got.tokens[:, 0], minlength=tiny.VOCAB_SIZE)
  logits = log_probs(model, variables, source[:1], [[BOS]])[0, 0] / temperature
  logits[np.argsort(logits)[:-top_k]] = -np.inf
  expected = np.exp(logits) / np.exp(logits).sum()
  error = np.sqrt(expected * (1 - expected) / draws)
  assert (np.abs(counts / draws - expected) <= 4 * error).all()


def test_samples_of_rows_and_steps_are_independent():
  """Where all logits are equal, so are the counts of all pairs of neighbours."""
  model, rows = tiny.create("decoder"), 6000
  variables = jax.tree.map(np.zeros_like, tiny.initialized(model))
  sample = {"method": "sample", "rng": jax.random.key(4), "max_length": 3}
  prompt = np.full((rows, 1), BOS)
  tokens, scores = models.generate(
    model, variables, prompt=prompt, **sample, **IDS
  )
  tokens, size = np.asarray(tokens), tiny.VOCAB_SIZE
  ends = np.cumsum(tokens == EOS, axis=1) - (tokens == EOS)
  lengths = (ends == 0).sum(1)
  np.testing.assert_allclose(scores, -lengths * np.log(size), rtol=1e-5)
  for one, other in (
    (tokens[:, 0], tokens[:, 1]),
    (tokens[:, 1], tokens[:, 2]),
    (tokens[:-1, 0], tokens[1:, 0]),
  ):
    counts = np.zeros((size, size))
    np.add.at(counts, (one, other), 1)
    # Rows that have ended are padded.
    counts = np.delete(counts, (models.PAD_ID, EOS), axis=0)
    expected = counts.sum() / counts.size
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def penalty(length, alpha):
  return ((5 + length) / 6) ** alpha


def test_wide_beam_is_exhaustive(translator):
  """As many beams as sequences find the best of all that end in time."""
  model, variables = translator
  others = [i for i in range(tiny.VOCAB_SIZE) if i != EOS]
  source = tiny.batch(batch_size=2)["source"]
  pairs = [*itertools.product(others, others)]
  inputs = [[BOS, *pair] for pair in pairs]
  scores = [
    log_probs(model, variables, np.repeat(row[None], len(pairs), 0), inputs)
    for row in source
  ]
  for alpha in (0.0, 0.6, 2.0):
    beam = {"method": "beam", "beam_size": tiny.VOCAB_SIZE * len(pairs)}
    beam |= {"length_penalty": alpha, "max_length": 3, **IDS}
    got = models.generate(model, variables, source=source, **beam)
    for row in range(2):
      best = -np.inf, None
      for pair, score in zip(pairs, scores[row], strict=True):
        for length in (1, 2, 3):
          ids = [*pair[: length - 1], EOS]
          total = sum(score[i, token] for i, token in enumerate(ids))
          best = max(best, (total / penalty(length, alpha), ids))
      expected = best[1] + [0] * (3 - len(best[1]))
      np.testing.assert_array_equal(got.tokens[row], expected)
      np.testing.assert_allclose(got.scores[row], best[0], atol=1e-4)


def plain_beam_search(next_log_probs, beam_size, longest, alpha, ends=(EOS,)):
  """One sequence at a time, in lists: what the compiled search must equal."""
  alive, finished = [(0.0, [])], []
  for _ in range(longest):
    candidates = sorted(
      (
        (score + log_prob, [*ids, token])
        for score, ids in alive
        for token, log_prob in enumerate(next_log_probs(ids))
      ),
      reverse=True,
    )
    for score, ids in candidates[:beam_size]:
      if ids[-1] in ends:
        finished.append((score / penalty(len(ids), alpha), ids))
    alive = [c for c in candidates if c[1][-1] not in ends][:beam_size]
    if len(finished) >= beam_size:
      break
  if finished:
    return max(finished)
  score, ids = alive[0]
  return score / penalty(longest, alpha), ids


def test_narrow_beams_over_unequal_prompts(translator):
  model, variables = translator
  rows, longest, alpha, beam_size = 4, 5, 0.6, 3
  source = tiny.batch(batch_size=rows)["source"]
  prompt = np.array(
    [[1, 0, 0, 0], [1, 4, 0, 0], [1, 5, 3, 0], [1, 3, 6, 5]], np.int32
  )
  prompt_length = np.array([1, 2, 3, 4])
  given = {"source": source, "prompt": prompt, "prompt_length": prompt_length}
  beam = {"method": "beam", "beam_size": beam_size, "length_penalty": alpha}
  got = models.generate(
    model, variables, **given, **beam, max_length=longest, **IDS
  )
  for row in range(rows):
    given = prompt[row, : prompt_length[row]].tolist()

    def next_log_probs(ids, row=row, given=given):
      # Padded to one shape; a causal model does not see the padding.
      inputs = given + ids
      padded = [inputs + [0] * (tiny.MAX_LENGTH - len(inputs))]
      scores = log_probs(model, variables, source[row : row + 1], padded)
      return scores[0, len(inputs) - 1]

    score, ids = plain_beam_search(next_log_probs, beam_size, longest, alpha)
    np.testing.assert_array_equal(
      got.tokens[row], ids + [0] * (longest - len(ids))
    )
    np.testing.assert_allclose(got.scores[row], score, atol=1e-4)


@pytest.mark.parametrize("beam_size", [2, 3])
def test_beams_over_tables_of_logits(beam_size):
  """Rows whose best hypotheses are short, long, or do not end in time."""
  rows, vocab_size, longest, size = 80, 5, 5, 997
  rng = np.random.default_rng(beam_size)
  tables = rng.normal(0.0, 1.5, (rows, size, vocab_size))
  tables[:, :, EOS] -= rng.uniform(-1.0, 6.0, (rows, 1))
  tables = np.asarray(jax.nn.log_softmax(tables), np.float32)

  def following(place, ids):
    return (31 * place + ids + 1) % size

  @jax.jit
  def search(tables, alpha):
    def decode(cache, ids):
      row, place = cache[0], following(cache[1], ids)
      return tables[row, place], (row, place)

    start = np.arange(rows), np.zeros(rows, int)
    sizes = {"beam_size": beam_size, "max_length": longest}
    ids = {"eos_ids": (EOS,), "pad_id": 0}
    return beam_search(decode, tables[:, 0], start, alpha, **sizes, **ids)

  lengths = set()
  for alpha in (0.0, 1.0, 3.0):
    tokens, scores = search(tables, alpha)
    for row in range(rows):

      def next_log_probs(ids, row=row):
        return tables[row, functools.reduce(following, ids, 0)].tolist()

      score, ids = plain_beam_search(next_log_probs, beam_size, longest, alpha)
      lengths.add(len(ids) if ids[-1] == EOS else None)
      padded = ids + [0] * (longest - len(ids))
      np.testing.assert_array_equal(tokens[row], padded)
      np.testing.assert_allclose(scores[row], score, rtol=1e-5)
  assert lengths == {1, 2, 3, 4, 5, None}


ENDS = (2, 5, 6)


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
  table = np.asarray(logits, np.float32)
  sizes = {"beam_size": beam_size, "max_length": 4}
  tokens, scores = beam_search(
    lambda cache, ids: (jax.numpy.asarray(table)[ids], cache),
    table[:1],
    {},
    np.float32(2.0),
    **sizes,
    eos_ids=ENDS,
    pad_id=0,
  )

  def next_log_probs(ids):
    return log_probs[ids[-1] if ids else 0]

  score, ids = plain_beam_search(next_log_probs, beam_size, 4, 2.0, ENDS)
  assert tokens[0].tolist() == ids + [0] * (4 - len(ids))
  assert scores[0] == pytest.approx(score, rel=1e-5)


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


def test_second_call_compiles_nothing(translator, monkeypatch):
  """Of an equal model made anew, with other values."""
  chex.clear_trace_counter()
  extend = chex.assert_max_traces(decoding._extend, n=1)
  monkeypatch.setattr(decoding, "_extend", extend)
  model, variables = translator
  for seed in range(3):
    sample = {"method": "sample", "temperature": 0.5 + seed}
    sample |= {"rng": jax.random.key(seed), "max_length": 4, **IDS}
    source = tiny.batch(seed)["source"]
    models.generate(model.clone(), variables, source=source, **sample)


def test_what_cannot_be_generated_raises(translator):
  model, variables = translator
  call = {"source": tiny.batch()["source"], "max_length": 4, **IDS}
  prompt = np.ones((3, 2), int)
  assert_refused(
    lambda **changes: models.generate(model, variables, **call | changes),
    {"method": "beams"},
    # The method is greedy, and does not read them.
    *({"temperature": 0.5}, {"beam_size": 8}),
    *({"top_k": 3}, {"length_penalty": 0.0}, {"top_k": 3, "method": "beam"}),
    *({"temperature": 0.5, "method": "beam"},),
    *({"beam_size": 8, "method": "sample"},),
    ("rng", {"method": "sample"}),
    {"temperature": 0.0, "method": "sample"},
    *({"top_k": 8, "method": "sample"}, {"beam_size": 0, "method": "beam"}),
    {"length_penalty": -1.0, "method": "beam"},
    # The model has 12 positions.
    *({"max_length": x} for x in (0, 13)),
    *({"source": None}, {"prompt": np.ones((2, 3), int)}),
    *({"prompt_length": [0, x, 2], "prompt": prompt} for x in (1, 1.5)),
    *({"prompt_length": x, "prompt": prompt} for x in ([1, 3, 2], [1, 2], 2)),
    {"prompt_length": [1, 1, 1]},
    {"inputs_mask": np.ones((3, 2), bool), "prompt": prompt},
    # Numbers that would be rounded, and ids that no token has.
    *({"max_length": x} for x in (3.5, "4", True)),
    *({"eos_id": x} for x in (7, -2, 2.7, "2", True, None, [])),
    *({"bos_id": x} for x in (1.7, True, None, -1, 7)),
    {"pad_id": 0.5},
    *({"top_k": x, "method": "sample"} for x in (2.0, True)),
    {"temperature": "1", "method": "sample"},
    *(
      {"rng": x, "method": "sample"}
      for x in (0, jax.random.split(jax.random.key(0)))
    ),
    {"beam_size": 2.0, "method": "beam"},
    {"length_penalty": float("inf"), "method": "beam"},
    {"temperature": float("inf"), "method": "sample"},
    *({"source_mask": x} for x in (np.ones((3, 6)), np.ones((3, 5), bool))),
  )
  # At the bounds, and a key of the old kind.
  limits = {"top_k": 7, "temperature": 9.0, "rng": jax.random.PRNGKey(0)}
  limits |= {"prompt_length": np.array([1, 2, 2], np.int64), "prompt": prompt}
  limits |= {"max_length": 11, "bos_id": np.int64(0), "pad_id": np.int64(3)}
  tokens, _ = models.generate(
    model, variables, **call | limits, method="sample"
  )
  assert tokens.shape == (3, 11)
  decoder = tiny.create("decoder")
  masked = functools.partial(models.generate, decoder, {}, max_length=3, **IDS)
  assert_refused(masked, {"source_mask": np.ones((3, 6), bool)})


def test_an_encoder_cannot_generate():
  with pytest.raises(ValueError, match="kind 'encoder' cannot generate"):
    models.generate(tiny.create("encoder"), {}, max_length=3, **IDS)


def test_a_mechanism_without_decode_says_what_to_do(monkeypatch):
  model = tiny.create("decoder")
  build = models.AttentionConfig.build

  def without_decode(config):
    attention = build(config)
    supports = attention.supports - {"decode"}
    return attention._replace(supports=supports, init_cache=None, decode=None)

  monkeypatch.setattr(models.AttentionConfig, "build", without_decode)
  with pytest.raises(ValueError, match=r"decoder_attention: dense .*'decode'"):
    models.generate(model, {}, max_length=3, **IDS)
