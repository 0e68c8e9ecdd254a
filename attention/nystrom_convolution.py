"""The depth-wise convolution beside Nyström attention, with its own backward.

  out[t, n] = Σ_j kernel[j, n] · value[t + j - (R-1)/2, k(n)],   j = 0 … R-1

with zeros before and after the sequence and k(n) the key head of query head n.

A block of C positions is one matrix product a head, of the band matrix
M[c, s] = kernel[s - c] with the C + R - 1 values round the block. The gradient
of the values is the same operation on the cotangent with the kernel turned
round, that of the kernel the sum of g valueᵀ along the diagonals of M.

A convolution of XLA's is many times slower on a CPU for one channel a group.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

BLOCK = 64


@jax.custom_vjp
def convolve(
  value: Float[Array, "B T K V"], kernel: Float[Array, "R N"]
) -> Float[Array, "B T N V"]:
  """Filters every head along the sequence, output as long as the input.

  Args:
    value: N is a multiple of K.
    kernel: one filter a query head, R odd.

  Returns:
    float32.

  Cost: time T·(C+R)·N·V for blocks of C positions, memory of one padded copy
  of the values.
  """
  return _band_product(value, kernel)


def _padded(x: Array, reach: int, size: int) -> Float[Array, "B P K V"]:
  """Zeros round the sequence, and up to a whole number of blocks."""
  length = x.shape[1]
  end = reach + -length % size
  return jnp.pad(x.astype(jnp.float32), ((0, 0), (reach, end), (0, 0), (0, 0)))


def _block(x: Array, i: Array, size: int, width: int) -> Array:
  """`[B, K, width, V]` from position i·size on."""
  x = jax.lax.dynamic_slice_in_dim(x, i * size, width, 1)
  return jnp.swapaxes(x, 1, 2)


def _band_product(value: Array, kernel: Array) -> Float[Array, "B T N V"]:
  batch, length, heads, features = value.shape
  taps, num_heads = kernel.shape
  size = min(BLOCK, length)
  width = size + taps - 1
  offset = jnp.arange(width)[None, :] - jnp.arange(size)[:, None]
  band = jnp.take(kernel, offset, axis=0, mode="fill", fill_value=0)
  inside = (offset >= 0)[None]
  band = jnp.where(inside, jnp.moveaxis(band, 2, 0), 0.0)
  band = band.reshape(heads, -1, width).astype(jnp.float32)
  padded = _padded(value, taps // 2, size)

  def step(i, out):
    window = _block(padded, i, size, width)
    result = jnp.einsum("krs,bksv->bkrv", band, window)
    result = result.reshape(batch, num_heads, size, features)
    return jax.lax.dynamic_update_slice_in_dim(
      out, jnp.swapaxes(result, 1, 2), i * size, 1
    )

  num_blocks = -(-length // size)
  out = jnp.zeros((batch, num_blocks * size, num_heads, features), jnp.float32)
  return jax.lax.fori_loop(0, num_blocks, step, out)[:, :length]


def _convolve_fwd(value, kernel):
  return convolve(value, kernel), (value, kernel)


def _convolve_bwd(residuals, g):
  value, kernel = residuals
  batch, length, heads, features = value.shape
  taps, num_heads = kernel.shape
  group = num_heads // heads
  d_value = _band_product(g, kernel[::-1])
  d_value = d_value.reshape(batch, length, heads, group, features).sum(3)

  size = min(BLOCK, length)
  width = size + taps - 1
  padded, g = _padded(value, taps // 2, size), _padded(g, 0, size)

  def step(i, total):
    rows = _block(g, i, size, size).reshape(batch, heads, -1, features)
    window = _block(padded, i, size, width)
    return total + jnp.einsum("bkrv,bksv->bkrs", rows, window).sum(0)

  total = jnp.zeros((heads, group * size, width), jnp.float32)
  total = jax.lax.fori_loop(0, -(-length // size), step, total)
  along = jnp.arange(size)[:, None] + jnp.arange(taps)[None, :]
  total = total.reshape(num_heads, size, width)
  d_kernel = jnp.take_along_axis(total, along[None], axis=2).sum(1).T
  return d_value.astype(value.dtype), d_kernel.astype(kernel.dtype)


convolve.defvjp(_convolve_fwd, _convolve_bwd)
