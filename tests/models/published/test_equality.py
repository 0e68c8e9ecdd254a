"""Published models give the logits that transformers gives them."""

import pathlib

import jax
import numpy as np
import pytest

import models
from tests.here import here

_HERE = pathlib.Path(__file__).parent
FOLDERS = {
  path.parent.name: path.parent
  for path in sorted(
    (
      *_HERE.glob("*/config.json"),
      *_HERE.parents[2].glob("projects/*/tests/published/*/config.json"),
    ),
    key=lambda path: path.parent.name,
  )
}
"""Small models that transformers wrote, by name."""
CASES = list(FOLDERS)


def expected(case):
  """The inputs of a case, and what transformers returned by dtype."""
  with np.load(FOLDERS[case] / "expected.npz") as arrays:
    inputs = {
      name.removeprefix("input."): arrays[name]
      for name in arrays
      if name.startswith("input.")
    }
    return inputs, {n: arrays[n] for n in arrays if n not in inputs}


def compute(p, inputs):
  """The logits, compiled as one program with all arrays as arguments."""
  return jax.jit(p.logits)(p.variables, **inputs)


def compared(inputs, out, wanted):
  """The largest difference over the largest logit, of what is no padding."""
  mask = inputs.get("attention_mask")
  # Of samples, the mask is no mask of logits: padding is compared as well.
  of_tokens = "input_ids" in inputs and "decoder_input_ids" not in inputs
  if of_tokens and mask is not None and out.ndim == 3:
    out, wanted = out[mask > 0], wanted[mask > 0]
  return np.abs(np.asarray(out) - wanted).max() / np.abs(wanted).max()


# Families whose forward pass is like no other one's; all are read and written by
# test_folders.py.
USUAL = (
  "bert_masked",
  "gpt2",
  "llama",
  "mamba2",
  "nystromformer",
  "perceiver",
  "qwen3_next",
  "swin",
  "t5",
  "vit",
  "wav2vec2_conformer_relative",
)


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=() if case in USUAL else pytest.mark.thorough)
    for case in CASES
  ],
)
def test_logits_are_those_of_transformers(case):
  p = models.load_pretrained(FOLDERS[case])
  inputs, outputs = expected(case)
  out = compute(p, inputs)
  assert out.shape == outputs["float32"].shape
  assert compared(inputs, out, outputs["float32"]) < 2e-5


@pytest.mark.parametrize("case", [case for case in ("vit",) if case in FOLDERS])
def test_positions_of_another_image_size(case):
  """Interpolated as transformers does, where a side grows and one shrinks."""
  p = models.load_pretrained(FOLDERS[case])
  _, outputs = expected(case)
  out = compute(p, {"pixel_values": outputs["others"]})
  assert compared({}, out, outputs["of_others"]) < 5e-5


@pytest.mark.parametrize(
  "case",
  [
    "bert",
    "gpt2",
    *(
      pytest.param(case, marks=pytest.mark.thorough)
      for case in here(("bert_masked", "roberta", "perceiver"))
    ),
  ],
)
def test_float64(case):
  with jax.enable_x64(True):
    p = models.load_pretrained(FOLDERS[case], dtype="float64")
    inputs, outputs = expected(case)
    out = compute(p, inputs)
    assert out.dtype == np.float64
    assert compared(inputs, out, outputs["float64"]) < 1e-10


def test_global_tokens_may_be_traced():
  """As numbers, a mask costs its tokens alone, and the result is the same."""
  inputs, _ = expected("longformer")
  p = models.load_pretrained(FOLDERS["longformer"])
  np.testing.assert_allclose(
    p.logits(p.variables, **inputs), compute(p, inputs), atol=2e-5
  )
