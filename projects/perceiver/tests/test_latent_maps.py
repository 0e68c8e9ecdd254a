"""Names, order and labels of the maps of latents."""

import types

import numpy as np
import pytest

import models
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


def test_a_text_has_its_latents_in_that_order(monkeypatch):
  """Of a text of four tokens: latents look at tokens 4, 1 and 2."""
  weights = np.eye(6)[None, None, [3, 0, 1]]
  calls, drawn = [], []
  monkeypatch.setattr(
    models,
    "attention_maps",
    lambda *call: calls.append(call) or {"encoder/cross_attention": weights},
  )
  monkeypatch.setattr(
    maps.attention_maps, "draw_maps", lambda *call: drawn.append(call)
  )
  chosen = {"cross_attention": [types.SimpleNamespace(name="linear")]}
  model = types.SimpleNamespace(
    config=types.SimpleNamespace(**vars(CONFIG), attentions=chosen)
  )
  model.name_map = maps.LatentPictures.name_map.__get__(model)
  task = types.SimpleNamespace(
    pad_id=0, labels=lambda ids: [" abcd"[i] for i in ids]
  )
  example = {
    "source": np.array([[1, 2, 3, 4, 0, 0]]),
    "weights": np.ones((1, 4)),
  }
  maps.LatentPictures.draw_attention(
    model, "a.png", {"own": 0}, task, [example]
  )
  [(read, variables, batch)] = calls
  assert (read, variables, {*batch}) == (model, {"own": 0}, {*example})
  [(path, [shown])] = drawn
  assert (path, shown.query_labels) == ("a.png", ["2", "3", "1"])
  assert (shown.key_labels, shown.mechanism) == (TOKENS[1], "linear")
  np.testing.assert_array_equal(shown.weights, np.eye(4)[None, [0, 1, 3]])


def test_an_image_has_the_class_and_ten_latents(monkeypatch):
  """Of twelve latents, 3 and 7 look everywhere; two blocks share one layer."""
  rng = np.random.default_rng(0)
  across = rng.dirichlet(np.ones(6), (2, 12))
  across[:, [2, 6]] = 1 / 6
  within = rng.dirichlet(np.ones(12), (2, 12))
  out = rng.dirichlet(np.ones(12), (2, 1))
  drawn = []
  monkeypatch.setattr(
    models,
    "attention_maps",
    lambda *unused: {
      "encoder/cross_attention": across[None],
      "encoder_0/self_attention": within[None],
      "decoder/cross_attention": out[None],
    },
  )
  monkeypatch.setattr(maps.overlay, "draw_panels", lambda *x: drawn.append(x))
  config = types.SimpleNamespace(
    num_layers=1,
    num_blocks=2,
    layers={"cross_attention": [types.SimpleNamespace(name="a")]}.get,
  )
  model = types.SimpleNamespace(config=config)
  batch = {"image": np.zeros((1, 2, 3, 1)), "weights": np.ones((1, 1))}
  maps.LatentPictures.draw_attention(model, "a.png", {}, None, [batch])
  [(path, image, (first, *rest), heading)] = drawn
  assert (path, image.shape) == ("a.png", (2, 3, 1))
  assert heading == "attention of latents, mean over heads: a"
  layer = 0.5 * within.mean(0) + 0.5 * np.eye(12)
  expected = out.mean(0) @ layer @ layer @ across.mean(0)
  assert (first.title, first.side) == ("class, rolled out", (1, 1))
  np.testing.assert_allclose(first.weights, expected.reshape(2, 3))
  latents = np.delete(np.arange(12), [2, 6])
  assert [x.title for x in rest] == [f"latent {i + 1}" for i in latents]
  np.testing.assert_allclose(
    [x.weights for x in rest], across.mean(0)[latents].reshape(-1, 2, 3)
  )


def test_a_latent_has_no_query_patch():
  with pytest.raises(ConfigError, match=r"^--query: only models of patches"):
    maps.LatentPictures.draw_input(None, None, None, None, "a", (1, 2))
