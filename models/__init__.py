"""Models that host any attention mechanism, as pure functions.

`create` makes a Transformer from a `ModelConfig` or a recurrent model from a
`Seq2SeqConfig`; `initialize`, `forward`, `attention_maps` and `generate` are
functions of it and its variables.
"""

from collections.abc import Mapping
import types

from models.api import (
  attention_maps,
  create,
  forward,
  initialize,
  observe_attention,
)
from models.config import KINDS, AttentionConfig, ModelConfig, slots
from models.decoding import Generated, generate
from models.seq2seq_config import Seq2SeqConfig

__all__ = [
  "AttentionConfig",
  "ModelConfig",
  "Seq2SeqConfig",
  "CONFIGS",
  "slots",
  "create",
  "initialize",
  "forward",
  "attention_maps",
  "observe_attention",
  "generate",
  "Generated",
]

CONFIGS: Mapping[str, type] = types.MappingProxyType(
  {**dict.fromkeys(KINDS, ModelConfig), "seq2seq": Seq2SeqConfig}
)
"""Kind of a model -> the config that describes it."""
