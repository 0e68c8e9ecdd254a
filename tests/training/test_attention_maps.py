"""Samples and pictures."""

import types

import numpy as np
import pytest

from training import evaluate
from training.evaluate import Sample
from training.pictures import attention_maps, overlay


def layer(weights, query_labels, key_labels, mechanism="dense"):
  return attention_maps.AttentionMap(
    weights, query_labels, key_labels, ("source", "target"), "layer", mechanism
  )


def model(encoder="dense", decoder="dense", cross="dense"):
  """What maps read of a model: which mechanism is where."""
  names = {"encoder": encoder, "decoder": decoder, "cross": cross}
  chosen = {
    f"{slot}_attention": (types.SimpleNamespace(name=name),)
    for slot, name in names.items()
  }
  return types.SimpleNamespace(config=types.SimpleNamespace(attentions=chosen))


def test_a_token_without_a_glyph_is_a_box_without_a_warning(tmp_path):
  labels = ["今天", "🙂"]
  attention_maps.draw_maps(
    tmp_path / "map.png", [layer(np.full((1, 2, 2), 0.5), labels, labels)]
  )
  assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


SLOTS = [
  *(f"encoder_{i}/self_attention" for i in (0, 1)),
  *(
    f"decoder_{i}/{kind}_attention"
    for kind in ("self", "cross")
    for i in (0, 1)
  ),
]
"""Names of the maps of two layers."""


@pytest.fixture
def mapped(monkeypatch):
  """Gives a model maps of these names."""

  def mapped(names, weights=None):
    weights = np.zeros((1, 1, 2, 2)) if weights is None else weights
    monkeypatch.setattr(
      attention_maps.models,
      "attention_maps",
      lambda unused, variables, rows: dict.fromkeys(names, weights),
    )

  return mapped


@pytest.fixture
def drawn(monkeypatch):
  """The maps that are drawn."""
  drawn = []
  monkeypatch.setattr(
    attention_maps, "draw_maps", lambda path, maps: drawn.extend(maps)
  )
  return drawn


def batch_of(*ids):
  ids = np.array([ids])
  return {"source": ids, "inputs": ids, "targets": ids, "weights": ids}


def task_of(batch=None):
  return types.SimpleNamespace(
    pad_id=0,
    labels=lambda ids: list(map(str, ids)),
    eval_splits=("validation",),
    eval_batches=lambda split: [batch],
  )


def test_samples_take_one_line_a_field(tmp_path):
  path = tmp_path / "samples.txt"
  samples = [Sample("a", "b\nc", "d"), Sample("e", "f", "g")]
  evaluate.write_samples(path, samples)
  first = "source     a\nreference  b\\nc\noutput     d\n"
  second = "source     e\nreference  f\noutput     g\n"
  assert path.read_text() == f"{first}\n{second}"
  evaluate.write_samples(path, samples, num=1)
  assert "source     e" not in path.read_text()
  evaluate.write_samples(path, samples * 40)
  assert path.read_text().count("source ") == 64


@pytest.fixture
def figures(monkeypatch):
  """The figures that were saved, in order."""
  from matplotlib.figure import Figure

  figures = []
  save = Figure.savefig

  def savefig(self, path, **options):
    save(self, path, **options)
    figures.append(self)

  monkeypatch.setattr(Figure, "savefig", savefig)
  return figures


def test_a_map_is_cut_to_what_has_labels():
  weights = np.arange(2 * 70 * 66).reshape(2, 70, 66)
  cut = layer(weights, [*range(70)], [*range(100, 166)]).cut()
  np.testing.assert_array_equal(cut.weights, weights[:, :64, :64])
  assert (cut.query_labels, cut.key_labels) == (
    [*range(64)],
    [*range(100, 164)],
  )


@pytest.mark.parametrize(
  ("shape", "inches", "dpi"),
  [
    # 0.22 inches a label and one for the axis, and half an inch for the title.
    ((1, 20, 30), (7.6, 5.9), 120),
    ((5, 20, 30), (3 * 7.6, 2 * 5.4 + 0.5), 120),
    ((3, 4, 5), (2 * 3.5, 2 * 3 + 0.5), 120),
    ((1, 4, 720), (6, 3.5), 150),  # 1.25 points for each of 720 keys.
    ((10, 64, 64), (4 * 15.08, 3 * 15.08 + 0.5), 6000 / (4 * 15.08)),
  ],
)
def test_sizes_of_pictures_by_hand(shape, inches, dpi):
  _, queries, keys = shape
  labels = [["q"] * queries, ["k"] * keys]
  drawn = attention_maps.figure([layer(np.ones(shape), *labels)])
  np.testing.assert_allclose(drawn.get_size_inches(), inches)
  assert drawn.dpi == pytest.approx(dpi)


def test_a_mechanism_of_each_layer():
  """Layers take those of a config in turn; a side of one layer has the last one's."""
  chosen = model()
  names = types.SimpleNamespace(name="a"), types.SimpleNamespace(name="b")
  chosen.config.attentions["decoder_attention"] = names
  chosen.config.attentions["encoder_attention"] = names
  found = [
    attention_maps._mechanism(chosen, side, number, kind)
    for side, number, kind in (
      *(("decoder", number, "self_attention") for number in (1, 2, 3, 0)),
      *(("encoder", number, "self_attention") for number in (2, 0)),
      ("decoder", 1, "cross_attention"),
    )
  ]
  assert found == ["a", "b", "a", "b", "b", "a", "dense"]


@pytest.mark.parametrize("heads", [1, 3])
def test_a_picture_names_rows_and_columns(tmp_path, heads, figures):
  path = tmp_path / "attention.png"
  weights = np.random.default_rng(0).dirichlet(np.ones(3), (heads, 2))
  attention_maps.draw_maps(path, [layer(weights, ["x", "ß"], ["$", "b", "_"])])
  assert path.read_bytes().startswith(b"\x89PNG")
  [figure] = figures
  labels = [
    [tick.get_text() for tick in axes.get_xticklabels()]
    for axes in figure.axes
    if axes.get_title().startswith("head")  # Not the bar of colours.
  ]
  assert len(labels) == heads
  assert labels[-1] == [r"\$", "b", "_"]  # Panels above share them.


def test_a_long_axis_has_positions_and_a_bounded_picture(
  tmp_path, monkeypatch, figures
):
  monkeypatch.setattr(attention_maps, "_MAX_PIXELS", 1000)
  path = tmp_path / "attention.png"
  for columns in (65, 64):
    weights = np.full((1, 2, columns), 1 / columns)
    labels = [f"w{i}" for i in range(columns)]
    attention_maps.draw_maps(path, [layer(weights, ["x", "y"], labels)])
    # Width and height stand in the header of a PNG.
    size = np.frombuffer(path.read_bytes()[16:24], ">u4")
    assert 600 < size.max() <= 1000
  long, labelled = figures
  assert long.subfigs[0].get_suptitle() == "layer: dense"
  ticks = [t.get_text() for t in long.axes[0].get_xticklabels()]
  assert "20" in ticks
  assert "w20" not in ticks
  assert [t.get_text() for t in long.axes[0].get_yticklabels()] == ["x", "y"]
  assert long.subfigs[0].get_supxlabel() == "source, by position"
  assert long.subfigs[0].get_supylabel() == "target"
  assert labelled.subfigs[0].get_supxlabel() == "source"


def test_an_overview_fits_a_cell_and_names_tokens_that_have_room():
  few = np.full((4, 8, 8), 1 / 8)
  many = np.full((12, 40, 40), 1 / 40)
  figure = attention_maps.overview(
    [layer(x, ["q"] * len(x[0]), ["k"] * len(x[0])) for x in (few, many)]
  )
  side = (9 - 1.2) / 12
  np.testing.assert_allclose(figure.get_size_inches(), [9, 2 * (side + 0.8)])
  # Panels are two inches wide at most; labels take 85 % of that.
  three = attention_maps.overview(
    [layer(np.ones((3, 2, 20)), ["q"] * 2, ["k"] * 20)]
  )
  np.testing.assert_allclose(three.get_size_inches(), [7.2, 2.8])
  for set_of, points in (("x", 72 * 0.85 * 2 / 20), ("y", 7)):
    tick = getattr(three.axes[0], f"get_{set_of}ticklabels")()[0]
    assert tick.get_fontsize() == pytest.approx(points)
  alone = attention_maps.overview([layer(few, ["q"] * 8, ["k"] * 8)])
  ticks = [t.get_text() for t in alone.axes[0].get_xticklabels()]
  assert ticks == ["k"] * 8
  # Panels of twelve heads are too small for forty names.
  assert figure.subfigs[1].get_supxlabel() == "source, by position"
  assert [p.get_title() for p in figure.subfigs[0].axes[:5]] == [
    *(f"head {n}" for n in (1, 2, 3, 4)),
    "",
  ]


@pytest.mark.parametrize("lowest", [0.0, -1e-5, -0.25])
def test_weights_below_0_have_a_colour_of_their_own(tmp_path, figures, lowest):
  weights = np.array([[[lowest, 0.5]]])
  attention_maps.draw_maps(
    tmp_path / "a.png", [layer(weights, ["x"], ["a", "b"])]
  )
  [image] = figures[0].axes[0].images
  assert image.get_clim() == ((-0.5, 0.5) if lowest < -0.1 else (0, 0.5))


def test_every_layer_in_order(mapped):
  decoder = ("0/cross", "0/self", "10/self", "9/self")
  names = [
    *(f"decoder_{x}_attention" for x in decoder),
    "encoder_0/self_attention",
  ]
  mapped(names, np.zeros((1, 2, 3, 3)))
  example = batch_of(5, 6, 0)
  maps = attention_maps.named_maps(model(), {}, task_of(), example)
  assert [(name, shown.title) for name, shown in maps.items()] == [
    (f"{stack}_{n}_{kind}_attention", f"{stack} layer {n}, {kind}-attention")
    for stack, n, kind in (
      *[
        ("encoder", 1, "self"),
        ("decoder", 1, "self"),
        ("decoder", 1, "cross"),
      ],
      *[("decoder", 10, "self"), ("decoder", 11, "self")],
    )
  ]
  for shown in maps.values():
    assert shown.weights.shape == (2, 2, 2)
    assert shown.query_labels == shown.key_labels == ["5", "6"]


@pytest.mark.parametrize("kind", ["encoder_decoder", "decoder", "encoder"])
def test_the_last_layer_is_drawn_without_padding(kind, mapped, drawn):
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
  mapped(names, attention)
  attention_maps.draw_attention("a.png", model(), {}, task_of(), [batch])
  [(weights, queries, keys, _, title, mechanism)] = drawn
  assert weights.shape == (2, 3, 3)
  assert mechanism == "dense"
  if kind == "encoder_decoder":
    assert (queries, keys) == (["8", "9", "2"], ["5", "6", "7"])
    assert title == "decoder layer 3, cross-attention"
  else:
    assert queries == keys == list("189" if kind == "decoder" else "567")
    assert "layer 11" in title


@pytest.mark.parametrize(
  ("slots", "shown"),
  [
    (("dense",) * 3, {"decoder, cross": "dense"}),
    (("linear",) * 3, {"decoder, cross": "linear"}),
    (("linformer", "dense", "linformer"), {"decoder, cross": "linformer"}),
    (
      ("lsh", "lsh", "dense"),
      {"decoder, self": "lsh", "decoder, cross": "dense"},
    ),
    (
      ("bigbird", "dense", "dense"),
      {"encoder, self": "bigbird", "decoder, cross": "dense"},
    ),
  ],
)
def test_the_mechanism_of_the_config_comes_first(mapped, drawn, slots, shown):
  mapped(SLOTS)
  chosen, batches = model(*slots), [batch_of(5, 6)]
  attention_maps.draw_attention("a.png", chosen, {}, task_of(), batches)
  assert [(one.title, one.mechanism) for one in drawn] == [
    (f"{slot.replace(',', ' layer 2,')}-attention", mechanism)
    for slot, mechanism in shown.items()
  ]


@pytest.mark.parametrize(
  ("slots", "title", "mechanism"),
  [
    (("dense",) * 3, "encoder layer 2, self-attention", "dense"),
    (("lsh", "lsh", "dense"), "encoder layer 2, self-attention", "lsh"),
    (("dense", "delta", "dense"), "decoder layer 2, self-attention", "delta"),
    (("dense", "dense", "x:y"), "decoder layer 2, cross-attention", "x:y"),
  ],
)
def test_a_report_shows_a_slot_that_the_mechanism_fills(
  mapped, slots, title, mechanism
):
  mapped(SLOTS)
  found = attention_maps.sketch(model(*slots), {}, task_of(batch_of(5, 6)))
  assert (found["title"], found["mechanism"]) == (title, mechanism)


def test_two_layers_are_one_picture(tmp_path, figures):
  path = tmp_path / "attention.png"
  wide, narrow = np.full((2, 3, 9), 0.1), np.full((3, 2, 2), 0.5)
  first = layer(wide, list("abc"), list("abcdefghi"), "lsh")
  attention_maps.draw_maps(path, [first, layer(narrow, list("ab"), list("ab"))])
  assert path.read_bytes().startswith(b"\x89PNG")
  [figure] = figures
  titles = [part.get_suptitle() for part in figure.subfigs]
  assert titles == ["layer: lsh", "layer: dense"]
  # One below the other, they take all of the picture but a gap.
  upper, lower = (part.bbox for part in figure.subfigs)
  assert 0.0 < upper.y0 - lower.y1 < 0.03 * figure.bbox.height
  np.testing.assert_allclose([lower.y0, upper.y1], [0, figure.bbox.y1], atol=1)


@pytest.mark.parametrize(
  ("lengths", "drawn"),
  [
    ((0, 70, 3), 1),  # The first fills up a batch.
    ((70, 20, 90), 1),
    ((5, 24, 20), 1),
  ],
)
def test_the_most_readable_row_is_drawn(lengths, drawn):
  weights = np.arange(90) < np.array(lengths)[:, None]
  batch = {"weights": weights.astype("f4"), "inputs": np.arange(3)[:, None]}
  assert attention_maps.readable_example([batch])["inputs"] == [[drawn]]


def test_panels_of_weights_cover_whole_patches_of_an_image(tmp_path, figures):
  """Patches may end outside the image, or before its edge."""
  image = np.linspace(-1.0, 3.0, 40).reshape(5, 8, 1)
  seen = np.array([[0.2, 0.1], [0.4, 0.3]])
  panels = [
    overlay.Panel("layer 1", seen, (3, 4), ([3], [4])),
    overlay.Panel("layer 2", np.zeros((2, 3)), (2, 2)),
  ]
  overlay.draw_panels(tmp_path / "a.png", image, panels, "attention")
  (figure,) = figures
  assert figure.get_suptitle() == "attention"
  np.testing.assert_allclose(figure.get_size_inches(), [3 * 2.0, 2.25 + 0.4])
  titles = [axes.get_title() for axes in figure.axes]
  assert titles == ["image", "layer 1, up to 0.40", "layer 2, up to 0.00"]
  whole = np.arange(40).reshape(5, 8) / 39
  for axes, pixels in zip(
    figure.axes, (whole, whole, whole[:4, :6]), strict=True
  ):
    np.testing.assert_allclose(axes.images[0].get_array(), pixels, atol=1e-7)
  weights = figure.axes[1].images[1]
  rows = np.array([[0.2] * 4 + [0.1] * 4] * 3 + [[0.4] * 4 + [0.3] * 4] * 2)
  np.testing.assert_allclose(weights.get_array(), rows)
  assert weights.get_clim() == (0, 0.4)
  across, down = figure.axes[1].lines
  assert (across.get_ydata()[0], down.get_xdata()[0]) == (2.5, 3.5)
  assert not figure.axes[2].lines
  panel = overlay.Panel("layer", seen, (3, 4))
  for count, inches in ((1, (4, 2.65)), (4, (8, 4.9))):
    overlay.draw_panels(tmp_path / "a.png", image, [panel] * count, "a")
    np.testing.assert_allclose(figures[-1].get_size_inches(), inches)
