"""Attention in windows of a two-dimensional grid of positions (Swin).

`attention` is the public function, `grid` brings positions into the order of
windows and back, and `windows` says what a window sees.
"""

from attention.window_2d.attention import window_2d, window_2d_attention

__all__ = ["window_2d", "window_2d_attention"]
