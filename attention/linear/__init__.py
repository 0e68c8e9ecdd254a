"""Linear attention: a product of features instead of an exponential.

`attention` is the public function. `features` says what a feature map is,
`hedgehog` has one that is trained,
`kernel` chooses the loop, `state` says how keys are summed and read,
`bidirectional` and `causal` are the loops over `blocks` of a sequence, `chunk`
is the part of the causal form within a chunk, and `cache` decodes. Performer is
the same with other features.
"""

from attention.linear.attention import (
  FEATURE_MAPS,
  elu_plus_one,
  linear,
  linear_attention,
  relu,
)
from attention.linear.hedgehog import hedgehog_features

__all__ = [
  "FEATURE_MAPS",
  "elu_plus_one",
  "hedgehog_features",
  "linear",
  "linear_attention",
  "relu",
]
