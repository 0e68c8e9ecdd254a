"""Models with any attention mechanism, as pure functions.

`create` creates the model of a config: a Transformer for a `ModelConfig`, or another
kind for one of the other `CONFIGS`. `initialize`, `forward`, `attention_maps` and
`generate` are functions of a model and its variables. `load_pretrained` loads a model
with published weights.
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
"""Maps kinds of models to their config classes."""


def find(kind: str) -> type:
  """Finds the config class of a kind of model, in `CONFIGS` or by import path.

  Args:
    kind: a key of `CONFIGS`, or 'package.module:attribute' of a class that
      follows `models.kind.Config`.

  Raises:
    ValueError: the kind is unknown, or does not follow `models.kind.Config`.
  """
  config = resolve(kind, CONFIGS, "Config")
  expected = "expected a dataclass that follows models.kind.Config"
  if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
    raise ValueError(
      f"{expected}, but {kind} is of type {type(config).__name__}"
    )
  # `create` imports `module`, so a config file must not be able to set it.
  fields = [field.name for field in dataclasses.fields(config)]
  if not isinstance(getattr(config, "module", None), str) or "module" in fields:
    raise ValueError(f"{expected}, but {kind} has no `module: ClassVar[str]`")
  return config
