"""Configs of attention modules, and overrides for single layers."""

from collections.abc import Mapping
import dataclasses
import functools
import types
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Le

from attention import rotary_frequencies
from attention.positions import deberta_buckets
from models.attention_config import AttentionConfig
from models.mlp_config import WITHOUT_EXPERTS
from settings.fields import (
  Count,
  Positive,
  Whole,
  check_unread,
  checked,
  rest,
)

QueryKeyNorm = Literal["none", "rms", "rms_from_one", "rms_joint", "l2"]
OutputNorm = Literal[
  "none",
  "rms",
  "group",
  "group_scale",
  "rms_joint",
  "rms_joint_first",
  "rms_grouped",
  "rms_grouped_first",
]
ProjectionActivation = Literal[
  "none", "relu", "gelu", "gelu_tanh", "silu", "relu2"
]
Factors = tuple[float, float]
ProjectionFactors = tuple[float, float, float, float]
OutputGate = Literal[
  "none", "silu", "gelu_tanh", "sigmoid", "sigmoid_head", "sigmoid_first"
]
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
    ValueError: the type or an option is unknown, missing or invalid.
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
class DisentangledConfig:
  """Config of disentangled attention, position 'disentangled'.

  Attributes:
    terms: the terms added to the product of query and key: 'c2p', the query times the
      position of the key, and 'p2c', the key times the position of the query.
    max_distance: distance from which on all distances share an embedding.
    num_buckets: number of distance buckets in each direction; None means no buckets.
    shared_projections: whether positions share the projections of the inputs;
      otherwise they have separate ones.
    norm: whether position embeddings are normalized.

  Paper: DeBERTa, equations 2 to 4, arXiv:2006.03654.
  """

  terms: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
  max_distance: Annotated[int, Interval(ge=1, le=2**20)] = 512
  num_buckets: Count | None = 256
  shared_projections: bool = True
  norm: bool = True

  def __post_init__(self):
    if len({*self.terms}) != len(self.terms):
      raise ValueError(f"terms: expected distinct terms, got {self.terms}")
    self.rows(0)

  @property
  def size(self) -> int:
    """The number of embeddings."""
    return 2 * (self.num_buckets or self.max_distance)

  def rows(self, longest: int) -> Any:
    """The embedding index of each distance from −`longest` to `longest`."""
    return deberta_buckets(
      longest, max_distance=self.max_distance, num_buckets=self.num_buckets
    )


@checked
class AroundConfig:
  """Overrides of the self-attention and feed-forward layer of one layer of a model.

  Attributes:
    num_heads: N.
    num_kv_heads: K; if it equals `num_heads`, no head is shared.
    head_dim: H.
    position: 'rotary' or 'none', in a model that has either.
    norm: 'pre', 'output' or 'sandwich', in a model that has one of these.
    mlp_features: hidden width of the feed-forward layer; 0 means no such layer.
    num_experts: E, the number of experts; 0 means one network of `mlp_features`.
    router_table: as in `MlpConfig`.

  These fields are those of `ModelConfig` and `MlpConfig`, the others those of
  `SlotConfig`. None keeps the value of the model.
  """

  num_heads: Count | None = None
  num_kv_heads: Count | None = None
  num_qk_heads: Count | None = None
  head_dim: Count | None = None
  value_dim: Count | None = None
  query_rank: Count | None = None
  latent_rank: Count | None = None
  shared_key_dim: Count | None = None
  attention_bias: bool | None = None
  out_bias: bool | None = None
  input_factor: float | None = None
  projection_factors: ProjectionFactors | None = None
  attention_scale: Positive | None = None
  projection_activation: ProjectionActivation | None = None
  query_key_norm: QueryKeyNorm | None = None
  short_convolution: bool | None = None
  short_convolution_bias: bool | None = None
  short_convolution_activation: ConvolutionActivation | None = None
  output_norm: OutputNorm | None = None
  output_gate: OutputGate | None = None
  exclusive: bool | None = None
  position: Literal["rotary", "none"] | None = None
  norm: Literal["pre", "output", "sandwich"] | None = None
  input_norm: bool | None = None
  residual_factors: Factors | None = None
  rotary_theta: Theta | None = None
  rotary_fraction: Fraction | None = None
  rotary_scaling: RotaryScaling | None = None
  self_attention: bool | None = None
  mlp_features: Whole | None = None
  num_experts: Whole | None = None
  router_table: Whole | None = None

  @property
  def changes(self) -> dict[str, Any]:
    """The fields that are not None, and their values."""
    changes = {
      name: value for name, value in vars(self).items() if value is not None
    }
    # The model's scaling does not apply to a layer without rotary positions.
    no_scaling = {"rotary_scaling": None} if self.position == "none" else {}
    # The model's experts do not apply to a layer without experts.
    has_none = 0 in (self.num_experts, self.mlp_features)
    no_experts = {"num_experts": 0, **WITHOUT_EXPERTS} if has_none else {}
    # A layer without an output gate has no rank of the gate.
    no_rank = {"output_gate_rank": None} if self.output_gate == "none" else {}
    return changes | no_scaling | no_experts | no_rank


@checked
class SecondAttention:
  """A second mechanism of a layer, beside its self-attention (Falcon-H1).

  Both take the same normalized inputs, and both outputs are added to the residual
  stream. The output of this one is multiplied by the second of its `residual_factors`.

  Attributes:
    mechanism: the mechanism.
    around: overrides of the config of the layer's self-attention.
  """

  mechanism: AttentionConfig
  around: AroundConfig = AroundConfig()


@checked
class SlotConfig:
  """Config of attention modules: projections, norms, gates and positions.

  Attributes:
    num_qk_heads: number of query and key heads, each of which adjacent value heads
      share ("multi-value attention", Mamba-2); None means that no heads are shared.
    value_dim: V, width of the values of each head; None is H.
    query_rank: rank of the query projection, q = norm(x·W)·W' (DeepSeek-V2); None
      means full rank, q = x·W.
    latent_rank: R, rank of the key and value projections of all heads. The last
      `shared_key_dim` features of a key are projected from x and shared by all heads;
      only these have rotary positions. A mechanism that computes its own keys
      ('own_keys') has its own rank. None means full rank.
    shared_key_dim: P, less than H; only with `latent_rank`.
    attention_bias: whether the projections have biases. The second factor of a
      low-rank projection has none, nor has the query with `latent_rank`.
    out_bias: whether the output projection has a bias; None is `attention_bias`, from
      which Qwen2 differs.
    input_factor: factor of the inputs of self-attention (Falcon-H1).
    projection_factors: factors of projected queries, keys, values and output gates
      (Falcon-H1), before the short convolution.
    out_groups: number of groups of heads in a low-rank output projection: the outputs
      of each group are projected to `out_rank` features, and these to the output
      (DeepSeek-V4); None means one full-rank projection.
    out_rank: rank for each group; only with `out_groups`.
    projection_activation: activation of projected queries, keys and values
      (MiniMax-01), after the short convolution, or 'none'.
    attention_scale: factor of the logits; None is the mechanism's default, 1/√H.
    query_key_norm: norm of the query and key of each head, before rotary positions:
      'rms' (Qwen3), 'rms_from_one', which stores its scales minus 1 (Qwen3-Next),
      'rms_joint', over all heads together (OLMo 2), 'l2', to length 1, or 'none'.
    short_convolution: whether queries, keys and values of a decoder's self-attention
      are convolved with the three previous positions, followed by SiLU (Mamba,
      DeltaNet). With 'own_keys', only queries are.
    short_convolution_bias: whether these convolutions have biases.
    short_convolution_activation: activation after these convolutions: 'silu', or
      'none' (Griffin).
    output_norm: norm of the output of each head of self-attention: 'rms' (GLA,
      DeltaNet), 'group', by mean and variance (RetNet), 'group_scale', the same
      without a bias (xLSTM), or 'none'; 'rms_joint_first', over all heads together
      (MiniMax-01), 'rms_grouped_first', over the heads that share a query and key; or,
      after the gate, 'rms_joint', over all heads together, or 'rms_grouped', over the
      heads that share a query and key (Mamba-2).
    output_norm_epsilon: ε of that norm; None is that of the model.
    output_gate: activation of another projection of the inputs, by which the output
      of each head is multiplied: 'silu' (RetNet, GLA), 'gelu_tanh' (Griffin) or
      'sigmoid' (Kimi Linear); 'sigmoid_head', with one number for each head (gated
      attention, arXiv:2505.06708); 'sigmoid_first', sigmoid(x W₁) W₂, whose sigmoid
      is between two low-rank projections (RWKV-7, equation 14); or 'none'.
    output_gate_rank: rank of that projection x W₁ W₂ (Kimi Linear, equation 10; Gated
      DeltaNet-2); None is full rank.
    exclusive: whether the component along the position's own value is removed from
      the output of each head of self-attention (exclusive self-attention,
      arXiv:2603.09078): y − (y·v)v / |v|².
    global_projections: whether the tokens of `global_indices` have separate
      projections (Longformer).
    self_attention: whether a layer has self-attention; a layer without it is a
      feed-forward layer only (Nemotron-H), and does not use its mechanism.
    second_attention: a second mechanism beside self-attention; None means no second
      one.
    streams: n, number of residual streams of a decoder (`models.hyper_connections`);
      1 is the usual residual stream.
    stream_steps: number of Sinkhorn iterations for the matrix that mixes the streams.
    stream_epsilon: ε of hyper-connections.
    residual_factors: α and β of a layer's self-attention f: x becomes α·x + β·f(x).
    input_norm: whether the inputs of self-attention are normalized, with norm 'pre'.
    shared_norm: whether the feed-forward layer takes the normalized inputs of
      self-attention, with `parallel` and norm 'pre' (Cohere).
    encoder_around: overrides for the layers of kind 'encoder', which take them in
      turn (ModernBERT); None means no overrides.
    query_temperature: factor of a decoder's query at position t: 'steps', 1 +
      β·log(1 + ⌊t / n⌋) (Llama 4, Ministral 3); 'log', s·log(t + 1), with a trained s
      for each head, initialized to 1 (scalable softmax, arXiv:2501.19399); or 'none'.
    temperature_rate: β.
    temperature_length: n.
    rotary_theta: base of the rotary wavelengths.
    rotary_fraction: fraction of the head dimension that is rotated.
    rotary_scaling: scaling of the rotary wavelengths, for sequences longer than in
      training: {'rope_type': 'yarn', 'factor': 4.0, …}; None means no scaling.
    relative_buckets: number of distance buckets of position 't5'.
    relative_distance: distance at which the last bucket starts.
    disentangled: config of position 'disentangled'.

  Raises:
    ValueError: two fields are incompatible.
  """

  num_qk_heads: Count | None = None
  value_dim: Count | None = None
  query_rank: Count | None = None
  latent_rank: Count | None = None
  shared_key_dim: Count | None = None
  attention_bias: bool = False
  out_bias: bool | None = None
  input_factor: float = 1.0
  projection_factors: ProjectionFactors = (1.0, 1.0, 1.0, 1.0)
  out_groups: Count | None = None
  out_rank: Count | None = None
  projection_activation: ProjectionActivation = "none"
  attention_scale: Positive | None = None
  query_key_norm: QueryKeyNorm = "none"
  short_convolution: bool = False
  short_convolution_bias: bool = False
  short_convolution_activation: ConvolutionActivation = "silu"
  output_norm: OutputNorm = "none"
  output_norm_epsilon: Annotated[float, Ge(0)] | None = None
  output_gate: OutputGate = "none"
  output_gate_rank: Count | None = None
  exclusive: bool = False
  global_projections: bool = False
  self_attention: bool = True
  second_attention: SecondAttention | None = None
  streams: Count = 1
  stream_steps: Count = 20
  stream_epsilon: Annotated[float, Ge(0)] = 1e-6
  residual_factors: Factors = (1.0, 1.0)
  input_norm: bool = True
  shared_norm: bool = False
  encoder_around: tuple[AroundConfig, ...] | None = None
  query_temperature: Literal["none", "steps", "log"] = "none"
  temperature_rate: float = 0.0
  temperature_length: Count | None = None
  rotary_theta: Theta = 10000.0
  rotary_fraction: Fraction = 1.0
  rotary_scaling: RotaryScaling | None = None
  relative_buckets: int = 32
  # A table has an entry for each distance.
  relative_distance: Annotated[int, Le(2**20)] = 128
  disentangled: DisentangledConfig = DisentangledConfig()

  def __post_init__(self):
    if self.short_convolution_bias and not self.short_convolution:
      raise ValueError(
        "short_convolution_bias: expected short_convolution with it, got False"
      )
    is_steps = self.query_temperature == "steps"
    if is_steps != (self.temperature_length is not None):
      raise ValueError(
        "temperature_length: expected it with query_temperature 'steps', and only "
        f"then, got {self.temperature_length}"
      )
    if not is_steps:
      reason = f"query_temperature is {self.query_temperature!r}"
      check_unread(self, ("temperature_rate",), reason)
    if (self.latent_rank is None) != (self.shared_key_dim is None):
      raise ValueError(
        "shared_key_dim: expected it with latent_rank, and only then, got "
        f"{self.shared_key_dim} with latent_rank {self.latent_rank}"
      )
    if (self.out_groups is None) != (self.out_rank is None):
      raise ValueError(
        "out_rank: expected it with out_groups, and only then, got "
        f"{self.out_rank} with out_groups {self.out_groups}"
      )
    if self.output_gate_rank is not None and self.output_gate == "none":
      raise ValueError(
        "output_gate_rank: expected an output_gate with it, got 'none'"
      )
    if self.output_gate_rank is None and self.output_gate == "sigmoid_first":
      raise ValueError(
        "output_gate_rank: expected it with output_gate 'sigmoid_first', got None"
      )
    if self.streams == 1:
      fields = "stream_steps", "stream_epsilon"
      check_unread(self, fields, "streams is 1")
    is_default = self.short_convolution_activation == "silu"
    if not (self.short_convolution or is_default):
      raise ValueError(
        "short_convolution_activation: expected short_convolution with it, got False"
      )

  @functools.cached_property
  def encoder(self) -> "SlotConfig":
    """The config of an encoder's self-attention, without options of decoders."""
    return dataclasses.replace(
      self,
      short_convolution=False,
      short_convolution_bias=False,
      query_temperature="none",
      temperature_rate=0.0,
      temperature_length=None,
      short_convolution_activation="silu",
    )

  @functools.cached_property
  def cross(self) -> "SlotConfig":
    """The config of cross-attention, without output norm, gate and low ranks."""
    return dataclasses.replace(
      self.encoder,
      output_norm="none",
      output_gate="none",
      output_gate_rank=None,
      exclusive=False,
      query_rank=None,
      latent_rank=None,
      shared_key_dim=None,
      out_groups=None,
      out_rank=None,
    )
