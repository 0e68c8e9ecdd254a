"""DeBERTa V2 and V3: He et al., arXiv:2006.03654 and arXiv:2111.09543."""

from collections.abc import Collection, Mapping
import math
import re
from typing import Any

from models.attention_module_config import DisentangledConfig
from models.published import bert, family
from models.published.family import Description, Family, Row
from models.published.keys import no_effect
from settings.fields import Whole


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  features = family.size(hf_config, "hidden_size")
  heads = family.size(hf_config, "num_attention_heads")
  family.only(
    hf_config,
    "hidden_size",
    embedding_size=features,
    pooler_hidden_size=features,
  )
  source = "hidden_size / num_attention_heads"
  family.only(hf_config, source, attention_head_size=features // heads)
  family.only(
    hf_config,
    conv_kernel_size=0,  # A convolution parallel to the first layer.
    legacy=True,  # Files without the legacy head have other tensors.
  )
  own = _positions(hf_config, features // heads)
  if head == "class":
    activation = family.activation(hf_config, "pooler_hidden_act", "gelu")
    own |= {"pooler": True, "pooler_activation": activation}
  vocab_size = family.size(hf_config, "vocab_size")
  return Description(
    bert.encoder(
      hf_config,
      head,
      norm_epsilon=family.number(hf_config, "layer_norm_eps", 1e-7),
      token_types=family.value(hf_config, "type_vocab_size", Whole, 0),
      **own,
    ),
    vocab_size,
    bert.num_labels(hf_config) if head == "class" else vocab_size,
    family.size(hf_config, "max_position_embeddings"),
  )


def _positions(hf_config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
  """The config fields of positions."""
  terms = hf_config.get("pos_att_type") or []
  if isinstance(terms, str):
    terms = [term.strip() for term in terms.lower().split("|")]
  terms = tuple(
    family.value({"pos_att_type": terms}, "pos_att_type", list[str])
  )
  if not {*terms} <= {"c2p", "p2c"} or len({*terms}) < len(terms):
    raise ValueError(f"pos_att_type: expected c2p and p2c, got {terms}")
  is_added = family.flag(hf_config, "position_biased_input", True)
  if not family.flag(hf_config, "relative_attention", False):
    family.only(
      hf_config,
      "relative_attention is false",
      max_relative_positions=-1,
      position_buckets=-1,
      norm_rel_ebd="none",
      share_att_key=False,
    )
    return {
      "position": "learned" if is_added else "none",
      "attention_scale": 1.0 / math.sqrt((1 + len(terms)) * head_dim),
    }
  if is_added:
    raise ValueError(
      "position_biased_input: expected false with relative_attention, got true"
    )
  norm = family.choice(
    hf_config, "norm_rel_ebd", ("none", "layer_norm"), "none"
  )
  longest, buckets = (
    None if hf_config.get(key, -1) == -1 else family.size(hf_config, key)
    for key in ("max_relative_positions", "position_buckets")
  )
  config = DisentangledConfig(
    terms=terms,
    max_distance=longest or family.size(hf_config, "max_position_embeddings"),
    num_buckets=buckets,
    shared_projections=family.flag(hf_config, "share_att_key", False),
    norm=norm == "layer_norm",
  )
  return {"position": "disentangled", "disentangled": config}


def _layer_rows() -> list[Row]:
  theirs, module = "deberta.encoder.layer.{i}", "encoder_{i}/self_attention"
  own = f"{theirs}.attention.self"
  return [
    *(
      row._replace(
        theirs=re.sub(r"self\.(query|key|value)", r"self.\1_proj", row.theirs)
      )
      for row in bert.layer_rows(theirs)
    ),
    *family.linear(f"{own}.pos_key_proj", f"{module}/position_key"),
    *family.linear(f"{own}.pos_query_proj", f"{module}/position_query"),
  ]


DEBERTA_V2 = Family(
  name="deberta-v2",
  architectures={
    "DebertaV2Model": "hidden",
    "DebertaV2ForMaskedLM": "tokens",
    "DebertaV2ForSequenceClassification": "class",
  },
  describe=describe,
  needs_first_token=True,
  rows=lambda config: (
    *bert.embedding_rows("deberta.embeddings"),
    *family.table(
      "deberta.encoder.rel_embeddings", "encoder_relative_embeddings"
    ),
    *family.norm("deberta.encoder.LayerNorm", "encoder_relative_norm"),
    *_layer_rows(),
    *bert.head_rows(),
    *family.linear("pooler.dense", "head/pooler"),
    *family.linear("classifier", "head/classes"),
  ),
  prefix="deberta.",
  parts=("embeddings", "encoder"),
  copies=bert.copies("deberta."),
  unread=(
    r"deberta\.embeddings\.position_embeddings\.weight",
    # Heads of V3's pretraining.
    r"(lm|mask)_predictions\..*",
  ),
  without_effect={
    **no_effect("affects only training", "pooler_dropout cls_dropout"),
    **no_effect("affects only the classification head", "pooler_hidden_act"),
  },
)
"""BERT with disentangled attention, and no absolute positions."""
