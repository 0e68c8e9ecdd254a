"""Short causal convolution of projected queries, keys and values."""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WIDTH = 4
"""W."""


class ShortConvolution(nn.Module):
  """y_t = SiLU(Σ_w k_w ⊙ x_{t−w} + b), each feature with W numbers of its own.

  Attributes:
    dtype: of activations.
    param_dtype: of the kernel, drawn from N(0, 1/W).
    use_bias: whether there is b, which starts at 0.

  Cost: time W·B·T·F; the copies of x are never made.

  Papers: Mamba, arXiv:2312.00752; H3, arXiv:2212.14052, whose shift it is.
  """

  dtype: str
  param_dtype: str
  use_bias: bool = False

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T F"],
    before: Float[Array, "B P F"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T F"]:
    """Convolves positions with those before them.

    Args:
      x: `[B, T, F]`.
      before: the P = W − 1 positions before `x`; None is zeros.
      segment_ids: `[B, T]`; nothing crosses from one segment to the next.
    """
    kernel = self.param(
      "kernel",
      nn.initializers.normal(WIDTH**-0.5),
      (WIDTH, x.shape[-1]),
      self.param_dtype,
    ).astype(x.dtype)
    if before is None:
      before = jnp.zeros((len(x), WIDTH - 1, x.shape[2]), x.dtype)
    length = x.shape[1]
    padded = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    out = x * kernel[0][None, None]
    for back in range(1, WIDTH):
      shifted = padded[:, WIDTH - 1 - back :][:, :length]
      if segment_ids is not None:
        first = segment_ids[:, :1] - 1
        earlier = jnp.concatenate([first] * back + [segment_ids], axis=1)
        same = earlier[:, :length] == segment_ids
        shifted = jnp.where(same[..., None], shifted, 0.0)
      out += shifted * kernel[back][None, None]
    if self.use_bias:
      zeros = nn.initializers.zeros
      bias = self.param("bias", zeros, x.shape[-1:], self.param_dtype)
      out += bias.astype(x.dtype)[None, None]
    return jax.nn.silu(out)


def last(
  x: Float[Array, "B P F"], lengths: Int[Array, "B"]
) -> Float[Array, "B W F"]:
  """The W − 1 positions before each of `lengths`, zeros before the first."""
  padded = jnp.pad(x, ((0, 0), (WIDTH - 1, 0), (0, 0)))
  places = lengths[:, None] + jnp.arange(WIDTH - 1)[None, :]
  return jnp.take_along_axis(padded, places[..., None], axis=1)
