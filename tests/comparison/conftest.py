"""Stand-ins for what trains and measures: no process, no model, the same files."""

import json

import pytest

from comparison import worker
from comparison.measurement import measurements
from training import loop
from training.signals import Signals


@pytest.fixture
def folder(tmp_path):
  """An empty folder of a comparison."""
  folder = tmp_path / "comparison"
  folder.mkdir()
  return folder


class Trainer:
  """Trains by a formula, in this process.

  Attributes:
    loss: (run, step) -> loss on the first held-out split; may raise.
    metrics: (run, step) -> other metrics there.
    end: run -> step at which `patience` ends it; None where it does not.
    calls: (run, where it was to stop), as they came.
    measured: identities, as they came.
    died: why the process ends after it has done all; empty where it does not.
  """

  def __init__(self, monkeypatch):
    self.loss = lambda run, step: 1.0
    self.metrics = lambda run, step: {}
    self.end = lambda run: None
    self.calls, self.measured, self.processes, self.died = [], [], [], ""
    monkeypatch.setattr(worker, "run", self.process)
    monkeypatch.setattr(worker, "begin", self.begin)
    monkeypatch.setattr(loop, "run", self.train)
    monkeypatch.setattr(measurements, "trained", self.measure)
    monkeypatch.setattr(
      measurements, "step_cost", lambda run: {"step_seconds": 0.25}
    )

  def process(self, request):
    """`worker.run`, what goes through a pipe included."""
    request = json.loads(json.dumps(request))
    self.processes.append([run["seed"] for run in request.get("runs", ())])

    def say(identity, text):
      print(f"  {identity}: {text}")

    worker.work(request, Signals(), say)
    return self.died

  def begin(self, run, home):
    """`worker.begin`; the run itself stands for all that is made of it."""
    steps = [line["step"] for line in worker.metrics.read(home)]
    return None if {run.steps, self.end(run)} & {*steps} else run

  def train(self, run, home, stop_at, signals):
    """`loop.run`: one line for each of two held-out splits at the end."""
    del signals
    self.calls.append((run, stop_at))
    home.mkdir(parents=True, exist_ok=True)
    step = stop_at or run.steps or run.leaves["num_steps"]
    if (end := self.end(run)) is not None and end <= step:
      step, stop_at = end, None
    loss = self.loss(run, step)
    splits = ("validation",) if stop_at else ("validation", "test")
    with (home / "metrics.jsonl").open("a") as file:
      for split in splits:
        line = {"step": step, "split": split, "seconds": 1.0, "loss": loss}
        line |= self.metrics(run, step)
        file.write(json.dumps(line) + "\n")
    return None if stop_at else {}

  def measure(self, home, *, with_map, shape):
    """`measurements.trained`."""
    self.measured.append(home.name)
    return {
      "step_seconds": 0.5,
      "compile_seconds": 1.0,
      "map": {} if with_map else None,
      "measured_others_cores": 0.0,
    }


@pytest.fixture
def trainer(monkeypatch):
  """A `Trainer` in place of processes."""
  return Trainer(monkeypatch)
