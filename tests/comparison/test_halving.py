"""Successive halving: which runs are made, how far, and what is said of the rest."""

import pytest

from comparison import halving, launch, plan, records
from reports import summary, words
from settings.errors import ConfigError
from tests.comparison.plans import comparison

# The loss falls with the steps, to the distance of its rate from 0.003. At 0.02 it
# is the best of all with seed 0 and the worst with seed 1.
TRAINING = """
import json, pathlib, sys
found = {name.lstrip('-'): value for name, _, value in
         (argument.partition('=') for argument in sys.argv[1:])}
folder = pathlib.Path(found['workdir'])
folder.mkdir(parents=True, exist_ok=True)
with (folder / 'calls').open('a') as calls:
  calls.write(found.get('stop_at', 'end') + '\\n')
rate = float(found['config.optimizer.learning_rate'])
if rate == 0.1: sys.exit('diverged')
step = int(found.get('stop_at', 40))
loss = abs(rate - 0.003) * 100 + 1 / step
if rate == 0.02: loss = 9.0 * int(found['config.seed'])
line = {'step': step, 'split': 'validation', 'seconds': 1.0,
        'loss': loss, 'exact_match': 0.5}
with (folder / 'metrics.jsonl').open('a') as file:
  file.write(json.dumps(line) + '\\n')
"""
MEASURING = """
import json, pathlib, sys
out = [a for a in sys.argv if a.startswith('--out=')][0].partition('=')[2]
pathlib.Path(out).write_text(json.dumps(
  {'step_seconds': 1.0, 'compile_seconds': 1.0, 'map': None}))
"""
RATES = "optimizer.learning_rate"


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A comparison whose processes are stand-ins: no model, the same files."""
  for name, text in (("_TRAIN", TRAINING), ("_MEASURE", MEASURING)):
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    monkeypatch.setattr(launch, name, [str(script)])
  records.claim(tmp_path / "comparison", {"tasks": "copy"})
  return tmp_path / "comparison"


def compared(rates="1e-3,3e-3,1e-2,0.1", attention="dense", **halving_leaves):
  return comparison(
    tasks="duplicate",
    attention=attention,
    seeds="0,1",
    num_steps=40,
    together="apart",
    grid={"optimizer": {"learning_rate": rates}},
    halving={"rungs": (0.25, 0.5)} | halving_leaves,
  )


def halve(one, folder, after=lambda: None):
  """Runs of the plan, after halving."""
  runs = plan.plan(one)
  halving.launch(halving.groups(runs), folder, one, after)
  return runs


def calls(folder, runs):
  """(rate, seed) -> how far it was trained, call by call."""
  found = {}
  for run in runs:
    path = folder / records.RUNS / run.identity / "calls"
    made = path.read_text().split() if path.exists() else []
    found[run.grid[RATES], run.seed] = made
  return found


def test_the_worse_half_is_stopped_and_other_seeds_run_the_best(folder):
  told = []
  runs = halve(compared(), folder, lambda: told.append(len(told)))
  assert len(told) == 2  # After each run that was made to its end.
  assert calls(folder, runs) == {
    (0.001, 0): ["10", "20"],
    (0.003, 0): ["10", "20", "end"],
    (0.01, 0): ["10"],
    (0.1, 0): ["10", "10"],  # It failed, and was tried again.
    (0.001, 1): [],
    (0.003, 1): ["end"],
    (0.01, 1): [],
    (0.1, 1): [],
  }
  status = {
    (record["grid"][RATES], record["seed"]): (
      record["status"],
      record["reason"],
    )
    for _, record in records.by_path(folder)
  }
  assert status[0.003, 0][0] == status[0.003, 1][0] == records.DONE
  assert status[0.001, 0] == (
    records.STOPPED_EARLY,
    "loss 0.25 after 0.5 of the steps, where 0.05 went on",
  )
  assert status[0.01, 1] == (
    records.STOPPED_EARLY,
    "seed 0 chose learning_rate=0.003",
  )


def test_all_seeds_choose_together_where_they_are_asked(folder):
  rates = "3e-3,0.02,1e-2"
  by_first = folder / "by_first"
  by_first.mkdir()
  runs = halve(compared(rates, rungs=(0.5,)), by_first)
  assert calls(by_first, runs)[0.02, 1] == ["end"]
  assert calls(by_first, runs)[0.003, 1] == []
  runs = halve(compared(rates, rungs=(0.5,), seeds="all"), folder)
  assert calls(folder, runs) == {
    (0.003, 0): ["20", "end"],
    (0.003, 1): ["20", "end"],
    (0.01, 0): ["20", "end"],
    (0.01, 1): ["20", "end"],
    (0.02, 0): ["20"],
    (0.02, 1): ["20"],
  }
  reasons = {
    (record["grid"][RATES], record["seed"]): record["reason"]
    for _, record in records.by_path(folder)
  }
  stopped = "loss 4.5 after 0.5 of the steps, where 0.75 went on"
  assert reasons[0.02, 0] == reasons[0.02, 1] == stopped
  text = " ".join(
    words.setup(
      {"halving.rungs": [0.5], "halving.seeds": "all"},
      records.read(folder)[0],
    )
  )
  assert "began at every point of the grid `optimizer.learning_rate`" in text
  assert "with every seed; after 50 % of the steps" in text
  assert "higher mean loss was stopped; tables" in text


def test_again_nothing_is_trained(folder):
  runs = halve(compared(), folder)
  before = calls(folder, runs)
  halve(compared(), folder)
  before[0.1, 0] = before[0.1, 0] * 2  # What failed is tried again.
  assert calls(folder, runs) == before


def test_it_continues_where_it_was_stopped(folder):
  launch.losses_at(plan.plan(compared())[:1], folder, 0.25)
  runs = halve(compared(), folder)
  assert calls(folder, runs)[0.001, 0] == ["10", "20"]


def test_of_several_that_are_left_the_best_is_chosen(folder):
  runs = halve(compared("1e-3,3e-3,4e-3", rungs=(0.25,)), folder)
  found = calls(folder, runs)
  assert found[0.004, 0] == found[0.003, 0] == ["10", "end"]
  assert found[0.003, 1] == ["end"]
  assert not found[0.004, 1]
  [(task, [one])] = summary.summarize(records.read(folder)[0]).items()
  assert task == "duplicate"
  assert (one.grid, len(one.done)) == ({RATES: 0.003}, 2)


def test_what_cannot_be_is_said_of_every_seed(folder):
  halve(compared(attention="linformer"), folder)
  found, _ = records.read(folder)
  assert {record["status"] for record in found} == {records.UNSUPPORTED}
  assert len(found) == 8


def test_a_run_that_is_not_finite_is_behind_all_others():
  losses = {"a": float("inf"), "b": 2.0, "c": float("nan"), "d": 1.0}
  assert halving.best_first(losses)[:2] == ["d", "b"]


@pytest.mark.parametrize(
  ("halving_leaves", "message"),
  [
    ({"rungs": "0.5,0.25"}, "growing shares .* got '0.5,0.25'"),
    ({"rungs": (0.5, 1.0)}, "growing shares"),
    ({"rungs": "a"}, "growing shares"),
    ({"steps": 3}, "halving.steps: no such leaf; expected rungs or seeds"),
    ({"seeds": 3}, "halving.seeds: expected 'first' or 'all', got 3"),
    ({"seeds": "all"}, "halving.seeds: .* expected halving.rungs as well"),
  ],
)
def test_faulty_rungs(halving_leaves, message):
  grid = {"optimizer": {"learning_rate": "1e-3,3e-3"}}
  with pytest.raises(ConfigError, match=message):
    comparison(halving=halving_leaves, grid=grid)


def test_rungs_want_a_grid():
  with pytest.raises(ConfigError, match="expected a grid of two points"):
    comparison(halving={"rungs": 0.5})


def test_the_report_says_how_the_point_was_chosen(folder):
  halve(compared(), folder)
  found, _ = records.read(folder)
  text = " ".join(words.setup({"halving.rungs": [0.25, 0.5]}, found))
  assert "after 25 % and 50 % of the steps the half with the higher" in text
  assert "chosen by the same split that it is reported on, validation" in text
  assert "halving.rungs" not in text
  # On another split than that of the choice.
  for record in found:
    if "final" in record:
      last = record["final"] | {"split": "test"}
      record["history"] = [*record["history"], last]
      record["final"] = last
  text = " ".join(words.setup({}, found))
  assert "chosen by the validation split and reported on test" in text
