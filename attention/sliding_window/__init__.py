"""Sliding-window attention (Longformer).

`attention` is the public function, `near` says what a tile sees, `dilation` and
`global_tokens` are the two options that need code of their own, and `cache`
decodes.
"""

from attention.sliding_window.attention import (
  sliding_window,
  sliding_window_attention,
)

__all__ = ["sliding_window", "sliding_window_attention"]
