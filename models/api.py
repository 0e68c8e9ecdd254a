"""Pure functions of a model and its variables."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.kind import NOTHING, Config, Model, Sizes
from models.multi_head_attention import (
  MultiHeadAttention,
  apply_mechanism,
  every_head,
)
from settings.import_paths import load

Batch = Mapping[str, Any]
"""Arrays by name, such as 'source' [B, S] and 'inputs' [B, T].

A model's `arguments` selects the arrays that it reads and ignores the others.
"""


def create(
  config: Config,
  *,
  source_vocab_size: int | None,
  target_vocab_size: int,
  max_source_length: int | None,
  max_target_length: int | None,
  shared_vocabulary: bool = False,
  input_shapes: Mapping[str, Any] = NOTHING,
) -> Model:
  """Creates the model of a config for a task's sizes, without computing anything.

  Equal arguments give equal models with equal hashes, so a compiled function
  may take the model as a static argument.

  Args:
    config: the config of the model.
    source_vocab_size: for kinds with an encoder.
    target_vocab_size: V, of decoder ids and of logits.
    max_source_length: the longest source, for kinds with an encoder.
    max_target_length: the longest sequence a decoder reads; for an encoder,
      the same as `max_source_length` or None.
    shared_vocabulary: whether source and target share a vocabulary, so that tied
      embeddings share one table.
    input_shapes: the inputs of a batch that are not ids, such as 'image' -> the shape
      of one row.

  Returns:
    A Linen module.

  Raises:
    ValueError: a size is missing, or a mechanism does not support it (such as a
      rank above the length); the message starts with the argument or field.
  """
  return load(config.module)(
    config,
    Sizes(
      source_vocab_size,
      target_vocab_size,
      max_source_length,
      max_target_length,
      shared_vocabulary,
      input_shapes,
    ),
  )


@functools.partial(jax.jit, static_argnums=0)
def initialize(model: Model, key: Array, batch: Batch) -> dict[str, Any]:
  """Initializes the variables of a model.

  Args:
    model: from `create`.
    key: random key from which 'params' and 'constants' are drawn.
    batch: only its shapes are used.

  Returns:
    `{'params': …, 'constants': …}`; constants may be empty. To redraw random
    features, replace the constants by those of another key.
  """
  ids, options = model.arguments(batch)
  variables = model.init(key, *ids, **options)
  return {"constants": {}, **variables}


def forward(
  model: Model,
  variables: Mapping[str, Any],
  batch: Batch,
  *,
  dropout_rng: Array | None = None,
) -> Float[Array, "B T V"]:
  """Computes the logits of every position with teacher forcing.

  Args:
    model: from `create`.
    variables: from `initialize`, or trained.
    batch: 'source' and 'inputs', as the kind requires.
    dropout_rng: random key for dropout; None means no dropout.

  Returns:
    `[B, T, V]` float32.
  """
  ids, options = model.arguments(batch)
  logits = model.apply(
    variables,
    *ids,
    **options,
    deterministic=dropout_rng is None,
    rngs=None if dropout_rng is None else {"dropout": dropout_rng},
  )
  return cast(Array, logits)


def forward_and_state(
  model: Model,
  variables: Mapping[str, Any],
  batch: Batch,
  *,
  dropout_rng: Array | None,
  axis_name: str | None = None,
) -> tuple[Float[Array, "B T V"], Mapping[str, Any]]:
  """Computes logits in training mode, and the model's new state and own losses.

  Batch norm uses the mean and variance of the batch and updates the running
  statistics, which `forward` uses. A mechanism with a `loss`, such as an indexer, adds
  it to the collection 'losses'.

  Args:
    model: from `create`; its `state` names the collections that a call updates.
    variables: the variables of the model, with these collections.
    batch: as in `forward`.
    dropout_rng: random key for dropout; None means no dropout.
    axis_name: axis of a `pmap` whose devices share the rows of one batch.

  Returns:
    `[B, T, V]` float32, and the new collections.
  """
  ids, options = model.arguments(batch)
  state = list(getattr(model, "state", ()))
  if state:
    options = {**options, "axis_name": axis_name}
  return model.apply(
    variables,
    *ids,
    **options,
    deterministic=False,
    rngs=None if dropout_rng is None else {"dropout": dropout_rng},
    mutable=[*state, "losses"],
  )


@functools.partial(jax.jit, static_argnums=0)
def attention_maps(
  model: Model, variables: Mapping[str, Any], batch: Batch
) -> dict[str, Float[Array, "B N T S"]]:
  """Computes the effective attention matrix of every layer.

  Args:
    model: from `create`.
    variables: from `initialize`, or trained.
    batch: 'source' and 'inputs', as the kind requires.

  Returns:
    'encoder_0/self_attention', 'decoder_0/self_attention',
    'decoder_0/cross_attention', …, each `[B, N, T, S]` float32. A recurrent
    model has only 'decoder/cross_attention'; a Perceiver has
    'encoder/cross_attention' from its latents to the input and
    'decoder/cross_attention' from its outputs to the latents. For a layer that runs
    several times, the matrix is that of its last run.
  """
  ids, options = model.arguments(batch)
  _, state = model.apply(variables, *ids, **options, mutable=["intermediates"])
  sown: Mapping[str, Any] = state["intermediates"]
  return {
    f"{block}/{module}": matrices["attention_weights"][-1].astype(jnp.float32)
    for block, modules in sown.items()
    for module, matrices in modules.items()
  }


def observe_attention(
  model: Model,
  variables: Mapping[str, Any],
  batch: Batch,
  observer: Callable[..., None],
) -> None:
  """Calls `observer` after every call of an attention mechanism in a model.

  Under `jax.jit` the observer receives tracers: it may compute with them and use
  the results until the trace ends.

  Args:
    model: from `create`, not recurrent.
    variables: from `initialize`, or trained.
    batch: 'source' and 'inputs', as the kind requires.
    observer: `(attention, query, key, value, out, **call)`: the mechanism, the
      arguments of its call, and its result.
  """

  def replacement(
    path, attention, apply, query, key, value, inputs, gates, **call
  ):
    del path, inputs
    call |= gates
    out = apply(query, key, value, **call)
    observer(attention, query, key, value, out, **call)
    return out

  replace_attention(model, variables, batch, replacement)


def replace_attention(
  model: Model,
  variables: Mapping[str, Any],
  batch: Batch,
  replacement: Callable[..., Array],
) -> Float[Array, "B T V"]:
  """Computes logits with another function in place of every attention mechanism.

  Args:
    model: from `create`, not recurrent.
    variables: from `initialize`, or trained.
    batch: 'source' and 'inputs', as the kind requires.
    replacement: `(path, attention, apply, query, key, value, **call) -> out`:
      the module's path in the model, such as 'decoder_0/self_attention'; its
      mechanism; that mechanism as a function of the remaining arguments; and the
      arguments of the call. `call` also has `inputs`, from which the queries are
      projected, and `gates`, which the mechanism computed from them. Gates are
      options of that mechanism and of no other one.

  Returns:
    `[B, T, V]` float32.

  Raises:
    ValueError: the model has no attention modules.
  """
  if not hasattr(model, "attend"):
    raise ValueError(
      "model: a recurrent model has no attention modules; expected a model with a "
      "field `attend`"
    )
  ids, options = model.arguments(batch)

  def replace(module: MultiHeadAttention, query, key, value, **call):
    path = "/".join(module.path)
    apply = functools.partial(apply_mechanism, module)
    # Not every replacement supports shared heads.
    query, key = every_head(query, key, value)
    return replacement(path, module.attention, apply, query, key, value, **call)

  model = model.clone(attend=replace)
  return cast(Array, model.apply(variables, *ids, **options))
