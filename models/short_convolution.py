"""Short causal convolution of projected queries, keys and values."""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WIDTH = 4
"""W, the width of the kernel."""


class ShortConvolution(nn.Module):
  """y_t = SiLU(Σ_w k_w ⊙ x_{t−w} + b), a depthwise causal convolution of width W.

  With activation 'none', y_t is the sum. Decoding stores the last W − 1 positions in
  'cache'.

  Attributes:
    features: F.
    dtype: the dtype of activations.
    param_dtype: the dtype of the kernel, drawn from N(0, 1/W).
    use_bias: whether there is a bias b, which is initialized to 0.
    activation: 'silu' or 'none'.

  Cost: time W·B·T·F; compiled programs never materialize shifted copies of x.

  Papers: Mamba, arXiv:2312.00752; the shift of H3, arXiv:2212.14052.
  """

  features: int
  dtype: str
  param_dtype: str
  use_bias: bool = False
  activation: str = "silu"

  def setup(self) -> None:
    """Creates the kernel `[W, F]` and the bias."""
    normal, zeros = nn.initializers.normal(WIDTH**-0.5), nn.initializers.zeros
    shape, dtype = (self.features,), self.param_dtype
    self.kernel = self.param("kernel", normal, (WIDTH, *shape), dtype)
    if self.use_bias:
      self.bias = self.param("bias", zeros, shape, dtype)

  def __call__(
    self,
    x: Float[Array, "B T F"],
    mask: Bool[Array, "B 1 1 T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T F"]:
    """Convolves each position with the previous ones.

    Args:
      x: `[B, T, F]`.
      mask: `[B, 1, 1, T]`; masked positions never affect later ones. Masks of other
        shapes apply only to attention.
      segment_ids: `[B, T]`; segments do not affect one another.
    """
    if mask is not None and mask.shape[1:3] == (1, 1):
      x = jnp.where(mask[:, 0, 0, :, None], x, 0.0)
    return self._convolve(x, self._zeros(x.shape[0], x.dtype), segment_ids)

  def start(self, batch: int) -> None:
    """Stores W − 1 zero vectors in 'cache'."""
    self.put_variable("cache", "last", self._zeros(batch, self.dtype))

  def prefill(
    self, x: Float[Array, "B P F"], lengths: Int[Array, "B"]
  ) -> Float[Array, "B P F"]:
    """Convolves P positions; stores the last of the first `lengths` in 'cache'."""
    padded = jnp.pad(x, ((0, 0), (WIDTH - 1, 0), (0, 0)))
    indices = lengths[:, None] + jnp.arange(WIDTH - 1)[None, :]
    last = jnp.take_along_axis(padded, indices[..., None], axis=1)
    self.put_variable("cache", "last", last)
    return self(x)

  def decode(self, x: Float[Array, "B 1 F"]) -> Float[Array, "B 1 F"]:
    """Convolves the next position with those in 'cache'."""
    previous = self.get_variable("cache", "last")
    last = jnp.concatenate([previous[:, 1:], x], axis=1)
    self.put_variable("cache", "last", last)
    return self._convolve(x, previous)

  def _zeros(self, batch, dtype):
    return jnp.zeros((batch, WIDTH - 1, self.features), dtype)

  def _convolve(self, x, previous, segment_ids=None):
    """Convolves positions after the `previous` W − 1, and applies the activation."""
    kernel, length = self.kernel.astype(x.dtype), x.shape[1]
    padded = jnp.concatenate([previous.astype(x.dtype), x], axis=1)
    out = x * kernel[0][None, None]
    for shift in range(1, WIDTH):
      shifted = padded[:, WIDTH - 1 - shift :][:, :length]
      if segment_ids is not None:
        first = segment_ids[:, :1] - 1
        shifted_ids = jnp.concatenate([first] * shift + [segment_ids], axis=1)
        is_same = shifted_ids[:, :length] == segment_ids
        shifted = jnp.where(is_same[..., None], shifted, 0.0)
      out += shifted * kernel[shift][None, None]
    if self.use_bias:
      out += self.bias.astype(x.dtype)[None, None]
    return jax.nn.silu(out) if self.activation == "silu" else out
