"""Recurrences with a state that decays, and the mechanisms that are made of them.

`gated_linear` and `delta_rule` have the two functions, each with the mechanism that
is closest to it; `retention`, `mamba2`, `gated_delta` and `kimi_delta` are the same
with other decays and rates. `recurrence` computes both chunk by chunk, `parts` does
it over devices, `gates` has what is read from the inputs, and `record` makes the
plug of a mechanism.
"""

from attention.recurrent.delta_rule import delta, delta_rule_attention
from attention.recurrent.gated_delta import gated_delta
from attention.recurrent.gated_linear import (
  gated_linear,
  gated_linear_attention,
)
from attention.recurrent.gates import unit_length
from attention.recurrent.kimi_delta import kimi_delta
from attention.recurrent.mamba2 import mamba2
from attention.recurrent.retention import retention

__all__ = [
  "delta",
  "delta_rule_attention",
  "gated_delta",
  "gated_linear",
  "gated_linear_attention",
  "kimi_delta",
  "mamba2",
  "retention",
  "unit_length",
]
