"""Speech encoders with logits of every symbol at every position."""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from models.attention_config import AttentionConfig
from models.batch_norm import BatchNorm
from models.config import ACTIVATIONS
from models.depthwise import depthwise
from models.head_projections import kernel_init
from models.kind import Sizes
from models.mechanism_variables import check_mechanisms
from models.mlp import Mlp
from models.multi_head_attention import apply_mechanism
from models.sizes import batch_array, check_length
from projects.speech.config import ConformerConfig
from projects.speech.features import (
  Extractor,
  Subsampling,
  num_positions,
  without_padding,
)
from projects.speech.maps import SpectrogramPictures
from projects.speech.slots import ATTENTION_MODULES


class Convolution(nn.Module):
  """The convolution module: gated, depthwise along time, with batch norm.

    a, b = x·W₁        y = a ⊙ σ(b)
    z_t = Σ_j k_j ⊙ y_{t + j − (R−1)/2}        j = 0 … R−1
    out = activation(batch norm(z)) · W₂

  With `mask_convolution`, y is 0 at padding and batch norm ignores padding, so padding
  has no effect.

  Attributes:
    config: config of the model.
    out_scale: factor of the last kernel's initial values.

  Paper: Conformer, section 2.2, arXiv:2005.08100.
  """

  config: ConformerConfig
  out_scale: float

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T F"],
    mask: Bool[Array, "B T"] | None,
    *,
    deterministic: bool,
    axis_name: str | None,
  ) -> Float[Array, "B T F"]:
    """Applies the module to a sequence."""
    config = self.config
    dense = functools.partial(
      nn.Dense,
      use_bias=False,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
    )
    first = dense(2 * config.features, name="gated")
    last = dense(
      config.features, kernel_init=kernel_init(self.out_scale), name="out"
    )
    mask = mask if config.mask_convolution else None
    value, gate = jnp.split(first(x), 2, axis=-1)
    x = without_padding(value * jax.nn.sigmoid(gate), mask)
    kernel = self.param(
      "kernel",
      nn.initializers.normal(1 / math.sqrt(config.kernel_size)),
      (config.kernel_size, config.features),
      config.param_dtype,
    )
    x = depthwise(x, kernel.astype(x.dtype))
    x = BatchNorm(config.dtype, config.param_dtype, name="batch_norm")(
      x, mask, deterministic=deterministic, axis_name=axis_name
    )
    return last(ACTIVATIONS[config.activation](x))


class ConformerBlock(nn.Module):
  """x + ½ FFN(x), + attention, + convolution, + ½ FFN, then a norm.

  Each sub-layer has its own norm at its input and dropout at its output.

  Attributes:
    config: config of the model.
    mechanism: self-attention mechanism.
    max_length: largest length of a sequence.
    attend: calls the mechanism of an attention module.

  Paper: Conformer, section 2.4, arXiv:2005.08100.
  """

  config: ConformerConfig
  mechanism: AttentionConfig
  max_length: int
  attend: Callable[..., Array] = apply_mechanism

  def setup(self) -> None:
    """Creates the sub-layers and their norms."""
    config, block = self.config, self.config.block
    # As in `Block`: the scale of the residual stream is similar at all depths.
    out_scale = 1.0 / math.sqrt(4 * config.num_layers)
    self.first_mlp_norm, self.first_mlp = (
      block.make_norm(),
      Mlp(block, out_scale),
    )
    self.self_attention_norm = block.make_norm()
    self.self_attention = ATTENTION_MODULES[config.position](
      attention=self.mechanism.build(),
      dims=config.dims(self.max_length),
      features=config.features,
      config=block.slot,
      rotary=config.position == "rotary",
      dropout_rate=config.attention_dropout_rate,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      out_scale=out_scale,
      attend=self.attend,
    )
    self.convolution_norm = block.make_norm()
    self.convolution = Convolution(config, out_scale)
    self.last_mlp_norm, self.last_mlp = block.make_norm(), Mlp(block, out_scale)
    self.norm = block.make_norm()
    self.dropout = nn.Dropout(config.dropout_rate)

  def __call__(
    self,
    x: Float[Array, "B T F"],
    mask: Bool[Array, "B T"] | None,
    *,
    deterministic: bool,
    axis_name: str | None,
  ) -> Float[Array, "B T F"]:
    """Applies the block to whole sequences."""

    def drop(out):
      return self.dropout(out, deterministic=deterministic)

    x = x + 0.5 * drop(self.first_mlp(self.first_mlp_norm(x)))
    out = self.self_attention(
      self.self_attention_norm(x),
      positions=np.arange(x.shape[1])[None, :],
      deterministic=deterministic,
      mask=None if mask is None else mask[:, None, None, :],
    )
    x = x + drop(out)
    out = self.convolution(
      self.convolution_norm(x),
      mask,
      deterministic=deterministic,
      axis_name=axis_name,
    )
    x = x + drop(out)
    x = x + 0.5 * drop(self.last_mlp(self.last_mlp_norm(x)))
    return self.norm(x)


class Conformer(SpectrogramPictures, nn.Module):
  """Maps log-mel frames, or samples, to logits of symbols at each position.

  Attributes:
    config: config of the model.
    vocab_size: V, including the blank of CTC.
    max_length: number of positions of the longest input.
    frames_shape: frames and bands of the longest input; None for samples.
    attend: calls the mechanism of an attention module.

  Paper: Conformer, arXiv:2005.08100; `docs.md` lists the differences.
  """

  state: ClassVar[tuple[str, ...]] = ("batch_stats",)

  config: ConformerConfig
  vocab_size: int
  max_length: int
  frames_shape: tuple[int, int] | None = None
  attend: Callable[..., Array] = apply_mechanism

  @nn.nowrap
  def arguments(
    self, batch: Mapping[str, Any]
  ) -> tuple[tuple[Array], dict[str, Any]]:
    """Returns the positional and keyword arguments of a call on a batch."""
    name = "audio" if self.frames_shape is None else "frames"
    options = {}
    if "source_mask" in batch:
      options["source_mask"] = jnp.asarray(batch["source_mask"]) != 0
    return (batch_array(batch, name),), options

  @nn.nowrap
  def example(self) -> dict[str, np.ndarray]:
    """Returns a batch whose shapes `initialize` uses."""
    if self.frames_shape is not None:
      bands = self.frames_shape[1]
      return {"frames": np.zeros((1, 1, bands), np.float32)}
    extractor = self.config.extractor
    assert extractor is not None  # Models of samples have an extractor.
    samples = 1
    for size, stride in zip(
      extractor.kernel_sizes[::-1], extractor.strides[::-1], strict=True
    ):
      samples = (samples - 1) * stride + size
    return {"audio": np.zeros((1, samples), np.float32)}

  def setup(self) -> None:
    """Creates the front end, the blocks and the softmax."""
    config = self.config
    front_end = Extractor if self.frames_shape is None else Subsampling
    self.front = front_end(config)
    self.encoder = [
      ConformerBlock(config, mechanism, self.max_length, attend=self.attend)
      for mechanism in config.layers("encoder_attention")
    ]
    self.encoder_norm = config.block.make_norm()
    self.symbols = nn.Dense(
      self.vocab_size, dtype=config.dtype, param_dtype=config.param_dtype
    )
    self.dropout = nn.Dropout(config.dropout_rate)

  def __call__(
    self,
    inputs: Float[Array, "B S M"] | Float[Array, "B S"],
    *,
    source_mask: Bool[Array, "B S"] | None = None,
    deterministic: bool = True,
    axis_name: str | None = None,
  ) -> Float[Array, "B T V"]:
    """Computes the logits of each position.

    Args:
      inputs: log-mel frames `[B, S, M]`, or samples `[B, S]`.
      source_mask: False at padding, which is at the end; None means no padding.
      deterministic: whether dropout is off and batch norm uses running statistics;
        otherwise the rng 'dropout' is needed.
      axis_name: axis of a `pmap` whose devices share the rows of one batch.

    Returns:
      `[B, T, V]` float32, or float64 with dtype 'float64'. Position j belongs to the
      frames near 4 j.

    Raises:
      ValueError: an input is longer than the model allows.
    """
    if self.frames_shape is not None:
      check_length("frames", inputs.shape[1], self.frames_shape[0])
    x, mask = self.front(inputs, source_mask)
    x = self.dropout(x, deterministic=deterministic)
    for block in self.encoder:
      x = block(x, mask, deterministic=deterministic, axis_name=axis_name)
    logits = self.symbols(self.encoder_norm(x))
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def create(config: ConformerConfig, sizes: Sizes) -> Conformer:
  """Creates the model for a task, without computing anything.

  Raises:
    ValueError: the task does not have the inputs that the model reads, or a mechanism
      does not support its length; the message starts with the field.
  """
  if sizes.target_vocab_size < 2:
    raise ValueError(
      "target_vocab_size: expected at least a blank and a symbol, got "
      f"{sizes.target_vocab_size}"
    )
  frames_shape = sizes.input_shapes.get("frames")
  if config.extractor is None:
    if frames_shape is None:
      raise ValueError(
        "kind: 'conformer' reads log-mel frames, which the task 'speech' has; "
        "this one has none"
      )
    max_length = num_positions(frames_shape[0])
  elif frames_shape is not None:
    raise ValueError(
      "extractor: it reads samples; expected None for a task of log-mel frames"
    )
  else:
    max_length = sizes.max_source_length or 1
  for field, configs in config.attentions.items():
    check_mechanisms(field, configs, config.dims(max_length))
  return Conformer(config, sizes.target_vocab_size, max_length, frames_shape)
