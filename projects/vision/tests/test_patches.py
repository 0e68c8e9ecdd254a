"""Images as sequences of patches."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import models
from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig
from projects.vision.patches import resize_bicubic
from projects.vision.vit_config import VitConfig
from tests.models import tiny
from tests.refusals import assert_refused

CONFIG = nested.make(
  VitConfig,
  num_layers=2,
  num_heads=2,
  features=8,
  mlp_features=12,
  activation="gelu",
  attention_bias=True,
  position="learned",
  patch_size=3,
  head="class",
  head_bias=True,
)


def make(config=CONFIG, shape=(6, 9, 2), classes=4):
  model = models.create(
    config,
    source_vocab_size=None,
    target_vocab_size=classes,
    max_source_length=None,
    max_target_length=1,
    input_shapes={} if shape is None else {"image": shape},
  )
  images = np.random.default_rng(0).standard_normal((3, *shape), np.float32)
  return (model, tiny.variables_of(model, {"image": images}), images)


def test_a_token_is_a_patch_times_a_kernel_and_its_position():
  model, variables, images = make()
  found = model.apply(
    variables, images, method=lambda model, images: model.patches(images)
  )
  assert found.shape == (3, 1 + 2 * 3, 8)
  own = jax.tree.map(np.asarray, variables["params"]["patches"])
  kernel = own["projection"]["kernel"].reshape(-1, 8)
  for row in range(2):
    for column in range(3):
      pixels = images[
        :, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3
      ].reshape(3, -1)
      place = 1 + 3 * row + column
      wanted = pixels @ kernel + own["projection"]["bias"]
      wanted += own["positions"][place]
      np.testing.assert_allclose(found[:, place], wanted, atol=1e-5)
  wanted = own["class_token"] + own["positions"][0]
  np.testing.assert_allclose(found[0, 0], wanted, atol=1e-6)


def test_logits_are_read_from_the_first_tokens():
  model, variables, images = make()
  logits = tiny.forward(model, variables, {"image": images})
  assert logits.shape == (3, 1, 4)
  two = nested.replace(CONFIG, distillation=True)
  model, variables, images = make(two)
  logits = tiny.forward(model, variables, {"image": images})
  assert logits.shape == (3, 2, 4)
  assert np.abs(logits[:, 0] - logits[:, 1]).min() > 0
  assert two.num_tokens((6, 9, 2)) == 8
  assert len(variables["params"]["patches"]["positions"]) == 8


def test_attention_sees_every_patch_and_no_mask():
  model, variables, images = make()
  seen = tiny.calls(model, variables, {"image": images})
  assert [place for place, *_ in seen] == [
    "encoder_0/self_attention",
    "encoder_1/self_attention",
  ]
  for _, _, query, _, _, options in seen:
    assert query.shape == (3, 7, 2, 4)
    assert options.get("mask") is None


def test_any_encoder_mechanism_serves():
  chosen = AttentionConfig("linformer", {"rank": 3})
  model, variables, images = make(
    dataclasses.replace(CONFIG, encoder_attention=chosen)
  )
  found = tiny.gradients(model, variables, {"image": images})
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
  assert np.abs(found["patches"]["positions"]).min() > 0


def naive_bicubic(table, grid):
  """Keys' kernel with a = −0.75, one point of the result after the other."""

  def kernel(x):
    x, a = abs(x), -0.75
    if x <= 1:
      return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0

  sizes = table.shape[:2]
  out = np.zeros((*grid, table.shape[2]))
  for place in np.ndindex(*grid):
    centre = [
      (p + 0.5) * size / wanted - 0.5
      for p, size, wanted in zip(place, sizes, grid, strict=True)
    ]
    for dy in range(-2, 4):
      for dx in range(-2, 4):
        y, x = int(np.floor(centre[0])) + dy, int(np.floor(centre[1])) + dx
        weight = kernel(centre[0] - y) * kernel(centre[1] - x)
        y, x = np.clip(y, 0, sizes[0] - 1), np.clip(x, 0, sizes[1] - 1)
        out[place] += weight * table[y, x]
  return out


@pytest.mark.parametrize("grid", [(1, 1), (3, 4), (7, 2), (5, 13)])
def test_positions_are_interpolated_bicubically(grid):
  table = np.random.default_rng(1).standard_normal((3, 4, 2))
  found = resize_bicubic(np.asarray(table, np.float32), grid)
  np.testing.assert_allclose(found, naive_bicubic(table, grid), atol=1e-5)
  if grid == (3, 4):
    np.testing.assert_allclose(found, table, atol=1e-6)


def test_images_of_another_size():
  model, variables, images = make()
  same = tiny.forward(model, variables, {"image": images})
  large = np.concatenate([images, images], axis=2)
  other = tiny.forward(model, variables, {"image": large})
  assert other.shape == same.shape
  assert np.isfinite(other).all()
  # What does not fill a patch is not read.
  wide = np.concatenate([images, images[:, :, :2]], axis=2)
  np.testing.assert_allclose(
    tiny.forward(model, variables, {"image": wide}), same, atol=1e-6
  )
  with pytest.raises(ValueError, match=r"image: expected \[B, H, W, 2\]"):
    models.forward(model, variables, {"image": images[..., :1]})
  with pytest.raises(ValueError, match="sides of at least 3, got"):
    models.forward(model, variables, {"image": images[:, :2]})


def test_faults_of_the_config():
  assert_refused(
    functools.partial(nested.replace, CONFIG),
    {"patch_size": 0},
    {"kind": "decoder"},
    {"head": "tokens"},
    {"position": "rotary"},
    {"embedding_scale": 2.0},
    {"vocab_size": 5},
  )


def test_faults_of_the_sizes():
  with pytest.raises(ValueError, match="patch_size: expected at most 2"):
    make(shape=(2, 9, 1))
  with pytest.raises(ValueError, match="kind: 'vit' reads images"):
    make(shape=None)
  tokens = ModelConfig(
    kind="encoder", num_layers=1, num_heads=1, features=4, mlp_features=4
  )
  with pytest.raises(ValueError, match="kind: 'encoder' reads ids"):
    make(tokens)
