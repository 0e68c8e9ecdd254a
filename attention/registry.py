"""The mechanisms by name, for configs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from attention.dense import dense
from attention.linformer import linformer
from attention.performer import performer
from attention.plug import Attention

ATTENTIONS: Mapping[str, Callable[..., Attention]] = MappingProxyType(
  dict(
    dense=dense,
    performer=performer,
    linformer=linformer,
  )
)
"""name -> typed factory; `ATTENTIONS['performer'](num_features=64)`."""
