"""Models that host any attention mechanism, as pure functions.

`create` makes a Transformer from a `ModelConfig`, and other models from the configs
of their kinds (`CONFIGS`); `initialize`, `forward`, `attention_maps` and `generate`
are functions of it and its variables. `load_pretrained` makes one of published
weights.
"""

from collections.abc import Mapping
import dataclasses

from attention.names import resolve
from models.api import (
  attention_maps,
  create,
  forward,
  forward_and_state,
  initialize,
  observe_attention,
  replace_attention,
)
from models.attention_config import (
  GENERATING,
  AttentionConfig,
  check_supports,
  missing,
  slots,
)
from models.attention_module_config import (
  AroundConfig,
  RotaryScaling,
  SlotConfig,
)
from models.config import KINDS, PAD_ID, ModelConfig
from models.decoding import Generated, generate
from models.io_config import EmbeddingConfig, HeadConfig
from models.kind import Config, Sizes
from models.mlp_config import MlpConfig
from models.published.load import Pretrained, load_pretrained, save_pretrained
from models.published.trained import as_pretrained
from models.sequence_shards import sequence_sharded
from settings.import_paths import ImportPaths, registered

__all__ = [
  "AttentionConfig",
  "AroundConfig",
  "RotaryScaling",
  "SlotConfig",
  "MlpConfig",
  "EmbeddingConfig",
  "HeadConfig",
  "ModelConfig",
  "CONFIGS",
  "find",
  "Config",
  "Sizes",
  "PAD_ID",
  "GENERATING",
  "check_supports",
  "missing",
  "slots",
  "create",
  "initialize",
  "forward",
  "forward_and_state",
  "attention_maps",
  "sequence_sharded",
  "observe_attention",
  "replace_attention",
  "generate",
  "Generated",
  "load_pretrained",
  "save_pretrained",
  "Pretrained",
  "as_pretrained",
]

CONFIGS: Mapping[str, type] = ImportPaths(
  {
    **dict.fromkeys(KINDS, "models.config:ModelConfig"),
    **registered("MODELS"),
  }
)
"""Kind of a model -> its config class."""


def find(kind: str) -> type:
  """Finds the config class of a kind of model, in `CONFIGS` or by import path.

  Args:
    kind: a key of `CONFIGS`, or 'package.module:attribute' of a class that
      follows `models.kind.Config`.

  Raises:
    ValueError: no such kind exists, or it is not a dataclass.
  """
  config = resolve(kind, CONFIGS, "Config")
  expected = "expected a dataclass that follows models.kind.Config"
  if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
    raise ValueError(
      f"{expected}, but {kind} is of type {type(config).__name__}"
    )
  # `create` imports it, so no config field of a file may set it.
  fields = [field.name for field in dataclasses.fields(config)]
  if not isinstance(getattr(config, "module", None), str) or "module" in fields:
    raise ValueError(f"{expected}, but {kind} has no `module: ClassVar[str]`")
  return config
