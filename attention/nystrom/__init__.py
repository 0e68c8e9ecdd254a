"""Softmax attention through landmarks (Nyströmformer).

`attention` is the public function, `means` computes the landmarks, `inverse`
the pseudo-inverse, and `convolution` the optional convolution of the values.
"""

from attention.nystrom.attention import nystrom, nystrom_attention

__all__ = ["nystrom", "nystrom_attention"]
