"""Attention below a spectrogram: which rows, times, colours and titles it has."""

import types

import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import pytest

from projects.speech import maps

FRAMES, WHOLE, BANDS = 8, 6, 3  # Two frames of padding, two frames a position.


class Model:
  """A name for each of two layers."""

  config = types.SimpleNamespace(
    layers=lambda field: [types.SimpleNamespace(name=x) for x in ("a", "b")]
  )


def decode(ids):
  return "".join(" $b"[i] for i in ids if i)


TASK = types.SimpleNamespace(
  labels=lambda ids: [" $b"[i] for i in ids], decode=decode
)


def example(**more):
  mask = np.arange(FRAMES)[None] < WHOLE
  frames = np.arange(FRAMES * BANDS).reshape(1, FRAMES, BANDS)
  return {"frames": frames, "source_mask": mask, **more}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
  """Draws the recognised ids of four positions; gives the figure and the text."""

  def draw(ids, **more):
    rng = np.random.default_rng(0)
    first = rng.random((1, 2, 4, 4))
    weights = {
      "encoder_0/self_attention": first,
      "encoder_1/self_attention": first - 0.5,  # Some mechanisms have these.
    }
    logits = jnp.eye(3)[jnp.array([ids])]
    monkeypatch.setattr(maps.models, "attention_maps", lambda *x: weights)
    monkeypatch.setattr(
      maps.models, "forward", lambda *x: logits, raising=False
    )
    figures = []
    monkeypatch.setattr(
      Figure, "savefig", lambda self, path, dpi: figures.append(self)
    )
    text = maps.draw_below_spectrogram(
      tmp_path / "a.png", Model(), {}, TASK, example(**more)
    )
    return figures[0], text, first[0]

  return draw


def test_rows_are_the_positions_of_symbols(drawn):
  figure, text, weights = drawn([0, 1, 2, 2], targets=np.array([[2, 1]]))
  assert text == "$b"
  above, *layers = figure.axes[:3]
  assert above.get_title() == r"recognised: \$b, said: b\$"
  assert above.get_xlim() == (0, 0.06)  # Six frames of 10 ms.
  assert above.images[0].get_array().shape == (BANDS, WHOLE)
  assert above.images[0].get_extent() == [0, 0.06, 0, BANDS]
  assert above.images[0].get_array()[1, 2] == 2 * BANDS + 1
  assert [x.get_title() for x in layers] == ["layer 1, a", "layer 2, b"]
  # The third position is the last that is no padding.
  shown = weights.mean(0)[[1, 2], :3]
  for place, wanted in zip(layers, (shown, shown - 0.5), strict=True):
    image = place.images[0]
    np.testing.assert_allclose(image.get_array(), wanted)
    assert image.get_extent() == [0, 0.06, 2, 0]
    assert [x.get_text() for x in place.get_yticklabels()] == [r"\$", "b"]
    np.testing.assert_allclose(place.get_yticks(), [0.5, 1.5])
    assert place.get_ylabel() == "recognised"
  plain, signed = (x.images[0] for x in layers)
  assert (plain.cmap.name, signed.cmap.name) == ("viridis", "RdBu")
  assert plain.get_clim() == (0, pytest.approx(shown.max()))
  top = np.abs(shown - 0.5).max()
  assert signed.get_clim() == pytest.approx((-top, top))
  assert layers[-1].get_xlabel() == "seconds"
  # Four lines of text at least for each layer.
  height = 2.5 + 2 * (0.6 + 0.2 * 4 + 0.3)
  np.testing.assert_allclose(figure.get_size_inches(), [10, height])


def test_without_a_symbol_rows_are_all_positions(drawn):
  figure, text, weights = drawn([0, 0, 0, 1])  # The last is padding.
  _, layer, *_ = figure.axes
  np.testing.assert_allclose(
    layer.images[0].get_array(), weights.mean(0)[:3, :3]
  )
  assert layer.get_ylabel() == "query position"
  assert figure.axes[0].get_title() == "recognised: nothing"
  assert text == ""


@pytest.mark.parametrize(
  ("whole", "count"), [(6, 3), (5, 3), (1, 1), (0, 1), (8, 4)]
)
def test_axes_are_times_without_padding(whole, count):
  """A position that has a frame counts; there is one at least."""
  mask = np.arange(FRAMES)[None] < whole
  weights = np.arange(2 * 4 * 4).reshape(2, 4, 4)
  found, rows, columns, names = maps.SpectrogramPictures.name_map(
    None, "name", weights, None, {**example(), "source_mask": mask}
  )
  np.testing.assert_array_equal(found, weights[:, :count, :count])
  assert rows == columns == ["0.00", "0.02", "0.04", "0.06"][:count]
  assert names == ("key, in seconds", "query, in seconds")
