"""FlashAttention (Dao et al., 2022), which computes dense attention exactly.

See theorem 1 of arXiv:2205.14135.
"""

from attention.definitions.dense import dense_attention

flash_attention = dense_attention
