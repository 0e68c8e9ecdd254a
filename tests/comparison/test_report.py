"""The files of a report, and its page in a real browser at two widths."""

import csv
import dataclasses
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest

from attention import ATTENTIONS
from comparison import records
from comparison.analysis.task import by_task
from comparison.report import figures, files, maps, page, style, tables
from comparison.report.lines import Line, line_figure, new_figure
from comparison.report.page import Section
from tests.comparison import made_up

BROWSER = next(
  filter(
    None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
  ),
  None,
)
needs_browser = pytest.mark.skipif(
  BROWSER is None, reason="no chromium or google-chrome on PATH"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """What a report has written of the made-up comparison."""
  folder = tmp_path_factory.mktemp("comparison")
  shared = {
    "tasks": "copy,paper/recall",
    "match_parameters": True,
    f"grid.{made_up.LEAF}": "0.001,0.003",
  }
  (folder / records.COMPARISON).write_text(json.dumps(shared))
  made_up.write(folder, made_up.records(), made_up.scaling())
  files.write(folder)
  return folder


def test_files_for_programs(folder):
  runs = pd.read_csv(folder / "results.csv")
  assert len(runs) == 10
  again = pd.read_json(folder / "results.jsonl", lines=True)
  assert list(again.columns) == list(runs.columns)
  summary = pd.read_csv(folder / "summary.csv")
  assert list(summary["row"]) == ["dense", "linear", "performer", "lsh"]
  curves = pd.read_csv(folder / "curves.csv")
  assert {"run", "step", "metric", "value"} <= set(curves.columns)
  with (folder / "results.csv").open() as file:
    table = list(csv.DictReader(file))
  command = table[0]["command"]
  assert command.startswith("python train.py --config=configs/copy.py:dense ")
  # Both files have every digit of a number.
  rows = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
  losses = [row["loss"] for row in rows]
  assert losses == [float(x["loss"]) if x["loss"] else None for x in table]


def test_the_text_has_what_was_found_first(folder):
  text = (folder / "report.md").read_text()
  assert (
    "copy: `dense` has the best exact_match on the validation split" in text
  )
  assert text.index("## Findings") < text.index("## How to read this")
  row = re.search(r"\| dense +\| +0\.960 \[\S+, \S+\] ≈ \|", text)
  assert row
  assert r"failed: exit code 1: loss is \<nan> at step 3" in text
  assert "not supported: lsh: a \\| b" in text
  assert "`linear`: decode_tokens_per_second: linear & others" in text
  for link in re.findall(r"\]\((plots/\S+)\)", text):
    assert (folder / link).is_file()


def test_latex_has_six_columns_and_no_bare_specials(folder):
  tasks = by_task(records.read(folder)[0])
  name = r'a_b \input{/etc/passwd} 5 % <"|>'
  told = r"\caption{a\_b \textbackslash{}input\{/etc/passwd\} 5 \% "
  told += r"\textless{}''\textbar{}\textgreater{}}"
  assert told in files._latex({name: next(iter(tasks.values()))})
  text = (folder / "report.tex").read_text()
  assert text.count("\\begin{table}") == 2
  assert re.findall(r"tabular\}\{(\w+)\}", text)[0] == "lrrrrr"
  assert not re.search(r"(?<!\\)_", text)
  assert "$\\approx$" in text


def test_a_picture_names_its_task(folder):
  stems = {path.stem for path in (folder / "plots").glob("*.svg")}
  kinds = ("seeds", "curves", "quality-cost", "maps")
  assert {f"{kind}-copy" for kind in kinds} <= stems
  assert {path.stem for path in (folder / "plots").glob("*.png")} == stems
  assert any(stem.startswith("scaling-causal-decode") for stem in stems)


def test_one_page_offline_below_a_megabyte(folder):
  text = (folder / "report.html").read_text()
  assert len(text.encode()) < page.LIMIT
  assert not re.findall(r"(?:src|href)=\"https?:", text)
  assert "@media (prefers-color-scheme: dark)" in text
  assert "&lt;nan&gt;" in text
  assert "<nan>" not in text
  # A long reason does not push columns off the page.
  assert re.search(r'<td class="long" data-order="">failed: exit code 1', text)
  assert len(re.findall('<td class="long"', text)) == 1


def test_labels_of_wide_axes_are_numbers():
  """Formulas are not typeset, and would be shown as '$10^{1}$'."""
  found = [
    record | {"measured": record["measured"] | {"cache_bytes": 4096 * 30**n}}
    for n, record in enumerate(made_up.records()[0:5:4])
  ]
  styles = style.styles(())
  costs = figures.quality_cost(by_task(found)["copy"], styles)
  scaling = figures.scaling(made_up.scaling(), styles)
  with style.look():
    for figure in (costs, *scaling.values()):
      figure.draw_without_rendering()
      labels = [
        label.get_text()
        for axes in figure.axes
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels())
      ]
      assert labels
      assert not any("$" in label for label in labels)


@pytest.mark.parametrize(
  ("places", "labels"),
  [
    ([1, 2, 4, 8], ["1", "2", "4", "8"]),
    ([6.25, 6.5, 6.76, 130.0], ["8", "32", "128"]),
    ([6.25, 6.5, 6.76], ["6.25", "6.5", "6.76"]),
    ([6.25, 6.26, 6.76], ["6.25", "6.76"]),
    ([5.0], ["5"]),
  ],
)
def test_ticks_are_at_places_that_are_apart(places, labels):
  lines = [Line("dense", "dense", [x], [1.0]) for x in places]
  figure = line_figure(lines, style.styles(()), "title", "x", "y", x_log=True)
  ticks = figure.axes[0].get_xticklabels()
  assert [tick.get_text() for tick in ticks] == labels


@pytest.mark.parametrize(("count", "panels"), [(8, 1), (9, 9)])
def test_more_than_eight_names_have_a_panel_each(count, panels):
  names = [*ATTENTIONS][:count]
  lines = [Line(name, name, [1, 2], [1.0, 2.0]) for name in names]
  figure = line_figure(lines, style.styles(()), "title", "x", "y")
  assert sum(axes.get_visible() for axes in figure.axes) == panels


def test_a_counterpart_has_a_line_of_its_own():
  found = [
    record | {"width": width}
    for record in made_up.across()
    for width in (None, "dense")
  ]
  figure = figures.capacity(by_task(found)["recall"], style.styles(()))
  lines = [
    line
    for axes in figure.axes
    for line in axes.get_lines()
    if line.get_zorder() > 1 and len(line.get_xdata()) > 1
  ]
  assert len(lines) == 8  # Two mechanisms, with and without convolutions.


def test_pairs_have_a_line_of_means_and_a_dot_for_each_seed():
  found = made_up.across()
  for record in found:
    quality = 0.9 - 0.1 * record["seed"]
    record["history"] = [
      *record.get("history", ()),
      {"step": 15, "split": "pairs_4", "accuracy": quality},
      {"step": 15, "split": "pairs_16", "accuracy": quality / 2},
    ]
  figure = figures.pairs(by_task(found)["recall"], style.styles(()))
  dense = figure.axes[0].get_lines()
  means = [
    x.get_xydata().tolist() for x in dense if x.get_linestyle() != "None"
  ]
  assert means
  for line in means:
    np.testing.assert_allclose(line, [[4, 0.85], [16, 0.425]])
  dots = [x.get_xydata() for x in dense if x.get_linestyle() == "None"]
  assert len(dots) == 6  # Three widths, with and without convolutions.
  for seeds in dots:
    expected = [[4, 0.9], [16, 0.45], [4, 0.8], [16, 0.4]]
    np.testing.assert_allclose(seeds, expected)
  assert figures.pairs(by_task(made_up.across())["recall"], {}) is None


def boxes(figure, artists):
  """Where artists are drawn, in pixels."""
  with style.look():
    figure.draw_without_rendering()
    return [artist.get_window_extent() for artist in artists]


def test_legends_are_beside_the_curves_and_name_what_differs():
  one = by_task(made_up.across())["recall"]
  figure = figures.learning_curves(one, style.styles(()), "accuracy")
  assert all(axes.get_legend() is None for axes in figure.axes)
  (legend,) = figure.legends
  kinds = [text.get_text() for text in legend.get_texts()]
  assert kinds == [
    f"features={width}, short_convolution={convolves}"
    for width in (16, 32, 64)
    for convolves in (False, True)
  ]
  shown, *panels = boxes(figure, [legend, *figure.axes])
  labels = [axes.xaxis.label for axes in figure.axes]
  assert not any(map(shown.overlaps, [*panels, *boxes(figure, labels)]))


@pytest.mark.parametrize(
  ("steps", "metric", "split", "quantity"),
  [
    (3, None, "train", "loss"),
    (4, None, "validation", "exact_match"),
    (1, "token_accuracy", "validation", "token_accuracy"),
  ],
)
def test_curves_are_of_the_deciding_metric_if_they_have_four_points(
  steps, metric, split, quantity
):
  found = made_up.records()
  for record in found:
    more = [
      {"step": n, "split": "validation", "exact_match": 0.5}
      for n in range(1, steps)
    ]
    record["history"] = [*more, *record.get("history", ())]
  one = by_task(found)["copy"]
  figure = figures.learning_curves(one, style.styles(()), metric)
  assert figure.get_suptitle() == f"copy: {quantity}, {split} split"
  assert figure.axes[0].get_ylabel() == quantity


def test_labels_of_a_bar_of_colours_do_not_overlap():
  sketch = made_up.records()[0]["measured"]["map"]
  figure = maps.draw("recall", {"dense": sketch, "linear": sketch})
  labels = boxes(figure, figure.axes[-1].get_yticklabels())
  assert len(labels) == 5
  assert not any(a.overlaps(b) for a, b in itertools.pairwise(labels))


def test_figures_do_not_repeat_what_all_rows_share():
  found = [
    record
    for record in made_up.across()
    if record["across"][made_up.CONVOLUTION]
    and record["across"][made_up.WIDTH] == 16
  ]
  one = by_task(found)["recall"]
  styles = style.styles(())
  (axes,) = figures.seeds(one, styles).axes
  names = [label.get_text() for label in axes.get_yticklabels()]
  assert names == ["dense", "linear"]
  curves = figures.lengths(one, styles).axes[0]
  assert [text.get_text() for text in curves.texts] == ["dense", "linear"]
  figure, note = maps.task_map(one)
  assert [axes.get_title() for axes in figure.axes[:2]] == ["dense", "linear"]
  assert note.startswith("No map of `lsh`")


def test_a_comparison_without_results_says_so(tmp_path):
  text = files.write(tmp_path)
  assert "No run has finished yet." in text


@pytest.mark.parametrize("status", ["failed", "not supported"])
@pytest.mark.parametrize("reference", [None, "dense"])
def test_a_comparison_of_which_no_run_has_a_result(tmp_path, status, reference):
  """compare.py then says that every run failed, and the table says why."""
  found = [x for x in made_up.records() if x["status"] == status]
  made_up.write(tmp_path, found)
  shared = {} if reference is None else {"reference": reference}
  (tmp_path / "comparison.json").write_text(json.dumps(shared))
  text = files.write(tmp_path)
  assert "No run has finished yet." in text
  reason = {"failed": "loss is", "not supported": "lsh: a"}[status]
  assert reason in text
  assert len(pd.read_csv(tmp_path / "summary.csv")) == 1


def test_the_largest_pictures_give_way(tmp_path):
  from matplotlib.figure import Figure

  pictures = []
  for size in (2, 8):
    figure = Figure((size, size))
    figure.subplots().plot([1, 2])
    pictures.append(page.Picture(f"p{size}", figure, "caption"))
  sections = [Section("A", pictures)]
  page.save(tmp_path, pictures)
  whole = page.render("T", "m", sections, tmp_path)
  assert whole.count("data:image/webp") == 2
  smaller = page.render("T", "m", sections, tmp_path, len(whole.encode()) - 1)
  assert "plots/p8.png" in smaller
  assert smaller.count("data:image/webp") == 1


def test_a_cell_that_has_markup_is_escaped(tmp_path):
  table = tables.Table(["a"], [[tables.Cell("<b>&", 1.0)]])
  sections = [Section("`x` <i>", [("t", table), "`c<`"])]
  text = page.render("<T>", "m", sections, tmp_path)
  assert "&lt;b&gt;&amp;" in text
  assert "<code>c&lt;</code>" in text
  assert "<b>" not in text


def test_text_of_a_report_has_no_markup_of_a_name():
  """HTML, links and line ends of names are text; a comparison with < is itself."""
  name = "<img src=x>|[a](http://b)\n# c ![d](e) </td>"
  table = tables.Table(
    [name, "p < 0.05"], [[tables.Cell(name)] * 2], {name: name}
  )
  sections = [
    Section(name, [name, [name], (name, table), page.Picture("p", None, name)])
  ]
  text = files.markdown("title", name, sections)
  shown = r"\<img src=x>|[a]\(http://b) # c ![d]\(e) \</td>"
  assert text.count(shown) + text.count(shown.replace("|", r"\|")) == 11
  assert "p < 0.05" in text
  assert not re.search(
    r"(?<!\\)<[a-z/]|\]\((?!plots/)|^# c", text, re.MULTILINE
  )


_PROBE = """<script type="module">
const wait = () => document.documentElement.dataset.ready !== undefined
  ? Promise.resolve() : new Promise((ok) => setTimeout(ok, 50)).then(wait);
await wait();
const table = document.querySelector("table.data");
const shown = (row) => [...row.cells].filter((cell) => cell.getClientRects().length);
const texts = (cells) => cells.map((cell) => cell.textContent.trim());
const read = () => [...table.tBodies[0].rows].map((row) => texts(shown(row)));
const report = { before: read(), width: [innerWidth, document.documentElement.scrollWidth] };
table.tBodies[0].rows[0].cells[0].click();
report.opened = [...table.querySelectorAll("dl.rest dt")].map((one) => one.textContent);
table.tHead.rows[0].cells[1].click();
await new Promise((ok) => setTimeout(ok, 300));  // DataTables sorts a moment later.
report.sorted = read();
const told = document.createElement("pre");
told.id = "result";
told.textContent = JSON.stringify(report);
document.body.append(told);
</script>"""


def browsed(folder, tmp_path, width):
  """What a browser of a width shows of the first table, and after two clicks."""
  file = tmp_path / "page.html"
  text = (folder / "report.html").read_text()
  file.write_text(text.replace("</body>", _PROBE + "</body>"))
  command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu"]
  command += ["--no-first-run", "--disable-background-networking"]
  command += [f"--window-size={width},900", "--virtual-time-budget=20000"]
  command += [
    f"--user-data-dir={tmp_path / 'profile'}",
    "--dump-dom",
    str(file),
  ]
  dom = subprocess.run(command, capture_output=True, text=True, timeout=120)
  found = re.search(r'<pre id="result">(.*?)</pre>', dom.stdout, re.DOTALL)
  assert found, dom.stderr[-2000:]
  return json.loads(found[1].replace("&lt;", "<").replace("&amp;", "&"))


@needs_browser
def test_a_wide_window_shows_all_columns_and_sorts(folder, tmp_path):
  seen = browsed(folder, tmp_path, 1280)
  assert [row[0] for row in seen["before"][:2]] == ["dense", "linear"]
  assert len(seen["before"][0]) > 3
  assert seen["width"][1] <= seen["width"][0]
  assert seen["opened"] == []
  names = [row[0] for row in seen["sorted"]]
  assert names.index("linear") < names.index("dense")  # The lowest first.


@needs_browser
def test_a_phone_shows_name_and_result_and_the_rest_on_tap(folder, tmp_path):
  seen = browsed(folder, tmp_path, 500)
  assert all(len(row) == 2 for row in seen["before"])
  assert seen["width"][1] <= seen["width"][0]
  assert "seeds" in seen["opened"]


_GRID = {f"grid.{made_up.LEAF}": "0.001,0.003"}


@pytest.mark.parametrize(
  ("shared", "choosing", "words"),
  [
    ({}, False, []),
    ({"match_parameters": True}, False, ["as nearly as the width of their"]),
    (
      {"match_parameters": False, "budget_seconds": 90.0},
      *(False, ["counts are not matched: ", "Every run trains for 90 s."]),
    ),
    (
      {"budget_flops": 1.5e12, "tasks": "copy", "model.features": 64},
      *(False, ["for 1.5e+12 floating-point", "runs: `model.features = 64`."]),
    ),
    (_GRID | {"across.x": "16,32"}, False, ["result of the reported seeds on"]),
    (
      _GRID | {"halving.rungs": "0.5", "halving.seeds": 2},
      *(True, ["result of separate seeds on"]),
    ),
    (_GRID | {"halving.rungs": "0.5"}, False, ["of the first seed, which is"]),
    (
      _GRID | {"halving.rungs": "0.5", "halving.seeds": "all"},
      *(False, ["result of the reported seeds on"]),
    ),
  ],
)
def test_the_page_says_what_all_runs_share(shared, choosing, words, tmp_path):
  (tmp_path / records.COMPARISON).write_text(json.dumps(shared))
  found = [{"task": "copy"}, *made_up.records()]  # The first has no line yet.
  found[-1]["choosing"] = choosing
  text = " ".join(files._setup(tmp_path, found))
  assert all(word in text for word in words)
  assert len(re.findall(r"\.( |$)", text)) == len(words)
  point = f"the point of `{made_up.LEAF}` ∈ 0.001,0.003 with the best"
  assert (point in text) == (_GRID.items() <= shared.items())


def test_machines_and_versions_are_those_of_all_runs():
  runs = {"jax": ["0.10.2", "0.9.0", None], "cores": [2, 2, 2]}
  runs |= {"device": ["8 × cpu", "1 × H100", "8 × cpu"]}
  runs["commit"] = ["0123456789abcdef"] * 3
  told = "1 × H100, 8 × cpu; cores 2; jax 0.10.2, 0.9.0; commit 0123456789ab"
  assert files._machine(pd.DataFrame(runs)) == told
  assert files._references({"nanoGPT": {"loss": 1.88}, "x": {"bleu": 7}}) == (
    "From elsewhere: nanoGPT loss 1.88, x bleu 7."
  )


def test_figures_show_the_numbers_of_their_rows():
  """Places, sizes and limits of what is drawn, and what it is called."""
  task = by_task(made_up.records())["copy"]
  styles = style.styles(())
  dots = figures.seeds(task, styles)
  (axes,) = dots.axes
  # Rows are a fifth of an inch high below one inch, the best at the top.
  np.testing.assert_allclose(dots.get_size_inches(), [6.8, 1.1 + 0.21 * 2])
  assert [x.get_text() for x in axes.get_yticklabels()] == ["dense", "linear"]
  assert (axes.get_ylim(), axes.get_xlim()) == ((1.5, -0.5), (0.0, 1.0))
  drawn = [(list(x.get_xdata()), list(x.get_ydata())) for x in axes.lines]
  np.testing.assert_allclose(
    drawn, [([0.95, 0.97], [0, 0]), ([0.65, 0.67], [1, 1])]
  )
  told = "exact_match on the validation split, one dot per seed"
  assert axes.get_xlabel() == told
  (axes,) = figures.learning_curves(task, styles).axes
  assert axes.get_xlabel() == "step"
  costs = figures.quality_cost(task, styles)
  np.testing.assert_allclose(costs.get_size_inches(), [3.4 * 2, 3.2 + 0.16])
  left, right = costs.axes
  labels = [x.get_xlabel() for x in costs.axes]
  assert labels == ["forward, GFLOP", "step, ms"]
  assert left.get_shared_y_axes().joined(left, right)
  assert (left.get_ylabel(), right.get_ylabel()) == ("exact_match", "")
  assert (left.get_xlim()[0], right.get_xlim()[0]) == (0, 0)


@pytest.mark.parametrize(
  ("largest", "scale"), [(19.5, "linear"), (20.5, "log")]
)
def test_costs_that_differ_twentyfold_have_a_logarithmic_axis(largest, scale):
  """FLOPs are shown in billions: 1 to 19.5, and 1 to 20.5."""
  task = by_task(made_up.records())["copy"]
  summary = task.summary.copy()
  ended = task.finished_rows.index
  flops = np.linspace(1e9, largest * 1e9, len(ended))
  summary.loc[ended, "forward_flops"] = flops
  task = dataclasses.replace(task, summary=summary)
  left, *_ = figures.quality_cost(task, style.styles(())).axes
  assert left.get_xscale() == scale


def _sketch(title, *heads, labels=("a ", "\n", "c")):
  return {
    "title": title,
    "query_axis": "target",
    "key_axis": "source",
    "query_labels": labels[:2],
    "key_labels": labels,
    "weights": heads,
  }


def test_maps_are_means_of_heads_on_one_scale():
  heads = [
    [[0.2, 0.8, 0.0], [0.6, 0.3, 0.1]],
    [[0.4, 0.6, 0.0], [0.2, 0.7, 0.1]],
  ]
  found = {f"m{n}": _sketch("layer 1", *heads) for n in range(4)}
  found["m4"] = _sketch(
    "layer 2", [[0.0] * 40, [0.9, *[0.0] * 39]], labels="x" * 40
  )
  with style.look():
    figure = maps.draw("recall", found)
  np.testing.assert_allclose(figure.get_size_inches(), [10.6, 5.6])
  *panels, bar = figure.axes
  assert [axes.get_visible() for axes in panels] == [True] * 5 + [False] * 3
  titles = [axes.get_title() for axes in panels[:5]]
  assert titles == ["m0", "m1", "m2", "m3", "m4\nlayer 2"]
  image = panels[0].images[0]
  np.testing.assert_allclose(
    image.get_array(), [[0.3, 0.7, 0.0], [0.4, 0.5, 0.1]]
  )
  assert {axes.images[0].norm for axes in panels[:5]} == {image.norm}
  assert (image.norm.vmin, image.norm.vmax, image.norm.gamma) == (0, 0.9, 0.5)
  first, last = panels[0], panels[4]
  assert [x.get_text() for x in first.get_xticklabels()] == ["a␣", "·", "c"]
  assert [x.get_text() for x in first.get_yticklabels()] == ["a␣", "·"]
  # Forty labels would be too small; two are not.
  assert "x" not in {x.get_text() for x in last.get_xticklabels()}
  assert [x.get_text() for x in last.get_yticklabels()] == ["x", "x"]
  lines = [*first.xaxis.get_gridlines(), *first.yaxis.get_gridlines()]
  assert not any(line.get_visible() for line in lines)
  ticks = [label.get_text() for label in bar.get_yticklabels()]
  assert ticks == ["0", "0.056", "0.23", "0.51", "0.9"]
  texts = (figure._suptitle, figure._supxlabel, figure._supylabel)
  told = "recall: layer 1|source|target"
  assert "|".join(x.get_text() for x in texts) == told
  alone = maps.draw("recall", {"m": found["m0"]})
  np.testing.assert_allclose(alone.get_size_inches(), [3.1, 3.0])


def _lines(count, seeds=2):
  """Rows of three mechanisms in turn, which end at 0, 0.1, …"""
  kinds = ("dense", "lsh", "path")
  return [
    Line(f"{kinds[n % 3]}, width={n // 3}", kinds[n % 3], [1, 2], [0.5, n / 10])
    for n in range(count)
    for _ in range(seeds)
  ]


def test_few_lines_have_their_names_at_their_ends():
  dots = [Line("dense, width=0", "dense", [1], [0.25])]
  figure = line_figure(
    _lines(3), style.styles(()), "title", "x", "y", dots=dots
  )
  (axes,) = figure.axes
  assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")
  joined, (dot, *_) = axes.lines[:6], axes.lines[6:]
  assert {(x.get_linewidth(), x.get_alpha()) for x in joined} == {(1.2, 1.0)}
  assert [list(x.get_ydata()) for x in joined[::2]] == [
    [0.5, n / 10] for n in range(3)
  ]
  assert [x.get_markevery() for x in joined] == [[1]] * 6
  assert (dot.get_alpha(), dot.get_markersize()) == (0.5, 3)
  assert (list(dot.get_ydata()), dot.get_linestyle()) == ([0.25], "None")
  assert dot.get_color() == joined[0].get_color() != joined[2].get_color()
  # The two upper ones are where their lines end, each a line of text apart.
  low, high = axes.get_ylim()
  heights = [text.get_position()[1] for text in axes.texts]
  ends = [(n / 10 - low) / (high - low) for n in range(3)]
  np.testing.assert_allclose(heights, ends, rtol=1e-6)


def test_names_that_would_overlap_are_moved_apart():
  series = [
    Line(str(n), "dense", [1, 2], [0.0, 1 + n / 1000]) for n in range(4)
  ]
  figure = line_figure(series, style.styles(()), "title", "x", "y")
  heights = [text.get_position()[1] for text in figure.axes[0].texts]
  np.testing.assert_allclose(np.diff(heights), 0.075)
  assert max(heights) <= 1


def test_many_lines_have_a_panel_for_each_mechanism():
  dots = [Line("lsh, width=1", "lsh", [1], [0.25])]
  styles = style.styles(())
  figure = line_figure(_lines(9, 1), styles, "title", "x", "y", dots=dots)
  np.testing.assert_allclose(figure.get_size_inches(), [9.2, 0.7 + 1.6])
  titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
  assert titles == ["dense", "lsh", "path"]
  assert [axes.get_xlabel() for axes in figure.axes] == ["x"] * 3 + [""]
  assert figure._supylabel.get_text() == "y"
  middle = figure.axes[1].lines
  # All nine in grey, and above them the three widths with falling opacity.
  grey, own, dot = middle[:9], middle[9:12], middle[12]
  assert {line.get_color() for line in grey} == {"#dcdcdc"}
  assert {line.get_color() for line in (*own, dot)} == {styles["lsh"].color}
  strengths = [1.0, 1 - 0.7 / 3, 1 - 1.4 / 3]
  assert [x.get_alpha() for x in own] == pytest.approx(strengths)
  assert dot.get_alpha() == pytest.approx(strengths[1])
  (legend,) = figure.legends
  words = [text.get_text() for text in legend.get_texts()]
  assert words == ["width=0", "width=1", "width=2"]


@pytest.mark.parametrize(("length", "columns"), [(9, 3), (24, 2), (60, 1)])
def test_a_legend_of_long_names_stays_inside_its_figure(length, columns):
  figure = new_figure((6.0, 4.0))
  names = [letter * length for letter in "abc"]
  styles = dict.fromkeys(names, style.Style("#000000", "-", "o"))
  figures.legend(figure, names, styles)
  (legend,) = figure.legends
  assert legend._ncols == columns  # No public name.
  box = legend.get_window_extent()
  assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_rows_of_a_mechanism_have_its_colour_lighter_or_darker():
  base = {
    "dark": style.Style("#000000", "-", "o"),
    "light": style.Style("#ffffff", "-", "o"),
  }
  rows = [(f"{kind} {n}", kind) for kind in base for n in range(4)]
  found = style.make_row_styles(base, [*rows, ("dark 0", "dark")])
  colors = [found[name].color for name, _ in rows]
  assert colors == [
    *("#000000", "#737373", "#404040", "#737373"),
    *("#ffffff", "#8c8c8c", "#bfbfbf", "#8c8c8c"),
  ]
  for kind, own in base.items():
    styles = [found[f"{kind} {n}"] for n in range(4)]
    assert styles[0] == own
    assert len({x.linestyle for x in styles}) == 4
    assert len({x.marker for x in styles}) == 4
