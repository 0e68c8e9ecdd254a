"""Exact attention in blocks (FlashAttention).

`attention` is the public function; `blocks` says what a tile sees.
"""

from attention.flash.attention import flash, flash_attention

__all__ = ["flash", "flash_attention"]
