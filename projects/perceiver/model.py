"""Perceiver IO: latents attend to inputs of any length, and outputs to the latents."""

from collections.abc import Callable, Mapping
import math
from typing import Any, cast

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import Dims
from models import embeddings
from models.attention_config import AttentionConfig
from models.attention_module_config import SlotConfig
from models.config import PAD_ID, ModelConfig
from models.head import Head
from models.io_config import HeadConfig
from models.kind import Sizes
from models.mechanism_variables import check_mechanisms
from models.mlp import Mlp
from models.multi_head_attention import MultiHeadAttention, apply_mechanism
from models.sizes import batch_array, check_length
from projects.perceiver.config import PerceiverConfig, Widths
from projects.perceiver.maps import LatentPictures
from projects.perceiver.pixels import Pixels

NORM_EPSILON = 1e-5
"""ε of every norm."""

_STD = 0.02
"""Initial standard deviation of learned vectors."""


class Layer(nn.Module):
  """One self- or cross-attention module and a feed-forward layer.

      x ← (x +) MultiHead(norm(x), norm(y)),   x ← x + FFN(norm(x))

  In cross-attention, y has a separate norm; in self-attention, y = x with one norm.

  Attributes:
    config: config of the model.
    mechanism: mechanism of the attention module.
    features: width of x.
    widths: widths of the attention module and of the feed-forward layer.
    max_length: largest number of keys.
    out_scale: factor of the initial values of output projections.
    residual: whether x is added to the output of the attention.
    attend: calls the mechanism of an attention module.

  Paper: Perceiver IO, section 3.1 and appendix E, arXiv:2107.14795.
  """

  config: PerceiverConfig
  mechanism: AttentionConfig
  features: int
  widths: Widths
  max_length: int
  out_scale: float = 1.0
  residual: bool = True
  attend: Callable[..., Array] = apply_mechanism

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B T F"],
    memory: Float[Array, "B S C"] | None = None,
    *,
    mask: Bool[Array, "B 1 1 S"] | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "B T F"]:
    """Applies the layer to x, which attends to `memory`, or to itself if None."""
    config = _layer_config(self.config, self.features, self.widths)
    module = "self_attention" if memory is None else "cross_attention"
    dropout = nn.Dropout(config.dropout_rate, deterministic=deterministic)
    if memory is not None:
      memory = config.make_norm(name="memory_norm")(memory)
    out = MultiHeadAttention(
      attention=self.mechanism.build(),
      dims=_dims(self.widths, self.max_length, self.features),
      features=self.features,
      config=SlotConfig(
        attention_bias=True,
        value_dim=self.widths.value // self.widths.num_heads,
      ),
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      out_scale=self.out_scale,
      attend=self.attend,
      name=module,
    )(
      config.make_norm(name=f"{module}_norm")(x),
      memory,
      mask=mask,
    )
    x = x + dropout(out) if self.residual else dropout(out)
    mlp = Mlp(config, self.out_scale, name="mlp")
    return x + dropout(mlp(config.make_norm(name="mlp_norm")(x)))


class Perceiver(LatentPictures, nn.Module):
  """Maps ids or images to logits through M latents.

      z = encoder(latents, inputs)              M latents attend to S inputs
      z = encoder_i(z), over all i, num_blocks times
      o = decoder(queries, z)                   T outputs attend to M latents

  Tokens are sums of embeddings and learned positions; pixels are embedded by `Pixels`.
  Queries are learned: one per position, or one for the classes. Queries of positions are
  initialised with sines, like the positions of the input, so that neighbours are
  similar; in the paper they are initialised randomly. For pieces of 128 bytes, sines
  give a loss of 2.87 instead of 3.17 nats per masked byte after 1,000 steps (unigram
  loss: 3.34).

  Attributes:
    config: config of the model.
    source_vocab_size: number of source ids; 0 with images.
    target_vocab_size: V, the number of logits.
    max_source_length: the longest input, in tokens or pixels.
    max_target_length: number of output queries.
    image_shape: height, width and channels of images, or None.
    attend: calls the mechanism of an attention module.

  Cost: O(S M + L M² + T M) time and memory with dense attention, L layers.

  Paper: Perceiver IO, arXiv:2107.14795.
  """

  config: PerceiverConfig
  source_vocab_size: int
  target_vocab_size: int
  max_source_length: int
  max_target_length: int
  image_shape: tuple[int, int, int] | None = None
  attend: Callable[..., Array] = apply_mechanism

  @nn.nowrap
  def arguments(
    self, batch: Mapping[str, Any]
  ) -> tuple[tuple[Array], dict[str, Any]]:
    """Returns the positional and keyword arguments of a call on a batch.

    The length of 'targets' is the number of outputs; a batch without targets has all.
    """
    if self.image_shape is not None:
      return (batch_array(batch, "image"),), {}
    options: dict[str, Any] = {}
    if "source_mask" in batch:
      options["source_mask"] = jnp.asarray(batch["source_mask"])
    if "targets" in batch:
      options["num_outputs"] = batch["targets"].shape[1]
    return (batch_array(batch, "source"),), options

  @nn.nowrap
  def example(self) -> dict[str, np.ndarray]:
    """Returns a batch whose shapes `initialize` uses."""
    if self.image_shape is not None:
      return {"image": np.zeros((1, *self.image_shape), np.float32)}
    return {"source": np.ones((1, 1), np.int32)}

  @nn.compact
  def __call__(
    self,
    source: Int[Array, "B S"] | Float[Array, "B H W C"],
    *,
    source_mask: Bool[Array, "B S"] | None = None,
    num_outputs: int | None = None,
    deterministic: bool = True,
  ) -> Float[Array, "B T V"]:
    """Computes the logits of each output.

    Args:
      source: ids, or images.
      source_mask: True at tokens; None means all ids except `PAD_ID`.
      num_outputs: T; only the first T queries are used; None means all.
      deterministic: whether dropout is off; otherwise the rng 'dropout' is needed.

    Returns:
      `[B, T, V]` float32, or float64 with dtype 'float64'.

    Raises:
      ValueError: a sequence or the number of outputs exceeds the model's limit.
    """
    config = self.config
    depth = config.num_layers * config.num_blocks
    encoder, decoder = config.layers("cross_attention")
    call = {"deterministic": deterministic}
    table = mask = None
    if self.image_shape is not None:
      x = Pixels(config, self.image_shape, name="pixels")(source)
    else:
      check_length("source", source.shape[1], self.max_source_length)
      if source_mask is None:
        source_mask = source != PAD_ID
      mask = source_mask[:, None, None, :]
      table = embeddings.token_table(
        self.source_vocab_size,
        config.input_features,
        config.dtype,
        config.param_dtype,
        "embedding",
      )
      positions = self._learned_vectors(
        "positions", _sines, self.max_source_length, config.input_features
      )
      x = table(source) + positions[None, : source.shape[1]]
    normal = nn.initializers.normal(_STD)
    z = self._learned_vectors(
      "latents", normal, config.num_latents, config.features
    )
    z = Layer(
      config,
      encoder,
      config.features,
      config.inputs,
      self.max_source_length,
      residual=config.input_residual,
      attend=self.attend,
      name="encoder",
    )(jnp.broadcast_to(z[None], (len(x), *z.shape)), x, mask=mask, **call)
    layers = [
      Layer(
        config,
        mechanism,
        config.features,
        config.latents,
        config.num_latents,
        1.0 / math.sqrt(2 * depth),
        attend=self.attend,
        name=f"encoder_{i}",
      )
      for i, mechanism in enumerate(config.layers("encoder_attention"))
    ]
    for layer in layers * config.num_blocks:
      z = layer(z, **call)
    queries = self._learned_vectors(
      "queries",
      normal if config.head == "class" else _sines,
      self.max_target_length,
      config.output_width,
    )
    if num_outputs is not None:
      check_length("targets", num_outputs, self.max_target_length)
      queries = queries[:num_outputs]
    out = Layer(
      config,
      decoder,
      config.output_width,
      config.outputs,
      config.num_latents,
      residual=config.output_residual,
      attend=self.attend,
      name="decoder",
    )(jnp.broadcast_to(queries[None], (len(z), *queries.shape)), z, **call)
    head_config = _layer_config(config, config.output_width, config.outputs)
    return Head(head_config, self.target_vocab_size, name="head")(out, table)

  def _learned_vectors(self, name, init, size, width):
    config = self.config
    vectors = self.param(name, init, (size, width), config.param_dtype)
    return vectors.astype(config.dtype)


def create(config: PerceiverConfig, sizes: Sizes) -> Perceiver:
  """Creates the module of a config for the sizes of a task, as in `models.create`.

  Raises:
    ValueError: config and sizes are incompatible; the message starts with the field or
      the argument.
  """
  shape = sizes.input_shapes.get("image")
  if shape is None:
    if config.fourier_bands is not None:
      raise ValueError(
        f"fourier_bands: expected None for a task without images, got "
        f"{config.fourier_bands}"
      )
    inputs = sizes.max_source_length or 0
  else:
    if config.fourier_bands is None:
      raise ValueError(
        "fourier_bands: expected the number of frequencies of pixel positions "
        "for a task of images, got None"
      )
    inputs = math.prod(shape[:2])
  for name, size, is_needed in (
    ("source_vocab_size", sizes.source_vocab_size, shape is None),
    ("max_source_length", sizes.max_source_length, shape is None),
    ("target_vocab_size", sizes.target_vocab_size, True),
    ("max_target_length", sizes.max_target_length, config.head == "tokens"),
  ):
    if is_needed and (size is None or size < 1):
      raise ValueError(
        f"{name}: expected at least 1 for kind 'perceiver', got {size}"
      )
  if config.head == "tokens" and not (
    sizes.shared_vocabulary
    and sizes.source_vocab_size == sizes.target_vocab_size
  ):
    raise ValueError(
      "head: 'tokens' predicts the ids that it reads; expected 'class' for a "
      "task with another target vocabulary"
    )
  encoder, decoder = config.layers("cross_attention")
  latents = config.num_latents
  for field, configs, widths, length in (
    (
      "encoder_attention",
      config.layers("encoder_attention"),
      config.latents,
      latents,
    ),
    ("cross_attention", [encoder], config.inputs, inputs),
    ("cross_attention", [decoder], config.outputs, latents),
  ):
    check_mechanisms(field, configs, _dims(widths, length, config.features))
  return Perceiver(
    config,
    source_vocab_size=sizes.source_vocab_size or 0,
    target_vocab_size=sizes.target_vocab_size,
    max_source_length=inputs,
    max_target_length=(
      1 if config.head == "class" else cast(int, sizes.max_target_length)
    ),
    image_shape=shape,
  )


def _sines(key: Array, shape: tuple[int, int], dtype: Any) -> Array:
  """Initializes positions with sines and cosines, with standard deviation `_STD`."""
  del key
  size, width = shape
  waves = embeddings.sinusoidal(np.arange(size)[None], width + width % 2)
  return (math.sqrt(2) * _STD * waves[0, :, :width]).astype(dtype)


def _dims(widths: Widths, max_length: int, features: int) -> Dims:
  heads = widths.num_heads
  return Dims(heads, heads, widths.query // heads, max_length, features)


def _layer_config(
  config: PerceiverConfig, features: int, widths: Widths
) -> ModelConfig:
  """Returns the config of norms, feed-forward layers and heads."""
  return ModelConfig(
    kind="encoder",
    num_layers=config.num_layers,
    num_heads=widths.num_heads,
    head_dim=widths.query // widths.num_heads,
    features=features,
    mlp_features=widths.mlp,
    activation=config.activation,
    position="none",
    norm_epsilon=NORM_EPSILON,
    dropout_rate=config.dropout_rate,
    head=cast(Any, config.head),
    output=HeadConfig(head_bias=True),
    dtype=config.dtype,
    param_dtype=config.param_dtype,
  )
