"""Which runs a summary is of, and in which order mechanisms stand."""

import itertools
import math

import pytest

from attention import ATTENTIONS
from reports import packing, quality, rows, style, summary, table, words
from tests.attention.forms import OWN
from tests.reports import made_up


def of_task(found, task="copy"):
  return {one.attention: one for one in summary.summarize(found)[task]}


def test_each_mechanism_is_shown_at_its_best_point():
  found = of_task(made_up.records())
  assert found["dense"].grid == {made_up.LEAF: 0.003}
  assert found["linear"].grid == {made_up.LEAF: 0.001}
  assert found["dense"].points == 2
  assert found["linear"].mean("exact_match") == pytest.approx(0.66)
  assert found["performer"].obstacle.startswith("failed: exit code 1")


def test_a_point_that_diverged_is_not_the_best():
  found = made_up.records()
  for run in found:
    better = run["grid"][made_up.LEAF] == 0.003 and run["attention"] == "dense"
    if better and run["seed"] == 1:
      del run["final"]
      run |= {"status": "failed", "reason": "it diverged"}
  assert of_task(found)["dense"].grid == {made_up.LEAF: 0.001}


def test_a_loss_is_better_when_it_is_lower():
  found = made_up.records()
  for run in found:
    if "final" in run:
      run["final"] = {"split": "validation", "loss": run["final"]["loss"]}
  assert of_task(found)["dense"].grid == {made_up.LEAF: 0.003}


def test_an_error_rate_is_better_when_it_is_lower():
  """It is the headline, its best value the lowest, its grid point likewise."""
  found = made_up.records()
  for run in found:
    if "final" in run:
      rate = run["final"]["loss"]
      run["final"] = {"split": "validation", "error_rate": rate, "loss": 1.0}
  assert quality.headline(found[0]) == "error_rate"
  assert of_task(found)["dense"].grid == {made_up.LEAF: 0.003}
  lines = [
    {"split": "validation", "step": i, "error_rate": rate}
    for i, rate in enumerate((0.9, 0.2, 0.4))
  ]
  run = {"final": {"split": "validation"}, "history": lines}
  assert quality.best(run) == 0.2


def test_bleu_is_the_headline_where_it_is_there():
  final = {"split": "test", "exact_match": 0.2, "loss": 1.0}
  run = {"final": final, "arguments": []}
  assert quality.headline(run) == "exact_match"
  final["bleu"] = 34.9
  assert quality.headline(run) == "bleu"
  [first, *_] = summary.quality_columns(
    [summary.Summary("t", "dense", {}, 1, [run])]
  )
  assert first.title == "bleu"


@pytest.mark.parametrize("name", ["exact_match", "accuracy_x", "best_quality"])
def test_a_share_is_at_most_one(name):
  assert quality.highest(name) == 1
  assert quality.highest("bleu") == 100
  assert quality.highest("loss") == math.inf


def test_mechanisms_stand_in_one_order_and_variants_after_them():
  assert [x for x in table.MECHANISMS if x in OWN] == list(OWN)
  assert table.ordered(["lsh_4", "linear", "a", "dense", "linear"]) == [
    "dense",
    "linear",
    "a",
    "lsh_4",
  ]


def test_a_mechanism_keeps_its_look():
  everything = style.styles([*ATTENTIONS, "variant"])
  alone = style.styles(["variant", "linear"])
  assert alone["linear"] == everything["linear"]
  # A variant takes what is free.
  assert alone["variant"].color != alone["linear"].color
  looks = {(one.color, one.marker) for one in everything.values()}
  assert len(looks) == len(everything)


def test_names_are_apart_and_in_order():
  heights = [0.99, 0.2, 0.98, 0.97, 0.985]
  placed = packing.spaced(heights, 0.1)
  order = sorted(range(5), key=lambda i: heights[i])
  assert order == sorted(range(5), key=lambda i: placed[i])
  there = sorted(placed)
  assert all(b - a > 0.1 - 1e-9 for a, b in itertools.pairwise(there))
  assert there[-1] == pytest.approx(0.95)
  # What has room stays where it is.
  assert placed[1] == pytest.approx(0.2)


def with_seeds(values, name="accuracy"):
  """Summaries of mechanisms: label -> one value of a metric for each seed."""
  one = made_up.records()[0]
  return [
    summary.Summary(
      "copy",
      label,
      {},
      1,
      [one | {"final": {"split": "validation", name: x}} for x in of_seeds],
    )
    for label, of_seeds in values.items()
  ]


def test_rows_are_marked_that_cannot_be_told_apart_from_the_best():
  values = {
    "dense": [0.97, 0.98, 0.99],
    "linear": [0.2, 0.21, 0.22],
    "flash": [0.98, 0.99, 0.985],
    "lsh": [0.999],
  }
  found = with_seeds(values)
  # The best has one seed, from which nothing can be told.
  assert summary.tied(found, "accuracy") == set()
  found = found[:-1]
  assert summary.tied(found, "accuracy") == {"dense", "flash"}
  columns = summary.quality_columns(found)
  marked = summary.marks(found, columns)
  texts = [summary.text(one, columns[0], marked) for one in found]
  assert [text.endswith(" ≈") for text in texts] == [True, False, True]
  assert summary.tied(found[:2], "accuracy") == set()
  assert summary.tied([], "accuracy") == set()


def test_of_losses_the_lowest_is_the_best():
  found = with_seeds(
    {"a": [1.0, 1.1], "b": [3.0, 3.1], "c": [1.05, 1.1]}, "loss"
  )
  assert summary.tied(found, "loss") == {"a", "c"}


def test_times_of_a_shared_machine_are_marked():
  found = made_up.records()
  assert "shared" not in " ".join(words.setup({}, found))
  for run in found:
    if run["attention"] == "dense" and "final" in run:
      run["others_cores"] = 0.2
      run["measured"] = run["measured"] | {"measured_others_cores": 0.6}
  assert "shared their machine" in " ".join(words.setup({}, found))
  summaries = of_task(found)
  for column in summary.cost_columns([*summaries.values()]):
    is_measured = column.name in ("step_seconds", "compile_seconds")
    is_measured |= column.name == "decode_tokens_per_second"
    shown = summary.text(summaries["dense"], column, {})
    assert shown.endswith(" *") == is_measured, column.name
    assert "*" not in summary.text(summaries["linear"], column, {})


def test_a_choice_is_made_by_the_first_split_and_the_last_is_reported():
  found = made_up.records()
  for run in found:
    if "final" in run:
      # On the test split every point is the opposite of what it was.
      tested = run["final"] | {
        "split": "test",
        "exact_match": 1 - run["final"]["exact_match"],
      }
      run["history"] = [*run["history"], tested]
      run["final"] = tested
  [dense, *_] = of_task(found).values()
  assert dense.grid == {made_up.LEAF: 0.003}
  assert dense.mean("exact_match") == pytest.approx(0.04)
  # The curve is that of the split that is evaluated while it trains.
  assert len(quality.evaluations(dense.runs[0])) == 3
  assert quality.best(dense.runs[0]) > 0.9


def test_options_and_learning_rates_are_columns():
  found = made_up.records()
  for run in found:
    run |= {"options": "", "learning_rate": run["grid"][made_up.LEAF]}
    if run["attention"] == "linear":
      run["options"] = "feature_map=elu"
  summaries = [*of_task(found).values()]
  assert summary.texts(summaries) == ["options"]
  # The grid shows it already.
  titles = [column.title for column in summary.quality_columns(summaries)]
  assert "learning rate" not in titles
  for run in found:
    run["grid"] = {}
  summaries = [*of_task(found).values()]
  shown = rows.make(summaries, (), summary.quality_columns(summaries))
  place = shown.header.index("learning rate")
  assert shown.header[:3] == ["attention", "options", "seeds"]
  assert shown.rows[0][1] == "–"
  assert shown.rows[0][place] == "0.001"
  assert shown.rows[1][1] == "feature_map=elu"
