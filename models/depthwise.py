"""Depthwise convolution: each feature has its own filter."""

import itertools

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float


def depthwise(
  x: Float[Array, "B *P F"], kernel: Float[Array, "*W F"]
) -> Float[Array, "B *P F"]:
  """y[p, f] = Σ_w k[w, f] · x[p + w − ⌊W/2⌋, f], with x = 0 outside of its positions.

  The kernel has one axis of odd size for each axis of positions. The convolution is
  computed as a sum of shifted copies, which on a CPU is faster than XLA's grouped
  convolution (`benchmarks/README.md`).

  Args:
    x: `[B, …, F]`.
    kernel: `[W, …, F]`.

  Cost: time B·P·F for each entry of a filter, memory B·P·F; compiled programs never
  materialize the copies.
  """
  sides = kernel.shape[:-1]
  padding = [(0, 0), *((side // 2, side // 2) for side in sides), (0, 0)]
  padded = jnp.pad(x, padding)
  out = jnp.zeros(x.shape, jnp.result_type(x, kernel))
  for offsets in itertools.product(*map(range, sides)):
    window = tuple(
      slice(start, start + length)
      for start, length in zip(offsets, x.shape[1:-1], strict=True)
    )
    filters = kernel[offsets].reshape(*[1] * (x.ndim - 1), -1)
    out += padded[(slice(None), *window)] * filters
  return out


class Depthwise(nn.Module):
  """A depthwise convolution with a trained kernel and without a bias.

  Attributes:
    sides: the sizes of the kernel's axes, which are odd.
    dtype: the dtype of activations.
    param_dtype: the dtype of the kernel, which is drawn from N(0, 1/entries).
  """

  sides: tuple[int, ...]
  dtype: str
  param_dtype: str

  @nn.compact
  def __call__(self, x: Float[Array, "B *P F"]) -> Float[Array, "B *P F"]:
    """Convolves `x`."""
    kernel = self.param(
      "kernel",
      nn.initializers.variance_scaling(
        1.0,
        "fan_in",
        "truncated_normal",
        in_axis=tuple(range(len(self.sides))),
        out_axis=-1,
      ),
      (*self.sides, x.shape[-1]),
      self.param_dtype,
    )
    return depthwise(x.astype(self.dtype), kernel.astype(self.dtype))
