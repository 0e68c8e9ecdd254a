"""What a comparison writes: tables for programs, text, plots."""

import csv
import json
import re
from xml.etree import ElementTree

import pytest

from reports import curves, files, numbers, style, summary
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
  assert dense[3:5] == ["0.003", "0.9600 [0.8329, 1.0000]"]
  linear = next(row for row in rows if row[1:3] == ["`linear`", "2/2"])
  assert linear[3:5] == ["0.001", "0.6600 ± 0.1271"]
  assert "| `performer`" in text
  assert "failed: exit code 1: loss is <nan> at step 3" in text
  assert "not supported: lsh: a \\| b" in text
  assert f"- `linear`, decoding: {made_up.NOT_DECODED}" in text
  assert "- `dense` is not measured: exit code 1: <b>gone</b>" in text
  assert "    python train.py --config=configs/copy.py:dense --con" in text
  assert "accuracy_depth_25" not in text
  for title in ("exact_match", "step, ms", "whole run, min"):
    assert f"- {title}: " in text


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
def test_without_seconds_there_are_curves_by_step_alone(with_seconds, labels):
  found = made_up.records(with_seconds=with_seconds)
  shown = [one for one in summary.summarize(found)["copy"] if one.done]
  styles = style.styles(one.attention for one in shown)
  assert list(curves.figure("copy", shown, styles).panels) == [
    f"{name} by {label}"
    for name in ("token_accuracy", "loss")
    for label in labels
  ]


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
  assert numbers.interval(values, 1.0) == "0.9900 [0.9652, 1.0000]"
  assert numbers.ends(values, 1.0) == pytest.approx((0.96516, 1.0), abs=1e-5)
  assert numbers.ends([0.5], 1.0) is None
  low = [0.0, 0.01, 0.02]
  assert numbers.interval(low, 1.0) == "0.0100 [0.0000, 0.0348]"
  assert numbers.short_interval(low) == "0.0100 [0.0000, 0.0348]"
  assert numbers.interval([1.0, 1.0], 1.0) == "1.0000 ± 0.0000"


def test_costs_have_three_digits():
  assert numbers.short_interval([0.0123456]) == "0.0123"
  assert numbers.short_interval([1234.5, 1235.5]) == "1,235 ± 6"
  # What is counted is the same for all seeds.
  assert numbers.short_interval([0.4, 0.4]) == "0.400"
