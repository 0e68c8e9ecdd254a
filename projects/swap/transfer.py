"""Fits a mechanism to the attention that it replaces, layer by layer."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attention import Attention
from models.transformer import Transformer
from projects.swap import substitution
from projects.swap.substitution import Batch, Mechanisms


def fit(
  model: Transformer,
  variables: Mapping[str, Any],
  attention: Attention,
  mechanisms: Mechanisms,
  batch_of: Callable[[int], Batch],
  *,
  steps: int,
  rate: float,
  pad_id: int,
) -> dict[str, Any]:
  """Trains a mechanism's variables so that each layer's output matches the model's own.

      loss = Σ_layers ‖out − own‖² / ‖own‖²

  The loss is the squared error of each layer for the queries, keys and values of the
  original model, relative to the square of the layer's own output. Layers share no
  variables, so all are fitted at the same time. The optimizer is Adam, with cosine
  decay of the learning rate to 0.

  Args:
    model: the model with its own mechanisms.
    variables: variables of the model, which do not change.
    attention: the other mechanism.
    mechanisms: its initial variables in each module.
    batch_of: `step -> batch`.
    steps: number of updates.
    rate: initial learning rate.
    pad_id: id of padding.

  Returns:
    The mechanism's variables in each module.

  Cost: a step is a forward pass of the model, and a forward and backward pass of the
    mechanism in every layer.

  Paper: LoLCATs, section 3.1, arXiv:2410.10254.
  """
  optimizer = optax.adam(optax.cosine_decay_schedule(rate, max(steps, 1)))
  trained = {
    module: tree.get("params", {}) for module, tree in mechanisms.items()
  }
  constants = {
    module: {name: x for name, x in tree.items() if name != "params"}
    for module, tree in mechanisms.items()
  }

  def merge(trained):
    return {
      module: {**constants[module], **({"params": tree} if tree else {})}
      for module, tree in trained.items()
    }

  def loss(trained, variables, batch):
    valid = substitution.valid_positions(batch, pad_id)
    norms = substitution.squares(
      model, variables, batch, valid, attention, merge(trained)
    )
    pairs = jnp.stack([*norms.values()])
    return jnp.sum(pairs[:, 0] / jnp.maximum(pairs[:, 1], 1e-30))

  @jax.jit
  def update(trained, state, variables, batch):
    gradient = jax.grad(loss)(trained, variables, batch)
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(trained, change), state

  state = optimizer.init(trained)
  for step in range(steps):
    trained, state = update(trained, state, variables, batch_of(step))
  return merge(trained)
