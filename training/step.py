"""The training step and the evaluation step, compiled for a mesh.

Every metric is a pair (sum, count), which is divided once, after the sums and counts of
all micro-batches and devices are added. A mean of means would be wrong if micro-batches
differ in padding.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

import models
from models.kind import Model
from tasks.base import Task
from training import optimizer as optimizer_lib
from training.config import TrainConfig
from training.devices import parallel
from training.devices.parallel import AXIS
from training.state import TrainState, evaluated_params, float32

Batch = Mapping[str, Array]
Sums = dict[str, Array]
"""Maps metric names to [2], the sum and the count."""


def cross_entropy(
  logits: Float[Array, "B T C"], batch: Batch, label_smoothing: float = 0.0
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
  """Computes weighted sums of the objective and of the cross-entropy, in nats.

  With smoothing ε over C classes, the objective is
  `−(1 − ε) log p(target) − ε/C Σ_c log p(c)` (Szegedy et al. 2016); the
  cross-entropy is `−log p(target)` for any ε. The batch needs 'targets' [B, T] and
  'weights' [B, T].

  Returns:
    The sum of the objective, the sum of the cross-entropy, and the sum of the weights.
  """
  targets, weights = batch["targets"], batch["weights"]
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  target_log_probs = jnp.take_along_axis(
    log_probs, targets[..., None], axis=-1
  )[..., 0]
  nats = -jnp.sum(weights * target_log_probs)
  objective = nats
  if label_smoothing:
    uniform = -jnp.sum(weights * jnp.mean(log_probs, axis=-1))
    objective = (1 - label_smoothing) * nats + label_smoothing * uniform
  return objective, nats, jnp.sum(weights)


def make_step(
  model: Model, task: Task, config: TrainConfig, mesh: jax.sharding.Mesh
) -> Any:
  """Builds the training step, `(state, batch) -> (state, metrics)`.

  The seed and the peak learning rate are in the state, so runs that differ only in
  these compile the same program. The step updates the state only if the loss, the
  gradient and the new parameters are finite; otherwise the state and
  `metrics['updates']` stay unchanged.

  Args:
    model: from `models.create`.
    task: the task, which has the metrics and may have its own loss.
    config: the optimiser, micro-batches, running mean and redrawn constants.
    mesh: from `parallel.make_mesh` of the same config.

  Returns:
    A compiled function that donates `state`. It expects `state` and `batch` to be
    placed by `parallel.place_state` and `parallel.place_batch`. Its metrics are 'loss'
    [2] (sum of nats, count), and the scalars 'grad_norm' (before clipping),
    'learning_rate' and 'updates'.
  """
  optimizer = optimizer_lib.make_optimizer(config.optimizer, config.num_steps)
  is_pmap = config.parallel == "pmap"
  objective = make_objective(model, task, config, mesh)

  def step(state, batch):
    key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    collections = state.collections
    if config.redraw_every:
      collections = _redraw_constants(model, config.redraw_every, state, key)
    if is_pmap:  # Each device draws dropout for its own rows.
      key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))
    gradient, sums, collections = mean_gradient(
      objective,
      state.params,
      collections,
      batch,
      key,
      splits=config.optimizer.accumulate_steps,
      axis_name=AXIS if is_pmap else None,
    )
    grad_norm = optax.tree.norm(gradient)
    updates, opt_state = optimizer.update(
      gradient, state.opt_state, state.params
    )
    params = cast(Any, optax.apply_updates(state.params, updates))
    ema = state.ema
    if ema is not None:
      rate = 1 - config.optimizer.ema_decay
      new_params = float32(evaluated_params(params, opt_state))
      ema = cast(Any, optax.incremental_update(new_params, ema, rate))
    updated = TrainState(
      state.step + 1, state.seed, params, collections, opt_state, ema
    )
    finite = jnp.isfinite(sums[0]) & jnp.isfinite(grad_norm)
    for leaf in jax.tree.leaves(updated.variables["params"]):
      finite &= jnp.all(jnp.isfinite(leaf))
    new_state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), updated, state
    )
    schedule = optimizer_lib.make_schedule(
      config.optimizer, config.num_steps, optimizer_lib.peak(state.opt_state)
    )
    if not is_pmap:
      new_state = jax.lax.with_sharding_constraint(
        new_state, parallel.shardings(mesh, new_state)
      )
    return new_state, {
      "loss": sums,
      "grad_norm": grad_norm,
      "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
      "updates": new_state.step,
    }

  if is_pmap:
    return jax.pmap(
      step,
      axis_name=AXIS,
      in_axes=(None, 0),
      out_axes=None,
      donate_argnums=0,
      devices=[*mesh.devices.flat],
    )
  replicated = jax.NamedSharding(mesh, jax.P())
  return jax.jit(step, donate_argnums=0, out_shardings=(None, replicated))


def make_objective(
  model: Model, task: Task, config: TrainConfig, mesh: jax.sharding.Mesh
) -> Callable[..., tuple[Array, Any]]:
  """Builds the objective of `mean_gradient`, with the arguments of `make_step`."""
  loss = getattr(task, "loss", cross_entropy)
  axis_name = AXIS if config.parallel == "pmap" else None
  model = parallel.sequence_sharded(mesh, model)

  def objective(params, collections, batch, key):
    variables = parallel.gather(mesh, {"params": params, **collections})
    logits, new = models.forward_and_state(
      model, variables, batch, dropout_rng=key, axis_name=axis_name
    )
    value, nats, count = loss(logits, batch, config.optimizer.label_smoothing)
    for mean in jax.tree.leaves(new.get("losses", {})):
      value += count * mean  # `mean_gradient` divides the sum by the count.
    new = {name: x for name, x in new.items() if name != "losses"}
    return value, (jnp.stack([nats, count]), {**collections, **new})

  return objective


def make_eval_step(
  model: Model, task: Task, config: TrainConfig, mesh: jax.sharding.Mesh
) -> Any:
  """Builds the evaluation step, `(variables, batch) -> sums`; see `metric_sums`."""
  model = parallel.sequence_sharded(mesh, model)

  def step(variables, batch):
    variables = parallel.gather(mesh, variables)
    return metric_sums(task, models.forward(model, variables, batch), batch)

  if config.parallel == "pmap":
    return jax.pmap(
      lambda *arguments: jax.lax.psum(step(*arguments), AXIS),
      axis_name=AXIS,
      in_axes=(None, 0),
      out_axes=None,
      devices=[*mesh.devices.flat],
    )
  return jax.jit(step, out_shardings=jax.NamedSharding(mesh, jax.P()))


def metric_sums(
  task: Task, logits: Float[Array, "B T C"], batch: Batch
) -> Sums:
  """Computes the sums of the loss (cross-entropy in nats) and of the task's metrics."""
  loss = getattr(task, "loss", cross_entropy)
  _, nats, count = loss(logits, batch, 0.0)
  return {"loss": jnp.stack([nats, count])} | task.metric_sums(logits, batch)


def mean_gradient(
  objective: Callable[..., tuple[Array, Any]],
  params: Any,
  collections: Mapping[str, Any],
  batch: Batch,
  key: Array,
  *,
  splits: int = 1,
  axis_name: str | None = None,
) -> tuple[Any, Float[Array, "2"], Any]:
  """Computes the gradient of the mean objective over all weighted targets.

  Micro-batches are scanned, so only one needs memory at a time. Their gradients and
  counts are summed and divided once, so the gradient equals that of the whole batch up
  to rounding, except for what depends on all rows of a micro-batch: batch norm and the
  load-balance loss of experts.

  Args:
    objective: `(params, collections, batch, key) -> (sum, (loss [2], collections))`,
      with the loss as sum and count.
    params: the parameters with respect to which to differentiate.
    collections: the model's other collections; every micro-batch replaces those in
      the model's `state`.
    batch: arrays `[B, …]`, B a multiple of `splits`.
    key: for dropout.
    splits: number of micro-batches.
    axis_name: axis of a `pmap` whose devices share the rows of one batch.

  Returns:
    The gradient (float32 if `params` have fewer bits), the loss as (sum, count), and
    the new collections.
  """

  def compute_gradient(*arguments):
    gradient, aux = jax.grad(objective, has_aux=True)(*arguments)
    return float32(gradient), aux

  if splits == 1:
    gradient, (sums, collections) = compute_gradient(
      params, collections, batch, key
    )
  else:

    def accumulate(carry, index_and_rows):
      totals, collections = carry
      index, rows = index_and_rows
      rng = jax.random.fold_in(key, index)
      gradient, (sums, collections) = compute_gradient(
        params, collections, rows, rng
      )
      totals = jax.tree.map(jnp.add, totals, (gradient, sums))
      return (totals, collections), None

    zeros = (jax.tree.map(jnp.zeros_like, float32(params)), jnp.zeros(2))
    ((gradient, sums), collections), _ = jax.lax.scan(
      accumulate,
      (zeros, collections),
      (jnp.arange(splits), _micro_batches(batch, splits)),
    )
  if axis_name is not None:
    gradient, sums = jax.lax.psum((gradient, sums), axis_name)
  # A batch without targets has gradient 0, not 0/0.
  count = jnp.where(sums[1] > 0, sums[1], 1.0)
  return jax.tree.map(lambda g: g / count, gradient), sums, collections


def _redraw_constants(
  model: Model, redraw_every: int, state: TrainState, key: Array
) -> Mapping[str, Any]:
  """Returns the collections, with new constants if due, equal on all devices."""
  # A large number, because dropout folds small numbers into the same key.
  key = jax.random.fold_in(key, 2**31 - 1)
  constants = jax.lax.cond(
    state.step % redraw_every == 0,
    # The compiled program draws only constants, because nothing else is used.
    lambda: models.initialize(model, key, model.example())["constants"],
    lambda: state.collections["constants"],
  )
  return {**state.collections, "constants": constants}


def _micro_batches(batch: Batch, splits: int) -> Batch:
  """Reshapes `[B, …]` to `[splits, B/splits, …]`.

  Row i belongs to micro-batch i mod splits, so that sharded rows stay on their device
  and each micro-batch is on all devices.
  """

  def split(rows):
    rows = rows.reshape(-1, splits, *rows.shape[1:])
    return jnp.swapaxes(rows, 0, 1)

  return jax.tree.map(split, batch)
