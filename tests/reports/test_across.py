"""Rows of one mechanism at several values: tables, marks and figures."""

import csv
import json
import re
from xml.etree import ElementTree

import pytest

from reports import (
  capacity,
  cells,
  comparison_maps,
  figures,
  latex,
  lengths,
  markdown,
  page,
  plots,
  rows,
  style,
  summary,
  table,
  words,
)
from reports.summary import Summary
from tests.reports import made_up

POINTS = [
  {made_up.WIDTH: width, made_up.CONVOLUTION: convolves}
  for width in (16, 32, 64)
  for convolves in (False, True)
]


@pytest.fixture(scope="module")
def found():
  return made_up.across()


@pytest.fixture(scope="module")
def summaries(found):
  return summary.summarize(found)["recall"]


@pytest.fixture(scope="module")
def drawn(summaries):
  """Stem -> figure."""
  styles = style.styles(one.attention for one in summaries)
  return {
    one.stem: one
    for one in (
      *plots.of_task("recall", summaries, styles, {}),
      *comparison_maps.of_task("recall", summaries),
    )
  }


def renamed(found, **changes):
  """The records with other values of `across`: a leaf -> a function of it."""
  return [
    record
    | {
      "across": {
        leaf: changes.get(leaf.rpartition(".")[2], lambda x: x)(value)
        for leaf, value in record["across"].items()
      }
    }
    for record in found
  ]


def test_every_value_is_a_row_and_a_mechanism_stays_together(summaries):
  assert [(one.attention, one.across) for one in summaries] == [
    (attention, point)
    for attention in ("dense", "linear", "lsh")
    for point in POINTS
  ]
  assert len({one.label for one in summaries}) == len(summaries)
  assert summaries[1].label == "dense, features=16, short_convolution=True"


def test_numbers_stand_by_size(found):
  wide = renamed(found, features=lambda x: {16: 100, 32: 20, 64: 3}[x])
  order = [
    one.across[made_up.WIDTH] for one in summary.summarize(wide)["recall"]
  ]
  assert order[:6] == [3, 3, 20, 20, 100, 100]
  csv_order = [row[made_up.WIDTH] for row in table.rows(wide)]
  assert csv_order[:24] == [3] * 8 + [20] * 8 + [100] * 8


def test_every_row_chooses_its_own_point_of_the_grid(summaries):
  for one in summaries[:12]:
    best = made_up.POINTS[one.across[made_up.WIDTH] == 64]
    assert one.grid == {made_up.LEAF: best}
    assert (one.points, len(one.done)) == (2, 2)


def test_rows_are_tied_and_not_mechanisms():
  one = made_up.records()[0]

  def row(attention, width, values):
    runs = [one | {"final": {"split": "test", "accuracy": x}} for x in values]
    return Summary("copy", attention, {}, 1, runs, {made_up.WIDTH: width})

  of_task = [
    row("dense", 16, [0.5, 0.51, 0.52]),
    row("dense", 32, [0.97, 0.98, 0.99]),
    row("linear", 16, [0.975, 0.98, 0.99]),
    row("linear", 32, [0.5, 0.51, 0.52]),
  ]
  assert summary.tied(of_task, "accuracy") == {
    "dense, features=32",
    "linear, features=16",
  }
  columns = summary.quality_columns(of_task)
  marked = summary.marks(of_task, columns)
  texts = [summary.text(one, columns[0], marked) for one in of_task]
  assert [text.endswith("≈") for text in texts] == [False, True, True, False]


def test_tables_show_the_values_behind_the_mechanism(summaries):
  columns = summary.cost_columns(summaries)
  made = rows.make(summaries, (), columns)
  assert made.header[:4] == [
    "attention",
    "features",
    "short_convolution",
    "seeds",
  ]
  assert made.left == 3
  assert made.rows[3][:4] == ["dense", "32", "True", "2/2"]
  # A row that cannot be says which one it is too.
  assert made.rows[-1] == [
    "lsh",
    "64",
    "True",
    "0/2",
    "not supported: lsh: not causal",
  ]
  styles = style.styles(one.attention for one in summaries)
  markup = cells.summaries(summaries, (), columns, styles)
  [head] = re.findall("<thead>(.*?)</thead>", markup)
  assert f'data-name="{made_up.WIDTH}" data-sort="number"' in head
  assert f'data-name="{made_up.CONVOLUTION}" data-sort="text"' in head
  widths = re.findall(r"dense</th><td data-value=\"(\d+)\"", markup)
  assert widths == ["16", "16", "32", "32", "64", "64"]


def test_results_have_a_column_a_leaf(found, tmp_path):
  table.write(tmp_path, found)
  with (tmp_path / "results.csv").open(newline="") as file:
    content = list(csv.DictReader(file))
  assert len(content) == len(found)
  row = content[-1]
  assert (row["attention"], row[made_up.WIDTH]) == ("lsh", "64")
  assert row[made_up.CONVOLUTION] == "True"
  assert row[made_up.LEAF] == "0.003"


def test_it_is_told_which_values_there_were(found):
  shared = {"match_parameters": True, f"across.{made_up.WIDTH}": [16, 32, 64]}
  told = " ".join(words.setup(shared, found))
  assert (
    "every combination of `model.features` ∈ {16, 32, 64} × "
    "`model.short_convolution` ∈ {False, True}"
  ) in told
  assert "Set for all runs" not in told
  assert "combination" not in " ".join(words.setup({}, made_up.records()))


def test_lengths_are_a_table(found, summaries):
  made = lengths.table(summaries)
  assert made is not None
  assert made.header == [
    "attention",
    "features",
    "short_convolution",
    "seeds",
    "32",
    "64 (trained)",
    "128",
    "256",
  ]
  # 0.9 + 0.016 + 0.01 − 0.1 of the trained length, mean over seeds.
  assert made.rows[0] == [
    "dense", "16", "False", "2/2", "0.8260", "0.8260", "0.6608", "0.4956"
  ]  # fmt: skip
  assert len(made.rows) == 12
  text = markdown.report(found, {}, {})
  assert "accuracy at each length" in text
  assert re.search(r"`dense` +\| 16 +\| False +\| +2/2 \| 0.8260 \|", text)
  assert "64 (trained)" in latex.report(found)


def test_a_trained_length_that_is_not_known_is_named_so(found):
  old = [{k: v for k, v in one.items() if k != "length"} for one in found]
  summaries = summary.summarize(old)["recall"]
  made = lengths.table(summaries)
  assert made is not None
  assert made.header[3:] == ["seeds", "trained", "32", "128", "256"]
  assert not lengths.figure("recall", summaries, {}).panels


def test_one_length_has_no_table():
  summaries = summary.summarize(made_up.records())["copy"]
  assert lengths.table(summaries) is None
  assert "at each length" not in markdown.report(made_up.records(), {}, {})


def test_a_length_is_compared_by_what_all_of_them_have(found):
  """Where only the trained length is generated, exact_match is no choice."""
  generated = []
  for record in found:
    lines = record.get("history", ())
    more = [
      line | {"exact_match": 0.0} if line["split"] == "test" else line
      for line in lines
    ]
    generated.append({**record, "history": more} if lines else record)
  assert lengths.metric(summary.summarize(generated)["recall"]) == "accuracy"


def test_a_seed_that_diverged_at_a_length_leaves_the_others(found):
  broken = json.loads(json.dumps(found))
  [line] = [
    line for line in broken[0]["history"] if line["split"] == "length_128"
  ]
  line["accuracy"] = float("nan")
  [one, *_] = summary.summarize(broken)["recall"]
  values = lengths.at_lengths(one, "accuracy")
  assert [len(values[n]) for n in (32, 64, 128, 256)] == [2, 2, 1, 2]


def test_capacity_has_a_panel_for_values_that_are_no_numbers(drawn):
  panels = drawn["capacity-recall"].panels
  assert list(panels) == ["short_convolution=False", "short_convolution=True"]


def test_capacity_wants_numbers_and_memory_that_differs(found):
  def panels(records):
    shown = [x for x in summary.summarize(records)["recall"] if x.done]
    return list(capacity.figure("recall", shown, {}).panels)

  assert panels(renamed(found, short_convolution=int)) == ["accuracy"]
  assert panels(renamed(found, features=str)) == []
  same = [
    one | ({"measured": {"cache_bytes": 64.0}} if "measured" in one else {})
    for one in found
  ]
  assert panels(same) == []


def test_rows_at_different_values_have_panels_of_their_own(drawn):
  counts = {stem: len(figure.panels) for stem, figure in drawn.items()}
  assert counts == {
    "capacity-recall": 2,
    "lengths-recall": 6,
    "quality-cost-recall": 12,
    "curves-recall": 6,
    "memory-recall": 12,
    "maps-recall": 12,
  }
  assert list(drawn["lengths-recall"].panels)[:2] == [
    "features=16, short_convolution=False",
    "features=16, short_convolution=True",
  ]


def test_panels_of_quality_against_cost_share_its_axis(drawn):
  import matplotlib.figure

  ends = set()
  for panel in drawn["quality-cost-recall"].panels.values():
    axes = matplotlib.figure.Figure().subplots()
    panel(axes)
    ends.add(axes.get_ylim())
  [(low, high)] = ends
  assert low < 0 < high


def test_figures_of_too_many_panels_are_left_out(found):
  many = [
    record | {"across": {**record["across"], "task.part": part}}
    for record in found
    for part in range(5)
  ]
  summaries = summary.summarize(many)["recall"]
  styles = style.styles(one.attention for one in summaries)
  stems = [one.stem for one in plots.of_task("recall", summaries, styles, {})]
  assert stems == ["capacity-recall"]
  assert comparison_maps.of_task("recall", summaries) == []


@pytest.mark.parametrize("stem", ["capacity-recall", "lengths-recall"])
def test_they_are_pictures(drawn, tmp_path, stem):
  figures.save(tmp_path, [drawn[stem]])
  assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
  root = ElementTree.parse(tmp_path / f"{stem}.svg").getroot()
  texts = ["".join(element.itertext()).strip() for element in root.iter()]
  expected = {"dense", "linear", "accuracy"}
  if stem.startswith("capacity"):
    expected |= {"4", "16", "cache and state of a sequence, KiB"}
  else:
    expected |= {"0.5", "1", "2", "4", "length / trained length of 64"}
  assert expected <= set(texts)
  assert "lsh" not in texts


def test_the_page_hides_by_mechanism(found):
  styles = style.styles(record["attention"] for record in found)
  markup = page.page(found, {}, {"recall": []}, [], styles)
  heads = set(
    re.findall(r'<th scope="row" class="text" data-value="(.*?)"', markup)
  )
  assert heads == {"dense", "linear", "lsh"}
