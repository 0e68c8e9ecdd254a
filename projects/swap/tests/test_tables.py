"""Cells of the swap's tables, and panels of its pictures."""

from comparison.analysis.summary import Cost
from projects.swap import figures, rows


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
    {
      "side": "decoder",
      "layer": layer,
      "error": 0.2 + layer,
      "loss": 2.5 + layer,
      "transfer_error": 0.1 + layer,
    }
    for layer in range(2)
  ]
  records = [
    {"attention": "own", "swaps": [{"loss": 2.0}]},
    {"attention": "flash", "layers": layers},
  ]
  figure = figures._layers(records)
  assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == [
    "error of a layer's output",
    "the same after the transfer",
    "loss added by one layer alone, %",
  ]
  [hidden] = [axes for axes in figure.axes if not axes.get_visible()]
  assert hidden.get_title() == ""
