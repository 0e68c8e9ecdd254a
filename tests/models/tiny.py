"""Models small enough to compile in a second, for any mechanism."""

import collections
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attention import ATTENTIONS
from attention import mechanism as mechanisms
import models
from models import nested

VOCAB_SIZE = 7
MAX_LENGTH = 12
# Options that suit these sizes; a mechanism without an entry gets its defaults.
_OPTIONS = {
  "sliding_window": {"window": 3},
  "window_2d": {"window": 2},
  "bigbird": {"block_size": 2, "num_random": 1},
  "performer": {"num_features": 16},
  "window_linear": {"window": 3},
  "linformer": {"rank": 5},
  "lsh": {"num_rounds": 2, "chunk_size": 4},
  "nystrom": {"num_landmarks": 4},
  "additive": {"width": 6},
}
OPTIONS = {
  name: _OPTIONS.get(name, dict(mechanisms.example(factory).sizes.short))
  for name, factory in ATTENTIONS.items()
}
"""Hyperparameters for a few positions; by default the record's own."""

# One program each, where operations one by one would be a hundred.
initialize = jax.jit(models.initialize, static_argnums=0)
forward = jax.jit(models.forward, static_argnums=0)
attention_maps = jax.jit(models.attention_maps, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def gradients(model, variables, batch):
  """Returns gradients of the mean squared logit by every parameter."""

  def loss(params):
    logits = models.forward(model, {**variables, "params": params}, batch)
    return jnp.square(logits).mean()

  return jax.grad(loss)(variables["params"])


def calls(model, variables, batch):
  """Traces (place, record, query, key, value, options) of each attention call."""
  found = []

  def replacement(place, record, own, query, key, value, **options):
    found.append((place, record, query, key, value, options))
    return own(query, key, value, **options)

  jax.eval_shape(
    lambda variables: models.replace_attention(
      model, variables, batch, replacement
    ),
    variables,
  )
  return found


def dropouts(model, variables, batch):
  """Traces a training step; returns module -> number of active dropouts."""
  found = collections.Counter()

  def count(function, args, kwargs, context):
    module = context.module
    if isinstance(module, nn.Dropout) and context.method_name == "__call__":
      options = module.deterministic, kwargs.get("deterministic")
      is_active = not nn.merge_param("deterministic", *options)
      found["/".join(module.path[:-1])] += is_active and module.rate > 0
    return function(*args, **kwargs)

  with nn.intercept_methods(count):
    jax.eval_shape(
      lambda variables: models.forward_and_state(
        model, variables, batch, dropout_rng=jax.random.key(0)
      ),
      variables,
    )
  return dict(found)


def attention(name):
  return models.AttentionConfig(name, OPTIONS.get(name, {}))


def names(*capabilities):
  """Returns the mechanisms that support all of `capabilities`."""
  return [
    name
    for name in ATTENTIONS
    if all(mechanisms.can(attention(name).build(), c) for c in capabilities)
  ]


def create(kind="encoder_decoder", *, shared_vocabulary=True, **changes):
  config = {
    "num_layers": 1,
    "num_heads": 2,
    "features": 16,
    "mlp_features": 32,
    **changes,
  }
  return models.create(
    nested.make(models.ModelConfig, kind=kind, **config),
    source_vocab_size=VOCAB_SIZE,
    target_vocab_size=VOCAB_SIZE,
    max_source_length=MAX_LENGTH,
    max_target_length=MAX_LENGTH,
    shared_vocabulary=shared_vocabulary,
  )


def of_config(config, **sizes):
  """Creates a model for a task of these sizes, by default with few targets."""
  none = dict.fromkeys(("source_vocab_size", "max_source_length"))
  few = {"target_vocab_size": VOCAB_SIZE, "max_target_length": 1}
  return models.create(config, **none | few | sizes)


@functools.cache
def initialized(model):
  """Variables for `batch()`."""
  return variables_of(model, batch())


def variables_of(model, batch):
  """Variables of the right size; mostly without compiling an initialiser.

  Biases are not 0 and scales not 1, as they are in a new model: that would hide
  their signs and axes.
  """
  key = jax.random.key(0)
  variables = jax.eval_shape(lambda: models.initialize(model, key, batch))
  is_new = bool(variables["constants"])
  if is_new:
    variables = initialize(model, key, batch)
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    name, noise = path[-1].key, rng.normal(size=leaf.shape)
    if name in ("scale", "var"):
      return np.exp(0.2 * noise).astype(leaf.dtype)
    if name in ("bias", "mean"):
      return (0.2 * noise).astype(leaf.dtype)
    if is_new:
      return leaf
    fan_in = leaf.shape[-1 if name == "embedding" else 0]
    return (noise * fan_in**-0.5).astype(leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, variables)


def batch(seed=0, batch_size=3, source_length=6, length=8):
  """Draws random ids from 3 on, with padded sources of unequal length."""
  rng = np.random.default_rng(seed)
  source = rng.integers(3, VOCAB_SIZE, (batch_size, source_length))
  for row in range(batch_size):
    source[row, source_length - row :] = 0
  inputs = rng.integers(3, VOCAB_SIZE, (batch_size, length))
  inputs[:, 0] = 1
  return {"source": source.astype(np.int32), "inputs": inputs.astype(np.int32)}


def step_by_step(model, variables, batch):
  """Logits `[B, T, V]` of one compiled scan over caches."""

  @jax.jit
  def run(variables, source, inputs):
    _, state = model.apply(
      variables,
      source,
      *inputs.shape,
      method="start",
      mutable=["cache", "memory"],
    )
    memory = state.get("memory", {})

    def step(cache, ids):
      logits, new = model.apply(
        {**variables, "memory": memory, "cache": cache},
        ids,
        method="decode",
        mutable=["cache"],
      )
      return new["cache"], logits

    return jnp.moveaxis(jax.lax.scan(step, state["cache"], inputs.T)[1], 0, 1)

  return run(variables, batch.get("source"), batch["inputs"])
