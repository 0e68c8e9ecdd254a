"""Selection between batch rows."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Tree = TypeVar("Tree")


def where_rows(chosen: Bool[Array, "B"], new: Tree, old: Tree) -> Tree:
  """Selects rows of `new` where `chosen` is True, else of `old`; arrays `[B, …]`."""

  def where(x, y):
    return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y)

  return jax.tree.map(where, new, old)
