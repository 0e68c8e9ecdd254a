"""The depth-wise convolution that Nyström attention may add, with its backward.

  out[t, n] = Σ_j kernel[j, n] · value[t + j - (R-1)/2, k(n)],   j = 0 … R-1

with zeros before and after the sequence, and k(n) the key head of query head n.
The gradient of the values is the same sum over the cotangent g with the kernel
reversed. That of the kernel sums g[t] · value[s] along the diagonals
s - t = j - (R-1)/2 of products of a block of C rows of g with the C + R - 1
values around it.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.core import layout, platform


@jax.custom_vjp
def convolve(
  value: Float[Array, "B T K V"], kernel: Float[Array, "R N"]
) -> Float[Array, "B T N V"]:
  """Filters every head along the sequence, output as long as the input.

  Args:
    value: `[B, T, K, V]`; N is a multiple of K.
    kernel: `[R, N]`, one filter for each query head, R odd.

  Returns:
    `[B, T, N, V]` float32.

  Cost: time T·R·N·V, in the backward T·(C+R)·N·V; memory of a padded copy of
  the values and of the cotangent.
  """
  length, heads = value.shape[1:3]
  taps, num_heads = kernel.shape
  padded = _padded(value, taps // 2, taps // 2)
  weights = kernel.astype(jnp.float32).reshape(taps, 1, 1, heads, -1, 1)
  terms = (padded[:, j : j + length, :, None] * weights[j] for j in range(taps))
  out = functools.reduce(jnp.add, terms)
  return out.reshape(*value.shape[:2], num_heads, -1)


def _padded(
  x: Float[Array, "B T K V"], before: int, after: int
) -> Float[Array, "B P K V"]:
  x = x.astype(jnp.float32)
  x = jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0)))
  # Otherwise XLA computes x again in each of the R terms.
  return platform.apart(x)


def _convolve_fwd(value, kernel):
  return convolve(value, kernel), (value, kernel)


def _convolve_bwd(residuals, g):
  value, kernel = residuals
  d_value = convolve(g, kernel[::-1])
  d_value = d_value.reshape(*value.shape[:3], -1, value.shape[3]).sum(3)
  d_kernel = _kernel_gradient(value, g, len(kernel))
  return d_value.astype(value.dtype), d_kernel.astype(kernel.dtype)


convolve.defvjp(_convolve_fwd, _convolve_bwd)


def _kernel_gradient(
  value: Float[Array, "B T K V"], g: Float[Array, "B T N V"], taps: int
) -> Float[Array, "R N"]:
  """Σ over examples, positions and features, block by block."""
  batch, length, heads, _ = value.shape
  num_heads = g.shape[2]
  rows = platform.DIAGONAL_ROWS
  size, _ = platform.block(4 * batch * num_heads, rows, rows, length, length)
  width, rest = size + taps - 1, -length % size
  values = _padded(value, taps // 2, taps // 2 + rest)
  g = _padded(g, 0, rest)

  def block(x, i, length):
    return jnp.swapaxes(layout.cut(x, i * size, length), 1, 2)

  def step(i, total):
    rows = block(g, i, size).reshape(batch, heads, -1, g.shape[3])
    window = block(values, i, width)
    return total + jnp.einsum("bkrv,bksv->bkrs", rows, window)

  total = jnp.zeros((batch, heads, num_heads // heads * size, width))
  total = jax.lax.fori_loop(0, -(-length // size), step, total)
  total = jnp.sum(total, 0).reshape(num_heads, size, width)
  along = jnp.arange(size)[:, None] + jnp.arange(taps)[None, :]
  return jnp.take_along_axis(total, along[None], axis=2).sum(1).T
