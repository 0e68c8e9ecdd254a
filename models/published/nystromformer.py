"""Nyströmformer: Xiong et al., arXiv:2102.03902."""

from collections import ChainMap
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from models.attention_config import AttentionConfig
from models.published import bert, family
from models.published.family import Description, Family, Layout, Row
from models.published.keys import no_effect

_OFFSET = 2
"""Position of the first token; the rows before it are unused."""

_DEFAULTS = MappingProxyType({"hidden_act": "gelu_new", "layer_norm_eps": 1e-5})
"""Defaults that differ from BERT's."""

_FILTERS = Layout(
  # A depth-wise convolution over (positions, 1), one filter for each head.
  lambda x, n: [x[:, 0, :, 0].T],
  lambda xs: np.transpose(xs[0])[:, None, :, None],
)


def describe(
  hf_config: Mapping[str, Any], names: Collection[str], head: str
) -> Description:
  """Implements `Family.describe`."""
  del names
  landmarks = family.size(hf_config, "num_landmarks")
  length = family.size(hf_config, "segment_means_seq_len")
  if landmarks >= length:
    raise ValueError(
      f"num_landmarks: expected fewer than segment_means_seq_len {length}, with "
      f"which the model is dense attention, got {landmarks}"
    )
  options = {
    "num_landmarks": landmarks,
    "shared_start": not family.flag(hf_config, "inv_coeff_init_option", False),
  }
  if kernel := family.optional_size(hf_config, "conv_kernel_size", 65):
    options["conv_kernel_size"] = kernel
  vocab_size = family.size(hf_config, "vocab_size")
  return Description(
    bert.encoder(
      ChainMap(cast(Any, hf_config), dict(_DEFAULTS)),
      head,
      position_offset=_OFFSET,
      encoder_attention=AttentionConfig("nystrom", options),
    ),
    vocab_size,
    vocab_size,
    family.size(hf_config, "max_position_embeddings"),
  )


NYSTROMFORMER = Family(
  name="nystromformer",
  architectures={"NystromformerForMaskedLM": "tokens"},
  describe=describe,
  rows=lambda config: (
    *bert.embedding_rows("nystromformer.embeddings"),
    *bert.layer_rows("nystromformer.encoder.layer.{i}"),
    Row(
      "nystromformer.encoder.layer.{i}.attention.self.conv.weight",
      ("params/encoder_{i}/self_attention/attention/conv_kernel",),
      _FILTERS,
    ),
    *bert.head_rows(),
  ),
  prefix="nystromformer.",
  parts=("embeddings", "encoder"),
  copies=bert.copies("nystromformer."),
  without_effect=no_effect(
    "is the only length that transformers' code supports",
    "segment_means_seq_len",
  ),
  unread=(r"nystromformer\.embeddings\.(position_ids|token_type_ids)",),
)
"""BERT with Nyström attention, for sequences without padding.

The landmarks of transformers' model include padding, those of `nystrom_attention` do
not, so logits of padded rows differ.
"""
