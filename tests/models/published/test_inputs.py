"""Ids that a published model has not, and inputs that are none."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.models.published.test_equality import (
  CASES,
  changed,
  compute,
  expected,
  loaded,
  usual,
)
from tests.refusals import assert_refused

PADDING = 3
"""Positions at the end of every sequence that masks hide."""


def padded(case):
  """The inputs of a case, the last positions of every row hidden."""
  inputs, _ = expected(case)
  for name, mask in (
    ("input_ids", "attention_mask"),
    ("decoder_input_ids", "decoder_attention_mask"),
  ):
    if name in inputs:
      shape = inputs[name].shape
      shown = np.arange(shape[1]) < shape[1] - PADDING
      inputs[mask] = np.broadcast_to(shown, shape).astype(np.int64)
  inputs.pop("global_attention_mask", None)
  return inputs


def without_padding(out):
  """What is shown: positions, or the classes of a sequence."""
  return np.asarray(out[:, :-PADDING] if out.ndim == 3 else out)


@pytest.mark.parametrize(
  "case",
  usual(
    [case for case in CASES if "input_ids" in expected(case)[0]],
    "bert_masked",
    "gpt2",
    "longformer",
    "t5",
  ),
)
def test_hidden_ids_do_not_matter(case):
  """Neither those of the vocabulary nor others, known or traced."""
  p, inputs = loaded(case), padded(case)
  wanted = without_padding(compute(p, inputs))
  for strange in (1, -100, -1, 10**9):
    others = dict(inputs)
    for name in ("input_ids", "token_type_ids", "decoder_input_ids"):
      if name in others:
        others[name] = others[name].copy()
        others[name][:, -PADDING:] = strange
    out = without_padding(compute(p, others))
    np.testing.assert_array_equal(out, wanted)
  if case == "bert_masked":
    known = jax.jit(lambda variables: p.logits(variables, **others))
    difference = without_padding(known(p.variables)) - wanted
    assert np.abs(difference).max() < 1e-5 * np.abs(wanted).max()


def test_traced_ids_outside_of_the_vocabulary_give_nan():
  """A negative one does not count from the end of the table."""
  p, inputs = loaded("gpt2"), padded("gpt2")
  for strange in (-100, -1, 61, 10**9):
    inputs["input_ids"][1, 4] = strange
    out = without_padding(compute(p, inputs))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1, 4:]).all()


IDS = np.ones((2, 5), np.int32)
STRANGE = np.where(np.arange(10).reshape(2, 5) == 8, -100, IDS)
STRANGE_ONES = STRANGE, jnp.asarray(STRANGE)


def test_inputs_that_are_none(tmp_path):
  """An id that is none is told with its place."""

  def read(case, **inputs):
    p = loaded(case)
    p.logits(p.variables, **inputs)

  for case, inputs, place in (
    *(("gpt2", {"input_ids": x}, "id -100 at [1, 3]") for x in STRANGE_ONES),
    ("gpt2", {"input_ids": IDS + 60}, "id 61 at [0, 0]"),
    ("gpt2", {"input_ids": IDS.astype(np.uint8) + 60}, "id 61 at [0, 0]"),
    ("gpt2", {"input_ids": np.int64(IDS) + 2**32}, "id 4294967297 at [0, 0]"),
    (
      "gpt2",
      {"input_ids": np.ones((1, 41), int)},
      "41 positions are more than the model's 40 (n_positions)",
    ),
    (
      "bert_masked",
      {"token_type_ids": IDS * 2, "input_ids": IDS},
      "id 2 at [0",
    ),
    (
      "t5",
      {"decoder_input_ids": STRANGE, "input_ids": IDS},
      "id -100 at [1, 3]",
    ),
  ):
    with pytest.raises(ValueError, match=re.escape(f": {place}")) as error:
      read(case, **inputs)
    assert str(error.value).startswith(f"{next(iter(inputs))}: ")
  ids = {"input_ids": IDS}
  assert_refused(
    functools.partial(read, "gpt2"),
    *({"input_ids": x} for x in (IDS[:, :0], IDS[:0], IDS * 1.0, IDS == 1)),
    {"input_ids": [[1, 2], [1]]},
    {"attention_mask": IDS[:, 1:], **ids},
    {"attention_mask": np.where(IDS > 2, 0.0, -1e9), **ids},
    # What is missing, and what the model does not read.
    ("input_ids", {}),
    *({name: IDS, **ids} for name in ("labels", "token_type_ids")),
  )
  assert_refused(
    functools.partial(read, "bert_masked"),
    {"input_ids": IDS[0]},
    {"token_type_ids": IDS[0], **ids},
  )
  # The classifier reads the first token, which transformers lets see padding.
  first = changed("modernbert_classes", tmp_path, classifier_pooling="cls")
  padding = np.where(np.arange(5) < 1, 0, IDS)
  for p in (loaded("deberta_v2_classes"), models.load_pretrained(first)):
    assert_refused(
      functools.partial(p.logits, p.variables, input_ids=IDS),
      {"attention_mask": padding},
    )
  assert_refused(
    functools.partial(read, "t5"), {"decoder_input_ids": IDS[:1], **ids}
  )


def test_generation_reads_ids_of_the_vocabulary():
  def generate(case, **options):
    p = loaded(case)
    call = {"max_length": 2, "bos_id": 0, "eos_id": 1} | options
    models.generate(p.model, p.variables, **call)

  assert_refused(
    functools.partial(generate, "gpt2"),
    *({"prompt": x} for x in (STRANGE, IDS[0], IDS * 1.0)),
    {"bos_id": 61},
  )
  assert_refused(functools.partial(generate, "t5"), {"source": STRANGE})


def test_generation_does_not_read_behind_a_prompt():
  p = loaded("gpt2")
  call = {"max_length": 3, "bos_id": 0, "eos_id": -1}
  call |= {"prompt_length": np.array([5, 3])}
  wanted = models.generate(p.model, p.variables, prompt=IDS, **call)
  out = models.generate(p.model, p.variables, prompt=STRANGE, **call)
  np.testing.assert_array_equal(out.tokens, wanted.tokens)
  np.testing.assert_array_equal(out.scores, wanted.scores)
