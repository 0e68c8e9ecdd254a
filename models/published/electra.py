"""ELECTRA: Clark et al., arXiv:2003.10555."""

from collections.abc import Collection, Mapping
from typing import Any

from models.published import bert, family
from models.published.family import Description, Family, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`; the head's activation is always gelu."""
  del names
  own: dict[str, Any] = {
    "hidden": {},
    "tokens": {"transform_activation": "gelu"},
    "class": {"pooler": True, "pooler_activation": "gelu"},
  }[head]
  width = family.size(hf_config, "embedding_size", 128)
  if width != family.size(hf_config, "hidden_size"):
    own["embedding_dim"] = width
  vocab_size = family.size(hf_config, "vocab_size")
  return Description(
    bert.encoder(hf_config, head, **own),
    vocab_size,
    bert.num_labels(hf_config) if head == "class" else vocab_size,
    family.size(hf_config, "max_position_embeddings"),
  )


ELECTRA = Family(
  name="electra",
  architectures={
    "ElectraModel": "hidden",
    "ElectraForMaskedLM": "tokens",
    "ElectraForSequenceClassification": "class",
  },
  describe=describe,
  rows=lambda config: (
    *bert.embedding_rows("electra.embeddings"),
    *family.linear("electra.embeddings_project", "source_projection"),
    *bert.layer_rows("electra.encoder.layer.{i}"),
    *family.linear("generator_predictions.dense", "head/transform"),
    *family.norm("generator_predictions.LayerNorm", "head/norm"),
    Row("generator_lm_head.bias", ("params/head/bias",)),
    *family.linear("classifier.dense", "head/pooler"),
    *family.linear("classifier.out_proj", "head/classes"),
  ),
  prefix="electra.",
  parts=("embeddings", "embeddings_project", "encoder"),
  copies=(
    ("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),
  ),
  without_effect=no_effect(
    "belongs to another head",
    "summary_type summary_use_proj summary_activation summary_last_dropout",
  ),
)
"""BERT with narrow embeddings, which a linear layer maps to the width of the layers."""
