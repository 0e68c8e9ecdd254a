"""Runs of one shape in one process: what is heard of it, and what is kept."""

import json

import pytest

from comparison import launch, plan, records, together
from settings.errors import RunError
from tests.comparison.plans import comparison
from tests.comparison.test_launch import MEASURING, TRAINING
from training import step
from training.signals import Signals

# Seed 1 fails, 2 is a fault of the config, and at 3 the process ends.
TOGETHER = """
import json, os, pathlib, signal, sys
path = pathlib.Path(sys.argv[1].partition('=')[2])
group = json.loads(path.read_text())
with (path.parent / 'groups').open('a') as file:
  file.write(json.dumps([run['leaves']['seed'] for run in group['runs']]) + '\\n')
usage = {'seconds': 2.0, 'cpu_seconds': 1.0, 'peak_bytes': 1, 'others_cores': 0}
def tell(run, event, **found):
  print(json.dumps({'index': run['index'], 'event': event, **found}), flush=True)
for run in group['runs']:
  seed = run['leaves']['seed']
  if seed == 1:
    tell(run, 'failed', reason='it diverged', is_final=False, usage=usage)
  elif seed == 2:
    tell(run, 'failed', reason='no such data', is_final=True)
  elif seed == 3: sys.exit('killed')
  elif seed == 4:
    # Blocked first: the parent may answer before the next line runs.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.kill(os.getppid(), signal.SIGTERM)
    signal.sigwait({signal.SIGTERM})
    tell(run, 'stopped', usage=usage)
    break
  else:
    folder = pathlib.Path(run['folder'])
    folder.mkdir(parents=True, exist_ok=True)
    step = group['stop_at'] or 12
    line = {'step': step, 'split': 'validation', 'seconds': 1.0, 'loss': 1.0}
    (folder / 'metrics.jsonl').write_text(json.dumps(line) + '\\n')
    if group['stop_at']:
      tell(run, 'stopped', usage=usage)
      continue
    tell(run, 'trained', usage=usage)
    found = {'step_seconds': 0.5, 'compile_seconds': 1.0, 'map': run['with_map']}
    tell(run, 'measured', error='', found=found)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A comparison whose processes are stand-ins: no model, the same files."""
  for name, text in (
    ("_TRAIN", TRAINING),
    ("_MEASURE", MEASURING),
    ("_TOGETHER", TOGETHER),
  ):
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    monkeypatch.setattr(launch, name, [str(script)])
  records.claim(tmp_path / "comparison", {"tasks": "copy"})
  return tmp_path / "comparison"


def planned(seeds, **changes):
  runs = plan.plan(
    comparison(tasks="duplicate", attention="dense", seeds=seeds, **changes)
  )
  return runs, {run.seed: run for run in runs}


def groups(folder):
  """Seeds of each process."""
  text = (folder / "together" / "groups").read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_seeds_and_rates_share_a_process_and_nothing_else_does(folder):
  rates = {"optimizer": {"learning_rate": "1e-3,3e-3"}}
  runs, _ = planned("0,5", grid=rates)
  wide, _ = planned("0", num_steps=13)
  launch.launch([*runs, *wide], folder, 0, "in_turn")
  assert groups(folder) == [[0, 0, 5, 5], [0]]
  found = {r["seed"]: r for _, r in records.by_path(folder)}
  assert len(records.by_path(folder)) == 5
  for seed, record in found.items():
    assert record["status"] == records.DONE
    assert record["measured"]["map"] is (seed == 0)
    assert record["seconds"] == 2.0
  assert found[5]["together"] == 4
  # Nothing is made again.
  launch.launch(runs, folder, 0, "in_turn")
  assert len(groups(folder)) == 2


def test_what_sentences_are_scored_by_is_in_the_record(folder):
  runs, by_seed = planned("0,5")
  home = folder / records.RUNS / by_seed[5].identity
  home.mkdir(parents=True)
  (home / "sentences.json").write_text('{"statistics": [[1, 2], [3, 4]]}')
  launch.launch(runs, folder, 0, "in_turn")
  found = {r["seed"]: r for _, r in records.by_path(folder)}
  assert found[5]["status"] == found[0]["status"] == records.DONE
  assert found[5]["sentences"] == [[1, 2], [3, 4]]
  assert "sentences" not in found[0]


def test_what_failed_is_tried_once_more_apart(folder, capsys):
  runs, _ = planned("0,1,2,5")
  launch.launch(runs, folder, 0, "in_turn")
  found = {r["seed"]: r for _, r in records.by_path(folder)}
  assert found[0]["status"] == found[5]["status"] == records.DONE
  # In the group, and then by train.py, whose stand-in fails as well.
  assert (found[1]["status"], found[1]["reason"]) == (
    records.FAILED,
    "exit code 1: broke",
  )
  assert found[1]["seconds"] > 2.0
  assert (found[2]["status"], found[2]["reason"]) == (
    records.FAILED,
    "no such data",
  )
  out = capsys.readouterr().out
  assert out.count("failed: it diverged") == out.count("broke") == 1
  assert out.count("no such data") == 1


def test_what_a_process_that_ends_leaves_is_made_apart(folder, capsys):
  runs, _ = planned("0,3,5")
  launch.launch(runs, folder, 0, "in_turn")
  found = {r["seed"]: r for _, r in records.by_path(folder)}
  assert all(r["status"] == records.DONE for r in found.values())
  assert found[0]["measured"]["step_seconds"] == 0.5
  # As the stand-ins of train.py and comparison.measure have it.
  assert found[5]["measured"]["step_seconds"] == 0.25
  assert "exit code 1: killed; those that are left" in capsys.readouterr().out


def test_a_stopped_comparison_hears_its_process_out(folder):
  runs, _ = planned("0,4,5")
  with pytest.raises(SystemExit):
    launch.launch(runs, folder, 0, "in_turn")
  found = {r["seed"]: r for _, r in records.by_path(folder)}
  assert {seed: r["status"] for seed, r in found.items()} == {
    0: records.DONE,
    4: records.STOPPED,
  }
  assert not list((folder / records.RUNNING).iterdir())


def test_what_is_trained_keeps_its_usage_and_is_measured(folder):
  runs, by_seed = planned("0,5")
  home = folder / records.RUNS / by_seed[5].identity
  home.mkdir(parents=True)
  records.write(
    folder,
    by_seed[5],
    status=records.TRAINED,
    final={"step": 12, "split": "validation", "loss": 3.0},
    seconds=77.0,
  )
  launch.launch(runs, folder, 0, "in_turn")
  found = {r["seed"]: r for _, r in records.by_path(folder)}
  assert found[5]["status"] == records.DONE
  assert (found[5]["seconds"], found[5]["final"]["loss"]) == (77.0, 3.0)
  assert (found[0]["seconds"], found[0]["final"]["loss"]) == (2.0, 1.0)


def test_losses_at_a_share_of_the_steps(folder):
  runs, by_seed = planned("0,1,5")
  losses = launch.losses_at(runs, folder, 0.5, "in_turn")
  # The stand-in of train.py is tried with seed 1, and fails.
  assert losses == [1.0, float("inf"), 1.0]
  assert groups(folder) == [[0, 1, 5]]
  record = dict(records.by_path(folder))
  (of_first,) = [r for r in record.values() if r["seed"] == 0]
  assert of_first["status"] == records.STOPPED
  assert of_first["reason"] == "at step 6; it may go on"
  # What is known is not made again.
  launch.losses_at([by_seed[0], by_seed[5]], folder, 0.5, "in_turn")
  assert len(groups(folder)) == 1


def test_a_full_disk_is_one_line(folder, monkeypatch):
  def full(*args, **found):
    raise OSError(28, "No space left on device", "records/x.json.tmp")

  monkeypatch.setattr(records, "write", full)
  runs, _ = planned("0")
  with pytest.raises(RunError, match=r"No space left .* continues the compar"):
    launch.launch(runs, folder, 0, "in_turn")


@pytest.mark.thorough
def test_runs_share_a_program_and_no_fault(tmp_path, monkeypatch):
  """Real ones: the second diverges, and the third has the first one's program."""
  leaves = {
    "num_steps": 4,
    "batch_size": 8,
    "log_every": 1,
    "task.vocab_size": 16,
    "task.length": 8,
    "task.num_pairs": 2,
    "task.eval_size": 8,
    "model.num_layers": 1,
    "model.features": 16,
    "model.mlp_features": 16,
  }
  chosen = [
    {"seed": 0},
    {"seed": 1, "optimizer.learning_rate": 1e38},
    {"seed": 2, "optimizer.learning_rate": 3e-3},
    {"batch_size": 0},
  ]
  runs = [
    {
      "index": index,
      "task": "recall",
      "mechanism": "dense",
      "leaves": leaves | own,
      "folder": str(tmp_path / str(index)),
      "with_map": False,
    }
    for index, own in enumerate(chosen)
  ]
  traced, train_step = [], step.train_step

  def counted(*arguments, **options):
    traced.append(arguments)
    return train_step(*arguments, **options)

  monkeypatch.setattr(step, "train_step", counted)
  heard = []
  together.train_all(
    runs,
    None,
    Signals(),
    lambda run, event, **found: heard.append((run["index"], event, found)),
  )
  events = [(index, event) for index, event, _ in heard]
  assert events == [
    (0, "trained"),
    (0, "measured"),
    (1, "failed"),
    (2, "trained"),
    (2, "measured"),
    (3, "failed"),
  ]
  assert "not finite" in heard[2][2]["reason"]
  assert not heard[2][2]["is_final"]
  assert heard[5][2]["is_final"]
  # The first run was measured in between, which traces steps of its own.
  programs = [functions.forward for functions, *_ in traced]
  assert programs.count(programs[0]) == 1
  measured = [heard[i][2] for i in (1, 4)]
  assert all(not found["error"] for found in measured)
  first, last = (found["found"]["step_seconds"] for found in measured)
  assert first == last
  # What is there already is not trained again.
  heard.clear()
  together.train_all(
    runs[:1],
    None,
    Signals(),
    lambda run, event, **found: heard.append((event, found)),
  )
  assert heard[0] == ("trained", {"usage": {}})
