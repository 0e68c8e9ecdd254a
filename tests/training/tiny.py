"""A tiny model and its batches, which any training code must work with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import tasks
from training import experiment_config
from training import optimizer as optimizer_lib
from training.config import OptimizerConfig
from training.state import TrainState
from training.step import Numbers, StepFunctions

CLASSES, LENGTH, ROWS = 7, 5, 16
RECALL = tasks.TASKS["recall"]


def config(kind, task, model=None, **leaves):
  """The config of a run with a model of one layer, of width 16."""
  small = {"num_layers": 1, "num_heads": 2, "features": 16, "mlp_features": 16}
  return experiment_config.parse(
    {
      **{"num_steps": 1, "batch_size": 8, "task": task, **leaves},
      "model": {"kind": kind, **small, **(model or {})},
    }
  )


def drawn(run):
  """A state to begin with, drawn by NumPy: to compile `run.init` takes a second."""
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), run.shapes)
  if jax.tree.leaves(zeros.collections):
    return run.init()
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    if leaf.ndim == 1:
      return leaf + (path[-1].key == "scale")
    return rng.normal(0.0, leaf.shape[0] ** -0.5, leaf.shape).astype(leaf.dtype)

  return zeros._replace(
    params=jax.tree_util.tree_map_with_path(draw, zeros.params)
  )


def forward(variables, batch, rng):
  """Logits from embeddings of the inputs, with dropout where there is a key."""
  hidden = variables["params"]["embedding"][batch["inputs"]]
  hidden = jnp.tanh(hidden @ variables["constants"]["mix"])
  if rng is not None and variables["constants"]["mix"].shape[0] % 2:
    hidden *= jax.random.bernoulli(rng, 0.5, hidden.shape)
  return hidden @ variables["params"]["kernel"]


def metric_sums(logits, batch):
  """Token accuracy."""
  right = jnp.argmax(logits, -1) == batch["targets"]
  weights = batch["weights"]
  return {"accuracy": jnp.stack([jnp.sum(right * weights), jnp.sum(weights)])}


def make_batch(seed=0, rows=ROWS):
  """Rows of uneven length; some have no target at all."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(0, LENGTH + 1, rows)
  lengths[: rows // 4] = 0
  lengths[-1] = LENGTH
  return {
    "inputs": rng.integers(1, CLASSES, (rows, LENGTH)).astype(np.int32),
    "targets": rng.integers(1, CLASSES, (rows, LENGTH)).astype(np.int32),
    "weights": (np.arange(LENGTH) < lengths[:, None]).astype(np.float32),
  }


def numbers(**options):
  """What a program of `make_functions` is called with."""
  return Numbers.of(1, OptimizerConfig(**options))


@functools.cache
def make_functions(dropout=False, num_steps=10, **options):
  """Functions of a step, and the state it starts from: the same for all tests."""
  config = OptimizerConfig(**options)
  width = 5 if dropout else 4
  rng = np.random.default_rng(3)
  embedding, kernel, mix = (
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in ((CLASSES, width), (width, CLASSES), (width, width))
  )
  params = {"embedding": embedding, "kernel": kernel}
  optimizer = optimizer_lib.make_optimizer(config, num_steps)
  functions = StepFunctions(
    forward=forward,
    metric_sums=metric_sums,
    optimizer=functools.partial(
      optimizer_lib.make_optimizer, config, num_steps
    ),
    schedule=functools.partial(optimizer_lib.make_schedule, config, num_steps),
    label_smoothing=config.label_smoothing,
    accumulate_steps=config.accumulate_steps,
    ema_decay=config.ema_decay,
  )
  variables = {"params": params, "constants": {"mix": mix}}
  state = TrainState.first(variables, optimizer, config.ema_decay > 0)
  return functions, state
