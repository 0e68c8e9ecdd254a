"""Sliding-window attention (Longformer)."""

from attention.sliding_window.attention import (
  sliding_window,
  sliding_window_attention,
)

__all__ = ["sliding_window", "sliding_window_attention"]
