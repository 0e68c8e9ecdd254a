"""Softmax attention through landmarks (Nyströmformer)."""

from attention.nystrom.attention import nystrom, nystrom_attention

__all__ = ["nystrom", "nystrom_attention"]
