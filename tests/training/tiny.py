"""A tiny model and its batches, for tests of training code."""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tasks
from training import experiment_config
from training import optimizer as optimizer_lib
from training import step as step_lib
from training.config import OptimizerConfig, TrainConfig
from training.devices import parallel
from training.state import TrainState

CLASSES, LENGTH, ROWS = 7, 5, 16
RECALL = tasks.TASKS["recall"]


def config(kind, task, model=None, **fields):
  """Returns the config of a run with a one-layer model of width 16."""
  small = {"num_layers": 1, "num_heads": 2, "features": 16, "mlp_features": 16}
  return experiment_config.parse(
    {
      **{"num_steps": 1, "batch_size": 8, "task": task, **fields},
      "model": {"kind": kind, **small, **(model or {})},
    }
  )


def drawn(run):
  """Draws an initial state with NumPy, which is faster than compiling `run.init`."""
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), run.shapes)
  peak = np.float32(run.config.train.optimizer.learning_rate)
  opt_state = zeros.opt_state._replace(hyperparams={"peak": peak})
  if jax.tree.leaves(zeros.collections):
    return run.init()
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    if leaf.ndim == 1:
      return leaf + (path[-1].key == "scale")
    return rng.normal(0.0, leaf.shape[0] ** -0.5, leaf.shape).astype(leaf.dtype)

  return zeros._replace(
    opt_state=opt_state,
    params=jax.tree_util.tree_map_with_path(draw, zeros.params),
  )


def forward(variables, batch, rng):
  """Computes logits from embeddings of the inputs, with dropout if a key is given."""
  hidden = variables["params"]["embedding"][batch["inputs"]]
  hidden = jnp.tanh(hidden @ variables["constants"]["mix"])
  if rng is not None and variables["constants"]["mix"].shape[0] % 2:
    hidden *= jax.random.bernoulli(rng, 0.5, hidden.shape)
  return hidden @ variables["params"]["kernel"]


def metric_sums(logits, batch):
  """Computes the sums of the token accuracy."""
  right = jnp.argmax(logits, -1) == batch["targets"]
  weights = batch["weights"]
  return {"accuracy": jnp.stack([jnp.sum(right * weights), jnp.sum(weights)])}


def make_batch(seed=0, rows=ROWS):
  """Draws rows of unequal length, some without targets."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(0, LENGTH + 1, rows)
  lengths[: rows // 4] = 0
  lengths[-1] = LENGTH
  return {
    "inputs": rng.integers(1, CLASSES, (rows, LENGTH)).astype(np.int32),
    "targets": rng.integers(1, CLASSES, (rows, LENGTH)).astype(np.int32),
    "weights": (np.arange(LENGTH) < lengths[:, None]).astype(np.float32),
  }


class Model:
  """A function of variables, batch and key, as `models.forward` calls a module."""

  def __init__(self, forward=forward, new=lambda variables: {}, draw=None):
    self._forward, self._new, self._draw = forward, new, draw

  def arguments(self, batch):
    """Returns the arguments of `apply` for a batch."""
    return (batch,), {}

  def apply(self, variables, batch, *, deterministic, rngs=None, mutable=()):
    """Returns logits and any mutable collections."""
    rng = None if deterministic or rngs is None else rngs["dropout"]
    logits = self._forward(variables, batch, rng)
    return (logits, self._new(variables)) if mutable else logits

  def example(self):
    """Returns an empty batch, since `init` needs none."""
    return {}

  def init(self, key, batch):
    """Draws new constants."""
    return {"constants": self._draw(key)}


class Programs(NamedTuple):
  """The training and the evaluation step on a mesh."""

  mesh: jax.sharding.Mesh
  step: Any
  eval_step: Any

  def place(self, state):
    """Copies a state, so that it can be donated."""
    return parallel.place_state(self.mesh, state)

  def train(self, state, batch):
    """Runs a training step, which donates the state."""
    return self.step(state, parallel.place_batch(self.mesh, batch))

  def update(self, state, batch):
    """Runs a training step on a copy of the state."""
    return self.train(self.place(state), batch)

  def evaluate(self, variables, batch):
    """Returns the sums of a batch."""
    return self.eval_step(variables, parallel.place_batch(self.mesh, batch))


class Parts(NamedTuple):
  """The model, task and config of a step."""

  model: Any
  task: Any
  config: TrainConfig

  @classmethod
  def of(cls, run, **fields):
    """Returns the parts of a run, with other config fields."""
    config = dataclasses.replace(run.config.train, **fields)
    return cls(run.model, run.task, config)

  def on(self, count=1):
    """Compiles both steps for the first devices."""
    mesh = parallel.make_mesh(self.config, jax.devices()[:count])
    return Programs(
      mesh,
      step_lib.make_step(*self, mesh),
      step_lib.make_eval_step(*self, mesh),
    )

  def gradient(self, params, collections, batch):
    """Computes the mean gradient in a compiled program."""
    gradient = functools.partial(
      step_lib.mean_gradient,
      step_lib.make_objective(*self, self.on().mesh),
      splits=self.config.optimizer.accumulate_steps,
    )
    return jax.jit(gradient)(params, collections, batch, jax.random.key(0))

  def with_optimizer(self, **options):
    """Returns the same parts with other optimiser options."""
    config = dataclasses.replace(self.config.optimizer, **options)
    return self._replace(
      config=dataclasses.replace(self.config, optimizer=config)
    )


@functools.cache
def make_parts(dropout=False, num_steps=10, kind="jit", **options):
  """Returns the parts of a step and its initial state, cached for all tests."""
  optimizer = OptimizerConfig(**options)
  config = TrainConfig(
    num_steps=num_steps,
    batch_size=ROWS,
    seed=1,
    parallel=kind,
    optimizer=optimizer,
  )
  width = 5 if dropout else 4
  rng = np.random.default_rng(3)
  embedding, kernel, mix = (
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in ((CLASSES, width), (width, CLASSES), (width, width))
  )
  params = {"embedding": embedding, "kernel": kernel}
  variables = {"params": params, "constants": {"mix": mix}}
  state = TrainState.first(
    variables,
    optimizer_lib.make_optimizer(optimizer, num_steps),
    config.seed,
    optimizer.ema_decay > 0,
  )
  task = types.SimpleNamespace(metric_sums=metric_sums)
  return Parts(Model(), task, config), state
