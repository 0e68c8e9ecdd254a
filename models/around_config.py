"""What is around the attention of one layer, where layers differ."""

import dataclasses
from typing import Any

from settings.checks import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class AroundConfig:
  """What one layer has around its self-attention that its model has not.

  Each field is that of `ModelConfig` with the same name; None is as in the model.

  Attributes:
    num_heads: N.
    num_kv_heads: K; as many as `num_heads` shares none.
    num_qk_heads: heads of queries and keys.
    head_dim: H.
    value_dim: V.
    attention_bias: whether the projections have biases.
    query_key_norm: of queries and keys.
    short_convolution: of queries, keys and values.
    short_convolution_bias: of these convolutions.
    output_norm: of each head's result.
    output_gate: of that result.
    position: 'rotary' or 'none', in a model that has either.
    rotary_theta: base of the rotary wavelengths.
    rotary_fraction: share of the head dimension that rotary positions turn.

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
    check(
      self,
      "position",
      self.position in (None, "rotary", "none"),
      "'rotary', 'none' or None",
    )

  @property
  def changes(self) -> dict[str, Any]:
    """The fields that differ, and their values."""
    return {
      name: value for name, value in vars(self).items() if value is not None
    }
