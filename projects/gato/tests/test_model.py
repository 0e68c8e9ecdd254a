"""A decoder of several modalities: its patches, its local positions, its cache."""

import math

from flax import linen as nn
import jax
import numpy as np
import pytest

import models
from projects.gato.config import PATCH_ID
from projects.gato.patch_embedding import (
  CHANNELS,
  GROUPS,
  NUM_POSITIONS,
  PatchEmbedding,
)
from tests.models import tiny

SHAPE = (2, 3, 4, 4, 3)
VOCABULARY, LENGTH = 11, 14
SIZES = {"target_vocab_size": VOCABULARY, "max_target_length": LENGTH}


def make(**changes):
  sizes = {"num_layers": 2, "num_heads": 2, "features": 8, "mlp_features": 16}
  choices = {"kind": "gato", "position": "rotary", "local_positions": True}
  choices |= dict.fromkeys(("dtype", "param_dtype"), "float64")
  config = models.CONFIGS["gato"](**sizes | choices | changes)
  return tiny.of_config(config, **SIZES, input_shapes={"patches": SHAPE})


def batch_of(seed=0):
  """Two rows: an image after two ids, and one without an image."""
  rng = np.random.default_rng(seed)
  inputs = rng.integers(1, VOCABULARY, (2, LENGTH)).astype(np.int32)
  inputs[0, 2:8] = PATCH_ID
  return {
    "inputs": inputs,
    "local": rng.integers(0, LENGTH + 1, (2, LENGTH)).astype(np.int32),
    "patches": rng.random((2, *SHAPE)),
  }


@pytest.fixture(scope="module")
def made():
  with jax.enable_x64(True):
    model, batch = make(), batch_of()
    drawn = tiny.variables_of(model, batch)
    # Norms and biases that are not 1 and 0.
    wide = jax.tree.map(
      lambda x: x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape),
      drawn,
    )
    yield model, wide, batch


def naive_patches(params, patches):
  """The formulas of `PatchEmbedding`, one patch and one pixel at a time."""

  def conv(x, weights):
    kernel, bias = np.asarray(weights["kernel"]), np.asarray(weights["bias"])
    padded = np.pad(x, [(1, 1), (1, 1), (0, 0)])
    out = np.zeros((*x.shape[:2], kernel.shape[-1]))
    for i in range(x.shape[0]):
      for j in range(x.shape[1]):
        window = padded[i : i + 3, j : j + 3]
        out[i, j] = np.einsum("ijc,ijcd->d", window, kernel) + bias
    return out

  def norm_and_gelu(x, weights):
    out = np.empty_like(x)
    size = CHANNELS // GROUPS
    for group in range(GROUPS):
      part = x[..., group * size : (group + 1) * size]
      scaled = (part - part.mean()) / math.sqrt(part.var() + 1e-6)
      out[..., group * size : (group + 1) * size] = scaled
    out = out * np.asarray(weights["scale"]) + np.asarray(weights["bias"])
    return 0.5 * out * (1 + np.vectorize(math.erf)(out / math.sqrt(2)))

  rows, columns, size, _, _ = patches.shape
  found = []
  for row in range(rows):
    for column in range(columns):
      x = (2 * patches[row, column] - 1) / math.sqrt(size)
      x = conv(x, params["stem"])
      y = conv(norm_and_gelu(x, params["first_norm"]), params["first"])
      y = conv(norm_and_gelu(y, params["second_norm"]), params["second"])
      out = (x + y).reshape(-1) @ np.asarray(params["projection"]["kernel"])
      out = out + np.asarray(params["projection"]["bias"])
      places = ("row", row, rows), ("column", column, columns)
      for axis, place, count in places:
        table = np.asarray(params[f"{axis}_positions"]["embedding"])
        first = place * NUM_POSITIONS // count
        last = (place + 1) * NUM_POSITIONS // count - 1
        out = out + table[(first + last + 1) // 2]
      found.append(out)
  return np.array(found)


def test_places_are_drawn_in_training():
  """From the interval of the row and column, each of its positions at times."""
  module = PatchEmbedding(4, "float32", "float32")
  patches = np.zeros((64, 2, 3, 4, 4, 1), np.float32)
  params = jax.jit(module.init)(jax.random.key(0), patches)["params"]
  # A position is told by its embedding: rows in the first, columns in the last.
  numbers = np.arange(NUM_POSITIONS, dtype=np.float32)
  for axis, place in (("row", 0), ("column", 3)):
    table = np.zeros((NUM_POSITIONS, 4), np.float32)
    table[:, place] = numbers
    params = params | {f"{axis}_positions": {"embedding": table}}
  params = params | {
    "projection": jax.tree.map(np.zeros_like, params["projection"])
  }
  variables = {"params": params}

  @jax.jit
  def both(variables, key):
    drawn = module.apply(
      variables, patches, deterministic=False, rngs={"dropout": key}
    )
    return drawn, module.apply(variables, patches)

  seen, middle = (
    np.asarray(x).reshape(64, 2, 3, 4)
    for x in both(variables, jax.random.key(1))
  )
  for row in range(2):
    places = seen[:, row, :, 0]
    assert (places == places[:, :1]).all()  # One of each row and image.
    assert 64 * row <= places.min() < 64 * row + 16
    assert 64 * row + 48 < places.max() < 64 * (row + 1)
  bounds = [0, 42, 85, 128]
  for column in range(3):
    places = seen[:, :, column, 3]
    assert places.min() >= bounds[column]
    assert places.max() < bounds[column + 1]
    assert len(np.unique(places)) > 15
  assert middle[0, :, 0, 0].tolist() == [32, 96]
  assert middle[0, 0, :, 3].tolist() == [21, 63, 106]


def test_patches_take_the_place_of_ids(made):
  """The stack reads what is at each place, put together by hand."""
  model, variables, batch = made
  params = variables["params"]
  tables = {
    name: np.asarray(params[name]["embedding"])
    for name in ("target_embedding", "local_positions")
  }
  scale = math.sqrt(8)
  embedded = naive_patches(params["patch_embedding"], batch["patches"][0])
  expected = np.empty((2, LENGTH, 8))
  for row in range(2):
    patch = 0
    for t, token in enumerate(batch["inputs"][row]):
      if token == PATCH_ID:
        expected[row, t] = embedded[patch]
        patch += 1
      else:
        expected[row, t] = tables["target_embedding"][token] * scale
      place = batch["local"][row, t]
      expected[row, t] += tables["local_positions"][place]

  def first_input(variables):
    seen = []

    def keep(following, args, kwargs, context):
      if context.module.name == "decoder_0" and context.method_name == (
        "__call__"
      ):
        seen.append(args[0])
      return following(*args, **kwargs)

    ids, options = model.arguments(batch)
    with nn.intercept_methods(keep):
      model.apply(variables, *ids, **options)
    return seen[0]

  with jax.enable_x64(True):
    seen = jax.jit(first_input)(variables)
  np.testing.assert_allclose(seen, expected, rtol=1e-9, atol=1e-11)


def test_patches_are_seen_by_what_follows_alone(made):
  """And what is given for a row without an image changes nothing."""
  model, variables, batch = made
  with jax.enable_x64(True):
    logits = tiny.forward(model, variables, batch)
    changed = batch["patches"].copy()
    changed[0, 0, 1] += 0.1  # The second patch, at place 3.
    changed[1] += 1
    other = tiny.forward(model, variables, batch | {"patches": changed})
  np.testing.assert_array_equal(logits[1], other[1])
  np.testing.assert_array_equal(logits[0, :3], other[0, :3])
  differs = np.abs(np.asarray(logits - other))[0].max(-1)
  assert (differs[3:] > 1e-9).all()


def test_local_positions_are_places_by_default(made):
  model, variables, batch = made
  plain = {"inputs": batch["inputs"], "patches": batch["patches"]}
  places = np.tile(np.arange(1, LENGTH + 1), (2, 1))
  with jax.enable_x64(True):
    # Two programs, which may round differently.
    np.testing.assert_allclose(
      tiny.forward(model, variables, plain),
      tiny.forward(model, variables, plain | {"local": places}),
      atol=1e-12,
    )
    other = tiny.forward(model, variables, batch)
  assert np.abs(np.asarray(other)).max() > 0
  assert not np.allclose(other, tiny.forward(model, variables, plain))


def test_generation_reads_images():
  """Token by token after a prompt, as one call on the whole has it."""
  model = make(dtype="float32", param_dtype="float32")
  batch = {name: x for name, x in batch_of().items() if name != "local"}
  batch["inputs"][0, :6], batch["inputs"][0, 6:8] = PATCH_ID, (3, 4)
  batch["inputs"][1, :6] = PATCH_ID
  variables = jax.tree.map(lambda x: 4 * x, tiny.variables_of(model, batch))
  lengths = np.array([8, 6], np.int32)
  prompt = {"prompt": batch["inputs"][:, :8], "prompt_length": lengths}
  call = {"max_length": 6, "bos_id": 0, "eos_id": -1}
  generated = models.generate(
    model, variables, **prompt, patches=batch["patches"], **call
  ).tokens
  rows = batch["inputs"].copy()
  for step in range(6):
    logits = tiny.forward(model, variables, batch | {"inputs": rows})
    chosen = np.asarray(logits)[[0, 1], lengths + step - 1].argmax(-1)
    np.testing.assert_array_equal(chosen, generated[:, step])
    rows[[0, 1], lengths + step] = chosen


def test_what_does_not_go_together_is_refused(made):
  model, variables, batch = made
  with pytest.raises(ValueError, match=r"^kind: expected one of gato, got"):
    make(kind="encoder")
  plain = tiny.of_config(model.config, **SIZES)
  call = {"prompt": batch["inputs"][:, :8], "patches": batch["patches"]}
  call |= {"max_length": 2, "bos_id": 0, "eos_id": 1}
  with pytest.raises(ValueError, match=r"^patches: this model has none"):
    models.generate(plain, variables, **call)
  with pytest.raises(ValueError, match="none has kind 'gato'"):
    models.as_pretrained(model, variables)


def test_where_dropout_is():
  """Of the sum of embeddings, and of each sub-layer's output."""
  with jax.enable_x64(True):
    model, batch = make(dropout_rate=0.5), batch_of()
    found = tiny.dropouts(model, tiny.variables_of(model, batch), batch)
  assert found == {"": 1, "decoder_0": 2, "decoder_1": 2}
