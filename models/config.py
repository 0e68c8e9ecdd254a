"""The config of a Transformer: a frozen dataclass that validates itself.

An invalid config raises a ValueError of one line that starts with the name of the
field, before data is read and before anything compiles.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from flax import linen as nn
import jax
import jax.numpy as jnp

from attention import Dims
from attention.names import failure_location, resolve, unknown_name
from models import nested
from models.attention_config import (
  NEEDS,
  AttentionConfig,
  Layers,
  check_supports,
  names,
)
from models.attention_module_config import AroundConfig, SlotConfig
from models.config_checks import (
  check_heads,
  check_positions,
  check_sublayers,
  check_unread_fields,
)
from models.embeddings import ADDED
from models.io_config import EmbeddingConfig, HeadConfig
from models.mlp_config import MlpConfig
from models.norms import NORM_KINDS
from settings.fields import Count, Rate, Whole, checked

PAD_ID = 0
"""The id of padding in a source without a mask."""

KINDS = ("encoder_decoder", "decoder", "encoder")
ACTIVATIONS = {
  "relu": jax.nn.relu,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "silu": jax.nn.silu,
  "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Maps `activation` to its function."""

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]

POSITIONS = {
  **ADDED,
  **dict.fromkeys(("learned", "rotary", "t5", "alibi", "shaw", "none")),
  "disentangled": None,
}
"""Maps `position` to the function whose result is added to embeddings, or None."""

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def _try_norm(norm: Any) -> None:
  if not (isinstance(norm, type) and issubclass(norm, nn.Module)):
    raise TypeError("expected a class of Linen modules")
  norm(epsilon=1e-6, dtype="float32", param_dtype="float32")


_FIELDS = {
  "encoder_decoder": tuple(NEEDS),
  "decoder": ("decoder_attention",),
  "encoder": ("encoder_attention",),
}


@checked
class ModelConfig:
  """An encoder-decoder, decoder or encoder Transformer.

  Config files and commands may give the fields of `slot`, `mlp`, `embedding` and
  `output` without their section, as may Python code with `models.nested`.

  Attributes:
    kind: 'encoder_decoder', 'decoder' or 'encoder'.
    num_layers: layers of the encoder, and of the decoder.
    num_decoder_layers: layers of the decoder; None is `num_layers`.
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads, each shared by N/K query heads; None is N.
    head_dim: H; None is features / N.
    features: F, width of the residual stream.
    mlp_features: hidden width of the feed-forward layers; 0 means none (Mamba-2).
    activation: the activation of the feed-forward layers: 'relu' (Vaswani), 'gelu'
      (x·Φ(x)), 'gelu_tanh' (its approximation by tanh, GPT-2), 'silu', 'relu2'
      (max(x, 0)², Primer), or 'package.module:function'.
    gated: whether the activation multiplies a second projection (Shazeer 2020).
    parallel: whether attention and feed-forward layer take the same input, to which
      both outputs are added (GPT-NeoX).
    dropout_rate: the dropout rate of sub-layer outputs and of embedding sums, as in the
      paper.
    attention_dropout_rate: the dropout rate of attention weights.
    position: 'sinusoidal' (Vaswani) or 'learned', added to the embeddings;
      'rotary' (Su), 't5', 'alibi', 'shaw' or 'disentangled' (DeBERTa) within
      self-attention; 'none'; or 'package.module:function' of
      `(positions, features)`, whose result is added to the embeddings.
    norm: 'post' as in the paper, 'pre' with one more norm at the end, 'output',
      which normalizes the output of each sub-layer (OLMo 2), 'sandwich', which is
      'pre' and 'output' together (Gemma 2), or 'residual', which is 'pre' with the
      normalized inputs as the residual stream (MiniMax-01).
    norm_kind: 'layer', 'layer_without_bias', 'rms' (Zhang and Sennrich 2019)
      without a mean or bias, 'rms_from_one', which stores its scales minus 1
      (Gemma), or 'package.module:Norm' of a Linen module.
    norm_epsilon: ε, which a norm adds to the variance.
    head: 'tokens', logits of every position; 'class', logits of only the first
      position; or 'hidden', the features of every position.
    tie_embeddings: whether the softmax shares the embedding table of the target, and
      also that of the source if they share a vocabulary.
    remat: 'block' stores only the input of each layer and recomputes the rest in the
      backward pass; 'none' stores everything.
    dtype: the dtype of activations; logits and softmax are float32, or float64 with
      dtype 'float64'.
    param_dtype: the dtype of parameters.
    encoder_attention: mechanism of the encoder's self-attention, or several that
      layers take in turn; None is dense.
    decoder_attention: likewise, of the decoder's self-attention.
    cross_attention: likewise, of the attention from decoder to encoder.
    slot: projections, norms, gates and positions of the attention modules.
    mlp: biases, gates and experts of the feed-forward layers.
    decoder_around: overrides for the layers of kind 'decoder', which take them in
      turn (Qwen3-Next); None means no overrides.
    embedding: embeddings of ids and positions.
    output: the head.

  Raises:
    ValueError: two fields are incompatible.
  """

  kinds: ClassVar[tuple[str, ...]] = KINDS
  module: ClassVar[str] = "models.transformer:create"

  kind: str
  num_layers: Count
  num_heads: Count
  features: Count
  mlp_features: Whole
  num_decoder_layers: Count | None = None
  num_kv_heads: int | None = None
  head_dim: Count | None = None
  activation: str = "relu"
  gated: bool = False
  parallel: bool = False
  dropout_rate: Rate = 0.0
  attention_dropout_rate: Rate = 0.0
  position: str = "sinusoidal"
  norm: Literal["pre", "post", "sandwich", "output", "residual"] = "pre"
  norm_kind: str = "layer"
  norm_epsilon: Annotated[float, Ge(0)] = 1e-6
  head: Literal["tokens", "class", "hidden"] = "tokens"
  tie_embeddings: bool = True
  remat: Literal["none", "block"] = "none"
  dtype: Dtype = "float32"
  param_dtype: Dtype = "float32"
  encoder_attention: Layers | None = None
  decoder_attention: Layers | None = None
  cross_attention: Layers | None = None
  slot: SlotConfig = dataclasses.field(default_factory=SlotConfig)
  mlp: MlpConfig = dataclasses.field(default_factory=MlpConfig)
  decoder_around: tuple[AroundConfig, ...] | None = None
  embedding: EmbeddingConfig = dataclasses.field(
    default_factory=EmbeddingConfig
  )
  output: HeadConfig = dataclasses.field(default_factory=HeadConfig)

  def __post_init__(self):
    if self.kind not in self.kinds:
      raise ValueError(f"kind: {unknown_name(self.kind, self.kinds)}")
    for config, field in (
      (self, "activation"),
      (self.output, "transform_activation"),
    ):
      self._check_function(
        field,
        ACTIVATIONS,
        "function",
        lambda f: jax.eval_shape(f, jax.ShapeDtypeStruct((2, 2), "float32")),
        config,
      )
    self._check_function(
      "position",
      POSITIONS,
      "function",
      lambda f: jax.eval_shape(
        lambda positions: f(positions, 2),
        jax.ShapeDtypeStruct((2, 2), "int32"),
      ),
    )
    self._check_function(
      "norm_kind",
      NORM_KINDS,
      "Norm",
      _try_norm,
    )
    check_sublayers(self)
    check_heads(self)
    check_positions(self)
    check_unread_fields(self)
    self._check_attentions()
    self._check_overrides()

  @property
  def layout(self) -> str:
    """The layout of batches, which equals the kind."""
    return self.kind

  @property
  def query_dim(self) -> int:
    """H, the head dimension."""
    return self.head_dim or self.features // self.num_heads

  @property
  def vocab_size(self) -> int | None:
    """The size of the vocabulary, if larger than the task's."""
    return self.embedding.vocab_size

  @property
  def max_length(self) -> int | None:
    """The largest length, if larger than the task's."""
    return self.embedding.max_length

  @property
  def embedding_dim(self) -> int:
    """E, the width of the embedding tables."""
    return self.embedding.embedding_dim or self.features

  @functools.cached_property
  def added_position(self) -> Callable[..., Any] | None:
    """`(positions, features) -> encodings` to add to embeddings, or None."""
    return resolve(self.position, POSITIONS, "function")

  @functools.cached_property
  def activation_function(self) -> Callable[..., Any]:
    """The function named by `activation`."""
    return resolve(self.activation, ACTIVATIONS, "function")

  @functools.cached_property
  def make_norm(self) -> Callable[..., nn.Module]:
    """The norm named by `norm_kind`, with the model's ε and dtypes."""
    return functools.partial(
      resolve(self.norm_kind, NORM_KINDS, "Norm"),
      epsilon=self.norm_epsilon,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )

  @property
  def kv_heads(self) -> int:
    """K, the number of key/value heads."""
    return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

  def dims(self, max_length: int) -> Dims:
    """The dimensions from which a mechanism creates its variables and caches."""
    return Dims(
      self.num_heads,
      self.kv_heads,
      self.query_dim,
      max_length,
      self.features,
      self.slot.value_dim,
    )

  @functools.cached_property
  def attentions(self) -> dict[str, tuple[AttentionConfig, ...]]:
    """The mechanisms of each attention field, which layers take in turn."""
    return {
      field: value if isinstance(value, tuple) else (value,)
      for field in _FIELDS[self.layout]
      for value in [getattr(self, field)]
    }

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of each layer to which the field applies."""
    mechanisms = self.attentions[field]
    return tuple(
      mechanisms[i % len(mechanisms)] for i in range(self._layers_with(field))
    )

  def _layers_with(self, field: str) -> int:
    if field == "encoder_attention":
      return self.num_layers
    return self.num_decoder_layers or self.num_layers

  @functools.cached_property
  def cycle(self) -> tuple["ModelConfig", ...]:
    """The configs of the layers of a decoder or encoder, until they repeat."""
    stack, overrides = self._overrides
    if overrides is None:
      return (self,)
    mechanisms = self.attentions[f"{stack}_attention"]
    period = math.lcm(len(overrides), len(mechanisms))
    configs = []
    for layer in range(min(period, self.num_layers)):
      index = layer % len(overrides)
      try:
        config = nested.replace(
          self,
          decoder_around=None,
          encoder_around=None,
          **{f"{stack}_attention": mechanisms[layer % len(mechanisms)]},
          **overrides[index].changes,
        )
      except ValueError as error:
        raise ValueError(f"{stack}_around[{index}].{error}") from None
      configs.append(config)
    return tuple(configs)

  @functools.cached_property
  def second(self) -> "ModelConfig | None":
    """The config of the second attention of a layer, or None."""
    second = self.slot.second_attention
    if second is None:
      return None
    return nested.replace(
      self,
      decoder_around=None,
      decoder_attention=second.mechanism,
      **{**second.around.changes, "second_attention": None},
    )

  @property
  def encoder_configs(self) -> tuple["ModelConfig", ...]:
    """The config of each layer of the encoder."""
    cycle = self.cycle
    return tuple(cycle[i % len(cycle)] for i in range(self.num_layers))

  @property
  def decoder_configs(self) -> tuple["ModelConfig", ...]:
    """The config of each layer of the decoder."""
    number = self.num_decoder_layers or self.num_layers
    return tuple(self.cycle[i % len(self.cycle)] for i in range(number))

  @property
  def _overrides(self):
    """The stack whose layers may have overrides, and these overrides."""
    if self.layout == "encoder":
      return "encoder", self.slot.encoder_around
    return "decoder", self.decoder_around

  def _check_function(self, field, table, kind, probe, config=None):
    """Checks a field with a known name, or an import path, which `probe` calls."""
    name = getattr(config or self, field)
    if name is None or name in table:
      return
    try:
      function = resolve(name, table, kind)
    except ValueError as error:
      raise ValueError(f"{field}: {error}") from None
    try:
      probe(function)
    # User code may raise any exception.
    except Exception as error:
      failure = failure_location(error, name)
      raise ValueError(f"{field}: {name} raised {failure}") from None

  def _check_attentions(self):
    for field in NEEDS:
      value = getattr(self, field)
      if field not in _FIELDS[self.layout]:
        if value is not None:
          got = names(value if isinstance(value, tuple) else (value,))
          raise ValueError(
            f"{field}: kind {self.kind!r} has no such layer; expected a config "
            f"without this field, got {got}"
          )
      elif value is None:
        object.__setattr__(self, field, AttentionConfig("dense"))
      elif value == ():
        raise ValueError(f"{field}: expected at least one mechanism, got none")
    for field, mechanisms in self.attentions.items():
      if len(mechanisms) > self._layers_with(field):
        raise ValueError(
          f"{field}: expected at most one mechanism for each of the "
          f"{self._layers_with(field)} layers, got {len(mechanisms)}"
        )
      needs = dict(NEEDS[field])
      tables = "t5", "alibi", "shaw", "disentangled"
      if self.position in tables and "cross" not in needs:
        needs["relative"] = (
          f"carry relative positions (position '{self.position}')"
        )
      if self.attention_dropout_rate:
        needs["dropout"] = "drop attention weights (attention_dropout_rate)"
      if self.slot.global_projections:
        needs["global"] = "have global tokens (global_projections)"
      shared = {
        "num_kv_heads": self.num_kv_heads,
        "num_qk_heads": self.slot.num_qk_heads,
      }
      for config in mechanisms:
        check_supports(field, config, needs)
        if "own_keys" not in config.build().supports:
          continue
        for name, number in shared.items():
          if number not in (None, self.num_heads):
            raise ValueError(
              f"{name}: {config.name} computes a key and a value for each head; "
              f"expected None, got {number}"
            )

  def _check_overrides(self):
    stack, overrides = self._overrides
    if overrides is None:
      return
    if not overrides:
      raise ValueError(
        f"{stack}_around: expected at least one override, got none"
      )
    for i, override in enumerate(overrides):
      if override.position and self.position not in ("rotary", "none"):
        raise ValueError(
          f"{stack}_around[{i}].position: expected None with position "
          f"{self.position!r} of the model, got {override.position!r}"
        )
      if override.norm and self.norm == "post":
        raise ValueError(
          f"{stack}_around[{i}].norm: expected None with norm 'post' of the model, "
          f"got {override.norm!r}"
        )
      # All layers share one table, with an entry for each head.
      if override.num_heads and self.position in ("t5", "alibi"):
        raise ValueError(
          f"{stack}_around[{i}].num_heads: expected None with position "
          f"{self.position!r}, whose table all layers share, got "
          f"{override.num_heads}"
        )
    _ = self.cycle  # Checks the config of each layer.
