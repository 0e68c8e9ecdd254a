"""Ids that a published model has not, and inputs that are none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.models.published.test_equality import (
  CASES,
  compute,
  expected,
  loaded,
  usual,
)

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


@pytest.mark.parametrize(
  ("case", "inputs", "message"),
  [
    ("gpt2", {"input_ids": STRANGE}, "input_ids: id -100 at [1, 3] is not of"),
    ("gpt2", {"input_ids": jnp.asarray(STRANGE)}, "input_ids: id -100 at [1"),
    ("gpt2", {"input_ids": IDS + 60}, "input_ids: id 61 at [0, 0]"),
    ("gpt2", {"input_ids": IDS.astype(np.uint8) + 60}, "input_ids: id 61 at"),
    (
      "gpt2",
      {"input_ids": np.int64(IDS) + 2**32},
      "input_ids: id 4294967297 at [0, 0]",
    ),
    (
      "bert_masked",
      {"input_ids": IDS, "token_type_ids": IDS * 2},
      "token_type_ids: id 2 at [0, 0] is not of the token types; expected 0 to 1",
    ),
    (
      "t5",
      {"input_ids": IDS, "decoder_input_ids": STRANGE},
      "decoder_input_ids: id -100 at [1, 3]",
    ),
    ("gpt2", {"input_ids": IDS[:, :0]}, "input_ids: expected shape [B, T]"),
    ("gpt2", {"input_ids": IDS[:0]}, "input_ids: expected shape [B, T] of"),
    ("bert_masked", {"input_ids": IDS[0]}, "input_ids: expected shape [B, T]"),
    ("gpt2", {"input_ids": IDS * 1.0}, "input_ids: expected integers, got"),
    ("gpt2", {"input_ids": IDS == 1}, "input_ids: expected integers, got bool"),
    ("gpt2", {"input_ids": [[1, 2], [1]]}, "input_ids: expected rows of one"),
    (
      "gpt2",
      {"input_ids": IDS, "attention_mask": IDS[:, 1:]},
      "attention_mask: expected shape (2, 5), as the input has it, got (2, 4)",
    ),
    (
      "gpt2",
      {"input_ids": IDS, "attention_mask": np.where(IDS > 2, 0.0, -1e9)},
      "attention_mask: expected 0 and 1, got -1000000000.0",
    ),
    (
      "bert_masked",
      {"input_ids": IDS, "token_type_ids": IDS[0]},
      "token_type_ids: expected shape [B, T]",
    ),
    (
      "t5",
      {"input_ids": IDS, "decoder_input_ids": IDS[:1]},
      "decoder_input_ids: expected shape (2, 5), as the input has it, got (1, 5)",
    ),
    # What is missing, and what the model does not read.
    ("gpt2", {}, "input_ids: missing"),
    ("gpt2", {"input_ids": IDS, "labels": IDS}, "labels: this model does not"),
    (
      "gpt2",
      {"input_ids": IDS, "token_type_ids": IDS},
      "token_type_ids: this model does not read it",
    ),
  ],
)
def test_inputs_that_are_none(case, inputs, message):
  p = loaded(case)
  with pytest.raises(ValueError, match=re.escape(message)) as info:
    p.logits(p.variables, **inputs)
  assert "\n" not in str(info.value)


@pytest.mark.parametrize(
  ("case", "options", "message"),
  [
    ("gpt2", {"prompt": STRANGE}, "prompt: id -100 at [1, 3] is not of the"),
    ("gpt2", {"bos_id": 61}, "bos_id: expected 0 to 60, got 61"),
    ("gpt2", {"prompt": IDS[0]}, "prompt: expected shape [B, T] of at least"),
    ("gpt2", {"prompt": IDS * 1.0}, "prompt: expected integers, got float64"),
    ("t5", {"source": STRANGE}, "source: id -100 at [1, 3] is not of the"),
  ],
)
def test_generation_reads_ids_of_the_vocabulary(case, options, message):
  p = loaded(case)
  call = {"max_length": 2, "bos_id": 0, "eos_id": 1} | options
  with pytest.raises(ValueError, match=re.escape(message)) as info:
    models.generate(p.model, p.variables, **call)
  assert "\n" not in str(info.value)


def test_generation_does_not_read_behind_a_prompt():
  p = loaded("gpt2")
  call = {"max_length": 3, "bos_id": 0, "eos_id": -1}
  call |= {"prompt_length": np.array([5, 3])}
  wanted = models.generate(p.model, p.variables, prompt=IDS, **call)
  out = models.generate(p.model, p.variables, prompt=STRANGE, **call)
  np.testing.assert_array_equal(out.tokens, wanted.tokens)
  np.testing.assert_array_equal(out.scores, wanted.scores)
