"""Which points of a grid are trained, how far, and which one is reported."""

import dataclasses

import pytest

from comparison import choose, plan, records
from comparison import folder as folder_lib
from comparison import run as run_lib
from settings.errors import ConfigError, RunError
from tests.comparison.plans import comparison

RATE = "optimizer.learning_rate"
# The loss falls with the steps, to the distance of the rate from this one.
BEST = 0.003


def by_rate(run, step):
  rate = run.fields[RATE]
  if rate == 0.1:
    raise RunError("it diverged")
  return abs(rate - BEST) * 100 + 1 / step


def compared(rates="1e-3,3e-3,1e-2", **changes):
  base = {"tasks": "duplicate", "attention": "dense", "seeds": "0,1"}
  base |= {"num_steps": 40, "grid": {"optimizer": {"learning_rate": rates}}}
  return comparison(**base | changes)


def calls(trainer):
  """(rate, seed) -> how far it was trained, call by call."""
  found = {}
  for run, stop_at in trainer.calls:
    found.setdefault((run.grid[RATE], run.seed), []).append(stop_at or "end")
  return found


def reported(folder):
  """Rates and edges of what is reported."""
  return {
    (record["grid"][RATE], tuple(record["at_edge"]))
    for record in records.read(folder)[0]
    if not record["choosing"]
  }


def test_seeds_of_their_own_choose_and_the_others_run_what_is_chosen(
  folder, trainer
):
  trainer.loss = by_rate
  one = compared("1e-3,3e-3,1e-2,0.1", halving={"rungs": (0.25, 0.5)})
  told = []
  run_lib.run(one, folder, after=lambda: told.append(len(told)))
  both = (10_000, 10_001)
  assert calls(trainer) == {
    **{(0.001, seed): [10, 20] for seed in both},
    **{(0.003, seed): [10, 20, "end"] for seed in both},
    **{(0.01, seed): [10] for seed in both},
    **{(0.1, seed): [10, 10] for seed in both},  # They failed, and again.
    (0.003, 0): ["end"],
    (0.003, 1): ["end"],
  }
  assert told  # After what is reported.
  found, _ = records.read(folder)
  status = {(r["grid"][RATE], r["choosing"], r["status"]) for r in found}
  assert status == {
    (0.001, True, records.STOPPED_EARLY),
    (0.003, True, records.DONE),
    (0.01, True, records.STOPPED_EARLY),
    (0.1, True, records.FAILED),
    (0.003, False, records.DONE),
  }
  reasons = {r["reason"] for r in found if r["grid"][RATE] == 0.001}
  assert reasons == {"loss 0.25 after 0.5 of the steps; the limit was 0.05"}
  # What chooses is not measured, and what is reported is on the last split.
  assert {r["seed"] for r in found if r.get("measured")} == {0, 1}
  assert all(r["final"]["split"] == "test" for r in found if "final" in r)
  assert reported(folder) == {(0.003, ())}


def test_the_point_that_most_seeds_solve_is_chosen_and_of_as_many_the_lowest_loss(
  folder, trainer, capsys
):
  """0.003 is solved by three of four seeds, with one that has a great loss."""
  solving = {1e-3: 1, 3e-3: 3, 1e-2: 3}

  def is_solved(run):
    return run.seed - 10_000 < solving.get(run.fields[RATE], 0)

  def loss(run, step):
    return run.fields[RATE] + (0.0 if is_solved(run) else 3.0)

  trainer.loss = lambda run, step: (
    0.5 if run.fields[RATE] == 1e-3 else loss(run, step)
  )
  trainer.metrics = lambda run, step: {"accuracy": 0.97 * is_solved(run)}
  run_lib.run(compared(halving={"seeds": 4}), folder)
  assert reported(folder) == {(0.003, ())}
  said = "chosen optimizer.learning_rate=0.003, solved by 3 of 4 choosing seeds"
  assert said in capsys.readouterr().out


def test_of_points_that_cannot_run_the_first_is_returned(folder, trainer):
  one = compared()
  runs = [
    dataclasses.replace(run, obstacle="too short")
    for run in plan.plan(one)
    if run.choosing
  ]
  assert len({run.grid[RATE] for run in runs}) == 3
  assert choose.choose(runs, folder, one) is runs[0]
  assert not trainer.calls


def test_halving_is_warned_of_where_a_task_is_all_or_nothing(
  folder, trainer, capsys
):
  run_lib.run(compared("1e-3,3e-3", halving={"rungs": (0.5,)}), folder)
  out = capsys.readouterr().out
  assert out.startswith(
    "warning: duplicate: all or nothing, and halving.rungs=0.5"
  )
  assert out.index("warning") < out.index("duplicate, dense")
  degree = compared(tasks="listops", halving={"rungs": (0.5,)})
  assert not choose.warning(plan.plan(degree), degree)
  whole = compared()
  assert not choose.warning(plan.plan(whole), whole)


@pytest.mark.parametrize("loss", [1.650, 1.997])
def test_a_run_that_patience_ends_before_a_rung_counts_by_its_last_line(
  folder, trainer, loss
):
  """0.003 ends at step 6 of 40, before the rungs at 10 and 20."""
  losses = {0.001: 2.5, 0.003: loss, 0.01: 1.996}
  trainer.loss = lambda run, step: losses[run.fields[RATE]] + 1 / (9 * step)
  trainer.end = lambda run: 6 if run.fields[RATE] == 0.003 else None
  run_lib.run(compared(halving={"rungs": (0.25, 0.5)}), folder)
  chosen = 0.003 if loss < 1.99 else 0.01
  assert {rate for rate, _ in reported(folder)} == {chosen}
  tried = calls(trainer)
  # To all rungs, or until it is worse than what goes on; never twice.
  assert tried[0.003, 10_000] == tried[0.001, 10_000] == [10]
  assert tried[0.01, 10_000] == [10, 20, "end"][: 2 + (chosen == 0.01)]
  found, _ = records.read(folder)
  ended = [r for r in found if r["grid"][RATE] == 0.003 and r["choosing"]]
  assert {r["status"] for r in ended} == {records.DONE}
  assert all(r["history"][-1]["step"] == 6 for r in ended)


def test_of_three_points_two_go_on(folder, trainer):
  trainer.loss = by_rate
  run_lib.run(compared(halving={"rungs": (0.5,)}), folder)
  ends = {place for place, tried in calls(trainer).items() if "end" in tried}
  assert {rate for rate, seed in ends if seed >= 10_000} == {0.001, 0.003}


def test_rungs_at_one_step_or_at_the_end_stop_nothing_more(folder, trainer):
  """Of three steps, the rungs are at 1, 1 and 3."""
  trainer.loss = by_rate
  rungs = {"rungs": (0.25, 0.3, 0.9), "seeds": 1}
  run_lib.run(
    compared("1e-3,2e-3,3e-3,1e-2", num_steps=3, halving=rungs), folder
  )
  tried = {rate: x for (rate, seed), x in calls(trainer).items() if seed > 1}
  assert tried == {
    **{rate: [1, "end"] for rate in (0.002, 0.003)},
    **{rate: [1] for rate in (0.001, 0.01)},
  }


def test_a_failed_point_is_behind_all_others_at_the_end(folder, trainer):
  trainer.loss = by_rate
  run_lib.run(compared("0.1,0.05"), folder)
  # Half of 0.05 is tried as well, and wins.
  assert reported(folder) == {(0.025, (RATE,))}
  trainer.loss = lambda run, step: float("nan" if run.seed % 2 else "inf")
  folder = folder.parent / "another"
  run_lib.run(compared(), folder)
  assert {rate for rate, _ in reported(folder)} == {0.001}


@pytest.mark.parametrize(
  ("value", "values", "expected"),
  [
    (3e-3, [1e-3, 3e-3], 9e-3),
    (1e-3, [3e-3, 1e-3], 3.33e-4),
    (1e-2, [1e-3, 3e-3, 1e-2], 0.0333),
    (3e-3, [1e-3, 3e-3, 1e-2], None),
    (64, [16, 32, 64], 128),
    (1, [1, 2], None),  # No whole number is half of it.
    (0.1, [0.0, 0.1], None),
    (True, [False, True], None),
    ("b", ["a", "b"], None),
    (3e-3, [3e-3], None),
    (1.0, [0.999, 1.0], None),  # Three digits of 1.001 are 1.0 again.
  ],
)
def test_one_value_beyond_an_end(value, values, expected):
  assert choose.next_grid_value(value, values) == expected


@pytest.mark.parametrize(
  ("best", "chosen", "edge", "tried"),
  [
    (3e-3, 3e-3, (), 3e-3),  # Within the grid.
    (0.011, 0.01, (), 0.0333),
    (0.05, 0.0333, (RATE,), 0.0333),
    (1e-4, 3.33e-4, (RATE,), 3.33e-4),
  ],
)
def test_the_grid_is_extended_once_beyond_the_chosen_end(
  folder, trainer, best, chosen, edge, tried
):
  trainer.loss = lambda run, step: abs(run.fields[RATE] - best)
  run_lib.run(compared(), folder)
  assert reported(folder) == {(chosen, edge)}
  made = calls(trainer)
  assert made[tried, 10_000] == made[tried, 10_001] == ["end"]
  assert len({rate for rate, _ in made}) == 3 + (
    tried not in (1e-3, 3e-3, 1e-2)
  )


def test_what_cannot_be_beyond_an_end_is_left_out(folder, trainer):
  grid = {"model": {"dropout_rate": (0.3, 0.9)}}
  trainer.loss = lambda run, step: -run.fields["model.dropout_rate"]
  run_lib.run(compared(grid=grid), folder)
  found, _ = records.read(folder)
  [edge] = {tuple(r["at_edge"]) for r in found if not r["choosing"]}
  assert edge == ("model.dropout_rate",)


def test_killed_anywhere_it_goes_on_to_the_same(folder, trainer):
  class Killed(BaseException):
    pass

  def killed_at(count):
    def loss(run, step):
      if len(trainer.calls) == count:
        raise Killed
      return by_rate(run, step)

    return loss

  one = compared("1e-3,3e-3", halving={"rungs": (0.5,), "seeds": 1})
  trainer.loss = by_rate
  run_lib.run(one, folder)
  whole, _ = records.read(folder)
  made = len(trainer.calls)
  assert made == 2 + 1 + 1 + 2  # A rung, the end, beyond the end, the report.
  for count in range(1, made + 1):
    trainer.calls.clear()
    trainer.loss = killed_at(count)
    folder = folder.parent / f"killed at {count}"
    with pytest.raises(Killed):
      run_lib.run(one, folder)
    trainer.loss = by_rate
    run_lib.run(one, folder)
    # What was killed is made again, and nothing else.
    assert len(trainer.calls) == made + 1
    found, _ = records.read(folder)
    names = ("grid", "seed", "status", "reason", "at_edge", "choosing", "final")
    assert [[r.get(x) for x in names] for r in found] == [
      [r.get(x) for x in names] for r in whole
    ]
  trainer.calls.clear()
  run_lib.run(one, folder)
  assert not trainer.calls
  # Seeds that come later run what was chosen.
  run_lib.run(compared("1e-3,3e-3", seeds="0,1,2", halving=one.halving), folder)
  [(last, _)] = trainer.calls
  assert (last.seed, last.grid[RATE]) == (2, 0.003)


def test_rows_choose_for_themselves_and_shards_divide_them(folder, trainer):
  best = {"dense": 1e-3, "linear": 1e-2}
  trainer.loss = lambda run, step: abs(run.fields[RATE] - best[run.attention])
  one = compared(attention="dense,linear,linformer", halving={"seeds": 1})
  run_lib.run(one, folder, (1, 2))
  assert {run.attention for run, _ in trainer.calls} == {"dense"}
  made = {r["attention"] for r in records.read(folder)[0]}
  assert made == {"dense", "linformer"}
  run_lib.run(one, folder, (2, 2))
  found, _ = records.read(folder)
  rates = {
    r["attention"]: r["grid"][RATE]
    for r in found
    if not r["choosing"] and not r["reason"]
  }
  assert rates == {"dense": 1e-3, "linear": 1e-2}
  refused = [r for r in found if r["attention"] == "linformer"]
  assert {r["status"] for r in refused} == {records.UNSUPPORTED}
  assert sorted(r["seed"] for r in refused if not r["choosing"]) == [0, 1]


def test_halving_wants_a_grid_and_is_that_of_its_folder():
  with pytest.raises(ConfigError, match="expected a grid of at least"):
    compared("1e-3", halving={"rungs": 0.5})

  assert folder_lib.shared(compared())["halving.seeds"] == 2
  assert "halving.seeds" not in folder_lib.shared(compared("1e-3"))
  assert not any(run.choosing for run in plan.plan(compared("1e-3")))
