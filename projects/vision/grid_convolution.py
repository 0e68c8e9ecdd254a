"""Attention with convolutions over a grid before its projections (CvT)."""

from typing import Any

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.attention_config import AttentionConfig
from models.attention_module_config import SlotConfig
from models.batch_norm import BatchNorm
from models.block import Block
from models.depthwise import Depthwise
from models.multi_head_attention import MultiHeadAttention


class GridConvolution(nn.Module):
  """BN(x * k): a depthwise convolution over a grid, and batch norm.

  In training, the mean and variance of a channel are those of all tokens of the batch,
  and the running statistics move a tenth of the way towards them; in evaluation, the
  running statistics are used. Tokens before the grid are not changed.

  Attributes:
    size: side of the kernel.
    dtype: dtype of activations.
    param_dtype: dtype of parameters.

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
    """Combines each token of a grid with its neighbours.

    Args:
      x: `[B, T, F]`; the last rows · columns tokens are the grid in row-major order.
      grid: rows and columns.
      deterministic: whether to use the running statistics.
      axis_name: axis of a `pmap` whose devices share the rows of one batch.
    """
    (rows, columns), features = grid, x.shape[2]
    special, x = x[:, : -rows * columns], x[:, -rows * columns :]
    x = x.reshape(len(x), rows, columns, features)
    sides = (self.size, self.size)
    x = Depthwise(sides, self.dtype, self.param_dtype, name="convolution")(x)
    x = BatchNorm(self.dtype, self.param_dtype, name="norm")(
      x.reshape(len(x), rows * columns, features),
      deterministic=deterministic,
      axis_name=axis_name,
    )
    return jnp.concatenate([special, x], axis=1)


class ConvolutionalAttention(MultiHeadAttention):
  """Convolves the grid of tokens before each projection.

  Attributes:
    convolution: side of the kernels.

  Paper: CvT, section 3.2, arXiv:2103.15808.
  """

  convolution: int = 3

  def setup(self) -> None:
    """Creates the attention module, and a convolution for each projection."""
    super().setup()
    for name in self.projections:
      convolution = GridConvolution(
        self.convolution, self.dtype, self.param_dtype
      )
      setattr(self, f"{name}_convolution", convolution)

  def sources(
    self,
    sources: dict[str, Float[Array, "B T F"]],
    positions: Any,
    deterministic: bool,
    call: dict[str, Any],
  ) -> dict[str, Float[Array, "B T F"]]:
    """Convolves the inputs; `call` has `grid` and `axis_name` of the convolutions."""
    del positions
    options = {"deterministic": deterministic}
    options["axis_name"] = call.pop("axis_name", None)
    grid = call.pop("grid")
    return {
      name: getattr(self, f"{name}_convolution")(x, grid, **options)
      for name, x in sources.items()
      if name in self.projections
    }


class ConvolutionalBlock(Block):
  """A layer whose self-attention convolves the inputs of its projections.

  Attributes:
    convolution: side of the kernels; a call then has `grid` and `axis_name`.
  """

  convolution: int = 3

  @nn.nowrap
  def make_attention(
    self,
    mechanism: AttentionConfig,
    max_length: int,
    config: SlotConfig,
    module_type: type[MultiHeadAttention] | None = None,
    **options: Any,
  ) -> MultiHeadAttention:
    """Creates the attention module with convolutions."""
    del module_type
    return super().make_attention(
      mechanism,
      max_length,
      config,
      ConvolutionalAttention,
      convolution=self.convolution,
      **options,
    )
