"""Images in stages: grids, merging, batch norm, and what is refused."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

import models
from models.depthwise import depthwise
from projects.vision.grid_convolution import GridConvolution
from projects.vision.pyramid_config import PyramidConfig
from tests import commands
from tests.models import tiny
from tests.models.published.test_equality import FOLDERS, compute
from tests.refusals import assert_refused

SIZES = {"num_heads": (2, 2), "mlp_features": (12, 12)}
SWIN = PyramidConfig(depths=(1, 2), features=(8, 16), patch_size=(2,), **SIZES)
CVT = PyramidConfig(
  **{"depths": (1, 1), "features": (8, 12), **SIZES},
  **{"patch_size": (3, 3), "patch_stride": (1, 2), "patch_padding": (1, 1)},
  **{"convolution": 3, "class_token": True, "scale_by_features": True},
  encoder_attention=models.AttentionConfig("strided_2d"),
)


def make(config, shape=(8, 6, 1)):
  return tiny.of_config(
    config, target_vocab_size=5, input_shapes={"image": shape}
  )


def images(shape=(3, 8, 6, 1)):
  return {"image": np.random.default_rng(0).standard_normal(shape, np.float32)}


@pytest.mark.parametrize("config", [SWIN, CVT])
def test_where_dropout_is(config):
  """Of the patches of each stage, and of each sub-layer's output."""
  model = make(dataclasses.replace(config, dropout_rate=0.5))
  variables = tiny.variables_of(model, images())
  layers = {f"encoder_{i}": 2 for i in range(sum(config.depths))}
  assert tiny.dropouts(model, variables, images()) == {"": 2, **layers}


def test_grids_of_both_kinds():
  """Merging rounds up; patches that overlap follow from stride and padding."""
  assert SWIN.grids(8, 6) == [(4, 3), (2, 2)]
  assert SWIN.grids(9, 6) == [(5, 3), (3, 2)]
  assert CVT.grids(8, 7) == [(8, 7), (4, 4)]
  # The sizes of the published CvT-13.
  config = dataclasses.replace(
    CVT, patch_size=(7, 3), patch_stride=(4, 2), patch_padding=(2, 1)
  )
  assert config.grids(224, 224) == [(56, 56), (28, 28)]


def test_grid_convolution_leaves_other_tokens_and_keeps_statistics():
  x = images((2, 7, 1, 3))["image"][:, :, 0]
  module = GridConvolution(3, "float32", "float32")

  @jax.jit
  def made(key):
    variables = module.init(key, x, (2, 3), deterministic=True)
    kernel = variables["params"]["convolution"]["kernel"]
    call = {"deterministic": False, "mutable": ["batch_stats"]}
    raw = depthwise(x[:, 1:].reshape(2, 2, 3, 3), kernel)
    return module.apply(variables, x, (2, 3), **call), raw

  (out, updated), raw = made(jax.random.key(0))
  np.testing.assert_array_equal(out[:, :1], x[:, :1])
  grid = np.asarray(out[:, 1:])
  np.testing.assert_allclose(grid.mean((0, 1)), 0.0, atol=1e-5)
  np.testing.assert_allclose(grid.var((0, 1)), 1.0, atol=1e-3)
  mean = updated["batch_stats"]["norm"]["mean"]
  wanted = 0.1 * np.asarray(raw).mean((0, 1, 2))
  np.testing.assert_allclose(mean, wanted, atol=1e-6)


@pytest.mark.parametrize(
  ("config", "name"),
  [(SWIN, "window_2d"), (CVT, "strided_2d"), (CVT, "linear")],
)
def test_every_mechanism_that_can_serve(config, name):
  """Those of the papers, and one that knows no grid."""
  config = dataclasses.replace(config, encoder_attention=tiny.attention(name))
  model = make(config)
  variables = tiny.variables_of(model, images())
  out = tiny.forward(model, variables, images())
  assert out.shape == (3, 1, 5)
  assert np.isfinite(out).all()
  assert np.std(out, axis=0).min() > 1e-4
  if name != "linear":  # Images of another size are read.
    other = tiny.forward(model, variables, images((2, 11, 9, 1)))
    assert other.shape == (2, 1, 5)
    assert np.isfinite(other).all()
  maps = tiny.attention_maps(model, variables, images())
  shape = next(iter(maps.values())).shape
  assert shape[-2:] == ((12, 12) if config.merges else (48, 48))


def test_what_cannot_be_is_refused():
  assert_refused(
    functools.partial(dataclasses.replace, SWIN),
    *({"depths": ()}, {"num_heads": (2,)}),
    ("features", {"num_heads": (3, 2)}),
    *({"features": (8, 8)}, {"patch_size": (2, 2, 2)}),
    {"patch_stride": (2, 2)},
    ("patch_padding[0]", {"patch_padding": (-1,)}),
    {"convolution": 2},
    {
      "encoder_attention": models.AttentionConfig("performer"),
      "attention_dropout_rate": 0.1,
    },
  )


def test_sizes_that_do_not_fit_are_refused():
  small = dataclasses.replace(
    CVT, patch_size=(9, 9), patch_stride=(2, 2), patch_padding=None
  )
  with pytest.raises(ValueError, match=r"^patch_size: expected patches that"):
    make(small, (8, 8, 1))
  with pytest.raises(ValueError, match=r"^kind: 'pyramid' reads images"):
    make(SWIN, None)
  model = make(SWIN)
  with pytest.raises(ValueError, match=r"^image: expected \[B, H, W, 1\]"):
    models.initialize(model, jax.random.key(0), images((1, 8, 6, 2)))


def test_a_mechanism_is_told_the_grid_of_its_stage():
  windows = models.AttentionConfig("window_2d", {"window": 2})
  config = dataclasses.replace(CVT, encoder_attention=windows)
  assert config.mechanism(0, 0, (8, 6)).options["grid"] == (8, 6)
  with pytest.raises(ValueError, match=r"^encoder_attention: grid: expected"):
    make(config)
  own = models.AttentionConfig("window_2d", {"window": 2, "grid": (4, 12)})
  config = dataclasses.replace(CVT, encoder_attention=own)
  assert config.mechanism(0, 0, (8, 6)) == own


@pytest.mark.parametrize("name", ["vit", "deit", "swin", "cvt"])
def test_a_trained_model_has_the_config_of_transformers(name):
  """The values of the file that transformers wrote for the same model."""
  p = models.load_pretrained(FOLDERS[name])
  made = models.as_pretrained(p.model, p.variables)
  assert made.family == name
  theirs = json.loads((FOLDERS[name] / "config.json").read_text("utf-8"))
  if name == "cvt":  # It accepts images of any size, and training drops layers.
    theirs |= {"image_size": 224, "drop_path_rate": [0.0] * 3}
  assert made.config == {key: theirs[key] for key in made.config}


TINY = {"depths": "1,1", "num_heads": "2,2", "features": "8,16"}
TINY |= {"mlp_features": "8,16", "dropout_rate": 0.0}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["swin", "cvt"])
def test_a_run_becomes_published_weights(name, tmp_path):
  """Trained, drawn, exported, and read again with the same logits."""
  folder, out = tmp_path / "run", tmp_path / "published"
  leaves = {"num_steps": 150, "batch_size": 32, "log_every": 30, "model": TINY}
  leaves["optimizer"] = {"learning_rate": 0.004, "warmup_steps": 5}
  printed = commands.trained(folder, name, **leaves)
  assert (folder / "attention.png").stat().st_size > 1000
  accuracy = float(printed.split("accuracy")[-1].split()[0])
  assert accuracy > 0.15  # Guessing is 0.1.
  flags = (f"--workdir={folder}", f"--export={out}")
  code, printed, error = commands.run("generate.py", *flags)
  assert (code, error) == (0, "")
  p, again = models.load_pretrained(folder), models.load_pretrained(out)
  batch = {"pixel_values": images((3, 8, 8, 1))["image"]}
  np.testing.assert_array_equal(compute(again, batch), compute(p, batch))
  assert again.family == name
  # Only what a family is can become one.
  other = dataclasses.replace(
    p.model.config, image_shape=(8, 6, 1), convolution=5
  )
  model = p.model.clone(config=other, image_shape=(8, 6, 1))
  with pytest.raises(ValueError, match=f"{name} does not fit: image_shape"):
    models.as_pretrained(model, p.variables)
