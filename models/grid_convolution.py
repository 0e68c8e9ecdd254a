"""What comes before a projection that reads neighbours on a grid."""

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.batch_norm import BatchNorm
from models.depthwise import Depthwise


class GridConvolution(nn.Module):
  """BN(x * k): a depth-wise convolution of a grid, and batch norm.

  In training the mean and variance of a channel are those of all tokens of the
  batch, and the running ones move a tenth of the way towards them; otherwise
  they are the running ones. Tokens before the grid are left as they are.

  Attributes:
    size: side of the kernel.
    dtype: of activations.
    param_dtype: of parameters.

  Paper: CvT, section 3.2, arXiv:2103.15808.
  """

  size: int
  dtype: str
  param_dtype: str

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T F"],
    grid: tuple[int, int],
    *,
    deterministic: bool,
    axis_name: str | None = None,
  ) -> Float[Array, "B T F"]:
    """Tokens of a grid, each with its neighbours in it.

    Args:
      x: `[B, T, F]`, the last rows · columns of them row after row.
      grid: rows and columns.
      deterministic: whether the running statistics are taken.
      axis_name: of a `pmap` whose devices have the rows of one batch.
    """
    (rows, columns), features = grid, x.shape[2]
    own, x = x[:, : -rows * columns], x[:, -rows * columns :]
    x = x.reshape(len(x), rows, columns, features)
    sides = (self.size, self.size)
    x = Depthwise(sides, self.dtype, self.param_dtype, name="convolution")(x)
    x = BatchNorm(self.dtype, self.param_dtype, name="norm")(
      x.reshape(len(x), rows * columns, features),
      deterministic=deterministic,
      axis_name=axis_name,
    )
    return jnp.concatenate([own, x], axis=1)
