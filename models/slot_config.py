"""What is around the attention of a layer."""

import dataclasses
import types
from typing import Any

import jax

from attention.positions import t5_buckets
from settings.checks import check, check_ranges
from settings.suggest import check_choices

QUERY_KEY_NORMS = ("none", "rms", "rms_from_one", "rms_joint", "l2")
OUTPUT_NORMS = ("none", "rms", "group", "rms_joint")
OUTPUT_GATES = types.MappingProxyType(
  {"none": None, "silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
)

_FARTHEST = 2**20
"""The largest `relative_distance`; a table has an entry for each distance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotConfig:
  """Projections, norms, gates and positions of a slot; by default Vaswani's.

  Attributes:
    num_qk_heads: heads of queries and keys, each shared by neighbouring heads of
      values ("multi-value attention", Mamba-2); None shares none.
    value_dim: V, width of the values of each head; None is H.
    attention_bias: whether the projections have biases.
    attention_scale: factor of the logits; None is the mechanism's own, 1/√H.
    query_key_norm: of the query and key of each head, before rotary positions:
      'rms', by their root mean square (Qwen3), 'rms_from_one', likewise with scales
      that are stored as what they have beyond 1 (Qwen3-Next), 'rms_joint', by that
      of all heads together (OLMo 2), 'l2', to length 1, or 'none'.
    short_convolution: queries, keys and values of a decoder's self-attention are
      convolved with the three positions before, then SiLU (Mamba, DeltaNet). Of a
      mechanism that makes its own keys ('own_keys') only queries are.
    short_convolution_bias: these have biases.
    output_norm: of the result of each head of self-attention: 'rms' (GLA,
      DeltaNet), 'group', by mean and variance (RetNet), or 'none'; or 'rms_joint',
      of all heads together and after the gate (Mamba-2).
    output_gate: 'silu' (RetNet, GLA) or 'sigmoid' (Kimi Linear) of another
      projection of the inputs, which multiplies that result; or 'none'.
    global_projections: tokens of `global_indices` have projections of their own
      (Longformer).
    rotary_theta: base of the rotary wavelengths.
    rotary_fraction: share of the head dimension that rotary positions turn.
    relative_buckets: buckets of distance of position 't5'.
    relative_distance: distance at which its last bucket begins.

  Raises:
    ValueError: a value that cannot work; the message starts with the field.
  """

  num_qk_heads: int | None = None
  value_dim: int | None = None
  attention_bias: bool = False
  attention_scale: float | None = None
  query_key_norm: str = "none"
  short_convolution: bool = False
  short_convolution_bias: bool = False
  output_norm: str = "none"
  output_gate: str = "none"
  global_projections: bool = False
  rotary_theta: float = 10000.0
  rotary_fraction: float = 1.0
  relative_buckets: int = 32
  relative_distance: int = 128

  def __post_init__(self):
    check_choices(
      self,
      query_key_norm=QUERY_KEY_NORMS,
      output_norm=OUTPUT_NORMS,
      output_gate=tuple(OUTPUT_GATES),
    )
    check_ranges(self, counts=("num_qk_heads", "value_dim"), rates=())
    scale = self.attention_scale
    check(
      self, "attention_scale", scale is None or scale > 0, "above 0, or None"
    )
    if self.short_convolution_bias and not self.short_convolution:
      raise ValueError(
        "short_convolution_bias: expected short_convolution with it, got False"
      )
    check(self, "rotary_theta", self.rotary_theta > 1.0, "more than 1")
    check(self, "rotary_fraction", 0 < self.rotary_fraction <= 1, "(0, 1]")
    distance, buckets = self.relative_distance, self.relative_buckets
    farthest = f"at most {_FARTHEST:,}"
    check(self, "relative_distance", distance <= _FARTHEST, farthest)
    try:
      for is_causal in (False, True):
        t5_buckets(distance, num_buckets=buckets, is_causal=is_causal)
    except ValueError as error:
      raise ValueError(f"relative_distance: {error}") from None

  @property
  def encoder(self) -> "SlotConfig":
    """As the self-attention of an encoder has it: nothing that is causal."""
    return dataclasses.replace(
      self, short_convolution=False, short_convolution_bias=False
    )

  @property
  def cross(self) -> "SlotConfig":
    """As attention across has it: nothing of the results either."""
    return dataclasses.replace(
      self.encoder, output_norm="none", output_gate="none"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AroundConfig:
  """What one layer has around its self-attention that its model has not.

  Attributes:
    num_heads: N.
    num_kv_heads: K; as many as `num_heads` shares none.
    head_dim: H.
    position: 'rotary' or 'none', in a model that has either.

  These are as in `ModelConfig`, the others as in `SlotConfig`; None is as in the
  model.

  Raises:
    ValueError: a position that the layers of a model cannot choose one by one.
  """

  num_heads: int | None = None
  num_kv_heads: int | None = None
  num_qk_heads: int | None = None
  head_dim: int | None = None
  value_dim: int | None = None
  attention_bias: bool | None = None
  query_key_norm: str | None = None
  short_convolution: bool | None = None
  short_convolution_bias: bool | None = None
  output_norm: str | None = None
  output_gate: str | None = None
  position: str | None = None
  rotary_theta: float | None = None
  rotary_fraction: float | None = None

  def __post_init__(self):
    alone = self.position in (None, "rotary", "none")
    check(self, "position", alone, "'rotary', 'none' or None")

  @property
  def changes(self) -> dict[str, Any]:
    """The fields that differ, and their values."""
    return {
      name: value for name, value in vars(self).items() if value is not None
    }
