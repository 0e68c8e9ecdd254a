"""The mechanisms by name, for configs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from attention.dense import dense
from attention.plug import Attention

ATTENTIONS: Mapping[str, Callable[..., Attention]] = MappingProxyType(
  {
    "dense": dense,
  }
)
"""name -> typed factory; `ATTENTIONS['performer'](num_features=64)`."""
