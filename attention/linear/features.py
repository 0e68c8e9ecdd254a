"""Feature maps, and the arrays that attention through one takes."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class FeatureMap(NamedTuple):
  """A feature map, known while a program is traced; hashable.

  Attributes:
    function: `(x [..., H], *parameters) -> [..., M]`, row by row: features φ,
      all ≥ 0, or their logarithms.
    is_log: whether `function` returns logarithms.
    size: M.
  """

  function: Callable[..., Array]
  is_log: bool
  size: int

  def of(
    self, x: Float[Array, "*A C H"], parameters: tuple[Array, ...]
  ) -> Float[Array, "*A C M"]:
    """The features of every row of a block, in float32."""
    x = x.astype(jnp.float32)
    return self.function(x, *parameters).astype(jnp.float32)


class Operands(NamedTuple):
  """The arrays that have a derivative.

  Attributes:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    parameters: the arrays of the feature map, of any shape.
  """

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  parameters: tuple[Array, ...]
