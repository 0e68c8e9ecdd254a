"""`compare.py`: what is planned, what is kept, what is told."""

import csv
import json

import pytest

from comparison import config, launch, plan, records, table
from configs.compare import copy
from tests import commands
from training.config import ConfigError

SMALL = {
  "model.num_layers": 1,
  "model.features": 16,
  "model.mlp_features": 512,
  "num_steps": 12,
}


def comparison(**changes):
  mapping = copy.get_config().to_dict()
  for leaf, value in {**SMALL, **changes}.items():
    section, _, name = leaf.rpartition(".")
    (mapping[section] if section else mapping)[name] = value
  return config.parse(mapping)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"attention": "dnse"}, "config.attention: no mechanism 'dnse'; did you"),
    ({"attention": "lsh,lsh"}, "config.attention: expected at least one, each"),
    ({"tasks": "cpoy"}, "config.tasks: no file configs/cpoy.py"),
    ({"seeds": "1,x"}, "config.seeds: expected whole numbers, got 'x'"),
    ({"seeds": ""}, "config.seeds: expected at least one"),
    ({"num_stps": 3}, "config.num_stps: unknown; did you mean 'num_steps'?"),
  ],
)
def test_faults_are_told_before_anything_runs(changes, message):
  with pytest.raises(ConfigError) as info:
    plan.plan(comparison(**changes))
  assert str(info.value).startswith(message)


def test_every_mechanism_gets_the_parameters_of_dense():
  runs = plan.plan(comparison(attention="all", seeds="0,1"))
  dense = next(run for run in runs if run.attention == "dense")
  for run in runs:
    assert not run.obstacle
    # One unit of the feed-forward layers is the finest step there is.
    assert abs(run.parameters - dense.parameters) < 0.02 * dense.parameters
  additive = next(run for run in runs if run.attention == "additive")
  assert additive.unmatched_parameters > 1.1 * dense.parameters
  assert additive.leaves["model.mlp_features"] < 512
  # Seeds come last, so that every mechanism has a result early.
  assert [run.seed for run in runs] == sorted(run.seed for run in runs)
  assert len({run.identity for run in runs}) == len(runs)
  again = plan.plan(comparison(attention="all", seeds="0,1"))
  assert [run.identity for run in again] == [run.identity for run in runs]


def test_what_a_mechanism_cannot_do_is_a_run_that_says_so():
  dense, linformer = plan.plan(
    comparison(tasks="duplicate", attention="dense,linformer")
  )
  assert not dense.obstacle
  assert "linformer cannot be causal" in linformer.obstacle


@pytest.fixture
def training(tmp_path, monkeypatch):
  """Stands in for train.py: writes metrics, or fails where the seed is 1."""
  script = tmp_path / "train.py"
  script.write_text(
    "import json, pathlib, sys\n"
    "if '--config.seed=1' in sys.argv: sys.exit('it\\nbroke')\n"
    "folder = pathlib.Path(sys.argv[-1].partition('=')[2])\n"
    "folder.mkdir(parents=True)\n"
    "lines = [{'step': 6, 'split': 'train', 'loss': 2.0},\n"
    "         {'step': 12, 'split': 'validation', 'exact_match': 0.5}]\n"
    "(folder / 'metrics.jsonl').write_text(\n"
    "  ''.join(json.dumps(line) + '\\n' for line in lines))\n"
  )
  monkeypatch.setattr(launch, "_TRAIN", script)


def test_runs_are_kept_and_not_made_again(tmp_path, training, capsys):
  folder = tmp_path / "comparison"
  records.claim(folder, {"tasks": "copy"})
  runs = plan.plan(
    comparison(tasks="duplicate", attention="dense,linformer", seeds="0,1")
  )
  launch.launch(runs, folder)
  out = capsys.readouterr().out
  assert out.count("not supported: ") == 2
  assert "exact_match 0.5000" in out
  assert "failed: exit code 1: " in out
  found, damaged = records.read(folder)
  assert sorted(record["status"] for record in found) == [
    records.DONE,
    records.FAILED,
    records.UNSUPPORTED,
    records.UNSUPPORTED,
  ]
  assert not damaged
  # Only what failed is tried again, and what was damaged.
  launch.launch(runs, folder)
  assert capsys.readouterr().out.count("parameters") == 1
  path = folder / records.RECORDS / f"{runs[0].identity}.json"
  path.write_text(path.read_text()[:50])
  assert records.read(folder)[1] == [path.name]
  assert records.status(folder, runs[0]) is None

  report = table.write(folder, found)
  assert "| `dense` | 1/2 (exit code 1: " in report
  assert "| `linformer` | 0/2 | not supported: " in report
  with (folder / "results.csv").open() as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 4
  done = next(row for row in rows if row["status"] == records.DONE)
  assert float(done["exact_match"]) == 0.5
  assert float(done["peak_bytes"]) > 1e6
  lines = (folder / "results.jsonl").read_text().splitlines()
  assert [json.loads(line)["command"] for line in lines] == [
    row["command"] for row in rows
  ]


def test_an_interval_is_students():
  assert table.interval([0.5]) == "0.5000"
  # t(2) = 4.303, s = 0.1, n = 3.
  assert table.interval([0.4, 0.5, 0.6]) == "0.5000 ± 0.2484"


def test_a_folder_of_something_else_is_refused(tmp_path):
  (tmp_path / "letter.txt").write_text("")
  with pytest.raises(ConfigError, match="holds other files"):
    records.claim(tmp_path, {"tasks": "copy"})
  folder = tmp_path / "comparison"
  records.claim(folder, {"tasks": "copy", "num_steps": 3})
  records.claim(folder, {"tasks": "copy", "num_steps": 3})
  with pytest.raises(ConfigError, match=r"config\.num_steps is 3 there and 4"):
    records.claim(folder, {"tasks": "copy", "num_steps": 4})


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("report",), "--workdir: missing; the folder of the comparison"),
    (("reprt",), "reprt: expected report or flags only (--name=value)"),
    (("--workdir=x", "--shard=3/2"), "--shard: expected i/n with 1 ≤ i ≤ n"),
    (("report", "--workdir=nosuch"), "--workdir: no comparison in nosuch"),
  ],
)
def test_wrong_arguments_are_one_line(arguments, message):
  code, _, error = commands.run("compare.py", *arguments)
  assert code == 2
  assert error.startswith(message)
  assert error.count("\n") == 1
