"""What a comparison writes: tables for programs, text, plots."""

import csv
import json
import math
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure
import numpy as np
import pytest
from scipy import stats

from comparison import config, records
from reports import curves, files, numbers, style, summary, words
from tests.reports import made_up

PLOTS = (
  "curves-copy",
  "maps-copy",
  "memory-copy",
  "quality-cost-copy",
  "scaling-causal",
  "scaling-full",
)


def rows_of(folder):
  with (folder / "results.csv").open(newline="") as file:
    return list(csv.DictReader(file))


def test_every_run_is_a_row_and_both_files_have_the_same(folder):
  rows = rows_of(folder)
  lines = (folder / "results.jsonl").read_text().splitlines()
  objects = [json.loads(line) for line in lines]
  assert len(rows) == len(objects) == len(made_up.records())
  for row, other in zip(rows, objects, strict=True):
    as_text = {k: "" if v is None else str(v) for k, v in other.items()}
    assert row == as_text


def test_a_row_has_everything_scalar(folder):
  row = next(
    row
    for row in rows_of(folder)
    if (row["attention"], row["seed"]) == ("linear", "1")
    and row[made_up.LEAF] == "0.001"
  )
  assert float(row["exact_match"]) == pytest.approx(0.67)
  assert float(row["best_quality"]) == pytest.approx(
    0.67 * (1 - 2.718**-5), 1e-3
  )
  assert float(row["step_seconds"]) == pytest.approx(0.022)
  assert row["cpu_seconds"] == "100.0"
  assert row["decode_tokens_per_second"] == ""
  assert row["device"] == "1 × cpu"
  assert row["command"] == (
    "python train.py --config=configs/copy.py:linear --config.seed=1 "
    "--config.optimizer.learning_rate=0.001"
  )


def test_what_failed_is_a_row_with_its_reason(folder):
  rows = {row["attention"]: row for row in rows_of(folder)}
  assert rows["performer"]["status"] == "failed"
  assert rows["performer"]["reason"] == "exit code 1: loss is <nan> at step 3"
  assert rows["performer"]["peak_bytes"] == "1000000000.0"
  assert rows["lsh"]["status"] == "not supported"
  assert rows["dense"]["reason"] == "exit code 1: <b>gone</b>"


def test_the_text_tells_the_tables_and_how_they_came_about(folder):
  text = (folder / "report.md").read_text("utf-8")
  assert "1 × cpu; jax 0.10.2." in text
  assert "have the parameters of the one with dense attention" in text
  assert "`optimizer.learning_rate` ∈ {0.001, 0.003}" in text
  assert "chosen by the same split that it is reported on" in text
  assert "Set for the runs of copy: `num_steps = 15`." in text
  rows = [re.split(r" *\| *", line) for line in text.splitlines()]
  dense = next(row for row in rows if row[1:3] == ["`dense`", "2/2"])
  # Of the better point: 0.95 and 0.97, t(1) = 12.71, s = 0.02 / √2; cut at 1.
  assert dense[3:5] == ["0.003", "0.9600 [0.4673, 0.9985] ≈"]
  linear = next(row for row in rows if row[1:3] == ["`linear`", "2/2"])
  assert linear[3:5] == ["0.001", "0.6600 [0.5242, 0.7737] ≈"]
  assert "| `performer`" in text
  assert "failed: exit code 1: loss is <nan> at step 3" in text
  assert "not supported: lsh: a \\| b" in text
  assert f"- `linear`, decoding: {made_up.NOT_DECODED}" in text
  assert "- `dense` is not measured: exit code 1: <b>gone</b>" in text
  assert "    python train.py --config=configs/copy.py:dense --con" in text
  assert "accuracy_depth_25" not in text
  for title in ("exact_match", "step, ms", "whole run, min"):
    assert f"- {title}: " in text


def test_choices_at_the_edge_of_a_grid_are_counted():
  """Of three rates dense takes the middle one, and linear the lowest."""
  found = [
    r for r in made_up.records() if r["attention"] in ("dense", "linear")
  ]
  # Of two rates, both are at an edge, which says nothing.
  assert "lowest or the highest" not in " ".join(words.setup({}, found))
  worst = [r | {"grid": {made_up.LEAF: 0.01}} for r in found if r["seed"] == 1]
  worst = [r | {"status": "failed", "reason": "diverged"} for r in worst]
  for record in worst:
    record.pop("final")
  text = " ".join(words.setup({}, found + worst))
  assert "1 of 2 rows chose the lowest or the highest value" in text


def test_a_row_that_could_not_be_matched_is_named():
  found = [dict(record) for record in made_up.records()]
  for record in found:
    if record["attention"] == "linear":
      narrowest = "--config.model.mlp_features=1"
      record["arguments"] = [*record["arguments"], narrowest]
      record["parameters"] = 1200
  summaries = summary.summarize(found)["copy"]
  told = words.notes(summaries, [], {"match_parameters": True})
  assert (
    "`linear`: its feed-forward layers have a width of 1, and it still has 20 % "
    "more parameters than `dense`"
  ) in told
  told = words.notes(summaries, [], {"match_parameters": False})
  assert not any("feed-forward" in note for note in told)
  for record in found:
    record["parameters"] = 1000
  told = words.notes(summaries, [], {"match_parameters": True})
  assert "`linear`: its feed-forward layers have a width of 1" in told


@pytest.mark.parametrize("stem", PLOTS)
def test_plots_are_pictures(folder, stem):
  png = (folder / files.PLOTS / f"{stem}.png").read_bytes()
  assert png.startswith(b"\x89PNG\r\n\x1a\n")
  root = ElementTree.parse(folder / files.PLOTS / f"{stem}.svg").getroot()
  text = " ".join(root.itertext())
  assert "dense" in text
  assert "linear" in text


def test_there_are_no_other_plots(folder):
  names = {path.name for path in (folder / files.PLOTS).iterdir()}
  assert names == {
    f"{stem}.{kind}" for stem in PLOTS for kind in ("png", "svg")
  }


def test_tokens_are_text_that_can_be_seen(folder):
  root = ElementTree.parse(folder / files.PLOTS / "maps-copy.svg").getroot()
  texts = {"".join(element.itertext()) for element in root.iter()}
  assert {"␣", "$x$", "</s>"} <= texts


@pytest.mark.parametrize(
  ("with_seconds", "labels"),
  [(True, ["step", "seconds of training"]), (False, ["step"])],
)
def test_without_seconds_there_are_no_curves_by_them(with_seconds, labels):
  found = made_up.records(with_seconds=with_seconds)
  shown = [one for one in summary.summarize(found)["copy"] if one.done]
  styles = style.styles(one.attention for one in shown)
  assert list(curves.figure("copy", shown, styles, {}).panels) == [
    f"{name} by {label}"
    for name in ("token_accuracy", "loss")
    for label in [*labels, "floating-point operations"]
  ]


def test_operations_are_those_of_a_step_times_steps():
  shown = summary.summarize(made_up.records())["copy"]
  drawn = lines_of("loss by floating-point operations", shown, {})
  # 15 steps of 3e8; one run was not measured, and has those of the other.
  assert {line.get_xdata()[-1] for line in drawn} == {4.5e9}


def test_a_reference_is_a_line_in_the_panels_of_its_metric():
  shown = summary.summarize(made_up.records())["copy"]
  references = {"nanoGPT": {"loss": 1.88}}
  added = lines_of("loss by step", shown, references)[0]
  assert set(added.get_ydata()) == {1.88}
  others = ("token_accuracy by step", shown)
  assert len(lines_of(*others, references)) == len(lines_of(*others, {}))
  caption = curves.figure("copy", [], {}, references).caption
  assert caption.endswith("elsewhere: nanoGPT loss 1.88.")


def test_references_are_kept_and_drawn(tmp_path):
  given = {"copy": {"nanoGPT": {"loss": 1.88}}}
  comparison = config.parse({"tasks": "copy", "references": given})
  records.refer(tmp_path, comparison.references)
  assert records.references(tmp_path) == given
  files.write(tmp_path, made_up.records(), None)
  picture = tmp_path / files.PLOTS / "curves-copy.svg"
  texts = ["".join(x.itertext()) for x in ElementTree.parse(picture).iter()]
  assert "nanoGPT" in texts
  records.refer(tmp_path, {})
  assert records.references(tmp_path) == {}


def lines_of(panel, shown, references):
  """What a panel of the curves draws, in its order."""
  shown = [one for one in shown if one.done]
  styles = style.styles(one.attention for one in shown)
  axes = Figure().subplots()
  curves.figure("copy", shown, styles, references).panels[panel](axes)
  return axes.lines


def test_a_comparison_that_has_only_begun_is_a_report(tmp_path):
  failed = [run for run in made_up.records() if "final" not in run]
  text = files.write(tmp_path, failed, None)
  assert "| `performer` |   0/1 | failed: exit code 1" in text
  assert list((tmp_path / files.PLOTS).iterdir()) == []
  assert "lsh: a | b" in (tmp_path / "report.html").read_text("utf-8")
  files.write(tmp_path, [], None)
  assert (tmp_path / "results.jsonl").read_text() == ""


def test_an_interval_is_students():
  assert numbers.interval([0.5]) == "0.5000"
  # t(2) = 4.303, s = 0.1, n = 3.
  assert numbers.interval([0.4, 0.5, 0.6]) == "0.5000 ± 0.2484"
  # t(11) = 2.201, s = 0.5222, n = 12.
  assert numbers.half_interval([0.0, 1.0] * 6) == pytest.approx(
    0.3318, abs=1e-4
  )


def test_an_interval_stays_in_the_range_of_its_metric():
  # t(2) = 4.303 and s = 0.01: half of it is 0.0248.
  values = [0.98, 0.99, 1.0]
  assert numbers.interval(values) == "0.9900 ± 0.0248"
  # logit(0.99) = 4.5951, and 0.02484 / (0.99 · 0.01) = 2.5092.
  expected = [1 / (1 + math.exp(-x)) for x in (2.0859, 7.1044)]
  assert numbers.ends(values, 1.0) == pytest.approx(expected, abs=1e-5)
  assert numbers.interval(values, 1.0) == "0.9900 [0.8895, 0.9992]"
  percents = [100 * x for x in values]
  found = numbers.ends(percents, 100.0)
  assert found == pytest.approx([100 * x for x in expected], abs=1e-3)
  assert numbers.ends([0.5], 1.0) is None
  low = [0.0, 0.01, 0.02]
  assert numbers.interval(low, 1.0) == "0.0100 [0.0008, 0.1105]"
  # Without a bound above, what would be below 0 is cut off.
  assert numbers.short_interval(low) == "0.0100 [0.0000, 0.0348]"
  assert numbers.interval([1.0, 1.0], 1.0) == "1.0000 ± 0.0000"
  widest = numbers.ends([1.0, 0.0], 1.0)
  assert widest == pytest.approx((0.0, 1.0), abs=1e-9)


@pytest.mark.parametrize(
  ("shape", "seeds", "least"),
  [
    ((5, 5), 3, 0.94),
    ((9, 1), 3, 0.94),
    ((9, 1), 5, 0.93),
    ((970, 30), 3, 0.94),
    # Most seeds right and a few lost: nothing is right for three of them.
    ((9.7, 0.3), 3, 0.89),
  ],
  ids=str,
)
def test_an_interval_holds_the_true_mean_as_often_as_it_says(
  shape, seeds, least
):
  """Shares from Beta distributions, and the common interval beside it."""
  mean = shape[0] / sum(shape)
  drawn = np.random.default_rng(0).beta(*shape, size=(4000, seeds))
  holds, common = 0, 0
  for values in drawn.tolist():
    low, high = numbers.ends(values, 1.0)
    holds += low <= mean <= high
    common += abs(np.mean(values) - mean) <= numbers.half_interval(values)
  assert least < holds / 4000 < 0.97
  assert holds / 4000 > common / 4000 - 0.01


def test_means_are_told_apart_by_welch():
  apart = numbers.can_be_told_apart
  # By hand: difference 0.2, errors 0.0577 each, 4 degrees of freedom, t = 2.776.
  assert apart([0.4, 0.5, 0.6], [0.6, 0.7, 0.8]) is False
  assert apart([0.4, 0.5, 0.6], [0.7, 0.8, 0.9]) is True
  assert apart([0.4], [0.9, 0.9]) is None
  assert apart([1.0, 1.0], [1.0, 1.0], 1.0) is False
  assert apart([1.0, 1.0], [0.9, 0.9], 1.0) is True
  # The same difference counts for more near an end.
  assert apart([0.50, 0.51, 0.52], [0.53, 0.54, 0.55], 1.0) is True
  assert apart([0.97, 0.98, 0.99], [0.98, 0.99, 1.0], 1.0) is False


def test_without_a_bound_it_is_the_test_of_scipy():
  drawn = np.random.default_rng(2).normal(size=(300, 2, 3)).tolist()
  drawn = [(x, [3 * value + 1 for value in y]) for x, y in drawn]
  expected = [
    stats.ttest_ind(x, y, equal_var=False).pvalue < 0.05 for x, y in drawn
  ]
  assert [numbers.can_be_told_apart(x, y) for x, y in drawn] == expected
  assert 3 < sum(expected) < 100


def test_equal_means_are_told_as_often_as_they_should():
  """Two mechanisms of one distribution differ in at most 5 % of comparisons."""
  drawn = np.random.default_rng(1).beta(9, 1, size=(4000, 2, 3)).tolist()
  found = [numbers.can_be_told_apart(x, y, 1.0) for x, y in drawn]
  assert 0.01 < np.mean(found) < 0.06


def test_costs_have_three_digits():
  assert numbers.short_interval([0.0123456]) == "0.0123"
  assert numbers.short_interval([1234.5, 1235.5]) == "1,235 ± 6"
  # What is counted is the same for all seeds.
  assert numbers.short_interval([0.4, 0.4]) == "0.400"


def test_the_report_of_a_comparison_that_runs_is_seldom_written(
  tmp_path, monkeypatch, capsys
):
  """The first at once, the next when 50 times as long has passed as it took."""
  now = 100.0
  written = []

  def read(workdir):
    nonlocal now
    now += 2.0
    written.append(now)
    return made_up.records(), []

  monkeypatch.setattr(files.time, "monotonic", lambda: now)
  monkeypatch.setattr(records, "read", read)
  after = files.meanwhile(tmp_path)
  after()
  assert "linear" in (tmp_path / "report.html").read_text()
  now = 199.0
  after()
  assert written == [102.0]
  now = 200.5
  (tmp_path / "plots").rename(tmp_path / "moved")
  (tmp_path / "plots").touch()
  after()
  assert written == [102.0, 202.5]
  assert "; the runs go on" in capsys.readouterr().out
  (tmp_path / "plots").unlink()
  (tmp_path / "report.html").unlink()
  now = 400.0
  after()
  assert (tmp_path / "report.html").exists()
