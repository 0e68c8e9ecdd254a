"""DistilBERT: Sanh et al., arXiv:1910.01108."""

from collections.abc import Collection, Mapping
from typing import Any

from models import nested
from models.config import ModelConfig
from models.published import bert, family
from models.published.family import Description, Family, Row
from models.published.keys import no_effect


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  bert.check_tied(hf_config, head)
  own: dict[str, Any] = {}
  if head == "class":
    own = {"pooler": True, "pooler_activation": "relu"}
  config = nested.make(
    ModelConfig,
    kind="encoder",
    num_layers=family.size(hf_config, "n_layers"),
    num_heads=family.size(hf_config, "n_heads"),
    features=family.size(hf_config, "dim"),
    mlp_features=family.size(hf_config, "hidden_dim"),
    activation=family.activation(hf_config, "activation", "gelu"),
    attention_bias=True,
    dropout_rate=family.number(hf_config, "dropout", 0.1),
    position="learned",
    norm="post",
    norm_epsilon=1e-12,
    embedding_norm=True,
    embedding_scale=1.0,
    head=head,
    head_transform=head == "tokens",
    head_bias=head != "hidden",
    **own,
  )
  vocab_size = family.size(hf_config, "vocab_size")
  return Description(
    config,
    vocab_size,
    bert.num_labels(hf_config) if head == "class" else vocab_size,
    family.size(hf_config, "max_position_embeddings"),
  )


_LAYER = "distilbert.transformer.layer.{i}"
_PARTS = {
  "attention.q_lin": "self_attention/query",
  "attention.k_lin": "self_attention/key",
  "attention.v_lin": "self_attention/value",
  "attention.out_lin": "self_attention/out",
  "ffn.lin1": "mlp/hidden",
  "ffn.lin2": "mlp/out",
}
_NORMS = {
  "sa_layer_norm": "self_attention_norm",
  "output_layer_norm": "mlp_norm",
}


def rows(config: ModelConfig) -> list[Row]:
  """Implements `Family.rows`."""
  del config
  table = bert.embedding_rows("distilbert.embeddings")
  for theirs, ours in _PARTS.items():
    table += family.linear(f"{_LAYER}.{theirs}", f"encoder_{{i}}/{ours}")
  for theirs, ours in _NORMS.items():
    table += family.norm(f"{_LAYER}.{theirs}", f"encoder_{{i}}/{ours}")
  return [
    *table,
    *family.linear("vocab_transform", "head/transform"),
    *family.norm("vocab_layer_norm", "head/norm"),
    Row("vocab_projector.bias", ("params/head/bias",)),
    *family.linear("pre_classifier", "head/pooler"),
    *family.linear("classifier", "head/classes"),
  ]


DISTILBERT = Family(
  name="distilbert",
  architectures={
    "DistilBertModel": "hidden",
    "DistilBertForMaskedLM": "tokens",
    "DistilBertForSequenceClassification": "class",
  },
  describe=describe,
  rows=rows,
  prefix="distilbert.",
  parts=("embeddings", "transformer"),
  copies=(
    ("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
  ),
  without_effect={
    **no_effect("affects only training", "qa_dropout seq_classif_dropout"),
    **no_effect("affects only initial weights", "sinusoidal_pos_embds"),
  },
)
"""BERT with half the layers, without token types."""
