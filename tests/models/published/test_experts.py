"""Decoders with experts or several mechanisms: padding, single keys, decoding."""

import json

import jax.numpy as jnp
import pytest

import models
from tests.models import tiny
from tests.models.published.test_equality import (
  changed,
  compared,
  compute,
  expected,
  loaded,
)

CASES = (
  *("mixtral", "qwen3_moe", "qwen3_moe_windows"),
  *("qwen3_next_experts", "qwen3_5_text", "qwen3_5_moe_text"),
)


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_padded_on_the_left(case):
  inputs, outputs = expected(case)
  inputs["attention_mask"] = outputs["left.attention_mask"]
  out = compute(loaded(case), inputs)
  assert compared(inputs, out, outputs["left.float32"]) < 2e-5


@pytest.mark.parametrize("case", CASES)
def test_single_keys_change_the_logits_as_in_transformers(case, tmp_path):
  """The weights are the same, and one key has another value."""
  inputs, outputs = expected(case)
  del inputs["attention_mask"]
  own = compute(loaded(case), inputs)
  changes = {
    name.removeprefix("changed."): array
    for name, array in outputs.items()
    if name.startswith("changed.")
  }
  assert changes
  for change, wanted in changes.items():
    folder = changed(case, tmp_path / change[:9], **json.loads(change))
    out = compute(models.load_pretrained(folder), inputs)
    assert compared({}, own, wanted) > 1e-3, change
    assert compared({}, out, wanted) < 2e-5, change


@pytest.mark.parametrize("case", CASES)
def test_token_by_token(case):
  """A cache gives the logits of the whole row."""
  p, (inputs, outputs) = loaded(case), expected(case)
  rows = {"inputs": jnp.asarray(inputs["input_ids"])}
  out = tiny.step_by_step(p.model, p.variables, rows)
  assert compared(inputs, out, outputs["float32"]) < 2e-5
