"""Every field of a run goes from the plan to its record and to its column."""

import dataclasses
import json

import pytest

from comparison import records
from comparison.analysis import frame
from comparison.planned_run import Run

LEAVES = {"seed": 3, "model.features": 24}
RUN = Run(
  task="recall",
  attention="mine",
  mechanism="delta",
  seed=3,
  fields=LEAVES,
  grid={"optimizer.learning_rate": 0.25},
  across={"model.features": 24},
  width="dense",
  choosing=True,
  at_edge=("optimizer.learning_rate",),
  parameters=11,
  unmatched_parameters=12,
  feed_forward=13,
  dense_feed_forward=14,
  dense_parameters=15,
  slots="decoder delta",
  options="chunk_size=8",
  learning_rate=0.125,
  steps=16,
  length=17,
  solved_at=0.875,
)
NOT_WRITTEN = {"mechanism", "fields", "budget_seconds", "obstacle", "steps"}
"""What a record leaves out is known from what it has."""
WRITTEN = {
  **{k: x for k, x in dataclasses.asdict(RUN).items() if k not in NOT_WRITTEN},
  "row": "recall, mine, features=24, feed-forward as in dense",
  "at_edge": ["optimizer.learning_rate"],
  "arguments": [
    "--config=configs/recall.py:delta",
    "--config.seed=3",
    "--config.model.features=24",
  ],
  "reason": "",
  "status": "failed",
}
MEASURED = {"seconds": 61.0, "cpu_seconds": 62.0, "peak_bytes": 63.0}
MEASURED |= {"others_cores": 0.5, "together": 2}


@pytest.fixture
def record(tmp_path):
  records.write(tmp_path, RUN, status="failed", **MEASURED)
  (path,) = (tmp_path / records.RECORDS).iterdir()
  # Folders of earlier versions have the same names.
  assert path.stem == RUN.identity == "recall-mine-3-dff04e18"
  return records.read_one(tmp_path, RUN.identity)


def test_every_field_is_written_and_no_other(record):
  assert record == WRITTEN | MEASURED


def test_values_of_across_are_sorted_by_size(record):
  values = [1e-7, -1.0, "a", 3e-8, 10, -2.0]
  found = [record | {"across": {"optimizer.eps": x}} for x in values]
  ordered = [-2.0, -1.0, 3e-8, 1e-7, 10, "a"]
  assert list(frame.runs(found)["optimizer.eps"]) == ordered


def test_every_column_has_its_field(record):
  lines = [
    {"step": 4, "split": "train", "accuracy": 0.1, "loss": 9.0},
    {"step": 4, "split": "validation", "accuracy": 0.2, "loss": 8.0},
    {"step": 8, "split": "validation", "accuracy": 0.5, "loss": 4.0},
    {"step": 8, "split": "length_34", "accuracy": 0.75, "loss": 2.0},
  ]
  notes = {"step_seconds": "why not", "cache_bytes": "so"}
  record |= {"history": lines, "final": lines[-1]}
  record |= {"measured": {"cache_bytes": 96, "notes": notes}}
  record |= {"machine": {"cores": 4, "jax": "1", "device": "cpu"}}
  (row,) = json.loads(frame.runs([record]).to_json(orient="records"))
  same = (
    *("task", "attention", "width", "seed", "status", "choosing", "slots"),
    *("parameters", "unmatched_parameters", "dense_parameters", "options"),
    *("feed_forward", "dense_feed_forward", "learning_rate", "length"),
    "solved_at",
  )
  expected = {name: WRITTEN[name] for name in same} | MEASURED
  expected |= {
    "row": "mine, features=24, feed-forward as in dense",
    "grid": "learning_rate=0.25",
    "across": "features=24",
    "at_edge": "learning_rate",
    "optimizer.learning_rate": 0.25,
    "model.features": 24,
    "split": "length_34",
    "metric": "accuracy",
    "quality": 0.75,
    "choosing_split": "validation",
    "choosing_quality": 0.5,
    "loss": 2.0,
    "cache_bytes": 96,
    "cores": 4,
    "notes": "step_seconds: why not\ncache_bytes: so",
    "command": "python train.py --config=configs/recall.py:delta "
    "--config.seed=3 --config.model.features=24",
  }
  assert {name: row[name] for name in expected} == expected
  assert "jax" not in row


def test_rows_are_ordered(record):
  """By task, by mechanism as in `ATTENTIONS`, variants last, then by each number."""
  changes = [
    *({"task": "copy"}, {"attention": "sliding_window"}),
    *({"attention": "bigbird"}, {"across": {"model.features": 9}}),
    *({}, {"seed": 10}, {"grid": {"optimizer.learning_rate": 0.5}}),
    *({"width": None}, {"across": {"model.features": 100}}),
    {"across": {"model.features": "all"}},
  ]
  numbered = [
    record | change | {"parameters": n} for n, change in enumerate(changes)
  ]
  found = frame.runs(numbered[::-1])["parameters"]
  assert found.tolist() == [*range(len(changes))]
