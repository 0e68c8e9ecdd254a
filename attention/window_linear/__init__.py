"""Softmax attention near the query and linear attention beyond, as one average.

`attention` is the public function, `joint` adds up the two kinds of keys, and
`cache` decodes. The near keys are those of `sliding_window.near`, and the sums
over the others those of `linear.causal` with the features of `linear.hedgehog`.
"""

from attention.window_linear.attention import (
  window_linear,
  window_linear_attention,
)

__all__ = ["window_linear", "window_linear_attention"]
