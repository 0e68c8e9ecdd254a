"""Longformer: Beltagy et al., arXiv:2004.05150."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from annotated_types import Ge

from models.attention_config import AttentionConfig
from models.published import bert, family, roberta
from models.published.family import Description, Family, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  family.only(
    hf_config,
    hidden_act="gelu",  # The head always uses gelu.
    attention_mode="longformer",
    ignore_attention_mask=False,
  )
  counted = roberta.positions(hf_config)
  vocab_size = family.size(hf_config, "vocab_size")
  positions = family.size(hf_config, "max_position_embeddings")
  length = positions - counted["position_offset"]
  return Description(
    bert.encoder(
      hf_config,
      head,
      global_projections=True,
      encoder_attention=_windows(hf_config, length),
      **counted,
    ),
    vocab_size,
    vocab_size,
    length,
  )


_Width = Annotated[int, Ge(2)]


def _windows(
  hf_config: Mapping[str, Any], length: int
) -> tuple[AttentionConfig, ...]:
  """Returns the mechanism of every layer, with half of the window on each side.

  A window may be wider than the longest sequence.
  """
  kind = _Width | list[_Width]
  widths = family.value(hf_config, "attention_window", kind)
  layers = family.size(hf_config, "num_hidden_layers")
  if isinstance(widths, int):
    widths = [widths] * layers
  if len(widths) != layers:
    raise ValueError(
      f"attention_window: expected {layers} (num_hidden_layers) numbers, got "
      f"{widths}"
    )
  return tuple(
    AttentionConfig("sliding_window", {"window": min(width // 2, length - 1)})
    for width in widths
  )


def _global_rows() -> list[Row]:
  theirs = "longformer.encoder.layer.{i}.attention.self"
  ours = "encoder_{i}/self_attention"
  return [
    row
    for name in ("query", "key", "value")
    for row in family.linear(f"{theirs}.{name}_global", f"{ours}/global_{name}")
  ]


LONGFORMER = Family(
  name="longformer",
  architectures={"LongformerForMaskedLM": "tokens"},
  describe=describe,
  rows=lambda config: (
    *bert.embedding_rows("longformer.embeddings"),
    *bert.layer_rows("longformer.encoder.layer.{i}"),
    *_global_rows(),
    *roberta.head_rows(),
  ),
  prefix="longformer.",
  parts=("embeddings", "encoder", "pooler"),
  copies=roberta.copies("longformer."),
  without_effect=no_effect("belongs to another format", "onnx_export"),
  unread=(
    r"longformer\.embeddings\.(position_ids|token_type_ids)",
    r"longformer\.pooler\.dense\.(weight|bias)",
  ),
)
"""RoBERTa with windows, and separate projections for global tokens."""
