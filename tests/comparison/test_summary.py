"""Tables of a comparison: what is chosen, counted, told apart and left out."""

import math
import shlex

import numpy as np
import pytest
import sacrebleu

from comparison.analysis import frame, remarks, sentences, task
from comparison.analysis import summary as summary_lib
from comparison.report import figures, style, tables
from tests.comparison import error_rates, made_up

LEAF = "optimizer.learning_rate"


def run(attention, seed, accuracy, *, rate=0.001, choosing=False, **record):
  """A record that ended with an accuracy on both held-out splits."""
  history = [
    {"step": 5, "split": split, "accuracy": accuracy, "loss": 1 - accuracy}
    for split in ("validation", "test")
  ]
  return {
    **{"task": "recall", "attention": attention, "seed": seed},
    **{"status": "done", "reason": "", "parameters": 100, "grid": {LEAF: rate}},
    "arguments": [f"--{attention}", f"--seed={seed}", f"--rate={rate}"],
    **{"choosing": choosing, "history": history, "final": history[-1]},
    **record,
  }


def runs(attention, accuracies, **record):
  """One record a seed."""
  return [run(attention, n, x, **record) for n, x in enumerate(accuracies)]


def solving(attention, *accuracies):
  """The same of a task that is solved at 0.95."""
  return runs(attention, accuracies, solved_at=0.95)


def diverged(attention, seed, **record):
  found = run(attention, seed, 0.0, status="failed", reason="NaN", **record)
  del found["final"], found["history"]
  return found


def summarize(records):
  return summary_lib.summarize(frame.runs(records)).set_index("row")


def finding(records):
  return sentences.finding(summary_lib.summarize(frame.runs(records)))


def test_a_row_a_run_and_a_row_a_point_of_a_curve():
  records = made_up.records()
  runs, curves = frame.runs(records), frame.curves(records)
  assert len(runs) == len(records) == 10
  first = runs.iloc[0]
  assert (first["task"], first["row"], first["seed"]) == ("copy", "dense", 0)
  assert first[LEAF] == 0.001
  assert first["metric"] == "exact_match"
  assert first["quality"] == pytest.approx(0.9)
  assert "perplexity" not in runs  # It is infinite in all of them.
  one = curves[(curves["run"] == first["run"]) & (curves["metric"] == "loss")]
  assert list(one["step"]) == [5, 5, 10, 15]
  assert set(curves["split"]) == {"train", "validation"}


def test_without_choosing_seeds_the_reported_ones_choose():
  found = summarize(made_up.records())
  assert found.loc["dense", "grid"] == "learning_rate=0.003"
  assert found.loc["linear", "grid"] == "learning_rate=0.001"
  assert found.loc["dense", "mean"] == pytest.approx(0.96)
  assert list(found.index) == ["dense", "linear", "performer", "lsh"]
  assert found.loc["performer", "reason"].startswith("failed: exit code 1")


def test_choosing_seeds_choose_and_are_not_reported():
  """They prefer 0.003, where the reported seeds are worse by chance."""
  records = [
    *(run("dense", 10000 + n, 0.5, choosing=True) for n in range(2)),
    *(
      run("dense", 10000 + n, 0.9, rate=0.003, choosing=True) for n in range(2)
    ),
    *runs("dense", [0.3, 0.4, 0.5], rate=0.003),
    run("dense", 0, 0.9),  # Of an earlier choice.
  ]
  row = summarize(records).loc["dense"]
  assert row["grid"] == "learning_rate=0.003"
  assert (row["seeds"], row["planned"]) == (3, 3)
  assert row["mean"] == pytest.approx(0.4)


def test_all_or_nothing_is_counted():
  records = [
    *runs("dense", [1] * 7 + [0.99], solved_at=0.95),
    *runs("delta", [1, 1, 0.2, 1, 0.3, 1, 0.2, 1], solved_at=0.95),
    *runs("linear", [0.2] * 8, solved_at=0.95),
  ]
  found = summarize(records)
  assert list(found["solved"]) == [8, 5, 0]
  assert list(found["is_tied"]) == [True, True, False]
  # Few shuffles are so far apart, and 5 of 8 is less than what they often reach.
  assert found.loc["linear", "p"] < 0.002
  assert found.loc["delta", "p"] > 0.1
  shown = tables.quality(found.reset_index()).frame()
  assert shown.iloc[1, 1] == "5 of 8 [0.31, 0.86] ≈"
  columns = ["mechanism", "solved (accuracy ≥ 0.95)"]
  columns += ["share solved, minus dense", "p", "mean", "best"]
  assert list(shown.columns) == columns
  # Wilson's intervals are [0.306, 0.863] and [0.676, 1].
  low = -0.375 - math.hypot(0.625 - 0.306, 1 - 1)
  assert shown.iloc[1, 2].startswith(f"-0.375 [{low:+.3f}, +0.0")
  assert list(shown.iloc[1, 4:]) == ["0.713", "1.000"]
  assert finding(records) == (
    "`dense` solved 8 of 8 seeds (accuracy of 0.95 or more on the test split); 1 of "
    "3 rows solved none. 1 of the 2 other rows differs significantly from `dense` "
    "(5 %); the smallest difference is that of `linear`, -1.000 [-1.000, -0.541]."
  )


def prefixes(attention, whole, **record):
  """Runs of a task of prefixes: all but the last position of a seed is right."""
  found = runs(attention, [0.97] * len(whole), task="state_tracking", **record)
  for one, last in zip(found, whole, strict=True):
    one["final"] |= {"last_accuracy": last, "sequence_accuracy": last / 2}
  return found


def test_the_last_position_decides_and_older_records_are_said_to_lack_it():
  new = prefixes("delta", [1, 0.5, 1, 0.5], solved_at=0.95)
  new += prefixes("dense", [0.5] * 4, solved_at=0.95)
  found = summary_lib.summarize(frame.runs(new))
  table = tables.quality(found)
  shown = table.frame()
  title = "solved (last_accuracy ≥ 0.95)"
  against = ["share solved, minus delta", "p"]
  columns = ["mechanism", title, *against, "mean", "best", "sequence accuracy"]
  assert list(shown.columns) == columns
  first, *none, mean, best, whole = shown.iloc[0, 1:]
  assert (first, none) == ("2 of 4 [0.15, 0.85] ≈", [tables.NOTHING] * 2)
  assert (mean, best, whole) == ("0.750", "1.000", "0.375")
  assert table.shared["accuracy"] == "0.970"
  assert not table.legend
  for record in new[4:]:
    del record["final"]["last_accuracy"]
  older = summary_lib.summarize(frame.runs(new))
  assert set(older["metric"]) == {"accuracy"}
  assert tables.quality(older).legend.startswith(
    "`accuracy` is a mean over all prefixes here"
  )
  # Recall has no prefixes.
  recall = summary_lib.summarize(frame.runs(runs("dense", [0.5])))
  assert not tables.quality(recall).legend


def test_lengths_are_counted_and_of_whole_sequences_too():
  found = made_up.across()
  for record in found:
    record["solved_at"] = 0.55
    for line in record.get("history", ()):
      line["sequence_accuracy"] = line["accuracy"] / 2
  one = task.by_task(found)["recall"]
  name = "dense, features=64, short_convolution=True"
  shown = tables.lengths(one).frame().set_index("mechanism").loc[name]
  # 0.964 and 0.984 at the trained length, 0.6 times that at 256.
  assert shown["at 64"] == "2 of 2; 0.974 (0.964–0.984)"
  assert shown["at 256"] == "2 of 2; 0.584 (0.578–0.590)"
  whole = tables.whole_sequences(one).frame().set_index("mechanism").loc[name]
  assert whole["at 64"] == "0.487 (0.482–0.492)"  # No row has 0.55.
  assert tables.lengths(one, "bleu") is None


def test_what_was_not_tested_is_not_told_apart():
  """A row of one seed has no p, and one row of several is told in other words."""
  records = runs("dense", [0.9, 0.91, 0.92]) + runs("delta", [0.3, 0.31, 0.34])
  assert finding(records).endswith(
    "0.910. The other row differs significantly from `dense` (5 %); the smallest "
    "difference is that of `delta`, -0.593 [-0.622, -0.565]."
  )
  found = summarize([*records, run("linear", 0, 0.1)])
  assert list(found["is_tied"]) == [True, False, True]


WAITING = run("delta", 0, 0.0, status="stopped", final={}, history=[])


@pytest.mark.parametrize(
  ("records", "start", "end"),
  [
    (
      [*runs("dense", [0.9, 0.92]), WAITING],
      "Only `dense` has finished: accuracy 0.910 on the test split.",
      "",
    ),
    (
      solving("dense", 1, 0.2),
      "Only `dense` has finished: 1 of 2 seeds have accuracy of 0.95 or more on "
      "the test split.",
      "",
    ),
    (
      [x for name in "abcdef" for x in solving(name, 1, 1, 1)],
      "`a`, `b`, `c` and 3 other rows solved 3 of 3 seeds",
      "None of the 5 other rows differ significantly from `a` (5 %).",
    ),
    # As many of more seeds are fewer.
    (
      solving("dense", 1, 1, 1) + solving("delta", 1, 1, 1, *[0.1] * 5),
      "`dense` solved 3 of 3 seeds",
      "",
    ),
    # Eight of eight are more than four of four.
    (
      solving("dense", *[1] * 4)
      + solving("delta", *[0.99] * 8)
      + solving("lsh", 1),
      "`delta` solved 8 of 8 seeds, `dense` solved 4 of 4 and `lsh` solved 1 of 1 (",
      "",
    ),
  ],
)
def test_what_is_found_is_a_sentence(records, start, end):
  assert finding(records).startswith(start)
  assert finding(records).endswith(end)


@pytest.mark.parametrize(
  ("found", "told"),
  [
    (
      {"a": [0.5], "b": [0.5]},
      "No row has the best accuracy on the test split: all rows have 0.500.",
    ),
    (
      {"a": [0.9], "b": [0.9], "c": [0.5]},
      "`a` and `b` have the best accuracy on the test split, 0.900; there are too "
      "few seeds for a test.",
    ),
    (
      {"a": [1.0] * 4, "b": [0.5] * 4},
      "`a` has the best accuracy on the test split, 1.000; no difference varies over "
      "three common seeds, so none is tested.",
    ),
    (
      {"a": [0.9, 0.91, 0.92], "b": [0.3, 0.31, 0.31], "c": [0.7, 0.71, 0.71]},
      "`a` has the best accuracy on the test split, 0.910. All of the 2 other rows "
      "differ significantly from `a` (5 %); the smallest difference is that of `c`, ",
    ),
  ],
)
def test_what_is_found_of_means(found, told):
  records = [
    run for name, values in found.items() for run in runs(name, values)
  ]
  assert finding(records).startswith(told)


@pytest.mark.parametrize(
  ("count", "text"),
  [
    (1, "`a`"),
    (2, "`a` and `b`"),
    (4, "`a`, `b`, `c` and `d`"),
    (5, "`a`, `b`, `c` and 2 other rows"),
  ],
)
def test_names_are_listed_up_to_four(count, text):
  assert sentences.enumeration("abcde"[:count]) == text


def of_losses(attention, values, **record):
  """Records that have no other metric than a loss."""
  found = runs(attention, [1 - x for x in values], **record)
  for one in found:
    for line in one["history"]:
      del line["accuracy"]
  return found


def test_the_point_that_is_shown_is_the_best_of_those_whose_runs_ended():
  """By solved seeds before the mean, and by the lowest loss."""

  def point(rate, made, *values, **record):
    choosing = {"rate": rate, "choosing": True, **record}
    return [
      *made("dense", [0.5], rate=rate),
      *made("dense", values, **choosing),
    ]

  failed = diverged("dense", 1, rate=0.001, choosing=True)
  for records, best in (
    ([*point(0.001, runs, 0.95), failed, *point(0.003, runs, 0.5, 0.5)], 0.003),
    (
      point(0.001, runs, 1.0, 0.0, solved_at=0.95)
      + point(0.003, runs, 0.9, 0.9, solved_at=0.95),
      0.001,
    ),
    (point(0.001, runs, 0.2) + point(0.003, runs, 0.6), 0.003),
    (point(0.001, of_losses, 0.2) + point(0.003, of_losses, 0.6), 0.001),
  ):
    assert summarize(records).loc["dense", "grid"] == f"learning_rate={best}"


def test_a_seed_that_diverged_has_the_highest_loss_of_the_table():
  """lsh has 0.5, 3.2 and 3.2, between the means 1.1 and 3.1 of the others."""
  records = of_losses("delta", [3.0, 3.1, 3.2]) + of_losses("lsh", [0.5])
  records += [diverged("lsh", n) for n in (1, 2)]
  records += of_losses("dense", [1.0, 1.1, 1.2])
  assert list(summarize(records).index) == ["dense", "lsh", "delta"]


@pytest.mark.parametrize(
  ("records", "text", "order"),
  [
    # One seed has no interval.
    (solving("dense", 1.0), "1 of 1 ≈", 1 + 1e-6),
    # The mean, 0.6, decides between rows that solved as often.
    (solving("dense", 1.0, 0.2), "1 of 2 [0.09, 0.91] ≈", 1 / 2 + 0.6e-6),
    # An interval has the digits of its mean.
    (runs("dense", [0.02, 0.1]), "0.060 [0.000, 0.9", 0.06),
  ],
)
def test_text_and_order_of_a_result(records, text, order):
  (row,) = summarize(records).to_dict("records")
  cell = tables.result(row)
  assert cell.text.startswith(text)
  assert cell.order == pytest.approx(order, rel=1e-9)


def test_what_all_rows_share_is_not_in_their_names():
  shared, records = {"model.short_convolution": True}, []
  for width in (16, 32):
    records += runs("dense", [0.5], across={**shared, "model.features": width})
  table = tables.quality(summary_lib.summarize(frame.runs(records)))
  names = {f"dense, features={width}" for width in (16, 32)}
  assert {*table.frame()["mechanism"]} == names
  assert table.shared["short convolution"] == "True"


def test_a_threshold_is_not_one_of_a_loss():
  """Where no accuracy was finite, the loss decides, and none has solved it."""
  records = runs("dense", [math.nan] * 3, solved_at=0.95)
  for n, record in enumerate(records):
    record["final"] |= {"loss": 1.0 + n}
  row = summarize(records).loc["dense"]
  assert (row["metric"], row["mean"]) == ("loss", 2.0)
  assert math.isnan(row["solved"])


def test_a_run_without_a_finite_metric_is_named():
  row = summarize(runs("dense", [math.nan, 0.5, 0.6])).loc["dense"]
  assert (row["seeds"], row["planned"]) == (2, 3)
  assert row["notes"] == "1 of 3 runs have no finite accuracy"


def test_every_reason_of_unfinished_runs_is_named():
  endings = [("failed", "NaN"), ("stopped", "told to"), ("failed", "NaN")]
  records = [run("dense", 0, 0.5)] + [
    run("dense", n, 0.5, status=status, reason=reason, final={}, history=[])
    for n, (status, reason) in enumerate(endings, 1)
  ]
  notes = summarize(records).loc["dense", "notes"].splitlines()
  assert notes == ["2 of 4 runs failed: NaN", "1 of 4 runs stopped: told to"]


def test_older_records_are_held_to_what_dense_has():
  """They do not say it; the command of a run has its width."""
  records = [
    run(name, 0, 0.5, parameters=parameters)
    | {"arguments": [f"--config.model.mlp_features={width}"]}
    for name, parameters, width in (("dense", 100, 64), ("latent", 120, 1))
  ]
  row = summarize(records).loc["latent"]
  assert row["dense_parameters"] == 100
  assert (row["feed_forward"], row["dense_feed_forward"]) == (1, 64)
  new = [record | {"dense_parameters": None} for record in records]
  assert math.isnan(summarize(new).loc["latent", "dense_parameters"])


def test_leaves_that_end_alike_are_named_whole():
  across = {"encoder.features": 8, "decoder.features": 16, "model.heads": 1}
  assert frame.point(across) == (
    "decoder.features=16, encoder.features=8, heads=1"
  )


def test_one_lucky_seed_decides_no_test():
  """What is counted is known before any result, and 94 % is above 30 %."""
  records = runs("dense", [0.94] * 8, solved_at=0.95)
  records += runs("delta", [0.3] * 8, solved_at=0.95)
  lucky = runs("lsh", [0.96] + [0.2] * 7, solved_at=0.95)
  for others in ([], lucky):
    found = summarize(records + others)
    assert list(found.loc[["dense", "delta"], "solved"]) == [0, 0]
    assert tables.result(found.loc["dense"]).text.startswith("0 of 8")
    first = "lsh" if others else "dense"
    assert found.index[0] == first
  reference = summary_lib.summarize(
    frame.runs(records + lucky), reference="dense"
  ).set_index("row")
  assert not reference.loc["delta", "is_tied"]
  assert not summarize(records).loc["delta", "is_tied"]


def test_a_seed_that_diverged_is_the_worst():
  """Three good seeds of eight do not lead, nor does one of eight that solves it."""
  good = runs("dense", [0.90, 0.91, 0.92, 0.9, 0.91, 0.9, 0.89, 0.9])
  lucky = runs("lsh", [0.97, 0.98, 0.97])
  lucky += [diverged("lsh", n) for n in range(3, 8)]
  others = runs("delta", [0.5, 0.6, 0.5, 0.4, 0.5, 0.5, 0.6, 0.5])
  found = summarize(lucky + good + others)
  assert found.index[0] == "dense"
  assert tables.result(found.loc["lsh"]).text == "0.973 of 3, 5 diverged"
  assert found.loc["lsh", "p"] < 0.05
  assert "a seed that diverged has the worst value" in found.loc["lsh", "test"]
  assert found["difference"].isna().all()
  survivor = runs("path", [1.0], solved_at=0.95)
  survivor += [diverged("path", n, solved_at=0.95) for n in range(1, 8)]
  solved = runs("delta", [1.0] * 8, solved_at=0.95)
  found = summarize(survivor + solved)
  assert list(found.index) == ["delta", "path"]
  shown = tables.quality(found.reset_index()).frame()
  assert shown.iloc[1, 1].startswith("1 of 8 ")


def test_a_row_is_ranked_when_all_of_its_planned_seeds_have_ended():
  records = runs("dense", [0.5, 0.6, 0.5]) + runs("delta", [0.9, 0.9, 0.8])
  plan = {
    f"{name}{seed}": {"row": f"recall, {name}", "seed": seed, "choosing": False}
    for name in ("dense", "delta")
    for seed in range(3)
  }
  plan["delta3"] = plan["delta2"] | {"seed": 3, "added": True}
  plan["delta9"] = plan["delta2"] | {"seed": 10_000, "choosing": True}
  found = summary_lib.summarize(frame.runs(records), plan).set_index("row")
  assert list(found.index) == ["dense", "delta"]
  assert list(found["planned"]) == [3, 4]
  assert tables.result(found.loc["delta"]).text.endswith("] so far")
  assert found["p"].isna().all()
  records.append(run("delta", 3, 0.9))
  one = task.by_task(records, plan)["recall"]
  assert list(one.summary["row"]) == ["delta", "dense"]
  assert one.summary["added"][0] == "3"
  assert remarks.tests(one).endswith(
    "Seeds 3 were added to those planned at first. If results led to them, 5 % of "
    "false differences become about 9 %."
  )


def test_steps_to_the_solution_are_censored_at_the_end():
  records = []
  for name, steps in (("dense", [10, 20, 30]), ("delta", [30, 99, 99])):
    for seed, solved_at in enumerate(steps):
      history = [
        {"step": step, "split": "validation"}
        | {"accuracy": 0.96 if step >= solved_at else 0.1}
        for step in (10, 20, 30, 40)
      ]
      final = history[-1] | {"split": "test"}
      one = run(name, seed, 0.0, solved_at=0.95)
      records.append(one | {"history": [*history, final], "final": final})
  one = task.by_task(records)["recall"]
  points = one.steps.set_index(["row", "seed"])
  assert list(points["steps"]) == [10, 20, 30, 30, 40, 40]
  assert list(points["solved"]) == [True, True, True, True, False, False]
  shown = tables.steps(one).frame().set_index("mechanism")
  assert list(shown["solved at some step"]) == ["3 of 3", "1 of 3"]
  assert list(shown["median steps"]) == ["20", tables.NOTHING]
  figure = figures.survival(one, style.styles(()))
  lines = {
    x.get_label(): x.get_xydata().tolist() for x in figure.axes[0].get_lines()
  }
  curve = next(x for x in lines.values() if len(x) > 6)
  third, two_thirds = pytest.approx(1 / 3), pytest.approx(2 / 3)
  assert curve == [
    *([5, 0], [10, 0], [10, third], [20, third], [20, two_thirds]),
    *([30, two_thirds], [30, pytest.approx(1)]),
  ]
  assert tables.steps(task.by_task(runs("dense", [0.5] * 3))["recall"]) is None


@pytest.mark.parametrize("bimodal", [False, True])
def test_simulated_mechanisms_are_ranked_as_they_are(bimodal, monkeypatch):
  """Two are equal and one is better, through the whole way from records."""
  error_rates.quicken(monkeypatch)
  generator = np.random.default_rng(0)
  truths = {"dense": 0.9, "flash": 0.9, "linear": 0.4}
  wrong = missed = 0
  for _ in range(10):
    records = []
    for name, truth in truths.items():
      values = np.clip(generator.normal(truth, 0.03, 8), 0, 1)
      if bimodal:
        values = np.where(generator.random(8) < truth, 1.0, 0.2)
      threshold = 0.95 if bimodal else None
      records += runs(name, values.tolist(), solved_at=threshold)
    found = summarize(records)
    wrong += not found.loc[["dense", "flash"], "is_tied"].all()
    missed += found.loc["linear", "is_tied"]
  assert wrong <= 1  # 5 % of 10, with its own error.
  # 0.9 against 0.4 of 8 is hard to tell.
  assert missed <= (8 if bimodal else 0)


def test_test_rows_bound_an_interval_from_below():
  records = runs("dense", [1.0] * 3, measured={"test_rows": 100})
  row = summarize(records).loc["dense"]
  assert row["low"] == pytest.approx(0.963, abs=1e-3)


def test_an_edge_of_the_grid_is_marked_and_what_all_rows_share_left_out():
  records = [
    run("dense", 0, 0.5, at_edge=[LEAF], slots="x"),
    run("linear", 0, 0.4, slots="y"),
  ]
  assert list(frame.runs(records)["slots"]) == ["x", "y"]
  table = tables.quality(summary_lib.summarize(frame.runs(records)))
  shown = table.frame().set_index("mechanism")
  assert shown.loc["dense", "learning rate"] == "0.001 (edge)"
  assert shown.loc["linear", "learning rate"] == "0.001"
  assert list(shown["slots"]) == ["x", "y"]
  assert table.shared == {"seeds": "1/1", "parameters": "100"}


def test_rows_go_across_what_a_comparison_goes_across():
  found = summarize(made_up.across())
  assert len(found) == 3 * 6
  row = found.loc["dense, features=64, short_convolution=True"]
  assert row["grid"] == "learning_rate=0.003"
  assert found.loc["dense, features=16, short_convolution=True", "grid"] == (
    "learning_rate=0.001"
  )
  assert (found.loc[found["attention"] == "lsh", "seeds"] == 0).all()


def test_bleu_is_compared_over_sentences_and_common_seeds():
  """Seeds are paired by number, wherever their records are."""
  from tests.comparison import test_statistics as cases

  lines, records, score = cases.references(40), [], {}
  for attention, seed, wrong in (
    *(("dense", 0, 0.05), ("dense", 1, 0.1), ("dense", 2, 0.3)),
    *(("linear", 2, 0.6), ("linear", 5, 0.1), ("linear", 1, 0.4)),
    ("lsh", 9, 0.6),
  ):
    statistics = cases.counts(lines, wrong, seed)
    sums = [int(x) for x in statistics.sum(axis=0)]
    score[attention, seed] = sacrebleu.BLEU.compute_bleu(
      sums[:4], sums[4:8], *sums[8:], smooth_method="exp"
    ).score
    final = {"step": 9, "split": "test", "loss": 1.0}
    final["bleu"] = score[attention, seed]
    record = {"final": final, "history": [final]}
    record["sentences"] = statistics.tolist()
    records.append(run(attention, seed, 0.0) | record)
  found = task.by_task(records)["recall"]
  shown = tables.bleu(found).frame().set_index("mechanism")
  expected = np.mean(
    [score["linear", seed] - score["dense", seed] for seed in (1, 2)]
  )
  assert shown.loc["linear", "BLEU − best"] == f"{expected:+.2f}"
  # No seed of its own is one of the best row's.
  assert (shown.loc["lsh"] == tables.NOTHING).all()
  for record in records:
    del record["sentences"]
  assert tables.bleu(found) is None


METRICS = (
  *("bleu", "exact_match", "last_accuracy", "accuracy", "error_rate"),
  *("bits_per_character", "token_accuracy", "loss", "unigram_loss"),
  *("bigram_loss", "sequence_accuracy", "perplexity", "return"),
)
MEASURED = (
  *("forward_flops", "train_flops", "step_seconds", "tokens_per_second"),
  *("temp_bytes", "device_peak_bytes", "decode_tokens_per_second"),
  *("cache_bytes", "compile_seconds", "approximation_error"),
)
PLANNED = (
  *("parameters", "seconds", "peak_bytes"),
  *("feed_forward", "dense_feed_forward", "dense_parameters"),
)


@pytest.mark.parametrize("name", [*METRICS, *MEASURED, *PLANNED])
def test_every_number_of_a_row_is_the_mean_of_its_seeds(name):
  """1, 2 and 6 have the mean 3 and the median 2."""
  records = runs("dense", [0.5, 0.5, 0.5])
  for record, value in zip(records, (1.0, 6.0, 2.0), strict=True):
    # Of a record that does not say it, it is looked up in dense attention's.
    record["dense_parameters"] = 100
    if name in METRICS:
      record["final"] = record["final"] | {name: value}
      record["history"] = [*record["history"][:-1], record["final"]]
    elif name in MEASURED:
      record["measured"] = {name: value}
    else:
      record[name] = value
  row = summarize(records).loc["dense"]
  assert row[name] == pytest.approx(3.0)
  if name == row["metric"]:
    lower = name in ("error_rate", "bits_per_character", "loss")
    assert row["mean"] == pytest.approx(3.0)
    assert (row["best"], row["worst"]) == ((1, 6) if lower else (6, 1))


@pytest.mark.parametrize(
  ("name", "value", "title", "text"),
  [
    ("parameters", 1234.0, "parameters", "1,234"),
    ("forward_flops", 2.5e9, "forward, GFLOP", "2.5"),
    ("train_flops", 7.5e12, "update, GFLOP", "7,500"),
    ("step_seconds", 0.0125, "step, ms", "12.5"),
    ("tokens_per_second", 4321.0, "training, tokens/s", "4,321"),
    ("temp_bytes", 3 * 2**20, "temporaries, MiB", "3"),
    ("device_peak_bytes", 5 * 2**20, "device peak, MiB", "5"),
    ("decode_tokens_per_second", 98.76, "decoding, tokens/s", "98.8"),
    ("cache_bytes", 6 * 2**10, "cache and state, KiB", "6"),
    ("compile_seconds", 1.25, "compiling, s", "1.25"),
    ("seconds", 90.0, "run, min", "1.5"),
    ("peak_bytes", 7 * 2**20, "process peak, MiB", "7"),
  ],
)
def test_every_cost_is_shown_in_its_unit(name, value, title, text):
  assert len(summary_lib.COSTS) == 12
  records = [*runs("dense", [0.9]), *runs("linear", [0.5])]
  for record, factor in zip(records, (1, 2), strict=True):
    # A table of costs has two at least.
    other = "parameters" if name != "parameters" else "seconds"
    numbers = {name: value * factor, other: 64.0}
    record["measured"] = numbers
    record |= {k: x for k, x in numbers.items() if k in PLANNED}
  shown = tables.cost(summary_lib.summarize(frame.runs(records))).frame()
  assert shown[title][0] == text


@pytest.mark.parametrize(
  ("name", "load"),
  [
    ("step_seconds", "measured_others_cores"),
    ("decode_tokens_per_second", "measured_others_cores"),
    ("compile_seconds", "measured_others_cores"),
    ("tokens_per_second", "others_cores"),
    ("seconds", "others_cores"),
  ],
)
@pytest.mark.parametrize("cores", [0.26, 0.25])
def test_a_measured_time_needs_an_idle_machine(name, load, cores):
  """More than a quarter of a core of other programs, as docs/comparing.md says."""

  def numbers(value, cores):
    found = {name: value, load: cores}
    measured = {k: x for k, x in found.items() if k not in PLANNED}
    if load == "others_cores":
      del measured[load]
    of_run = {k: x for k, x in found.items() if k not in measured}
    return {"measured": measured, **of_run}

  records = [
    run("dense", 0, 0.5, **numbers(9.0, cores)),
    run("dense", 1, 0.5, **numbers(1.0, 0.0)),
    run("linear", 0, 0.4, **numbers(9.0, cores)),
  ]
  found, is_busy = summarize(records), cores > 0.25
  assert found.loc["dense", name] == (1.0 if is_busy else 5.0)
  assert math.isnan(found.loc["linear", name]) == is_busy
  assert list(found["busy"]) == [is_busy] * 2


def test_no_two_mechanisms_look_alike():
  from attention import ATTENTIONS

  named = style.styles(["my.module:one", "a_variant"])
  assert {*ATTENTIONS, "my.module:one", "a_variant"} == {*named}
  lines = {(s.color, str(s.linestyle)) for s in named.values()}
  marks = {(s.color, s.marker) for s in named.values()}
  assert len(lines) == len(marks) == len(named)
  assert style.styles([])["dense"] == named["dense"]


def test_a_row_is_known_when_its_point_is_chosen():
  """Until then a page shows the other tasks, or that nothing has ended."""
  choosing = [run("dense", 10_000, 0.5, choosing=True)]
  assert summary_lib.summarize(frame.runs(choosing)).empty
  assert not task.by_task(choosing)
  others = runs("delta", [0.5, 0.6], task="copy")
  found = summary_lib.summarize(frame.runs([*choosing, *others]))
  assert list(found["task"]) == ["copy"]


def test_a_list_is_one_part_of_a_name():
  records = []
  for pairs in ([4, 8], (2, 8), [[4], 16]):
    records += runs("dense", [0.5], across={"task.fewer_pairs": pairs})
  table = tables.quality(summary_lib.summarize(frame.runs(records)))
  assert set(table.frame()["mechanism"]) == {
    "dense, fewer_pairs=[4,8]",
    "dense, fewer_pairs=[2,8]",
    "dense, fewer_pairs=[[4],16]",
  }
  assert "All rows" not in table.shared


def test_an_edge_is_of_the_leaf_that_has_it():
  encoder, decoder = "model.encoder_attention.window", "model.decoder.window"
  grid = {encoder: 8, decoder: 16}
  found = summarize([run("dense", 0, 0.5, grid=grid, at_edge=[decoder])])
  table = tables.quality(found.reset_index())
  assert table.frame()[encoder.replace("_", " ")].tolist() == ["8"]
  assert table.frame()[decoder].tolist() == ["16 (edge)"]


def test_a_command_can_be_pasted():
  arguments = ["--config=configs/recall.py:dense", "--config.task.pairs=[4, 8]"]
  (command,) = frame.runs([run("dense", 0, 0.5, arguments=arguments)])[
    "command"
  ]
  assert shlex.split(command) == ["python", "train.py", *arguments]


def test_the_best_of_lengths_is_the_lowest_of_a_loss():
  found = runs("dense", [0.5, 0.5], length=32)
  for record, loss in zip(found, (1.0, 2.0), strict=True):
    record["history"] = [
      {"step": 5, "split": split, "error_rate": loss}
      for split in ("test", "length_64")
    ]
    record["final"] = record["history"][-1]
  (one,) = task.by_task(found).values()
  shown = tables.lengths(one).frame()
  assert shown["at 64"].tolist() == ["1.500 (2.000–1.000)"]


@pytest.mark.parametrize(
  ("value", "text"),
  [
    *((0.0, "0.000"), (0.0012345, "0.001234"), (0.00999, "0.00999")),
    *((0.01, "0.010"), (-0.5, "-0.500"), (9.9994, "9.999"), (10, "10.0")),
    *((-12.34, "-12.3"), (999.94, "999.9"), (1000, "1,000")),
    *((-1_234_567.8, "-1,234,568"), (math.inf, "–"), (math.nan, "–")),
  ],
)
def test_numbers_have_the_digits_that_a_reader_needs(value, text):
  assert sentences.number(value) == text
