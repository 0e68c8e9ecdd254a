"""Names, order and labels of the maps of latents."""

import types

import numpy as np
import pytest

from projects.perceiver import maps
from settings.errors import ConfigError

CONFIG = types.SimpleNamespace(num_latents=3, head="tokens")
CLASSES = types.SimpleNamespace(num_latents=3, head="class")
TOKENS = ("token", ["a", "b", "c", "d"])
LATENTS = ("latent", ["1", "2", "3"])


@pytest.mark.parametrize(
  ("config", "name", "rows", "columns"),
  [
    (CONFIG, "encoder/cross_attention", LATENTS, TOKENS),
    (CONFIG, "encoder_1/self_attention", LATENTS, LATENTS),
    (CONFIG, "decoder/cross_attention", ("output", TOKENS[1]), LATENTS),
    (CLASSES, "encoder/cross_attention", LATENTS, TOKENS),
    (CLASSES, "decoder/cross_attention", ("output", ["class"]), LATENTS),
  ],
)
def test_each_map_has_its_axes(config, name, rows, columns):
  assert maps.axes(config, name, TOKENS) == (rows, columns)
  # And as many weights, those of padding not.
  model = types.SimpleNamespace(config=config)
  task = types.SimpleNamespace(
    pad_id=0, labels=lambda ids: [" abcd"[i] for i in ids]
  )
  example = {"source": np.array([[1, 2, 3, 4, 0, 0]])}
  weights = np.arange(2 * 7 * 6).reshape(2, 7, 6)
  shown = maps.LatentPictures.name_map(model, name, weights, task, example)
  np.testing.assert_array_equal(
    shown[0], weights[:, : len(rows[1]), : len(columns[1])]
  )
  assert shown[1:] == (rows[1], columns[1], (columns[0], rows[0]))


def test_pixels_have_a_row_and_a_column():
  model = types.SimpleNamespace(config=CONFIG)
  example = {"image": np.zeros((1, 2, 3, 1))}
  _, _, columns, names = maps.LatentPictures.name_map(
    model, "encoder/cross_attention", np.zeros((1, 3, 6)), None, example
  )
  assert columns == ["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
  assert names == ("pixel", "latent")


def test_latents_are_in_the_order_of_where_they_look():
  """At 2, at 0.5, nowhere, and at 1.5, where what is below 0 does not count."""
  one = [[0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [-9.0, 0.5, 0.5]]
  weights = np.array([one, one]) * [[[2.0]], [[1.0]]]
  assert maps.sort_by_position(weights).tolist() == [2, 1, 3, 0]


def test_a_latent_has_no_query_patch():
  with pytest.raises(ConfigError, match=r"^--query: only models of patches"):
    maps.LatentPictures.draw_input(None, None, None, None, "a", (1, 2))
