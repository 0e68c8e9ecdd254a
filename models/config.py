"""What a model is made of, as frozen dataclasses that check themselves.

Every fault is a ValueError that starts with the name of the field, raised when
the config is made: before data is read and before anything compiles.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

from attention import Dims
from attention.positions import t5_buckets
from models.around_config import AroundConfig
from models.attention_config import (
  NEEDS,
  AttentionConfig,
  Layers,
  check_supports,
  names,
)
from models.kind import Sizes
from settings.checks import check, check_ranges
from settings.suggest import check_choices

PAD_ID = 0
"""Id of padding in a source where nothing else says what is padding."""

KINDS = ("encoder_decoder", "decoder", "encoder")
POSITIONS = (
  "sinusoidal",
  "learned",
  "rotary",
  "t5",
  "alibi",
  "shaw",
  "none",
)
NORMS = ("pre", "post", "sandwich", "output")
NORM_KINDS = ("layer", "rms", "rms_from_one")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
QUERY_KEY_NORMS = ("none", "rms", "rms_from_one", "rms_joint", "l2")
OUTPUT_NORMS = ("none", "rms", "group", "rms_joint")
OUTPUT_GATES = ("none", "silu", "sigmoid")
HEADS = ("tokens", "class", "hidden")
REMAT = ("none", "block")
DTYPES = ("float32", "bfloat16", "float16", "float64")

_FARTHEST = 2**20
"""The largest `relative_distance`; a table has an entry for each distance."""

_SLOTS = {
  "encoder_decoder": tuple(NEEDS),
  "decoder": ("decoder_attention",),
  "encoder": ("encoder_attention",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """An encoder-decoder, decoder or encoder Transformer.

  Attributes:
    kind: 'encoder_decoder', 'decoder' or 'encoder'.
    num_layers: layers of the encoder, and of the decoder.
    num_decoder_layers: layers of the decoder, if not as many.
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads that groups of N/K query heads share;
      None is N.
    num_qk_heads: heads of queries and keys, each shared by neighbouring heads of
      values ("multi-value attention", Mamba-2); None shares none.
    head_dim: H; None is features / N.
    value_dim: V, width of the values of each head; None is H.
    features: F, width of the residual stream.
    mlp_features: width inside the feed-forward layers; 0 has none (Mamba-2).
    activation: of the feed-forward layers: 'relu' (Vaswani), 'gelu' (x·Φ(x)),
      'gelu_tanh' (its approximation by tanh, GPT-2) or 'silu'.
    gated: the activation multiplies a second projection (Shazeer 2020).
    mlp_bias: whether the feed-forward layers have biases.
    attention_bias: whether the projections around attention have biases.
    attention_scale: factor of the attention logits; None is 1/√H.
    query_key_norm: of the query and key of each head, before rotary positions:
      'rms', by their root mean square (Qwen3), 'rms_from_one', likewise with scales
      that are stored as what they have beyond 1 (Qwen3-Next), 'rms_joint', by that
      of all heads together (OLMo 2), 'l2', to length 1, or 'none'.
    short_convolution: queries, keys and values of a decoder's self-attention are
      convolved with the three positions before, then SiLU (Mamba, DeltaNet). Of a
      mechanism that makes its own keys ('own_keys') only queries are.
    short_convolution_bias: these have biases.
    output_norm: of the result of each head of self-attention: 'rms' (GLA,
      DeltaNet), 'group' (RetNet) or 'none'; or 'rms_joint', of all heads together
      and after the gate (Mamba-2).
    output_gate: 'silu' (RetNet, GLA) or 'sigmoid' (Kimi Linear) of another
      projection of the inputs, which multiplies that result; or 'none'.
    global_projections: tokens of `global_tokens` have projections of their own
      (Longformer).
    parallel: attention and feed-forward layer read the same input, and both are
      added to it (GPT-NeoX).
    dropout_rate: of sub-layer outputs and of embedding sums, as in the paper.
    attention_dropout_rate: of attention weights.
    position: 'sinusoidal' (Vaswani) or 'learned', added to the embeddings;
      'rotary' (Su), 't5', 'alibi' or 'shaw' within self-attention; or 'none'.
    position_offset: position of the first token, of 'learned'.
    position_padding: an id that does not count and is at `position_offset` − 1
      (RoBERTa); None counts every position.
    rotary_theta: base of the rotary wavelengths.
    rotary_fraction: share of the head dimension that rotary positions turn.
    relative_buckets: buckets of distance of 't5'.
    relative_distance: distance at which its last bucket begins.
    norm: 'post' as in the paper, 'pre' with one more norm at the end, 'output',
      which norms what a sub-layer adds (OLMo 2), or 'sandwich', which is both of
      these (Gemma 2).
    norm_kind: 'layer', 'rms' (Zhang and Sennrich 2019) without a mean or bias, or
      'rms_from_one', whose scales are stored as what they have beyond 1 (Gemma).
    norm_epsilon: what a norm adds to the variance.
    embedding_norm: whether the sum of embeddings is normalised (BERT).
    embedding_scale: factor of embeddings; None is √F (Vaswani).
    token_types: size of a table of token types, such as BERT's two segments; 0
      has none.
    head: 'tokens', logits of every position; 'class', logits of the first
      position alone; or 'hidden', the features of every position.
    pooler: a layer with tanh before the classes (BERT).
    head_transform: a layer with activation and norm before the logits of tokens
      (BERT).
    head_bias: whether logits have a bias.
    logit_scale: factor of what the softmax's table is multiplied with.
    logit_soft_cap: c; logits x of tokens become c · tanh(x / c) (Gemma 2). None
      caps nothing; attention has `logits_soft_cap` of its own.
    tie_embeddings: the softmax shares the target's embedding table, and the
      source's too where the vocabulary is shared.
    tie_inputs: encoder and decoder read one table where the vocabulary is
      shared; None is as `tie_embeddings`.
    vocab_size: ids that the model knows, if more than its task has.
    max_length: the longest sequence, if longer than its task's.
    remat: 'block' keeps of each layer its input alone and computes the rest again
      for the backward pass; 'none' keeps everything.
    dtype: of activations; logits and softmax are float32, or float64 like it.
    param_dtype: of parameters.
    encoder_attention: mechanism of the encoder, or several that layers take in
      turn; None is dense.
    decoder_attention: likewise, of the decoder's self-attention.
    cross_attention: likewise, from decoder to encoder.
    decoder_around: what the layers of kind 'decoder' have around self-attention
      that differs from this config, in turn (Qwen3-Next); None has them alike.

  Raises:
    ValueError: a value or a pair that cannot work; the message starts with the
      field.
  """

  kinds: ClassVar[tuple[str, ...]] = KINDS

  kind: str
  num_layers: int
  num_heads: int
  features: int
  mlp_features: int
  num_decoder_layers: int | None = None
  num_kv_heads: int | None = None
  num_qk_heads: int | None = None
  head_dim: int | None = None
  value_dim: int | None = None
  activation: str = "relu"
  gated: bool = False
  mlp_bias: bool = True
  attention_bias: bool = False
  attention_scale: float | None = None
  query_key_norm: str = "none"
  short_convolution: bool = False
  short_convolution_bias: bool = False
  output_norm: str = "none"
  output_gate: str = "none"
  global_projections: bool = False
  parallel: bool = False
  dropout_rate: float = 0.0
  attention_dropout_rate: float = 0.0
  position: str = "sinusoidal"
  position_offset: int = 0
  position_padding: int | None = None
  rotary_theta: float = 10000.0
  rotary_fraction: float = 1.0
  relative_buckets: int = 32
  relative_distance: int = 128
  norm: str = "pre"
  norm_kind: str = "layer"
  norm_epsilon: float = 1e-6
  embedding_norm: bool = False
  embedding_scale: float | None = None
  token_types: int = 0
  head: str = "tokens"
  pooler: bool = False
  head_transform: bool = False
  head_bias: bool = False
  logit_scale: float = 1.0
  logit_soft_cap: float | None = None
  tie_embeddings: bool = True
  tie_inputs: bool | None = None
  vocab_size: int | None = None
  max_length: int | None = None
  remat: str = "none"
  dtype: str = "float32"
  param_dtype: str = "float32"
  encoder_attention: Layers | None = None
  decoder_attention: Layers | None = None
  cross_attention: Layers | None = None
  decoder_around: tuple[AroundConfig, ...] | None = None

  def __post_init__(self):
    check_choices(
      self,
      kind=self.kinds,
      activation=ACTIVATIONS,
      position=POSITIONS,
      norm=NORMS,
      norm_kind=NORM_KINDS,
      query_key_norm=QUERY_KEY_NORMS,
      output_norm=OUTPUT_NORMS,
      output_gate=OUTPUT_GATES,
      head=HEADS,
      remat=REMAT,
      dtype=DTYPES,
      param_dtype=DTYPES,
    )
    check_ranges(
      self,
      counts=(
        "num_layers",
        "num_heads",
        "features",
        "num_decoder_layers",
        "num_qk_heads",
        "head_dim",
        "value_dim",
        "vocab_size",
        "max_length",
      ),
      rates=("dropout_rate", "attention_dropout_rate"),
    )
    check(self, "mlp_features", self.mlp_features >= 0, "0 or more")
    self._check_heads()
    self._check_positions()
    self._check_choices()
    self._check_attentions()
    self._check_around()

  @property
  def layout(self) -> str:
    """Whose batches it reads: its kind."""
    return self.kind

  def make(self, sizes: Sizes) -> Any:
    """The Transformer for a task's sizes; see `models.create`."""
    # Flax is imported with it, which a config alone does not need.
    from models.transformer import create

    return create(self, sizes)

  def least_parameters(self, symbols: int) -> int:
    """Of the tables that the config sizes, and of each layer the matrices.

    Of queries and of results; a mechanism may have no keys. Layers may differ.
    """
    layer = self.features * min(
      (one.num_qk_heads or one.num_heads) * one.query_dim
      + one.num_heads * (one.value_dim or one.query_dim)
      for one in self.cycle
    )
    layer += 2 * self.features * self.mlp_features
    rows = max(symbols, self.vocab_size or 0) + self.token_types
    rows += self.position_offset
    if self.position == "learned":
      rows += self.max_length or 0
    if self.position == "t5":
      rows += self.relative_buckets * self.num_heads // self.features
    return self.num_layers * layer + rows * self.features

  def longest(self, sizes: Sizes) -> int:
    """The longer of source and target."""
    return max(sizes.max_source_length or 0, sizes.max_target_length or 0)

  def least_activations(self, sizes: Sizes) -> int:
    """What feed-forward layers read and compute of one row."""
    wide = self.features + self.mlp_features
    return self.num_layers * self.longest(sizes) * wide

  @property
  def query_dim(self) -> int:
    """H."""
    return self.head_dim or self.features // self.num_heads

  @property
  def rotary_dim(self) -> int:
    """Features of a head that rotary positions turn."""
    # A whole is not multiplied: it may be beyond every float.
    whole = self.rotary_fraction == 1.0
    return (
      self.query_dim if whole else int(self.query_dim * self.rotary_fraction)
    )

  @property
  def kv_heads(self) -> int:
    """K."""
    return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

  def dims(self, max_length: int) -> Dims:
    """The sizes that a mechanism makes its variables and caches from."""
    return Dims(
      self.num_heads,
      self.kv_heads,
      self.query_dim,
      max_length,
      self.features,
      self.value_dim,
    )

  @property
  def attentions(self) -> dict[str, tuple[AttentionConfig, ...]]:
    """The mechanisms of each slot of this kind, which layers take in turn."""
    return {
      field: chosen if isinstance(chosen, tuple) else (chosen,)
      for field in _SLOTS[self.layout]
      for chosen in [getattr(self, field)]
    }

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of every layer that has the slot `field`."""
    number = self.num_layers
    if field != "encoder_attention":
      number = self.num_decoder_layers or number
    chosen = self.attentions[field]
    return tuple(chosen[i % len(chosen)] for i in range(number))

  @functools.cached_property
  def cycle(self) -> tuple["ModelConfig", ...]:
    """This config as the layers of a decoder have it, until they repeat."""
    if self.decoder_around is None:
      return (self,)
    return tuple(self._with_around(i) for i in range(self._period))

  @property
  def decoder_configs(self) -> tuple["ModelConfig", ...]:
    """This config as every layer of the decoder has it."""
    number = self.num_decoder_layers or self.num_layers
    return tuple(self.cycle[i % len(self.cycle)] for i in range(number))

  @property
  def _period(self) -> int:
    """After how many layers mechanisms and what is around them repeat."""
    mechanisms = self.attentions["decoder_attention"]
    period = math.lcm(len(self.decoder_around or ()), len(mechanisms))
    return min(period, self.num_layers)

  def _with_around(self, layer: int) -> "ModelConfig":
    """This config as one layer has it, in which none differs."""
    arounds = self.decoder_around or ()
    mechanisms = self.attentions["decoder_attention"]
    return dataclasses.replace(
      self,
      decoder_around=None,
      decoder_attention=mechanisms[layer % len(mechanisms)],
      **arounds[layer % len(arounds)].changes,
    )

  def _check_heads(self):
    if self.head_dim is None and self.features % self.num_heads:
      raise ValueError(
        f"features: {self.features} is not divisible by num_heads "
        f"{self.num_heads}"
      )
    if self.kv_heads < 1 or self.num_heads % self.kv_heads:
      raise ValueError(
        f"num_kv_heads: expected a divisor of num_heads {self.num_heads}, got "
        f"{self.num_kv_heads}"
      )
    shared = self.num_qk_heads or self.num_heads
    if self.num_heads % shared or (
      self.num_qk_heads and self.kv_heads != self.num_heads
    ):
      raise ValueError(
        f"num_qk_heads: expected a divisor of num_heads {self.num_heads}, without "
        f"num_kv_heads, got {self.num_qk_heads}"
      )
    if self.num_decoder_layers is not None and self.layout != "encoder_decoder":
      raise ValueError(
        f"num_decoder_layers: kind '{self.kind}' has one stack, whose layers "
        f"are num_layers; expected None, got {self.num_decoder_layers}"
      )

  def _check_positions(self):
    check(self, "rotary_theta", self.rotary_theta > 1.0, "more than 1")
    check(self, "rotary_fraction", 0 < self.rotary_fraction <= 1, "(0, 1]")
    if self.position == "rotary" and (
      self.rotary_dim % 2 or not self.rotary_dim
    ):
      width = f"head_dim {self.head_dim}"
      if self.head_dim is None:
        width = f"features / num_heads = {self.query_dim}"
      raise ValueError(
        "position: rotary turns pairs and needs an even head dimension, got "
        f"{width}, of which rotary_fraction {self.rotary_fraction} is turned"
      )
    if self.position == "sinusoidal" and self.features % 2:
      raise ValueError(
        "features: sinusoidal positions pair sines and cosines and need an "
        f"even width, got {self.features}"
      )
    if self.position != "learned":
      for field, without in (
        ("position_offset", 0),
        ("position_padding", None),
      ):
        if getattr(self, field) != without:
          raise ValueError(
            f"{field}: belongs to position 'learned'; expected {without}, got "
            f"{getattr(self, field)}"
          )
    check(self, "position_offset", self.position_offset >= 0, "0 or more")
    if self.position_padding is not None and self.position_offset < 1:
      raise ValueError(
        "position_padding: expected position_offset of at least 1 with it, got "
        f"{self.position_offset}"
      )
    check(
      self,
      "relative_distance",
      self.relative_distance <= _FARTHEST,
      f"at most {_FARTHEST:,}",
    )
    if self.position == "t5":
      try:
        t5_buckets(self.relative_distance, num_buckets=self.relative_buckets)
        t5_buckets(
          self.relative_distance,
          num_buckets=self.relative_buckets,
          is_causal=True,
        )
      except ValueError as error:
        raise ValueError(f"relative_distance: {error}") from None

  def _check_choices(self):
    scale = self.attention_scale
    check(
      self, "attention_scale", scale is None or scale > 0, "above 0, or None"
    )
    cap = self.logit_soft_cap
    check(self, "logit_soft_cap", cap is None or cap > 0, "above 0, or None")
    check(self, "norm_epsilon", self.norm_epsilon >= 0, "0 or more")
    check(self, "token_types", self.token_types >= 0, "0 or more")
    if self.layout != "encoder":
      for field, without in (
        ("head", "tokens"),
        ("position_offset", 0),
        ("position_padding", None),
        ("token_types", 0),
        ("global_projections", False),
      ):
        if getattr(self, field) != without:
          raise ValueError(
            f"{field}: only kind 'encoder' has it; expected {without!r}, got "
            f"{getattr(self, field)!r}"
          )
    if self.short_convolution and self.layout == "encoder":
      raise ValueError(
        "short_convolution: it is causal, for a decoder's self-attention; "
        "expected False with kind 'encoder', got True"
      )
    if self.short_convolution_bias and not self.short_convolution:
      raise ValueError(
        "short_convolution_bias: expected short_convolution with it, got False"
      )
    if self.head != "tokens":
      for field, without in (
        ("head_transform", False),
        ("logit_scale", 1.0),
        ("logit_soft_cap", None),
      ):
        if getattr(self, field) != without:
          raise ValueError(
            f"{field}: belongs to head 'tokens'; expected {without}, got "
            f"{getattr(self, field)} with head '{self.head}'"
          )
    if self.pooler and self.head == "tokens":
      raise ValueError(
        "pooler: expected False with head 'tokens', which reads every position"
      )

  def _check_attentions(self):
    for field in NEEDS:
      chosen = getattr(self, field)
      if field not in _SLOTS[self.layout]:
        if chosen is not None:
          raise ValueError(
            f"{field}: kind '{self.kind}' has no such layer; expected a config "
            "without this choice, got "
            + names(chosen if isinstance(chosen, tuple) else (chosen,))
          )
        continue
      if chosen is None:
        object.__setattr__(self, field, AttentionConfig("dense"))
      elif isinstance(chosen, tuple) and not chosen:
        raise ValueError(f"{field}: expected at least one mechanism, got none")
      needs = dict(NEEDS[field])
      if self.position in ("t5", "alibi", "shaw") and "cross" not in needs:
        needs["relative"] = (
          f"carry relative positions (position '{self.position}')"
        )
      if self.attention_dropout_rate:
        needs["dropout"] = "drop attention weights (attention_dropout_rate)"
      if self.global_projections:
        needs["global"] = "have global tokens (global_projections)"
      for config in self.attentions[field]:
        check_supports(field, config, needs)
        makes_keys = "own_keys" in config.build().supports
        for shared in ("num_kv_heads", "num_qk_heads"):
          number = getattr(self, shared)
          if makes_keys and number not in (None, self.num_heads):
            raise ValueError(
              f"{shared}: {config.name} makes a key and a value for every head; "
              f"expected None, got {number}"
            )

  def _check_around(self):
    arounds = self.decoder_around
    if arounds is None:
      return
    if self.layout != "decoder":
      raise ValueError(
        "decoder_around: only kind 'decoder' has it; expected None, got "
        f"{len(arounds)} choices"
      )
    if not arounds:
      raise ValueError("decoder_around: expected at least one choice, got none")
    for i, around in enumerate(arounds):
      if around.position and self.position not in ("rotary", "none"):
        raise ValueError(
          f"decoder_around[{i}].position: expected None with position "
          f"{self.position!r} of the model, got {around.position!r}"
        )
      # One table is for the heads of all layers.
      if around.num_heads and self.position in ("t5", "alibi"):
        raise ValueError(
          f"decoder_around[{i}].num_heads: expected None with position "
          f"{self.position!r}, whose table all layers share, got "
          f"{around.num_heads}"
        )
    for layer in range(self._period):
      try:
        self._with_around(layer)
      except ValueError as error:
        place = layer % len(arounds)
        raise ValueError(f"decoder_around[{place}].{error}") from None
