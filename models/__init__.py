"""Transformers that host any attention mechanism, as pure functions.

`create` makes a model from a `ModelConfig`; `initialize`, `forward`,
`attention_maps` and `generate` are functions of it and its variables.
"""

import importlib
from typing import TYPE_CHECKING, Any

from models.config import AttentionConfig, ModelConfig

if TYPE_CHECKING:
  from models.api import attention_maps, create, forward, initialize
  from models.decoding import Generated, generate

__all__ = [
  "AttentionConfig",
  "ModelConfig",
  "create",
  "initialize",
  "forward",
  "attention_maps",
  "generate",
  "Generated",
]


def __getattr__(name: str) -> Any:
  # Flax is imported with the first function that needs it, so that a faulty
  # config is reported before.
  if name not in __all__:
    raise AttributeError(f"module 'models' has no attribute '{name}'")
  home = "decoding" if name.lower().startswith("generate") else "api"
  return getattr(importlib.import_module(f"models.{home}"), name)
