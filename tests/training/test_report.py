"""Samples and pictures."""

import types

import numpy as np
import pytest

from training import report
from training.evaluate import Sample


def test_samples_take_one_line_a_field(tmp_path):
  path = tmp_path / "samples.txt"
  samples = [Sample("a", "b\nc", "d"), Sample("e", "f", "g")]
  report.write_samples(path, samples)
  assert path.read_text().splitlines() == [
    "source     a",
    "reference  b\\nc",
    "output     d",
    "",
    "source     e",
    "reference  f",
    "output     g",
  ]
  report.write_samples(path, samples, num=1)
  assert "source     e" not in path.read_text()


@pytest.mark.parametrize("heads", [1, 3])
def test_a_picture_names_rows_and_columns(tmp_path, heads, monkeypatch):
  labels = []
  from matplotlib.axes import Axes

  draw = Axes.set_xticks

  def set_xticks(self, ticks, names, **options):
    labels.append(names)
    return draw(self, ticks, names, **options)

  monkeypatch.setattr(Axes, "set_xticks", set_xticks)
  path = tmp_path / "attention.png"
  weights = np.random.default_rng(0).dirichlet(np.ones(3), (heads, 2))
  report.draw_heads(
    path, weights, ["x", "ß"], ["$", "b", "_"], ("source", "target"), "layer"
  )
  assert path.read_bytes().startswith(b"\x89PNG")
  assert labels == [[r"\$", "b", "_"]] * heads


@pytest.mark.parametrize("kind", ["encoder_decoder", "decoder", "encoder"])
def test_the_last_layer_is_drawn_without_padding(kind, monkeypatch):
  source = np.array([[5, 6, 7, 0], [5, 0, 0, 0]])
  inputs = np.array([[1, 8, 9, 0, 0], [1, 0, 0, 0, 0]])
  targets = np.array([[8, 9, 2, 0, 0], [2, 0, 0, 0, 0]])
  batch = {"targets": targets, "weights": (targets != 0).astype(np.float32)}
  if kind == "encoder":
    source = np.pad(source, ((0, 0), (0, 1)))
  if kind != "decoder":
    batch["source"] = source
  if kind != "encoder":
    batch["inputs"] = inputs
  lengths = {"encoder": 5, "decoder": 5, "encoder_decoder": 4}
  attention = np.full((1, 2, 5, lengths[kind]), 0.25)
  maps = {"encoder_decoder": ["decoder_2/cross_attention"]}.get(kind, [])
  names = [f"{kind[:7]}_{i}/self_attention" for i in (10, 9, 1)] + maps
  monkeypatch.setattr(
    report.models,
    "attention_maps",
    lambda model, variables, rows: {n: attention for n in names},
  )
  drawn = []
  monkeypatch.setattr(report, "draw_heads", lambda *args: drawn.extend(args))
  task = types.SimpleNamespace(pad_id=0, labels=lambda ids: list(map(int, ids)))
  report.draw_attention("a.png", None, {}, task, [batch])
  _, weights, queries, keys, _, title = drawn
  assert weights.shape == (2, 3, 3)
  if kind == "encoder_decoder":
    assert (queries, keys) == ([8, 9, 2], [5, 6, 7])
    assert title == "decoder layer 3, cross-attention"
  else:
    assert queries == keys == ([1, 8, 9] if kind == "decoder" else [5, 6, 7])
    assert "layer 11" in title
