"""Images as sequences of patches, beside what published models show of them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import models
from models import nested
from models.attention_config import AttentionConfig
from models.config import ModelConfig
from projects.vision import patches
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
  shapes = {} if shape is None else {"image": shape}
  model = tiny.of_config(config, target_vocab_size=classes, input_shapes=shapes)
  images = np.random.default_rng(0).standard_normal((3, *shape), np.float32)
  return (model, tiny.variables_of(model, {"image": images}), images)


def test_any_encoder_mechanism_serves():
  chosen = AttentionConfig("linformer", {"rank": 3})
  model, variables, images = make(
    dataclasses.replace(CONFIG, encoder_attention=chosen)
  )
  found = tiny.gradients(model, variables, {"image": images})
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
  assert np.abs(found["patches"]["positions"]).min() > 0


@pytest.mark.parametrize("distillation", [False, True])
def test_where_dropout_is(distillation):
  """Of the patches, and of each sub-layer's output."""
  model, variables, images = make(
    dataclasses.replace(CONFIG, dropout_rate=0.5, distillation=distillation)
  )
  found = tiny.dropouts(model, variables, {"image": images})
  assert found == {"": 1, "encoder_0": 2, "encoder_1": 2}


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
  small = tiny.forward(model, variables, {"image": images[:, :3, :3]})
  assert small.shape == same.shape
  with pytest.raises(ValueError, match=r"image: expected \[B, H, W, 2\]"):
    models.forward(model, variables, {"image": images[..., :1]})
  with pytest.raises(ValueError, match="sides of at least 3, got"):
    models.forward(model, variables, {"image": images[:, :2]})


def test_positions_are_resampled_by_the_kernel_of_keys():
  """Of 1981, with a = −3/4: what is at ¼, ½ and ¾ of the way, by hand."""
  table = np.eye(8, dtype=np.float32)[:, None]
  half, far = 0.59375, -0.09375
  found = patches.resize_bicubic(table, (4, 1))[:, 0]
  expected = np.zeros((4, 8))
  expected[0, :3] = far + half, half, far  # The edge is repeated.
  expected[1, 1:5] = expected[2, 3:7] = far, half, half, far
  expected[3, 5:] = far, half, half + far
  np.testing.assert_allclose(found, expected, atol=1e-6)
  quarters = [-0.10546875, 0.87890625, 0.26171875, -0.03515625]
  table = np.eye(4, dtype=np.float32)[None]
  found = patches.resize_bicubic(table, (1, 8))[0]
  np.testing.assert_allclose(found[3], quarters, atol=1e-6)
  np.testing.assert_allclose(found[4], quarters[::-1], atol=1e-6)
  edge = [quarters[0] + quarters[1], *quarters[2:], 0]
  np.testing.assert_allclose(found[1], edge, atol=1e-6)


def test_faults_of_the_config():
  assert_refused(
    functools.partial(nested.replace, CONFIG),
    *({"patch_size": 0}, {"kind": "decoder"}, {"head": "tokens"}),
    *({"position": "rotary"}, {"embedding_scale": 2.0}, {"vocab_size": 5}),
  )


def test_faults_of_the_sizes():
  with pytest.raises(ValueError, match="patch_size: expected at most 2"):
    make(shape=(2, 9, 1))
  make(shape=(3, 9, 1))
  with pytest.raises(ValueError, match="kind: 'vit' reads images"):
    make(shape=None)
  tokens = ModelConfig(
    kind="encoder", num_layers=1, num_heads=1, features=4, mlp_features=4
  )
  with pytest.raises(ValueError, match="kind: 'encoder' reads ids"):
    make(tokens)
