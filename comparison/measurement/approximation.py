"""The approximation error of a trained model's attention."""

from collections.abc import Callable, Mapping
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attention import Attention, dense_attention, lsh_attention
from attention import mechanism as mechanisms
import models
from models.kind import Model

_OPTIONS = {
  *inspect.signature(dense_attention).parameters,
  *mechanisms.CALL_OPTIONS,
}


def error(
  model: Model,
  variables: Mapping[str, Any],
  batch: Mapping[str, Any],
) -> float | None:
  """‖out − exact‖ / ‖exact‖ over all layers that have the mechanism.

  `exact` is dense attention with the same trained query, key and value, mask and
  tables. For LSH it is dense attention with its unit keys, in which no token attends to
  itself (one bucket, one chunk). Norms are Frobenius norms over layers, rows, positions
  (including padding), heads and features.

  Returns:
    The relative error, which is 0 for dense attention itself; None if the mechanism's
    `approximates` says that it is not an approximation.

  Raises:
    ValueError: attention is not a separate module, as in a recurrent model, and cannot
      be observed.

  Cost: that of dense attention.
  """
  config = model.config
  dense = models.AttentionConfig("dense")
  configs = {layer for layers in config.attentions.values() for layer in layers}
  # Modules that the mechanism does not support are dense. They are ignored, because
  # they have no error.
  measured = configs - {dense} or configs
  if any(layer.build().approximates is None for layer in measured):
    return None
  ignored = dense.build() if measured != configs else None
  squares = jax.jit(functools.partial(_squares, model, ignored))
  deviation, size = squares(variables, dict(batch))
  return float(jnp.sqrt(deviation / size))


def _squares(
  model: Model,
  ignored: Attention | None,
  variables: Mapping[str, Any],
  batch: Mapping[str, Any],
) -> tuple[Array, Array]:
  """Sums of the squared norms of out − exact and of exact, without `ignored`."""
  squares = []

  def observer(attention, query, key, value, out, **call):
    if attention != ignored:
      reference = exact(attention)(query, key, value, **call)
      squares.append((_square(out - reference), _square(reference)))

  models.observe_attention(model, variables, batch, observer)
  deviations, sizes = zip(*squares, strict=True)
  return jnp.stack(deviations).sum(), jnp.stack(sizes).sum()


def exact(attention: Attention) -> Callable[..., Any]:
  """The function that a mechanism approximates: `(query, key, value, **call)`."""
  if attention.approximates == "dense":

    def dense(query, key, value, **call):
      # Other options are gates, which select and weight keys; dense attention uses all
      # keys.
      options = {name: x for name, x in call.items() if name in _OPTIONS}
      return dense_attention(query, key, value, **options)

    return dense

  def one_bucket(query, key, value, **call):
    del key
    rotations = jnp.zeros((1, query.shape[-1], 0))
    return lsh_attention(
      query, value, rotations=rotations, chunk_size=query.shape[1], **call
    )

  return one_bucket


def _square(x: Array) -> Array:
  return jnp.sum(jnp.square(x.astype(jnp.float32)))
