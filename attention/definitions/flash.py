"""FlashAttention (Dao et al., 2022): an algorithm, not another definition."""

from attention.definitions.dense import dense_attention

flash_attention = dense_attention
"""Dense attention itself.

FlashAttention computes softmax(scale · Q Kᵀ + bias) V exactly, block by block,
so its definition is that of `dense_attention`.

Paper: FlashAttention, theorem 1, arXiv:2205.14135.
"""
