"""Embeds image patches as tokens by a residual block (Gato)."""

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

CHANNELS = 32
"""Number of channels of the convolutions, which the paper does not give."""

GROUPS = 32
"""Groups of channels in a group norm, as in the paper."""

NUM_POSITIONS = 128
"""Rows of the tables of positions, as in the paper."""

_EPSILON = 1e-6


class PatchEmbedding(nn.Module):
  """A vector for each patch of an image, including its position in the image.

      x = (2 p − 1) / √P                       pixels p in [0, 1]
      h = conv(x),  h ← h + conv(act(norm(conv(act(norm(h))))))
      out = W · h + row + column

  with 3 × 3 convolutions over a patch of P × P pixels, group norm and GELU. The
  `NUM_POSITIONS` positions are divided into equal intervals, one per row of the image.
  A patch has the embedding of one position in the interval of its row: a random one in
  training, and the central one otherwise. The same holds for columns.

  Attributes:
    features: F.
    dtype: dtype of activations.
    param_dtype: dtype of parameters.

  Cost: O(P² · CHANNELS²) per patch.

  Paper: A generalist agent, sections 2.1 and 2.2 and appendix C, arXiv:2205.06175.
  """

  features: int
  dtype: str
  param_dtype: str

  @nn.compact
  def __call__(
    self, patches: Float[Array, "B R C P P D"], *, deterministic: bool = True
  ) -> Float[Array, "B S F"]:
    """Embeds the patches of one image per row.

    Args:
      patches: R rows of C patches of an image, with D channels.
      deterministic: whether to use central positions; otherwise the rng 'dropout' is
        needed.

    Returns:
      `[B, R · C, F]`, in row-major order.
    """
    batch, rows, columns, size, _, depth = patches.shape
    types = {"dtype": self.dtype, "param_dtype": self.param_dtype}

    def conv(name):
      return nn.Conv(CHANNELS, (3, 3), name=name, **types)

    def norm_and_act(x, name):
      norm = nn.GroupNorm(GROUPS, epsilon=_EPSILON, name=name, **types)
      return jax.nn.gelu(norm(x), approximate=False)

    x = patches.reshape(-1, size, size, depth).astype(self.dtype)
    x = conv("stem")((2 * x - 1) / np.sqrt(size).astype(x.dtype))
    y = conv("first")(norm_and_act(x, "first_norm"))
    x = x + conv("second")(norm_and_act(y, "second_norm"))
    x = x.reshape(batch, rows * columns, -1)
    x = nn.Dense(self.features, name="projection", **types)(x)
    for axis, count in (("row", rows), ("column", columns)):
      table = nn.Embed(
        NUM_POSITIONS,
        self.features,
        embedding_init=nn.initializers.normal(0.02),
        name=f"{axis}_positions",
        **types,
      )
      positions = self._positions(batch, count, deterministic)
      grid = jnp.expand_dims(positions, 2 if axis == "row" else 1)
      grid = jnp.broadcast_to(grid, (batch, rows, columns))
      x = x + table(grid.reshape(batch, -1))
    return x

  def _positions(self, batch: int, count: int, deterministic: bool) -> Array:
    """Returns one position from each interval, `[batch, count]`."""
    bounds = np.arange(count + 1) * NUM_POSITIONS // count
    first, last = bounds[:-1], np.maximum(bounds[1:] - 1, bounds[:-1])
    shape = (batch, count)
    if deterministic:
      return jnp.broadcast_to(((first + last + 1) // 2)[None], shape)
    key = self.make_rng("dropout")
    return jax.random.randint(key, shape, first[None], last[None] + 1)
