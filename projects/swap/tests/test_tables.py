"""Cells of the swap's tables, and panels of its pictures."""

import math

import numpy as np
import pytest

from comparison.analysis.summary import Cost
from projects.swap import figures, measure, records, report, rows
from projects.swap.settings import Settings
from settings.errors import ConfigError


def test_a_cell_is_in_the_unit_of_its_column():
  milliseconds = Cost("step", "ms", 1e3, "time of a step")
  shares = Cost("added", "%", 100.0, "loss added")
  assert rows.cell(0.0123456, milliseconds).text == "12.35"
  assert rows.cell(1234.5678, milliseconds).text == "1,234,568"
  assert rows.cell(-1.5, milliseconds).text == "-1,500"
  assert rows.cell(0.012346, shares).text == "1.23"
  assert rows.cell(None, shares).text == rows.NOTHING


def test_layers_have_a_panel_for_each_number_and_no_empty_one():
  layers = [
    {"side": "decoder", "layer": n, "error": 0.2 + n, "loss": 2.5 + n}
    | {"transfer_error": 0.1 + n}
    for n in range(2)
  ]
  own = {"attention": "own", "swaps": [{"loss": 2.0}]}
  figure = figures._layers([own, {"attention": "flash", "layers": layers}])
  titles = {axes.get_title(): axes.get_visible() for axes in figure.axes}
  assert titles == {
    "error of a layer's output": True,
    "the same after the transfer": True,
    "loss added by swapping one layer, %": True,
    "": False,
  }


def _swap(keep, *losses, **more):
  names = ("loss", "transfer_loss", "finetune_loss")
  return {"keep": keep, **dict(zip(names, losses, strict=False)), **more}


def _record(attention, *swaps, status=records.DONE, **more):
  name = attention.partition(":")[0]
  return {
    **{"attention": attention, "name": name, "status": status},
    **({"swaps": list(swaps)} if swaps else {}),
    **more,
  }


FOUND = [
  _record("own", _swap(2, 2.0), cache_bytes=2048, step_seconds=0.25),
  _record(
    "lsh",
    _swap(0, 4.0, 3.0, accuracy=0.25, transfer_accuracy=0.5, folder="a"),
    _swap(1, 2.5, kept=[1]),
    error=0.5,
    trained=7,
    all_options="num_rounds=2",
    cache_bytes=4096,
    notes={"map": "too long"},
  ),
  _record("path", _swap(2, 800.0, 4.0, 1.0, kept=[0, 1]), reason="slow"),
  _record("flash", status=records.CANNOT, reason="not causal"),
]


def test_rows_have_the_last_of_each_number():
  own, first, second, third, refused = rows.results(FOUND)
  shown = ("attention", "keep", "kept", "loss_added", "last_accuracy")
  assert [[row[x] for x in shown] for row in (own, first, second, third)] == [
    ["own", 2, "", 0.0, None],
    ["lsh", 0, "", 0.5, 0.5],
    ["lsh", 1, "1", 0.25, None],
    ["path", 2, "0 1", -0.5, None],
  ]
  losses = ("loss", "transfer_loss", "finetune_loss")
  assert [first[x] for x in losses] == [4.0, 3.0, None]
  assert first["perplexity"] == pytest.approx(math.exp(3))
  assert (first["folder"], second["folder"]) == ("a", None)
  assert (first["error"], first["trained"]) == (0.5, 7)
  assert first["options"] == "num_rounds=2"
  assert [*own][:5] == ["attention", "name", "status", "keep", "kept"]
  assert [*own][-1] == "reason"
  reasons = [row["reason"] for row in (own, first, third, refused)]
  assert reasons == [None, "map: too long", "slow", "not causal"]
  assert (refused["loss"], refused["perplexity"]) == (None, None)
  # Without the original model nothing is relative to it.
  assert rows.results(FOUND[1:])[0]["loss_added"] is None
  beyond = [FOUND[0], _record("path", _swap(0, 800.0))]
  assert rows.results(beyond)[1]["perplexity"] == math.inf


def test_a_record_in_one_line():
  assert [*map(rows.line, FOUND)] == [
    "own: loss 2.0000 (2 layers kept)",
    "lsh (num_rounds=2): loss 4.0000 → 3.0000, loss 2.5000 (1 layer kept); "
    "map: too long",
    "path: loss 800.0000 → 4.0000 → 1.0000 (2 layers kept); slow",
    "flash: not causal",
  ]


def test_the_subject_of_a_report_is_one_sentence():
  """With the trainings that there were, and the length that was measured."""
  settings = Settings(
    weights="gpt2", text="a.txt", transfer_steps=1500, batch_size=4
  )
  assert report._subject(settings) == (
    "`gpt2` on `a.txt`, 1,500 steps of transfer, batches of 4 windows"
  )
  settings = Settings(
    weights="gpt2", text="a.txt", finetune_steps=20, length=2048
  )
  assert report._subject(settings) == (
    "`gpt2` on `a.txt`, 20 steps of fine-tuning, batches of 8 windows, "
    "--length 2,048"
  )


def test_units_of_columns():
  """What 1 is in each column, as a reader sees it."""
  columns = {**rows.QUALITY, **rows.COSTS}
  assert {
    name: rows.cell(1.0, column).text + column.unit
    for name, column in columns.items()
    if column.unit
  } == {
    **dict.fromkeys(["loss", "transfer_loss", "finetune_loss"], "1nats"),
    **dict.fromkeys(["loss_added", "last_accuracy"], "100.00%"),
    **dict.fromkeys(["step_seconds", "long_step_seconds"], "1,000ms"),
    **dict.fromkeys(["temp_bytes", "long_temp_bytes"], "9.537e-07MiB"),
    **{"cache_bytes": "0.0009766KiB", "cache_token_bytes": "1B"},
  }
  plain = [x for x in columns.values() if not x.unit]
  assert {rows.cell(1.0, column).order for column in plain} == {1.0}


def test_layers_are_relative_to_the_model_as_it_is():
  layer = {"side": "decoder", "layer": 3, "error": 0.2, "loss": 3.0}
  found = [FOUND[0], _record("lsh", layers=[{**layer, "transfer_loss": 2.5}])]
  assert rows.layers(found) == [
    {
      **{"attention": "lsh", **layer, "transfer_error": None},
      **{"loss_added": 0.5, "transfer_loss": 2.5, "transfer_loss_added": 0.25},
    }
  ]


def test_a_record_of_another_spelling_is_not_replaced(tmp_path):
  (tmp_path / records.RECORDS).mkdir()
  label = "sliding_window:window=(4,2)"
  records.write(tmp_path, {"attention": label, "loss": 1.5})
  assert records.read(tmp_path, label)["loss"] == 1.5
  with pytest.raises(ConfigError, match="already has the results of"):
    records.read(tmp_path, "sliding_window:window=[4,2]")


def test_records_are_in_the_order_of_the_registry(tmp_path):
  (tmp_path / records.RECORDS).mkdir()
  names = ["mine:other", "lsh:num_rounds=2", "lsh", "own", "dense"]
  for name in names:
    records.write(tmp_path, _record(name))
  found = [one["attention"] for one in records.read_all(tmp_path)]
  assert found == ["own", "dense", "lsh", "lsh:num_rounds=2", "mine:other"]


@pytest.mark.parametrize(
  ("label", "keep", "name"),
  [
    ("performer", 0, "performer"),
    ("lsh", 2, "lsh-keep-2"),
    ("window:window=(5, 0):x=1.5", 1, "window-window=-5-0-x=1.5-keep-1"),
    ("their.swap:mine:(", 0, "their.swap-mine"),
  ],
)
def test_folders_of_swapped_models(label, keep, name):
  assert records.folder_name(label, keep) == name


def test_layers_that_cost_most_are_kept():
  """Those whose loss is no number first, then in the order of the model."""
  losses = [2.0, math.nan, 3.0, 2.5, math.inf, 3.0]
  layers = [{"loss": loss} for loss in losses]
  kept = measure._most_sensitive_modules("abcdef", layers, (0, 1, 3, 5))
  assert kept == {0: set(), 1: {*"b"}, 3: {*"bec"}, 5: {*"becfd"}}


def test_losses_are_drawn_over_the_cost_of_each():
  figure = figures._quality_cost(FOUND)
  time, cache = figure.axes
  np.testing.assert_allclose(figure.get_size_inches(), [7.2, 3.2 + 0.16])
  assert time.get_xlabel() == "step, ms"
  assert cache.get_xlabel() == "cache, KiB"
  assert time.get_ylabel() == "held-out loss, nats"
  assert time.get_shared_y_axes().joined(time, cache)
  assert (time.get_xlim()[0], cache.get_xlim()[0]) == (0, 0)
  # A line and a marker for each loss, and a line across for the original model.
  drawn = [
    (list(x.get_xdata()), list(x.get_ydata()), x.get_alpha())
    for x in cache.lines
  ]
  assert drawn == [
    ([4, 4], [4.0, 3.0], None),
    ([4], [4.0], 0.35),
    ([4], [3.0], 1.0),
    ([2], [2.0], None),
    ([2], [2.0], 1.0),
    ([0, 1], [2.0, 2.0], None),
  ]
  (words,) = ([x.get_text() for x in y.get_texts()] for y in figure.legends)
  assert words == ["own", "lsh", "path"]


@pytest.mark.parametrize("sides", [("decoder",), ("encoder", "decoder")])
def test_a_heat_map_has_its_numbers_in_their_cells(sides):
  layers = [
    {"side": side, "layer": n, "error": 0.02 + 0.9 * n, "loss": 2.0 + n}
    for side in sides
    for n in range(2)
  ]
  found = [
    _record("own", _swap(0, 2.0)),
    _record("a.b:mine", layers=layers[::-1]),
    _record("lsh", layers=layers),
  ]
  figure = figures._layers(found)
  errors, added = figure.axes
  count = len(layers)
  size = (2 * max(3.9, 1.7 + 0.38 * count), max(2.2, 0.9 + 0.25 * 2))
  np.testing.assert_allclose(figure.get_size_inches(), size)
  cells = {x.get_position(): x for x in errors.texts}
  assert len(cells) == 2 * count
  assert [cells[j, 1].get_text() for j in range(2)] == ["0.02", "0.92"]
  assert [cells[j, 0].get_text() for j in range(2)] == ["0.92", "0.02"]
  colors = [cells[j, 1].get_color() for j in range(2)]
  assert colors == ["#1c1b19", "#ffffff"]
  assert {(x.get_ha(), x.get_va()) for x in cells.values()} == {
    ("center", "center")
  }
  texts = {x.get_position(): x.get_text() for x in added.texts}
  assert [texts[j, 1] for j in range(2)] == ["+0.0", "+50.0"]
  assert errors.images[0].get_clim() == (-2, 0)
  np.testing.assert_allclose(added.images[0].get_clim(), (-1, 2))
  ticks = [x.get_text() for x in errors.get_xticklabels()]
  letters = ["e", "d"] if len(sides) > 1 else [""]
  expected = [f"{x}{n}" for x in letters for n in range(2)]
  assert ticks == expected[::-1]
  names = [x.get_text() for x in errors.get_yticklabels()]
  assert names == ["b\nmine", "lsh"]
