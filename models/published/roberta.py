"""RoBERTa: Liu et al., arXiv:1907.11692."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import bert, family
from models.published.family import Description, Family, Row


def positions(hf_config: Mapping[str, Any]) -> dict[str, int]:
  """Returns the config fields of positions that skip padding."""
  padding = int(family.number(hf_config, "pad_token_id", 1))
  return {"position_offset": padding + 1, "position_padding": padding}


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  counted = positions(hf_config)
  vocab_size = family.size(hf_config, "vocab_size")
  # Its head has no other activation.
  own = {"transform_activation": "gelu"} if head == "tokens" else {}
  return Description(
    bert.encoder(
      hf_config, head, pooler=bert.has_pooler(names, head), **own, **counted
    ),
    vocab_size,
    bert.num_labels(hf_config) if head == "class" else vocab_size,
    family.size(hf_config, "max_position_embeddings")
    - counted["position_offset"],
  )


def head_rows() -> list[Row]:
  """Returns the rows of the head for tokens."""
  return [
    *family.linear("lm_head.dense", "head/transform"),
    *family.norm("lm_head.layer_norm", "head/norm"),
    Row("lm_head.bias", ("params/head/bias",)),
  ]


def copies(prefix: str) -> tuple[tuple[str, str], ...]:
  """Returns the tensors of the head that files may store twice."""
  return (
    ("lm_head.decoder.weight", f"{prefix}embeddings.word_embeddings.weight"),
    ("lm_head.decoder.bias", "lm_head.bias"),
  )


_HEADS = {
  "Model": "hidden",
  "ForMaskedLM": "tokens",
  "ForSequenceClassification": "class",
}

ROBERTA = Family(
  name="roberta",
  architectures={f"Roberta{name}": head for name, head in _HEADS.items()},
  describe=describe,
  rows=lambda config: (
    *bert.embedding_rows("roberta.embeddings"),
    *bert.layer_rows("roberta.encoder.layer.{i}"),
    *bert.pooler_rows(config, "roberta.pooler.dense", "classifier.dense"),
    *head_rows(),
    *family.linear("classifier.out_proj", "head/classes"),
  ),
  prefix="roberta.",
  parts=("embeddings", "encoder", "pooler"),
  copies=copies("roberta."),
  unread=(
    r"roberta\.embeddings\.(position_ids|token_type_ids)",
    r"roberta\.pooler\.dense\.(weight|bias)",
  ),
)
"""BERT with positions that skip padding."""

XLM_ROBERTA = ROBERTA._replace(
  name="xlm-roberta",
  architectures={f"XLMRoberta{name}": head for name, head in _HEADS.items()},
)
"""RoBERTa for a hundred languages: Conneau et al., arXiv:1911.02116."""
