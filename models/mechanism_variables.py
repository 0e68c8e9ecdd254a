"""The variables of a mechanism inside a Linen module."""

from collections.abc import Iterable, Mapping
import functools
from typing import Any

from flax import linen as nn
import jax

from attention import Attention, Dims
from models.attention_config import AttentionConfig


@functools.cache
def variable_shapes(attention: Attention, dims: Dims) -> Mapping[str, Any]:
  """Returns the shapes of a mechanism's variables, without computing them.

  Raises:
    ValueError: the mechanism does not support these dimensions.
  """
  return jax.eval_shape(lambda: attention.init(jax.random.key(0), dims))


def check_mechanisms(
  field: str, configs: Iterable[AttentionConfig], dims: Dims
) -> None:
  """Raises ValueError, naming a field, if a mechanism does not support `dims`."""
  for config in configs:
    attention = config.build()
    try:
      shapes = variable_shapes(attention, dims)
    except ValueError as error:
      raise ValueError(f"{field}: {error}") from error
    if dims.values == dims.head_dim or "own_keys" not in attention.supports:
      continue
    # A mechanism that computes values of any width has parameters for them.
    if shapes == variable_shapes(attention, dims._replace(value_dim=None)):
      raise ValueError(
        f"value_dim: {config.name} computes values of the {dims.head_dim} features "
        f"of a head; expected None, got {dims.value_dim}"
      )


def mechanism_variables(
  module: nn.Module, attention: Attention, dims: Dims
) -> Mapping[str, Any]:
  """Creates a mechanism's variables, or reads them, in the `setup` of a module.

  Their name is 'attention', in the collection 'params' (trained) or 'constants'
  (not trained).
  """
  # All collections have one key, because `init` draws them together. After
  # initialization, Flax uses the initializers only to check shapes.
  initializing = module.is_initializing()
  key = module.make_rng("params") if initializing else jax.random.key(0)

  def init_collection(collection):
    return attention.init(key, dims)[collection]

  variables = {}
  for collection in variable_shapes(attention, dims):
    if collection == "params":
      variables["params"] = module.param(
        "attention", lambda _: init_collection("params")
      )
    else:
      variables[collection] = module.variable(
        collection, "attention", init_collection, collection
      ).value
  return variables
