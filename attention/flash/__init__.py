"""Exact attention in blocks (FlashAttention)."""

from attention.flash.attention import flash, flash_attention

__all__ = ["flash", "flash_attention"]
