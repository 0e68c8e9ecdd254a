"""metrics.jsonl, and what a run says while it goes."""

import json
import sys
import types

import pytest

from training import metrics
from training.config import LogConfig


def write(workdir, first, *steps):
  writer = metrics.MetricsWriter(workdir, first)
  for step in steps:
    writer.write(step, {"train": {"loss": float(step)}}, 0.5 * step)
  writer.close()


def test_one_object_a_line(tmp_path):
  writer = metrics.MetricsWriter(tmp_path, 0)
  writer.write(
    3,
    {"validation": {"loss": 0.5, "bleu_signature": "x"}, "test": {"loss": 1}},
    seconds=1.23456,
  )
  writer.close()
  lines = (tmp_path / metrics.FILE).read_text().splitlines()
  assert [json.loads(line) for line in lines] == [
    {"step": 3, "split": "validation", "seconds": 1.235}
    | {"loss": 0.5, "bleu_signature": "x"},
    {"step": 3, "split": "test", "seconds": 1.235, "loss": 1},
  ]
  assert list((tmp_path / "tensorboard").glob("events*"))


def test_the_final_metrics_of_several_splits_are_written_as_a_whole(
  tmp_path, monkeypatch
):
  writer = metrics.MetricsWriter(tmp_path, 0)
  writer.write(1, {"train": {"loss": 2.0}}, 0.1)
  before = (tmp_path / metrics.FILE).read_text()

  def full_disk(partial, content):
    with partial.open("wb") as file:
      file.write(content[: len(before) + 20])
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(type(tmp_path), "write_bytes", full_disk)
  with pytest.raises(OSError, match="No space"):
    writer.write(2, {"validation": {"loss": 1.0}, "test": {"loss": 1}}, 0.2)
  writer.close()
  assert (tmp_path / metrics.FILE).read_text() == before
  assert [x.name for x in tmp_path.iterdir() if x.suffix == ".tmp"] == []


def test_weights_and_biases_gets_the_numbers(tmp_path, monkeypatch):
  """A stand-in for the package, which the project does not need."""
  calls = []

  class Wandb(types.ModuleType):
    Settings = dict

    def init(self, **options):
      calls.append(options)
      self.id = options["id"] or "3f9k"
      return self

    def log(self, numbers, step):
      calls.append((step, numbers))

    def finish(self):
      calls.append("finished")

  monkeypatch.setitem(sys.modules, "wandb", Wandb("wandb"))
  (tmp_path / "config.json").write_text('{"seed": 3}')
  log = LogConfig(tensorboard=False, wandb=True, project="p")
  writer = metrics.MetricsWriter(tmp_path, 0, log=log)
  writer.write(3, {"test": {"loss": 0.5, "bleu_signature": "x"}}, 1.0)
  writer.close()
  options = {
    **{"project": "p", "name": tmp_path.name, "dir": str(tmp_path)},
    **{"config": {"seed": 3}, "id": None, "resume": "allow"},
    "settings": {"silent": True},
  }
  assert calls[0] == options
  assert calls[1:] == [(3, {"test/loss": 0.5}), "finished"]
  # A run that continues goes on in the same run there.
  metrics.MetricsWriter(tmp_path, 3, log=log).close()
  assert calls[3] == options | {"id": "3f9k"}
  assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
  calls = []

  class Board:
    def __init__(self, folder, purge_step):
      calls.append((folder, purge_step))

    def add_scalar(self, name, value, step):
      calls.append((name, value, step))

    def close(self):
      calls.append("closed")

  monkeypatch.setattr(metrics.tensorboardX, "SummaryWriter", Board)
  for first in (0, 3):
    writer = metrics.MetricsWriter(tmp_path, first)
    writer.write(7, {"test": {"loss": 0.5, "bleu_signature": "x"}}, 1.0)
    writer.close()
  folder, events = str(tmp_path / "tensorboard"), [("test/loss", 0.5, 7)]
  assert calls == [
    *[(folder, None), *events, "closed"],
    *[(folder, 4), *events, "closed"],  # Events after the checkpoint go.
  ]


def test_weights_and_biases_itself_offline(tmp_path, monkeypatch):
  pytest.importorskip("wandb", reason="pip install wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  writer = metrics.MetricsWriter(tmp_path, 0, log=LogConfig(wandb=True))
  writer.write(3, {"test": {"loss": 0.5}}, 1.0)
  writer.close()
  assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_continuing_drops_what_came_after_the_checkpoint(tmp_path):
  write(tmp_path, 0, 1, 2, 3, 4)
  with (tmp_path / metrics.FILE).open("a") as file:
    file.write('{"step": 5, "spl')  # Cut by a kill.
  write(tmp_path, 2, 3)
  assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3]


def test_a_damaged_line_costs_that_line(tmp_path, capsys):
  write(tmp_path, 0, 1, 2)
  path = tmp_path / metrics.FILE
  first, last = path.read_bytes().splitlines()
  wrong = [b"\xff\x00" + first, b"[" * 1_200 + b"]" * 1_200, b"3"]
  wrong += [b'{"step": "1", "split": "x"}', b"9" * 5_000, b"null"]
  path.write_bytes(b"\n".join([first, *wrong, last, b""]))
  assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2]
  assert capsys.readouterr().err.splitlines() == [
    f"{path}: line {number} is damaged" for number in range(2, 8)
  ]


def test_plain_lines_without_a_terminal(capsys):
  progress = metrics.Progress(10, 100)
  progress.restart_clock(10, 30.0)
  progress.update(20, {"loss": 1.0, "tokens_per_second": 12345.6}, 40.0)
  progress.say("validation  loss 1.0")
  progress.close()
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith("step 20/100  loss 1.0000  ")
  assert "12,346" in lines[0]
  assert lines[0].endswith("  0:01:20 left")
  assert lines[1] == "validation  loss 1.0"
  progress.update(10, {}, 30.0)  # No step since then says how long one takes.
  assert capsys.readouterr().out == "step 10/100    0:00:00 left\n"


def test_a_bar_on_a_terminal(monkeypatch, capsys):
  monkeypatch.setattr(metrics.sys.stderr, "isatty", lambda: True)
  progress = metrics.Progress(4, 10)
  progress.update(7, {"loss": 1.0, "grad_norm": 3.0}, 2.0)
  progress.update(10, {"loss": 1.0, "grad_norm": 3.0}, 2.0)
  progress.close()
  error = capsys.readouterr().err
  assert " 4/10 " in error
  assert " 10/10 " in error
  assert "loss 1.0" in error
  assert "grad_norm" not in error
  # Of several processes, only the first shows one.
  metrics.Progress(4, 10, shown=False).update(7, {}, 2.0)
  assert capsys.readouterr() == ("step 7/10    0:00:02 left\n", "")


@pytest.mark.parametrize(
  ("value", "text"),
  [
    *[(0.5, "0.5000"), (0, "0.0000"), (2e-5, "2.00e-05"), ("a|b", "a|b")],
    *[(-0.5, "-0.5000"), (-2e-5, "-2.00e-05"), (-12345.6, "-12,346")],
    *[(1e-3, "0.0010"), (9e-4, "9.00e-04"), (9999, "9999.0000")],
    (1e4, "10,000"),
  ],
)
def test_numbers_are_readable(value, text):
  assert metrics.format_number(value) == text
