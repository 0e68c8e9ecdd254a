"""Additive attention (Bahdanau): scores from a small network.

`attention` is the public function and the decode cache, `score` the scores of a
tile. The keys of a tile are those of `flash.blocks`.
"""

from attention.additive.attention import additive, additive_attention

__all__ = ["additive", "additive_attention"]
