"""One step of training and one of evaluation, as pure functions.

Every metric is a pair (sum, count), divided once after all rows of all
micro-batches and devices are in. A mean of means would be wrong as soon as
padding is uneven.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np
import optax

from training.config import OptimizerConfig
from training.optimizer import LearningRate
from training.state import TrainState, evaluated, float32

Batch = Mapping[str, Array]
Sums = dict[str, Array]
"""Metric name → [2]: sum and count."""


def cross_entropy(
  logits: Float[Array, "B T C"], batch: Batch, label_smoothing: float = 0.0
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
  """Weighted sums of the objective and of the cross-entropy, in nats.

  With smoothing ε over C classes the objective is
  `−(1 − ε) log p(target) − ε/C Σ_c log p(c)` (Szegedy et al. 2016); the
  cross-entropy is `−log p(target)` for any ε. Of the batch 'targets' [B, T] and
  'weights' [B, T] are read.

  Returns:
    objective sum, cross-entropy sum, and the sum of weights.
  """
  targets, weights = batch["targets"], batch["weights"]
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  nats = -jnp.sum(weights * picked)
  objective = nats
  if label_smoothing:
    uniform = -jnp.sum(weights * jnp.mean(log_probs, axis=-1))
    objective = (1 - label_smoothing) * nats + label_smoothing * uniform
  return objective, nats, jnp.sum(weights)


class Numbers(NamedTuple):
  """What runs of one program differ in: arguments of their compiled step.

  Attributes:
    seed: dropout of step i follows from (seed, i) alone.
    learning_rate: of the optimiser's schedule.
  """

  seed: Int[Array, ""] | np.int32
  learning_rate: LearningRate

  @classmethod
  def of(cls, seed: int, config: OptimizerConfig) -> "Numbers":
    """Those of a run."""
    return cls(np.int32(seed), LearningRate.of(config))


class StepFunctions(NamedTuple):
  """What a step is made of, and nothing of where it runs.

  Attributes:
    forward: `(variables, batch, dropout_rng) -> logits [B, T, C]`;
      `dropout_rng` None means deterministic.
    metric_sums: `(logits, batch) -> Sums`, in addition to the loss.
    optimizer: `LearningRate -> (init, update)`.
    schedule: `LearningRate -> (step -> learning rate)`, for the record.
    label_smoothing: in what is minimised, never in what is reported.
    accumulate_steps: micro-batches of one step.
    redraw_every: steps between new constants; 0 keeps the first.
    ema_decay: of the running mean of parameters, in a state that has one.
    draw_constants: `key -> constants`, needed where `redraw_every` > 0.
    forward_and_state: `(variables, batch, dropout_rng) -> (logits, collections)`
      of a model that replaces collections while it is trained, as with batch norm
      the running statistics, or that has 'losses' of its own, which are added to
      the mean objective; None for any other model.
    loss: `(logits, batch, label_smoothing) -> (objective sum, sum of nats,
      count)`, see `cross_entropy`.
  """

  forward: Callable[..., Float[Array, "B T C"]]
  metric_sums: Callable[..., Sums]
  optimizer: Callable[[LearningRate], optax.GradientTransformation]
  schedule: Callable[[LearningRate], optax.Schedule]
  label_smoothing: float = 0.0
  accumulate_steps: int = 1
  redraw_every: int = 0
  ema_decay: float = 0.0
  draw_constants: Callable[[Array], Any] | None = None
  forward_and_state: Callable[..., tuple[Array, Any]] | None = None
  loss: Callable[..., tuple[Array, Array, Array]] = cross_entropy


def mean_gradient(
  functions: StepFunctions,
  params: Any,
  collections: Mapping[str, Any],
  batch: Batch,
  key: Array | None = None,
  reduce: Callable[[Any], Any] = lambda tree: tree,
) -> tuple[Any, Float[Array, "2"], Any]:
  """Gradient of the mean objective over all weighted targets.

  Micro-batches are scanned, so that memory is that of one of them; gradients
  and counts are summed and divided once: the same gradient as of the whole
  batch, up to rounding.

  Args:
    functions: see `StepFunctions`.
    params: differentiated.
    collections: what else the model has; every micro-batch replaces those that
      the model replaces.
    batch: leaves `[B, …]`, B a multiple of `accumulate_steps`.
    key: for dropout; None means deterministic.
    reduce: sums a tree over devices where each holds only its own rows.

  Returns:
    gradient (float32 if `params` have fewer bits), the cross-entropy as (sum,
    count), and the collections afterwards.
  """

  def objective(params, rows, key, collections):
    variables, losses = {"params": params, **collections}, {}
    if functions.forward_and_state is None:
      logits = functions.forward(variables, rows, key)
    else:
      logits, new = functions.forward_and_state(variables, rows, key)
      losses = new.get("losses", {})
      new = {name: x for name, x in new.items() if name != "losses"}
      collections = {**collections, **new}
    value, nats, count = functions.loss(logits, rows, functions.label_smoothing)
    for mean in jax.tree.leaves(losses):
      value += count * mean  # The sum is divided by the count later.
    return value, (jnp.stack([nats, count]), collections)

  def gradient_of(params, *arguments):
    gradient, aux = jax.grad(objective, has_aux=True)(params, *arguments)
    return float32(gradient), aux

  splits = functions.accumulate_steps
  if splits == 1:
    gradient, (sums, collections) = gradient_of(params, batch, key, collections)
  else:

    def accumulate(carry, index_and_rows):
      totals, collections = carry
      index, rows = index_and_rows
      rng = None if key is None else jax.random.fold_in(key, index)
      gradient, (sums, collections) = gradient_of(
        params, rows, rng, collections
      )
      totals = jax.tree.map(jnp.add, totals, (gradient, sums))
      return (totals, collections), None

    zeros = (jax.tree.map(jnp.zeros_like, float32(params)), jnp.zeros(2))
    ((gradient, sums), collections), _ = jax.lax.scan(
      accumulate,
      (zeros, collections),
      (jnp.arange(splits), _micro_batches(batch, splits)),
    )
  gradient, sums = reduce((gradient, sums))
  # A batch without a single target has gradient 0, not 0/0.
  count = jnp.where(sums[1] > 0, sums[1], 1.0)
  return jax.tree.map(lambda g: g / count, gradient), sums, collections


def train_step(
  functions: StepFunctions,
  numbers: Numbers,
  state: TrainState,
  batch: Batch,
  step: Int[Array, ""],
  *,
  reduce: Callable[[Any], Any] = lambda tree: tree,
  shard: Callable[[Array], Array] = lambda key: key,
) -> tuple[TrainState, dict[str, Array]]:
  """One update, done only if loss, gradient and new parameters are finite.

  A bad step leaves the whole state as it was, and since an update also wants
  `state.step == step`, so do all that follow. The host may therefore look
  late: `metrics['updates']` then still is the index of the bad step.

  Args:
    functions: see `StepFunctions`.
    numbers: see `Numbers`.
    state: donated by the caller.
    batch: the rows of this step.
    step: its index, from 0.
    reduce: as in `mean_gradient`.
    shard: makes a dropout key of this device's own, where rows are split.

  Returns:
    new state and metrics: 'loss' [2] (sum of nats, count), and the scalars
    'grad_norm' (before clipping), 'learning_rate', 'updates'.
  """
  seed, learning_rate = numbers
  key = jax.random.fold_in(jax.random.key(seed), step)
  collections = _redrawn(functions, state, step, key)
  gradient, sums, collections = mean_gradient(
    functions, state.params, collections, batch, shard(key), reduce
  )
  grad_norm = optax.tree.norm(gradient)
  updates, opt_state = functions.optimizer(learning_rate).update(
    gradient, state.opt_state, state.params
  )
  params = cast(Any, optax.apply_updates(state.params, updates))
  ema = state.ema
  if ema is not None:
    rate = 1 - functions.ema_decay
    mean_of = float32(evaluated(params, opt_state))
    ema = cast(Any, optax.incremental_update(mean_of, ema, rate))
  updated = TrainState(state.step + 1, params, collections, opt_state, ema)
  finite = jnp.isfinite(sums[0]) & jnp.isfinite(grad_norm)
  for leaf in jax.tree.leaves(updated.variables["params"]):
    finite &= jnp.all(jnp.isfinite(leaf))
  valid = finite & (state.step == step)
  new_state = jax.tree.map(
    lambda new, old: jnp.where(valid, new, old), updated, state
  )
  return new_state, {
    "loss": sums,
    "grad_norm": grad_norm,
    "learning_rate": jnp.asarray(
      functions.schedule(learning_rate)(step), jnp.float32
    ),
    "updates": new_state.step,
  }


def _redrawn(
  functions: StepFunctions, state: TrainState, step: Int[Array, ""], key: Array
) -> Mapping[str, Any]:
  """The state's collections, or with new constants: the same on every device."""
  draw, collections = functions.draw_constants, state.collections
  if not functions.redraw_every or draw is None:
    return collections
  # Dropout folds small numbers into the same key.
  key = jax.random.fold_in(key, 2**31 - 1)
  constants = jax.lax.cond(
    step % functions.redraw_every == 0,
    lambda: draw(key),
    lambda: collections["constants"],
  )
  return {**collections, "constants": constants}


def eval_step(
  functions: StepFunctions,
  variables: Mapping[str, Any],
  batch: Batch,
  *,
  reduce: Callable[[Any], Any] = lambda tree: tree,
) -> Sums:
  """Sums of the loss (plain cross-entropy in nats) and the task's metrics."""
  logits = functions.forward(variables, batch, None)
  _, nats, count = functions.loss(logits, batch, 0.0)
  sums = {"loss": jnp.stack([nats, count])}
  return reduce(sums | functions.metric_sums(logits, batch))


def _micro_batches(batch: Batch, splits: int) -> Batch:
  """`[B, …]` to `[splits, B/splits, …]`, every micro-batch over all devices.

  Rows are dealt out in turn (row i goes to micro-batch i mod splits), so that
  rows which are split over devices stay on the device where they are.
  """

  def split(rows):
    rows = rows.reshape(-1, splits, *rows.shape[1:])
    return jnp.swapaxes(rows, 0, 1)

  return jax.tree.map(split, batch)
