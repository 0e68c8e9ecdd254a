"""Modules and layers as attention functions on `[B, T, 1, F]`, for the laws.

    from flax import linen
    from attention.testing.modules import from_linen

    attention = from_linen(linen.MultiHeadDotProductAttention(4), features=32)

in `my_module.py`, and then `python -m attention.testing my_module:attention`. The F
features of a module count as one head, so the laws of heads do not apply. The libraries
themselves are not imported.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax

from attention.testing.function import Function


def from_linen(module: Any, features: int, path: str = "") -> Function:
  """Converts a Linen module that is called as `(query, key, value, mask=…)`.

  Args:
    module: a module such as `linen.MultiHeadDotProductAttention`.
    features: F.
    path: the import path `package.module:name` of the result, for reproductions.
  """

  @functools.cache
  def variables():
    x = jax.numpy.zeros((1, 2, features))
    return module.init(jax.random.key(0), x, x, x)

  def call(query, key, value, **options):
    return module.apply(variables(), query, key, value, **options)

  return _function(call, features, path)


def from_nnx(module: Any, features: int, path: str = "") -> Function:
  """Converts an NNX module with decode=False, as `from_linen` does."""
  return _function(module, features, path)


def from_equinox(layer: Any, features: int, path: str = "") -> Function:
  """Converts an Equinox layer, which has no batch axis, as `from_linen` does."""

  def call(query, key, value, mask=None):
    if mask is None:
      return jax.vmap(layer)(query, key, value)
    shape = len(query), query.shape[1], key.shape[1]
    mask = jax.numpy.broadcast_to(mask[:, 0], shape)
    return jax.vmap(layer)(query, key, value, mask)

  return _function(call, features, path)


def _function(call: Callable[..., Any], features: int, path: str) -> Function:
  def one_head(query, key, value, mask=None):
    arrays = (x[:, :, 0] for x in (query, key, value))
    options = {} if mask is None else {"mask": mask}
    return call(*arrays, **options)[:, :, None]

  return Function(one_head, path, num_heads=1, head_dim=features)
