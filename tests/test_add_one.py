"""One of each is added from outside, in one file: a task and a kind of model."""

import json

from tests import commands

_MODULE = '''
"""A task whose answer is the first symbol, and a model of embeddings alone."""

import dataclasses

from flax import linen as nn
import jax.numpy as jnp
import numpy as np

import tasks
from tasks import base


@dataclasses.dataclass(frozen=True)
class FirstConfig:
  symbols: int = 5


class First(tasks.Task):
  eval_splits, max_target_length = ("held_out",), 4

  def __init__(self, config, batch_size, seed):
    self.target_vocab_size = 3 + config.symbols
    self._batch_size, self._seed = batch_size, seed

  def train_batch(self, step, rows=None):
    rng = np.random.default_rng((self._seed, step))
    shape = self._batch_size, self.max_target_length
    inputs = rng.integers(3, self.target_vocab_size, shape, np.int32)
    targets = np.broadcast_to(inputs[:, :1], shape).copy()
    weights = np.ones(shape, np.float32)
    batch = {"inputs": inputs, "targets": targets, "weights": weights}
    return base.select_rows(batch, rows)

  def eval_batches(self, split):
    yield self.train_batch(10**6)

  def labels(self, ids):
    return [str(i) for i in ids]

  def encode(self, line):
    return [int(x) for x in line.split()]

  def encode_target(self, line):
    return self.encode(line)

  def decode(self, ids):
    return " ".join(self.labels(ids))

  def save(self, directory):
    base.save_vocabulary(directory, {"symbols": b"5"})


def make(config, *, kind, batch_size, seed, workdir=None, restore=False):
  base.layout("first", kind, ("decoder",))
  return First(config, batch_size, seed)


FIRST = tasks.TaskEntry(FirstConfig, make)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BagConfig:
  kind: str
  features: int = 8
  num_layers: int = 1
  dtype: str = "float32"
  param_dtype: str = "float32"
  layout = "decoder"
  module = "mine:create"
  attentions = {}

  def layers(self, field):
    return ()


def create(config, sizes):
  return Bag(config, sizes.target_vocab_size)


class Bag(nn.Module):
  config: BagConfig
  target_vocab_size: int

  @nn.nowrap
  def arguments(self, batch):
    return (jnp.asarray(batch["inputs"]),), {}

  @nn.nowrap
  def example(self):
    return {"inputs": np.ones((1, 1), np.int32)}

  @nn.nowrap
  def draw_attention(self, path, variables, task, batches):
    path.write_bytes(b"none")

  @nn.compact
  def __call__(self, inputs, *, deterministic=True):
    x = nn.Embed(self.target_vocab_size, self.config.features)(inputs[:, :1])
    x = jnp.broadcast_to(x, (*inputs.shape, x.shape[-1]))
    return nn.Dense(self.target_vocab_size)(x)
'''
_CONFIG = """
import ml_collections


def get_config():
  return ml_collections.ConfigDict({
    "num_steps": 60, "batch_size": 16, "eval_every": 60,
    "task": {"name": "mine:FIRST"},
    "model": {"kind": "mine:BagConfig"},
    "optimizer": {"name": "adam", "learning_rate": 0.1},
  })
"""


def test_a_task_and_a_model_of_ones_own_are_trained(tmp_path):
  (tmp_path / "mine.py").write_text(_MODULE)
  (tmp_path / "config.py").write_text(_CONFIG)
  code, _, error = commands.run(
    "train.py",
    f"--config={tmp_path / 'config.py'}",
    f"--workdir={tmp_path / 'run'}",
    variables={"PYTHONPATH": str(tmp_path)},
  )
  assert (code, error) == (0, ""), error
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  last = json.loads(lines[-1])
  assert (last["split"], last["accuracy"]) == ("held_out", 1.0)
