"""FlashAttention (Dao et al., 2022): an algorithm, not another definition.

It computes `dense_attention` exactly, block by block: theorem 1 of
arXiv:2205.14135.
"""

from attention.definitions.dense import dense_attention

flash_attention = dense_attention
