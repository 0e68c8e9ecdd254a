"""Models that host any attention mechanism, as pure functions.

`create` makes a Transformer from a `ModelConfig`, and other models from the configs
of their kinds (`CONFIGS`); `initialize`, `forward`, `attention_maps` and `generate`
are functions of it and its variables. `load_pretrained` makes one of published
weights.
"""

from collections.abc import Mapping
import importlib
import types
from typing import TYPE_CHECKING, Any

from models.around_config import AroundConfig
from models.attention_config import (
  GENERATING,
  AttentionConfig,
  check_supports,
  missing,
  slots,
)
from models.config import KINDS, PAD_ID, PATCH_ID, ModelConfig
from models.conformer_config import ConformerConfig, ExtractorConfig
from models.perceiver_config import PerceiverConfig
from models.pyramid_config import PyramidConfig
from models.seq2seq_config import Seq2SeqConfig
from models.size import Config, least_activations, least_parameters, num_tokens

if TYPE_CHECKING:
  from models.api import (
    attention_in_parts,
    attention_maps,
    create,
    forward,
    forward_and_statistics,
    initialize,
    observe_attention,
    replace_attention,
  )
  from models.decoding import Generated, generate
  from models.pretrained.load import (
    Pretrained,
    load_pretrained,
    save_pretrained,
  )
  from models.pretrained.trained import as_pretrained

__all__ = [
  "AttentionConfig",
  "AroundConfig",
  "ModelConfig",
  "Seq2SeqConfig",
  "PyramidConfig",
  "PerceiverConfig",
  "ConformerConfig",
  "ExtractorConfig",
  "CONFIGS",
  "Config",
  "PAD_ID",
  "PATCH_ID",
  "GENERATING",
  "check_supports",
  "missing",
  "slots",
  "least_parameters",
  "least_activations",
  "num_tokens",
  "create",
  "initialize",
  "forward",
  "forward_and_statistics",
  "attention_maps",
  "attention_in_parts",
  "observe_attention",
  "replace_attention",
  "generate",
  "Generated",
  "load_pretrained",
  "save_pretrained",
  "Pretrained",
  "as_pretrained",
]

CONFIGS: Mapping[str, type] = types.MappingProxyType(
  {
    **dict.fromkeys(KINDS, ModelConfig),
    "seq2seq": Seq2SeqConfig,
    "pyramid": PyramidConfig,
    "perceiver": PerceiverConfig,
    "conformer": ConformerConfig,
  }
)
"""Kind of a model -> the config that describes it."""


def __getattr__(name: str) -> Any:
  # Flax is imported with the first function that needs it: config files import
  # `models.config`, hence JAX, and are run and checked without Flax.
  if name not in __all__:
    raise AttributeError(f"module 'models' has no attribute '{name}'")
  home = "api"
  if name.lower().startswith("generate"):
    home = "decoding"
  elif name == "as_pretrained":
    home = "pretrained.trained"
  elif "pretrained" in name.lower():
    home = "pretrained.load"
  return getattr(importlib.import_module(f"models.{home}"), name)
