"""Mechanisms in Flax's multi-head attention modules, Linen and NNX.

These modules train the `params` of a mechanism and store its `constants`:

    fn = LinenAttention(linformer(rank=64), Dims(8, 8, 64, max_length=1000))
    linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=fn)

    fn = NNXAttention(linformer(rank=64), dims, rngs=rngs)
    nnx.MultiHeadAttention(8, 512, attention_fn=fn, decode=False, rngs=rngs)

This file needs Flax; the rest of the library does not.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
from typing import Any

from flax import linen, nnx
import jax
from jaxtyping import Array

from attention.attention_fn import as_attention_fn
from attention.dense import dense_attention
from attention.mechanism import Attention, Dims


def _with_attention_fn_signature(
  call: Callable[..., Array],
) -> Callable[..., Array]:
  """Sets the signature of an `attention_fn`, whose parameters Linen reads."""
  parameters = inspect.signature(
    as_attention_fn(dense_attention)
  ).parameters.values()
  first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
  signature = inspect.Signature([first, *parameters])
  setattr(call, "__signature__", signature)  # noqa: B010
  return call


class LinenAttention(linen.Module):
  """A trainable `attention_fn` for `linen.MultiHeadDotProductAttention`.

  Attributes:
    attention: the mechanism.
    dims: the sizes of its variables.
    options: the options of every call, as in `as_attention_fn`.
  """

  attention: Attention
  dims: Dims
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @linen.compact
  @_with_attention_fn_signature
  def __call__(
    self, query: Array, key: Array, value: Array, **call: Any
  ) -> Array:
    """`[..., T, N, H]`, `[..., S, K, H]`, `[..., S, K, V]` to `[..., T, N, V]`."""

    def init(key):
      return self.attention.init(key, self.dims)

    initial_values = functools.cache(lambda: init(self.make_rng("params")))

    def array(collection, name):
      variable = self.variable(
        collection, name, lambda: initial_values()[collection][name]
      )
      return variable.value

    shapes = jax.eval_shape(init, jax.random.key(0))
    variables = {
      collection: {name: array(collection, name) for name in arrays}
      for collection, arrays in shapes.items()
    }
    fn = as_attention_fn(self.attention, variables, **self.options)
    return fn(query, key, value, **call)


class NNXAttention(nnx.Module):
  """A trainable `attention_fn` for `nnx.MultiHeadAttention`."""

  def __init__(
    self,
    attention: Attention,
    dims: Dims,
    *,
    rngs: nnx.Rngs,
    **options: Any,
  ):
    """Initializes the variables.

    Args:
      attention: the mechanism.
      dims: the sizes of its variables.
      rngs: `rngs.params` is the random stream for them.
      **options: the options of every call, as in `as_attention_fn`.
    """
    self.attention = nnx.static(attention)
    self.options = nnx.static(options)
    variables = dict(attention.init(rngs.params(), dims))
    params = variables.pop("params", {})
    self.params = nnx.data(jax.tree.map(nnx.Param, params))
    self.constants = nnx.data(jax.tree.map(nnx.Variable, variables))

  def __call__(
    self, query: Array, key: Array, value: Array, **call: Any
  ) -> Array:
    """`[..., T, N, H]`, `[..., S, K, H]`, `[..., S, K, V]` to `[..., T, N, V]`."""
    variables = jax.tree.map(
      lambda variable: variable[...],
      {"params": self.params, **self.constants},
      is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    fn = as_attention_fn(self.attention, variables, **self.options)
    return fn(query, key, value, **call)
