"""`train.py` as a user meets it: results, restarts and faults."""

import json
import re
import signal
import time

import pytest

from attention import ATTENTIONS
from attention import mechanism as mechanisms
from tests import commands


def train(workdir, *arguments, **options):
  return commands.run(
    "train.py", *commands.TINY, f"--workdir={workdir}", *arguments, **options
  )


def digests(workdir):
  """What the newest checkpoint says of its own leaves, and its step."""
  step = max(int(path.name) for path in (workdir / "checkpoints").iterdir())
  record = workdir / "checkpoints" / str(step) / "record" / "metadata"
  return step, json.loads(record.read_text())["digests"]


def records(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  parsed = [json.loads(line) for line in lines]
  for record in parsed:
    record.pop("tokens_per_second", None)
    record.pop("seconds")
  return parsed


@pytest.fixture
def finished():
  """A run that nothing interrupted."""
  return commands.finished()


def test_a_run_leaves_everything_behind(finished):
  workdir, out = finished
  files = {"config.json", "metrics.jsonl", "samples.txt", "attention.png"}
  files |= {"tensorboard", "checkpoints", "vocabulary"}
  assert {path.name for path in workdir.iterdir()} == files
  last = records(workdir)[-1]
  assert last["step"] == 12
  assert last["split"] == "validation"
  assert {"loss", "token_accuracy", "exact_match"} <= last.keys()
  for name in (*last.keys() - {"step", "split"}, "attention.png"):
    assert name in out
  config = json.loads((workdir / "config.json").read_text("utf-8"))
  assert config["num_steps"] == 12
  # The first line says what fills each slot, and so do the file and the end.
  assert f"{workdir}: slots dense · dense · dense (" in out.splitlines()[0]
  assert config["slots"] == "dense · dense · dense"
  assert "\nslots: dense · dense · dense\n" in out


def test_a_finished_run_says_its_metrics_again_and_keeps_others_out(finished):
  workdir, out = finished
  before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
  code, again, error = train(workdir)
  assert (code, error) == (0, "")
  first, _, rest = again.partition("\n")
  assert first.startswith(f"{workdir}: had finished at step 12 before; nothing")
  assert rest.strip() in out
  told = commands.fault(train(workdir, "--config.seed=5"))
  assert "config.seed is 0 there and 5 here" in told
  assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before


# SIGTERM: see tests/training/test_loop.py and test_processes.py.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
  finished, tmp_path, number
):
  workdir = tmp_path / "run"
  process = commands.Fork(["train.py", *commands.TINY, f"--workdir={workdir}"])
  deadline = time.monotonic() + 200
  while not any(p.name.isdigit() for p in workdir.glob("checkpoints/*")):
    assert process.poll() is None, process.communicate()[1]
    assert time.monotonic() < deadline
    time.sleep(0.001)
  process.send_signal(number)
  out, error = process.communicate(timeout=200)
  if number != signal.SIGKILL:
    stopped = "stopped and saved at step" in out
    assert stopped or "exact_match" in out
    # So that `train && next` ends with Ctrl-C.
    is_interrupted = stopped and number == signal.SIGINT
    assert process.returncode == (130 if is_interrupted else 0), error
  else:
    assert process.returncode == -signal.SIGKILL
  code, out, error = train(workdir)
  assert code == 0, error
  assert digests(workdir) == digests(finished[0])
  assert records(workdir) == records(finished[0])


def test_ctrl_c_ends_a_compiling_run_at_once(tmp_path):
  config = ("--config=configs/translation.py", "--config.model.num_layers=16")
  process = commands.Fork(
    ["train.py", *config, f"--workdir={tmp_path / 'run'}"]
  )
  try:
    while not process.stdout.read_text().startswith(str(tmp_path)):
      assert process.poll() is None, process.communicate()
      time.sleep(0.01)
    time.sleep(1)  # It compiles now, for much longer.
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=5)
  finally:
    process.kill()
  assert (process.returncode, error) == (130, "stopped before the first step\n")


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path):
  workdir = tmp_path / "run"
  optimizer = {"learning_rate": 1e30, "warmup_steps": 0}
  leaves = {"optimizer": optimizer, "checkpoint_every": 1}
  found = train(workdir, *commands.flags(leaves))
  error = commands.fault(found, code=1)
  step = int(re.match(r"step (\d+): loss or gradient is not finite", error)[1])
  assert str(workdir / "config.json") in error
  assert digests(workdir)[0] == step - 1


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--config.model.num_layrs=2", "config.model.num_layrs: unknown; did"),
    ("--config.modle.num_layers=2", "did you mean config.model.num_layers?"),
    ("--config.num_steps=many", "config.num_steps: expected a valid integer"),
    ("--config.optimizer.learning_rate=nan", "expected a finite number"),
    ("--config=configs/copy.py:performr", "did you mean 'performer'?"),
    ("--config=configs/nosuch.py", "no such file: 'configs/nosuch.py'"),
    ("--config=configs/cpy.py", "did you mean 'configs/copy.py'?"),
    ("--nosuch=1", "Unknown command line flag 'nosuch'"),
    ("--config.batch_size=9", "9 rows do not split over 2 devices"),
    ("--config.task.kind=swap", "config.task.kind: expected 'copy', 'reverse'"),
  ],
)
def test_a_fault_is_one_line_and_writes_nothing(argument, message, tmp_path):
  workdir = tmp_path / "run"
  config = "--config=configs/copy.py"
  arguments = [argument] if "--config=" in argument else [config, argument]
  arguments.append(f"--workdir={workdir}")
  found = commands.run("train.py", *arguments, devices=2)
  assert message in commands.fault(found)
  assert not found[1]
  assert not workdir.exists()


def test_a_mechanism_of_the_current_folder_is_found(tmp_path):
  (tmp_path / "their_module.py").write_text(
    "from attention import linformer as mine\n"
  )
  code, _, error = commands.run(
    "train.py",
    f"--config={commands.ROOT / 'configs' / 'duplicate.py'}:their_module:mine",
    cwd=tmp_path,
  )
  assert code == 2
  can = ", ".join(mechanisms.supporting(ATTENTIONS, "causal"))
  told = "their_module:mine cannot be causal; one of"
  assert error == f"config.model.decoder_attention: {told} {can} can\n"


def test_the_commands_of_this_file_have_no_network(tmp_path):
  """What a run opens is refused by an audit hook, so no run here opens one."""
  script = tmp_path / "call.py"
  script.write_text(
    "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)\n"
  )
  code, _, error = commands.run(script)
  assert code
  assert "network access" in error
