"""BERT: Devlin et al., arXiv:1810.04805."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from models import nested
from models.config import ModelConfig
from models.published import family
from models.published.family import Description, Family, Row
from models.published.keys import no_effect


def layer_rows(theirs: str, ours: str = "encoder_{i}") -> list[Row]:
  """Returns the rows of one layer, whose norms follow its sub-layers."""
  attention, module = f"{theirs}.attention", f"{ours}/self_attention"
  return [
    *family.linear(f"{attention}.self.query", f"{module}/query"),
    *family.linear(f"{attention}.self.key", f"{module}/key"),
    *family.linear(f"{attention}.self.value", f"{module}/value"),
    *family.linear(f"{attention}.output.dense", f"{module}/out"),
    *family.norm(f"{attention}.output.LayerNorm", f"{module}_norm"),
    *family.linear(f"{theirs}.intermediate.dense", f"{ours}/mlp/hidden"),
    *family.linear(f"{theirs}.output.dense", f"{ours}/mlp/out"),
    *family.norm(f"{theirs}.output.LayerNorm", f"{ours}/mlp_norm"),
  ]


def embedding_rows(theirs: str) -> list[Row]:
  """Returns the rows of the embeddings."""
  return [
    # For token logits, the softmax uses the same table.
    *family.table(f"{theirs}.word_embeddings", "target_embedding"),
    *family.table(f"{theirs}.word_embeddings", "source_embedding"),
    *family.table(f"{theirs}.position_embeddings", "source_positions"),
    *family.table(f"{theirs}.token_type_embeddings", "source_types"),
    *family.norm(f"{theirs}.LayerNorm", "source_embedding_norm"),
  ]


def pooler_rows(config: ModelConfig, base: str, classes: str) -> list[Row]:
  """Returns the rows of the pooler, which classifiers name differently."""
  theirs = classes if config.head == "class" else base
  return family.linear(theirs, "head/pooler")


def head_rows() -> list[Row]:
  """Returns the rows of the head for tokens."""
  return [
    *family.linear("cls.predictions.transform.dense", "head/transform"),
    *family.norm("cls.predictions.transform.LayerNorm", "head/norm"),
    Row("cls.predictions.bias", ("params/head/bias",)),
  ]


def copies(prefix: str) -> tuple[tuple[str, str], ...]:
  """Returns the tensors of the head that files may store twice."""
  words = f"{prefix}embeddings.word_embeddings.weight"
  return (
    ("cls.predictions.decoder.weight", words),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
  )


def check_tied(hf_config: Mapping[str, Any], head: str) -> None:
  """Raises ValueError if logits of tokens have a table of their own."""
  tied = family.flag(hf_config, "tie_word_embeddings", True)
  if head == "tokens" and not tied:
    raise ValueError("tie_word_embeddings: expected True, got False")


def encoder(
  hf_config: Mapping[str, Any], head: str, **others: Any
) -> ModelConfig:
  """Returns the config fields that BERT and its successors share.

  Args:
    hf_config: `config.json`.
    head: our name of the head.
    **others: config fields in which a family differs.
  """
  family.only(
    hf_config,
    position_embedding_type="absolute",
    is_decoder=False,
    add_cross_attention=False,
  )
  check_tied(hf_config, head)
  dropout = family.number(hf_config, "hidden_dropout_prob", 0.1)
  # If a family replaces a field, its key is not read.
  read: dict[str, Callable[[], Any]] = {
    "norm_epsilon": lambda: family.number(hf_config, "layer_norm_eps", 1e-12),
    "token_types": lambda: family.size(hf_config, "type_vocab_size"),
    "position": lambda: "learned",
  }
  choices = {
    name: value() for name, value in read.items() if name not in others
  }
  return nested.make(
    ModelConfig,
    kind="encoder",
    num_layers=family.size(hf_config, "num_hidden_layers"),
    num_heads=family.size(hf_config, "num_attention_heads"),
    features=family.size(hf_config, "hidden_size"),
    mlp_features=family.size(hf_config, "intermediate_size"),
    activation=family.activation(hf_config, "hidden_act", "gelu"),
    attention_bias=True,
    dropout_rate=dropout,
    norm="post",
    embedding_norm=True,
    embedding_scale=1.0,
    head=head,
    head_transform=head == "tokens",
    head_bias=head != "hidden",
    **choices,
    **others,
  )


def has_pooler(names: Collection[str], head: str) -> bool:
  """Returns whether a model has a pooler.

  A base model may have one or not; a model of masked tokens does not use it.
  """
  return head == "class" or (
    head == "hidden" and any("pooler." in name for name in names)
  )


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  vocab_size = family.size(hf_config, "vocab_size")
  return Description(
    encoder(hf_config, head, pooler=has_pooler(names, head)),
    vocab_size,
    num_labels(hf_config) if head == "class" else vocab_size,
    family.size(hf_config, "max_position_embeddings"),
  )


def to_json(description: Description) -> dict[str, Any]:
  """Implements `Family.to_json`."""
  config = description.config
  labels = range(description.outputs if config.head == "class" else 2)
  return {
    "model_type": "bert",
    "vocab_size": description.vocab_size,
    "max_position_embeddings": description.max_length,
    **sizes_json(config),
    "type_vocab_size": max(config.embedding.token_types, 1),
    "id2label": {str(i): f"LABEL_{i}" for i in labels},
  }


def sizes_json(config: ModelConfig) -> dict[str, Any]:
  """Returns the keys of `config.json` that BERT and its successors share."""
  return {
    "hidden_size": config.features,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "intermediate_size": config.mlp_features,
    "hidden_act": family.their_activation(config.activation),
    "hidden_dropout_prob": config.dropout_rate,
    "attention_probs_dropout_prob": config.attention_dropout_rate,
    "layer_norm_eps": config.norm_epsilon,
  }


def num_labels(hf_config: Mapping[str, Any]) -> int:
  """Returns the number of classes: the number of their names, or 2 by default."""
  labels = hf_config.get("id2label")
  if isinstance(labels, dict) and labels:
    family.only(hf_config, num_labels=len(labels))
    return len(labels)
  return family.size(hf_config, "num_labels", 2)


BERT = Family(
  name="bert",
  architectures={
    "BertModel": "hidden",
    "BertForMaskedLM": "tokens",
    "BertForSequenceClassification": "class",
  },
  describe=describe,
  rows=lambda config: (
    *embedding_rows("bert.embeddings"),
    *layer_rows("bert.encoder.layer.{i}"),
    *family.linear("bert.pooler.dense", "head/pooler"),
    *head_rows(),
    *family.linear("classifier", "head/classes"),
  ),
  prefix="bert.",
  parts=("embeddings", "encoder", "pooler"),
  # Files of 2018.
  renamed=(
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
  ),
  copies=copies("bert."),
  unread=(
    r"bert\.embeddings\.position_ids",
    # Heads of BERT's pretraining that masked language modelling does not use.
    r"bert\.pooler\.dense\.(weight|bias)",
    r"cls\.seq_relationship\.(weight|bias)",
  ),
  to_json=to_json,
  without_effect=no_effect(
    "was used by the code of 2018",
    "directionality pooler_fc_size pooler_num_attention_heads "
    "pooler_num_fc_layers pooler_size_per_head pooler_type",
  ),
)
"""Post-norm encoders with token types; 'gelu' is the exact gelu."""
