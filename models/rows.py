"""Functions of one position, on rows that are one axis or several."""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.platform import backend

Tree = TypeVar("Tree")

_MERGES = contextvars.ContextVar("merges", default=True)


def where_rows(chosen: Bool[Array, "B"], new: Tree, old: Tree) -> Tree:
  """Takes the chosen rows from `new` and the others from `old`; arrays `[B, …]`."""

  def where(x, y):
    return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y)

  return jax.tree.map(where, new, old)


@contextlib.contextmanager
def positions_apart() -> Iterator[None]:
  """Within it, `by_rows` merges nothing: for positions that lie on devices.

  Rows and positions as one axis would have to be gathered first.
  """
  token = _MERGES.set(False)
  try:
    yield
  finally:
    _MERGES.reset(token)


def by_rows(
  function: Callable[[Array], Array], x: Float[Array, "*A F"]
) -> Float[Array, "*A V"]:
  """`function(x)`, of one matrix of rows where `platform.Profile` merges them.

  Args:
    function: of the last axis alone, such as a Dense layer.
    x: `[*A, F]`, such as `[B, T, F]`.

  Returns:
    `[*A, V]`, the same on every platform.
  """
  if not (backend.profile().merges_rows and _MERGES.get()):
    return function(x)
  rows = function(x.reshape(-1, x.shape[-1]))
  return rows.reshape(*x.shape[:-1], -1)
