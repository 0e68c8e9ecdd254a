"""The mechanisms by name, for configs, tests and tables.

A new mechanism is one entry here; its record says everything else about it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from attention import arguments
from attention.additive import additive
from attention.bigbird import bigbird
from attention.dense import dense
from attention.flash import flash
from attention.linear import linear
from attention.linformer import linformer
from attention.lsh import lsh
from attention.multiplicative import multiplicative
from attention.nystrom import nystrom
from attention.performer import performer
from attention.plug import Attention
from attention.sliding_window import sliding_window

ATTENTIONS: Mapping[str, Callable[..., Attention]] = MappingProxyType(
  dict(
    dense=dense,
    flash=flash,
    sliding_window=sliding_window,
    bigbird=bigbird,
    linear=linear,
    performer=performer,
    linformer=linformer,
    lsh=lsh,
    nystrom=nystrom,
    additive=additive,
    multiplicative=multiplicative,
  )
)
"""name -> typed factory; `ATTENTIONS['performer'](num_features=64)`."""

arguments.register(ATTENTIONS)
