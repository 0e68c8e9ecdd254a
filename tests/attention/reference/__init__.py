"""Naive float64 references of every mechanism, from the formulas alone.

Each is a loop over examples, heads and queries in NumPy, as slow as it is
plain. They share nothing with the implementations and are the only thing that
the contract suite compares numbers with.
"""

from tests.attention.reference.additive import additive_attention
from tests.attention.reference.bigbird import (
  attended_blocks,
  bigbird_attention,
)
from tests.attention.reference.linear import (
  linear_attention,
  performer_attention,
  random_features,
)
from tests.attention.reference.linformer import linformer_attention
from tests.attention.reference.lsh import lsh_attention, lsh_visible_sets
from tests.attention.reference.nystrom import (
  iterated_inverse,
  nystrom_attention,
)
from tests.attention.reference.softmax import (
  dense_attention,
  in_window,
  multiplicative_attention,
  sliding_window_attention,
)

__all__ = [
  "attended_blocks",
  "bigbird_attention",
  "additive_attention",
  "dense_attention",
  "in_window",
  "linear_attention",
  "linformer_attention",
  "lsh_attention",
  "lsh_visible_sets",
  "multiplicative_attention",
  "iterated_inverse",
  "nystrom_attention",
  "performer_attention",
  "random_features",
  "sliding_window_attention",
]
