"""Configs of attention modules, and overrides for single layers."""

from collections.abc import Mapping
import dataclasses
import functools
import types
from typing import Annotated, Any, Literal

from annotated_types import Gt, Interval, Le

from attention import rotary_frequencies
from attention.positions import t5_buckets
from settings.fields import Count, Positive, checked, rest

QueryKeyNorm = Literal["none", "rms", "rms_from_one", "rms_joint", "l2"]
OutputNorm = Literal[
  "none", "rms", "group", "group_scale", "rms_joint", "rms_grouped"
]
OutputGate = Literal["none", "silu", "gelu_tanh", "sigmoid", "sigmoid_head"]
ConvolutionActivation = Literal["silu", "none"]
Theta = Annotated[float, Gt(1)]
Fraction = Annotated[float, Interval(gt=0, le=1)]


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
  """Scaling of rotary wavelengths for longer sequences, as in `config.json`.

  Attributes:
    rope_type: 'default', 'linear', 'dynamic', 'llama3' or 'yarn'.
    options: options of the type, such as `factor`; see
      `attention.rotary_frequencies`.

  Raises:
    ValueError: an unknown type or option, a missing option, or an invalid value.
  """

  rope_type: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  _rest = rest("options")

  def __post_init__(self):
    options = types.MappingProxyType(dict(self.options))
    object.__setattr__(self, "options", options)
    rotary_frequencies(4, 10000.0, self.scaling)

  def __hash__(self):
    return hash((self.rope_type, tuple(sorted(self.options.items()))))

  @property
  def scaling(self) -> dict[str, Any]:
    """The argument `scaling` of `attention.rotary`."""
    return {"rope_type": self.rope_type, **self.options}


@checked
class AroundConfig:
  """Overrides of the self-attention of one layer.

  Attributes:
    num_heads: N.
    num_kv_heads: K; if it equals `num_heads`, no head is shared.
    head_dim: H.
    position: 'rotary' or 'none', in a model that has either.

  These fields are as in `ModelConfig`, the others as in `SlotConfig`. None keeps the
  value of the model.
  """

  num_heads: Count | None = None
  num_kv_heads: Count | None = None
  num_qk_heads: Count | None = None
  head_dim: Count | None = None
  value_dim: Count | None = None
  attention_bias: bool | None = None
  query_key_norm: QueryKeyNorm | None = None
  short_convolution: bool | None = None
  short_convolution_bias: bool | None = None
  short_convolution_activation: ConvolutionActivation | None = None
  output_norm: OutputNorm | None = None
  output_gate: OutputGate | None = None
  exclusive: bool | None = None
  position: Literal["rotary", "none"] | None = None
  input_norm: bool | None = None
  rotary_theta: Theta | None = None
  rotary_fraction: Fraction | None = None
  rotary_scaling: RotaryScaling | None = None

  @property
  def changes(self) -> dict[str, Any]:
    """The fields that are not None, and their values."""
    changes = {
      name: value for name, value in vars(self).items() if value is not None
    }
    # The model's scaling does not apply to a layer without rotary positions.
    none = {"rotary_scaling": None} if self.position == "none" else {}
    return changes | none


@checked
class SlotConfig:
  """Config of attention modules: projections, norms, gates and positions.

  Attributes:
    num_qk_heads: heads of queries and keys, each shared by adjacent heads of values
      ("multi-value attention", Mamba-2); None shares none.
    value_dim: V, width of the values of each head; None is H.
    attention_bias: whether the projections have biases.
    out_bias: whether the output projection has a bias; None is `attention_bias`
      (Qwen2 differs).
    attention_scale: factor of the logits; None is the mechanism's own, 1/√H.
    query_key_norm: norm of the query and key of each head, before rotary positions:
      'rms' (Qwen3), 'rms_from_one', which stores its scales minus 1 (Qwen3-Next),
      'rms_joint', over all heads together (OLMo 2), 'l2', to length 1, or 'none'.
    short_convolution: whether queries, keys and values of a decoder's self-attention
      are convolved with the three positions before, then SiLU (Mamba, DeltaNet).
      With a mechanism that makes its own keys ('own_keys'), only queries are.
    short_convolution_bias: whether these convolutions have biases.
    short_convolution_activation: 'silu' follows these convolutions; 'none' is no
      activation (Griffin).
    output_norm: norm of the result of each head of self-attention: 'rms' (GLA,
      DeltaNet), 'group', by mean and variance (RetNet), 'group_scale', the same
      without a bias (xLSTM), or 'none'; or, after the
      gate, 'rms_joint', over all heads together, or 'rms_grouped', over the heads
      that share a query and key (Mamba-2).
    output_gate: 'silu' (RetNet, GLA), 'gelu_tanh' (Griffin) or 'sigmoid' (Kimi
      Linear) of another projection of the inputs, which multiplies that result; 'sigmoid_head', with
      one number for each head (gated attention, arXiv:2505.06708); or 'none'.
    exclusive: whether the component along the position's own value is removed from
      the result of each head of self-attention (exclusive self-attention,
      arXiv:2603.09078): y − (y·v)v / |v|².
    global_projections: whether the tokens of `global_indices` have separate
      projections (Longformer).
    input_norm: whether the inputs of self-attention are normalized, with norm 'pre'.
    encoder_around: overrides for the layers of kind 'encoder', which take them in
      turn (ModernBERT); None is no overrides.
    rotary_theta: base of the rotary wavelengths.
    rotary_fraction: fraction of the head dimension that is rotated.
    rotary_scaling: scaling of the rotary wavelengths, for sequences longer than in
      training: {'rope_type': 'yarn', 'factor': 4.0, …}; None is no scaling.
    relative_buckets: number of distance buckets of position 't5'.
    relative_distance: distance at which the last bucket begins.

  Raises:
    ValueError: two values do not fit each other.
  """

  num_qk_heads: Count | None = None
  value_dim: Count | None = None
  attention_bias: bool = False
  out_bias: bool | None = None
  attention_scale: Positive | None = None
  query_key_norm: QueryKeyNorm = "none"
  short_convolution: bool = False
  short_convolution_bias: bool = False
  short_convolution_activation: ConvolutionActivation = "silu"
  output_norm: OutputNorm = "none"
  output_gate: OutputGate = "none"
  exclusive: bool = False
  global_projections: bool = False
  input_norm: bool = True
  encoder_around: tuple[AroundConfig, ...] | None = None
  rotary_theta: Theta = 10000.0
  rotary_fraction: Fraction = 1.0
  rotary_scaling: RotaryScaling | None = None
  relative_buckets: int = 32
  # A table has an entry for each distance.
  relative_distance: Annotated[int, Le(2**20)] = 128

  def __post_init__(self):
    if self.short_convolution_bias and not self.short_convolution:
      raise ValueError(
        "short_convolution_bias: expected short_convolution with it, got False"
      )
    is_default = self.short_convolution_activation == "silu"
    if not (self.short_convolution or is_default):
      raise ValueError(
        "short_convolution_activation: expected short_convolution with it, got False"
      )
    distance, buckets = self.relative_distance, self.relative_buckets
    try:
      for is_causal in (False, True):
        t5_buckets(distance, num_buckets=buckets, is_causal=is_causal)
    except ValueError as error:
      raise ValueError(f"relative_distance: {error}") from None

  @functools.cached_property
  def encoder(self) -> "SlotConfig":
    """The config of an encoder's self-attention, without causal convolutions."""
    return dataclasses.replace(
      self,
      short_convolution=False,
      short_convolution_bias=False,
      short_convolution_activation="silu",
    )

  @functools.cached_property
  def cross(self) -> "SlotConfig":
    """The config of cross-attention, which has no output norm or gate either."""
    return dataclasses.replace(
      self.encoder, output_norm="none", output_gate="none", exclusive=False
    )
