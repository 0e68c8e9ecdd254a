"""Published models give the logits that transformers gives them."""

import functools
import json
import pathlib
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.published import files
from tests.here import here
from tests.models import tiny

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


@functools.cache
def loaded(case):
  """A small model with its own mechanisms, read once."""
  return models.load_pretrained(FOLDERS[case])


def changed(case, path, change=None, **values):
  """A copy of a folder, with other tensors and other values in config.json.

  `...` takes a value out.
  """
  shutil.copytree(FOLDERS[case], path, dirs_exist_ok=True)
  config = path / "config.json"
  values = json.loads(config.read_text()) | values
  kept = {name: x for name, x in values.items() if x is not ...}
  config.write_text(json.dumps(kept))
  if change is not None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
  return path


def assert_not_read(case, path, message, change=None, **values):
  """Such a folder is refused by a line that names it and says `message`."""
  changed(case, path, change, **values)
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    models.load_pretrained(path)
  assert str(error.value).startswith(str(path))
  assert "\n" not in str(error.value)


def same(one, other):
  """Variables of the same names are equal in every bit."""
  chex.assert_trees_all_equal(one, other)


def expected(case, file="expected"):
  """The inputs of a case, and what transformers returned by dtype."""
  with np.load(FOLDERS[case] / f"{file}.npz") as arrays:
    inputs = {
      name.removeprefix("input."): arrays[name]
      for name in arrays
      if name.startswith("input.")
    }
    return inputs, {n: arrays[n] for n in arrays if n not in inputs}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(family, model, variables, inputs):
  p = models.Pretrained(family, "", model, variables, {})
  return p.logits(variables, **inputs)


def compute(p, inputs):
  """The logits of one program with all arrays as arguments.

  Models that are equal share it: a folder that was saved is not compiled again.
  """
  return np.asarray(_logits(p.family, p.model, p.variables, inputs))


def compared(inputs, out, wanted):
  """The largest difference over the largest logit, of what is no padding."""
  out, mask = np.asarray(out), inputs.get("attention_mask")
  # Of samples, the mask is no mask of logits: padding is compared as well.
  of_tokens = "input_ids" in inputs and "decoder_input_ids" not in inputs
  if of_tokens and mask is not None and out.ndim == 3:
    out, wanted = out[mask > 0], wanted[mask > 0]
  return np.abs(out - wanted).max() / np.abs(wanted).max()


def usual(cases, *chosen):
  """Parameters of a test, those that are not chosen marked `thorough`."""
  return [
    pytest.param(case, marks=() if case in chosen else pytest.mark.thorough)
    for case in cases
  ]


# Every published class has a case here or in USUAL of test_versions.py, and so has
# every choice that one alone makes. Two are in `test_float64`.
USUAL = tuple(
  case
  for case in CASES
  if case not in ("bert", "gpt2", "wav2vec2_conformer_no_positions")
)


@pytest.mark.parametrize("case", usual(CASES, *USUAL))
def test_logits_are_those_of_transformers(case):
  inputs, outputs = expected(case)
  out = compute(loaded(case), inputs)
  assert out.shape == outputs["float32"].shape
  assert compared(inputs, out, outputs["float32"]) < 2e-5


@pytest.mark.parametrize(
  "case", [case for case in CASES if (FOLDERS[case] / "left.npz").exists()]
)
def test_rows_that_are_padded_on_the_left(case):
  """Blocks do not shift with the padding; those of transformers do."""
  inputs, outputs = expected(case, "left")
  assert not inputs["attention_mask"][1:, 0].any()
  out = compute(loaded(case), inputs)
  assert compared(inputs, out, outputs["float32"]) < 2e-5


def is_decoder(case):
  """Whether a model predicts the next token."""
  (kind,) = files.read_config(FOLDERS[case])["architectures"]
  return kind.endswith("CausalLM") or kind.startswith("MiniMaxM3")


@pytest.mark.parametrize("case", [*filter(is_decoder, CASES)])
def test_token_by_token(case):
  """Every step of a row gives the logits that transformers has for all of it."""
  p, (inputs, outputs) = loaded(case), expected(case)
  # A step knows no padding before it.
  rows = inputs["attention_mask"][:, 0] > 0
  ids = jnp.asarray(inputs["input_ids"][rows])
  out = tiny.step_by_step(p.model, p.variables, {"inputs": ids})
  mask = {**inputs, "attention_mask": inputs["attention_mask"][rows]}
  assert compared(mask, out, outputs["float32"][rows]) < 2e-5


CHANGES = [
  pytest.param(case, str(number), change, id=f"{case}-{number}")
  for case, folder in FOLDERS.items()
  if (folder / "changes.json").exists()
  for number, change in enumerate(
    json.loads((folder / "changes.json").read_text())
  )
]


@pytest.mark.parametrize(("case", "number", "change"), CHANGES)
def test_a_key_changes_what_it_changes_in_transformers(
  case, number, change, tmp_path
):
  """The weights are the same; null takes a key out."""
  values = {key: ... if x is None else x for key, x in change.items()}
  p = models.load_pretrained(changed(case, tmp_path, **values))
  (inputs, outputs), (_, wanted) = expected(case), expected(case, "changes")
  assert compared(inputs, outputs["float32"], wanted[number]) > 1e-3
  # Rounding depends on the CPU: some have 2.7e-5.
  assert compared(inputs, compute(p, inputs), wanted[number]) < 5e-5


@pytest.mark.parametrize("case", [case for case in ("vit",) if case in FOLDERS])
def test_positions_of_another_image_size(case):
  """Interpolated as transformers does, where a side grows and one shrinks."""
  _, outputs = expected(case)
  out = compute(loaded(case), {"pixel_values": outputs["others"]})
  assert compared({}, out, outputs["of_others"]) < 5e-5


@pytest.mark.parametrize(
  "case",
  usual(
    ("bert", "gpt2", *here(("bert_masked", "roberta", "perceiver"))),
    "bert",
    "gpt2",
  ),
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
  p = loaded("longformer")
  known = jax.jit(lambda variables: p.logits(variables, **inputs))(p.variables)
  np.testing.assert_allclose(known, compute(p, inputs), atol=2e-5)
