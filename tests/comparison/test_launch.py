"""Which processes a comparison starts, and what it keeps of them."""

import subprocess
import sys

import pytest

from comparison import child, launch, plan, records
from settings.errors import RunError
from tests.comparison.plans import budgeted, comparison

TRAINING = """
import json, os, pathlib, signal, sys
if '--config.seed=1' in sys.argv: sys.exit('it\\nbroke')
folder = pathlib.Path(sys.argv[-1].partition('=')[2])
folder.mkdir(parents=True, exist_ok=True)
if '--config.seed=2' in sys.argv and not (folder / 'second').exists():
  (folder / 'second').touch()
  os.kill(os.getppid(), signal.SIGTERM)
  signal.pause()
lines = [{'step': 6, 'split': 'train', 'loss': 2.0, 'seconds': 1.0},
         {'step': 12, 'split': 'validation', 'seconds': 2.0, 'loss': 1.0,
          'exact_match': 0.5, 'arguments': ' '.join(sys.argv)}]
(folder / 'metrics.jsonl').write_text(
  ''.join(json.dumps(line) + '\\n' for line in lines))
"""

MEASURING = """
import json, pathlib, sys
found = {name.lstrip('-'): value for name, _, value in
         (argument.partition('=') for argument in sys.argv[1:])}
out = pathlib.Path(found['out'])
calls = out.parent / 'calls'
calls.write_text(calls.read_text() + '.' if calls.exists() else '.')
if (out.parent / 'no').exists(): sys.exit('no measure')
out.write_text(json.dumps({'step_seconds': 0.25, 'compile_seconds': 1.0,
                           'map': found.get('map')}))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A comparison whose processes are stand-ins: no model, the same files.

  Training fails where the seed is 1, and where it is 2 stops everything once.
  """
  for name, text in (("_TRAIN", TRAINING), ("_MEASURE", MEASURING)):
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    monkeypatch.setattr(launch, name, [str(script)])
  records.claim(tmp_path / "comparison", {"tasks": "copy"})
  return tmp_path / "comparison"


def small_plan(seeds="0,1", **changes):
  return plan.plan(
    comparison(
      tasks="duplicate", attention="dense,linformer", seeds=seeds, **changes
    )
  )


def test_runs_are_kept_and_not_made_again(folder, capsys):
  runs = small_plan()
  launch.launch(runs, folder, map_seed=0)
  out = capsys.readouterr().out
  assert out.count("not supported: ") == 2
  assert "exact_match 0.5000" in out
  assert "step 250.0 ms" in out
  # The last line of what it wrote to standard error.
  assert "failed: exit code 1: broke" in out
  found, damaged = records.read(folder)
  assert sorted(record["status"] for record in found) == [
    records.DONE,
    records.FAILED,
    records.UNSUPPORTED,
    records.UNSUPPORTED,
  ]
  assert not damaged
  done = next(r for r in found if r["status"] == records.DONE)
  assert done["peak_bytes"] > 1e6
  assert done["measured"]["map"] == ""
  assert len(done["history"]) == 2
  assert "sentences" not in done
  # Only what failed is tried again, and what was damaged.
  launch.launch(runs, folder, map_seed=0)
  assert capsys.readouterr().out.count("parameters") == 1
  path = folder / records.RECORDS / f"{runs[0].identity}.json"
  path.write_text(path.read_text()[:50])
  assert records.read(folder)[1] == [path.name]
  assert records.status(folder, runs[0]) is None


def test_whoever_asks_is_told_after_every_run(folder):
  runs = [run for run in small_plan() if not run.obstacle]
  told = []

  def after():
    told.append([records.status(folder, run) for run in runs])

  launch.launch(runs, folder, map_seed=0, after=after)
  assert told == [[records.DONE, None], [records.DONE, records.FAILED]]


def test_what_sentences_are_scored_by_is_in_the_record(folder):
  """Of a run by itself; its stand-in writes nothing of the kind."""
  (run, _) = small_plan(seeds="0")
  home = folder / records.RUNS / run.identity
  home.mkdir(parents=True)
  (home / "sentences.json").write_text('{"statistics": [[1, 2], [3, 4]]}')
  launch.launch([run], folder, map_seed=0)
  (record,), _ = records.read(folder)
  assert record["status"] == records.DONE
  assert record["sentences"] == [[1, 2], [3, 4]]


def test_what_could_not_be_measured_is_measured_again_not_trained(
  folder, capsys
):
  (run, _) = small_plan(seeds="0")
  home = folder / records.RUNS / run.identity
  home.mkdir(parents=True)
  (home / "no").touch()
  launch.launch([run], folder, map_seed=0)
  assert "not measured: exit code 1: no measure" in capsys.readouterr().out
  (record,), _ = records.read(folder)
  assert record["status"] == records.TRAINED
  assert record["reason"] == "measuring: exit code 1: no measure"
  (home / "no").unlink()
  (home / "metrics.jsonl").unlink()
  launch.launch([run], folder, map_seed=1)
  (record,), _ = records.read(folder)
  assert record["status"] == records.DONE
  assert record["measured"] == {
    "step_seconds": 0.25,
    "compile_seconds": 1.0,
    "map": None,
  }
  assert not (home / "metrics.jsonl").exists()


def test_a_stopped_run_is_a_record_and_its_time_counts(folder):
  (run, _) = small_plan(seeds="2")
  with pytest.raises(SystemExit):
    launch.launch([run], folder, map_seed=0)
  (stopped,), _ = records.read(folder)
  assert stopped["status"] == records.STOPPED
  launch.launch([run], folder, map_seed=0)
  (record,), _ = records.read(folder)
  assert record["status"] == records.DONE
  assert record["seconds"] > stopped["seconds"]


def test_what_fails_is_tried_twice_and_its_time_counts(folder, capsys):
  (run, _) = small_plan(seeds="1")
  launch.launch([run], folder, map_seed=0)
  out = capsys.readouterr().out
  assert out.count("failed: exit code 1: broke") == 2
  assert out.count("tried again") == 1
  (twice,), _ = records.read(folder)
  assert (twice["status"], twice["reason"]) == (
    records.FAILED,
    "exit code 1: broke",
  )
  assert twice["cpu_seconds"] > 0
  # Of a fault in what was asked for, once is enough.
  script = folder.parent / "_TRAIN.py"
  script.write_text(
    "import sys; print('model.x: no', file=sys.stderr); sys.exit(2)"
  )
  launch.launch([run], folder, map_seed=0)
  out = capsys.readouterr().out
  assert out.count("failed: exit code 2: model.x: no") == 1
  assert "tried again" not in out


def test_a_full_disk_is_one_line(folder, monkeypatch):
  def full(*args, **found):
    raise OSError(28, "No space left on device", "records/x.json.tmp")

  monkeypatch.setattr(records, "write", full)
  with pytest.raises(RunError, match=r"No space left .* continues the compar"):
    launch.launch(small_plan(seeds="0"), folder, map_seed=0)


def test_a_budget_of_seconds_is_timed_once_for_all_seeds(folder):
  runs = plan.plan(
    budgeted(attention="dense", seeds="0,3", budget_seconds=10.0)
  )
  launch.launch(runs, folder, map_seed=0)
  found, _ = records.read(folder)
  # 10 seconds of steps that take a quarter of one.
  for record in found:
    assert "--config.num_steps=40" in record["arguments"]
    assert "--config.num_steps=40" in record["final"]["arguments"]
  assert (folder / "budgets" / "calls").read_text() == "."


def test_a_reason_is_the_last_line_above_the_note_of_jax():
  script = "import jax\ndef f(x): raise ValueError('it\\nbroke')\njax.jit(f)(1)"
  found = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True, check=False
  )
  assert "JAX has removed" in found.stderr
  assert child._reason(1, found.stderr) == "exit code 1: broke"
