"""A fake task, and readers of what its runs write."""

import signal
import types

import numpy as np

from tests.training.tiny import CLASSES, make_batch, make_parts, metric_sums
from training import metrics
from training.checkpoint import Checkpoints, digests


class FakeTask:
  """Batches that follow from the step, two splits, one decoded example."""

  eval_splits = ("validation", "test")
  baselines = types.MappingProxyType({})
  metric_sums = staticmethod(metric_sums)

  def __init__(self, **faults):
    self.faults = faults
    self.asked = []
    self.target_vocab_size = faults.get("classes", CLASSES)

  def train_batch(self, step):
    self.asked.append(step)
    if step == self.faults.get("unreadable"):
      raise RuntimeError("hash mismatch\nin shard 3")
    batch = make_batch(seed=step)
    if step == self.faults.get("infinite"):
      batch["weights"][-1] = np.inf
    if step == self.faults.get("stop"):
      signal.raise_signal(signal.SIGTERM)
    return batch

  def eval_batches(self, split):
    yield make_batch(seed=1000)
    if "evaluation" in self.faults:
      raise OSError("disk gone")
    yield make_batch(seed=1001)

  def summarize(self, sums, split=None):
    found = {name: total / count for name, (total, count) in sums.items()}
    return found | self.faults.get("measured", {})

  def decode_batches(self, split):
    inputs = {"source": np.ones((2, 3), np.int32)}
    yield types.SimpleNamespace(inputs=inputs, references=["a"], max_length=3)

  def decode(self, ids):
    return " ".join(map(str, ids))

  def score(self, hypotheses, references):
    assert len(hypotheses) == len(references) == 1
    return {"exact_match": 0.0, "signature": "s"}


def newest(workdir, **options):
  """Returns the step and the digests of the newest checkpoint."""
  parts, state = make_parts(dropout=True, **options)
  checkpoints = Checkpoints(workdir, parts.config, read_only=True)
  state, _ = checkpoints.restore(state)
  checkpoints.close()
  return int(state.step), digests(state._asdict())


def records(workdir):
  """Returns the lines of metrics.jsonl without times."""
  clock = ("tokens_per_second", "seconds")
  return [
    {k: v for k, v in record.items() if k not in clock}
    for record in metrics.read(workdir)
  ]


def emptied(workdir, **options):
  """Deletes a workdir and returns its checkpoint and metrics; see `newest`."""
  contents = newest(workdir, **options), records(workdir)
  for path in sorted(workdir.rglob("*"), reverse=True):
    path.rmdir() if path.is_dir() else path.unlink()
  return contents
