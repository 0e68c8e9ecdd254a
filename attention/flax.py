"""Mechanisms inside of Flax's own multi-head modules, Linen and NNX.

Modules train the `params` of a mechanism and keep its `constants`:

    own = LinenAttention(linformer(rank=64), Dims(8, 8, 64, max_length=1000))
    linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=own)

    own = NNXAttention(linformer(rank=64), dims, rngs=rngs)
    nnx.MultiHeadAttention(8, 512, attention_fn=own, decode=False, rngs=rngs)

It needs Flax; the rest of the library does not.
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


def _with_names(call: Callable[..., Array]) -> Callable[..., Array]:
  """Names every parameter of an `attention_fn`: Linen passes no others."""
  own = inspect.signature(as_attention_fn(dense_attention)).parameters.values()
  this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
  setattr(call, "__signature__", inspect.Signature([this, *own]))  # noqa: B010
  return call


class LinenAttention(linen.Module):
  """An `attention_fn` of `linen.MultiHeadDotProductAttention`, trained with it.

  Attributes:
    attention: the mechanism.
    dims: heads and lengths that its variables are made for.
    options: of every call, as those of `as_attention_fn`.
  """

  attention: Attention
  dims: Dims
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @linen.compact
  @_with_names
  def __call__(
    self, query: Array, key: Array, value: Array, **call: Any
  ) -> Array:
    """`[..., T, N, H]`, `[..., S, K, H]`, `[..., S, K, V]` to `[..., T, N, V]`."""

    def init(key):
      return self.attention.init(key, self.dims)

    draw = functools.cache(lambda: init(self.make_rng("params")))
    variables = {
      kind: {
        name: self.variable(
          kind, name, lambda kind, name: draw()[kind][name], kind, name
        ).value
        for name in arrays
      }
      for kind, arrays in jax.eval_shape(init, jax.random.key(0)).items()
    }
    fn = as_attention_fn(self.attention, variables, **self.options)
    return fn(query, key, value, **call)


class NNXAttention(nnx.Module):
  """An `attention_fn` of `nnx.MultiHeadAttention`, trained with it."""

  def __init__(
    self,
    attention: Attention,
    dims: Dims,
    *,
    rngs: nnx.Rngs,
    **options: Any,
  ):
    """Makes the variables.

    Args:
      attention: the mechanism.
      dims: heads and lengths that its variables are made for.
      rngs: `rngs.params` draws them.
      **options: of every call, as those of `as_attention_fn`.
    """
    self.attention = nnx.static(attention)
    self.options = nnx.static(options)
    made = dict(attention.init(rngs.params(), dims))
    params = made.pop("params", {})
    self.params = nnx.data(jax.tree.map(nnx.Param, params))
    self.constants = nnx.data(jax.tree.map(nnx.Variable, made))

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
