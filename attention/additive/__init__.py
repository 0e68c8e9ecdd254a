"""Scores from a small network (Bahdanau)."""

from attention.additive.attention import additive, additive_attention

__all__ = ["additive", "additive_attention"]
