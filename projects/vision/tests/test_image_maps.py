"""Attention drawn over an image, and rolled out through the layers."""

import types

import numpy as np
import pytest

import models
from projects.vision import maps as image_maps
from tests.models.published.test_equality import FOLDERS


def test_rollout_by_hand():
  """Two layers of two heads of three tokens, product by product."""
  rng = np.random.default_rng(0)
  layers = [rng.dirichlet(np.ones(3), (2, 3)) for _ in range(2)]
  first, second = (
    0.5 * (heads[0] + heads[1]) / 2 + 0.5 * np.eye(3) for heads in layers
  )
  found = image_maps.rollout(layers)
  np.testing.assert_allclose(found, second @ first, atol=1e-12)
  np.testing.assert_allclose(found.sum(1), 1.0)


def test_rollout_of_weights_that_are_no_distribution():
  """Below 0, or no attention at all: rows still sum to 1."""
  weights = np.array([[[-0.5, 0.5], [0.0, 0.0]]])
  found = image_maps.rollout([weights])
  np.testing.assert_allclose(found, [[0.5, 0.5], [0.0, 1.0]])


def test_labels_are_rows_and_columns():
  p = models.load_pretrained(FOLDERS["vit"])
  assert image_maps.labels(p.model, 10)[:5] == [
    *["[CLS]", "0,0", "0,1", "0,2", "1,0"]
  ]
  p = models.load_pretrained(FOLDERS["deit"])
  assert image_maps.labels(p.model, 11)[:3] == ["[CLS]", "[DIST]", "0,0"]


def test_a_query_is_a_patch_of_the_image():
  """Of 3 × 2 patches of 4 × 4 pixels."""
  model = models.load_pretrained(FOLDERS["deit"]).model
  shape = 1, 15, 11, 3
  assert image_maps.parse_query(model, shape, None) is None
  assert image_maps.parse_query(model, shape, [" 2", "1 "]) == (2, 1)
  for query in (["3", "0"], ["2", "2"], ["-1", "0"], ["1"], ["0", "0", "0"]):
    with pytest.raises(ValueError, match="a row below 3 and a column below 2"):
      image_maps.parse_query(model, shape, query)


@pytest.mark.parametrize(
  ("query", "name", "token"), [(None, "[CLS]", 0), ((1, 2), "1,2", 7)]
)
def test_panels_are_layers_and_their_rollout(monkeypatch, query, name, token):
  """Of two special tokens and 3 × 3 patches."""
  p = models.load_pretrained(FOLDERS["deit"], ["dense", "linear", "dense"])
  rng = np.random.default_rng(0)
  layers = rng.dirichlet(np.ones(11), (3, 2, 11))
  maps = {f"encoder_{i}/self_attention": x[None] for i, x in enumerate(layers)}
  drawn = []
  monkeypatch.setattr(models, "attention_maps", lambda *unused: maps)
  monkeypatch.setattr(image_maps, "draw_panels", lambda *x: drawn.append(x))
  example = {"image": np.zeros((1, 15, 15, 3), np.float32)}
  image_maps.draw_on_image("a.png", p.model, {}, example, query)
  [(path, image, panels, heading)] = drawn
  assert (path, image.shape) == ("a.png", (15, 15, 3))
  assert heading == f"attention of {name}, mean over heads: dense + linear"
  titles = ["layer 1", "layer 2", "layer 3", "rolled out"]
  assert [panel.title for panel in panels] == titles
  assert {panel.side for panel in panels} == {(4, 4)}
  shown = [*layers.mean(1)[:, token], image_maps.rollout(layers)[token]]
  for panel, weights in zip(panels, shown, strict=True):
    np.testing.assert_allclose(panel.weights, weights[2:].reshape(3, 3))


@pytest.mark.parametrize(
  ("mechanism", "options", "grid", "rows", "columns"),
  [
    ("window_2d", {"window": 2}, (5, 4), [6, 12], [4]),
    ("window_2d", {"window": 2, "shift": 1}, (5, 4), [3, 9], [2, 6]),
    ("window_2d", {}, (9, 8), [21], [14]),
    ("window_2d", {"window": 4}, (5, 4), [], []),
    ("dense", {}, (9, 8), [], []),
  ],
)
def test_borders_are_between_windows(mechanism, options, grid, rows, columns):
  """In pixels, of tokens of 3 × 2 pixels."""
  chosen = models.AttentionConfig(mechanism, options)
  assert image_maps._borders(chosen, grid, (3, 2)) == (rows, columns)


@pytest.mark.parametrize(
  ("query", "grid", "special", "token"),
  [
    (None, (6, 8), 2, 0),  # [CLS]
    (None, (6, 8), 0, 3 * 8 + 4),  # The middle.
    (None, (3, 4), 0, 1 * 4 + 2),
    ((5, 7), (6, 8), 0, 5 * 8 + 7),
    ((5, 7), (6, 8), 2, 2 + 5 * 8 + 7),
    ((5, 7), (3, 4), 0, 2 * 4 + 3),
    ((0, 2), (3, 4), 1, 1 + 0 * 4 + 1),
  ],
)
def test_a_token_covers_the_patch_of_the_first_layer(
  query, grid, special, token
):
  assert image_maps._token(query, (6, 8), grid, special) == token


@pytest.mark.parametrize(
  ("patch", "grid", "side"),
  [(4, (2, 2), (4, 4)), ((7, 3), (5, 2), (3, 10)), ((7, 3), (16, 21), (1, 1))],
)
def test_sides_of_tokens_in_pixels(patch, grid, side):
  config = types.SimpleNamespace(patch_size=patch)
  model = types.SimpleNamespace(config=config)
  assert image_maps._side(model, (15, 20, 3), grid) == side


def test_a_picture_of_every_layer(tmp_path):
  from PIL import Image

  images = np.random.default_rng(0).random((1, 15, 15, 3), np.float32)
  for case, query in (("vit", None), ("deit", (0, 2))):
    p = models.load_pretrained(FOLDERS[case])
    path = tmp_path / f"{case}.png"
    image_maps.draw_on_image(
      path, p.model, p.variables, {"image": images}, query
    )
    with Image.open(path) as drawn:
      pixels = np.asarray(drawn.convert("L"), float)
    # Five panels in two rows of four: the last three places are empty.
    height, width = pixels.shape
    assert pixels[: height // 2].std() > 20
    assert pixels[height // 2 + 40 :, width // 2 :].min() == 255
