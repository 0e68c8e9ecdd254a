"""Fakes of training and measurement that write the same files."""

import json
import time

import pytest

from comparison import process, records, train_run, worker
from comparison.measurement import measurements
from settings.errors import ConfigError, one_line


@pytest.fixture
def folder(tmp_path):
  """Returns an empty folder for a comparison."""
  folder = tmp_path / "comparison"
  folder.mkdir()
  return folder


class Trainer:
  """Computes the results of training by formulas, in this process.

  Attributes:
    loss: (run, step) -> loss on the first held-out split; may raise.
    metrics: (run, step) -> other metrics of this split.
    end: run -> step at which `patience` ends it, or None.
    calls: (run, `stop_at`) of each training, in order.
    measured: identities of measured runs, in order.
    processes: numbers of runs of each measuring process, in order.
    code: exit code of each process that finishes.
  """

  def __init__(self, monkeypatch):
    self.loss = lambda run, step: 1.0
    self.metrics = lambda run, step: {}
    self.end = lambda run: None
    self.calls, self.measured, self.processes, self.code = [], [], [], 0
    monkeypatch.setattr(process, "run", self.process)
    monkeypatch.setattr(train_run, "command", lambda *arguments: arguments)
    monkeypatch.setattr(measurements, "measure_trained", self.measure)
    monkeypatch.setattr(
      measurements,
      "step_cost",
      lambda run: {"step_seconds": 0.25, "compile_seconds": 1.0},
    )

  def process(self, command, request=None, watch=None):
    """Replaces `process.run`; requests are converted to JSON and back."""
    code, error, start = self.code, "", time.monotonic()
    if request is not None:
      request = json.loads(json.dumps(request))
      self.processes.append(len(request.get("trained", ())))
      worker.work(request)
    else:
      run, home, share, steps = command
      stop_at = None if share is None else records.step_at(steps, share)
      try:
        self.train(run, home, stop_at)
      except Exception as fault:
        code = 2 if isinstance(fault, ConfigError) else 1
        error = one_line(fault)
    seconds = time.monotonic() - start
    used = {"seconds": seconds, "cpu_seconds": seconds, "others_cores": 0.0}
    return process.ProcessResult(code, error, used | {"peak_bytes": 2e6}, None)

  def train(self, run, home, stop_at):
    """Replaces `train.py`; writes one line per held-out split."""
    self.calls.append((run, stop_at))
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text('{"device": "1 × cpu"}')
    step = stop_at or run.steps or run.fields["num_steps"]
    if (end := self.end(run)) is not None and end <= step:
      step, stop_at = end, None
    loss = self.loss(run, step)
    splits = ("validation",) if stop_at else ("validation", "test")
    with (home / "metrics.jsonl").open("a") as file:
      for split in splits:
        line = {"step": step, "split": split, "seconds": 1.0, "loss": loss}
        line |= self.metrics(run, step)
        if step == end:
          line["stopped"] = "no gain"
        file.write(json.dumps(line) + "\n")

  def measure(self, home, *, with_map, shape):
    """Replaces `measurements.measure_trained`."""
    self.measured.append(home.name)
    return {
      "step_seconds": 0.5,
      "compile_seconds": 1.0,
      "map": {} if with_map else None,
      "measured_others_cores": 0.0,
    }


@pytest.fixture
def trainer(monkeypatch):
  """Replaces processes by a `Trainer`."""
  return Trainer(monkeypatch)
