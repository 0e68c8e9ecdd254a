"""Exact attention in blocks, with memory linear in length (Dao et al., 2022).

In `attention.softmax`, `visible` defines the visible pairs, `logits` their logits,
`tiles` computes the attention, and `kernels` selects cuDNN or tokamax.
"""

from functools import partial
from typing import Any, Literal, Unpack

from jaxtyping import Array, Float

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.dense import dense
from attention.mechanism import Attention
from attention.softmax import kernels, own_logits
from attention.softmax.kernels import Implementation, InParts
from attention.softmax.logits import PLAIN, Logits, SoftmaxOptions
from attention.softmax.mods import BlockMask
from attention.softmax.rows import Output
from attention.softmax.sharding import attend_to_shards
from attention.softmax.tiles import attend
from attention.softmax.visible import EVERY_PAIR, Visible


class FlashOptions(SoftmaxOptions, total=False):
  """The options of `dense_attention`, and a block mask."""

  block_mask: BlockMask | None


@attention_function
def flash_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | tuple[int, int] | None = None,
  implementation: Implementation | None = None,
  axis_name: str | None = None,
  in_parts: InParts = "ring",
  visible: Visible = EVERY_PAIR,
  logits: Logits = PLAIN,
  return_lse: bool = False,
  **pairs: Unpack[FlashOptions],
) -> Output:
  """`dense_attention` without the T×S matrix: softmax(scale · Q Kᵀ + bias) V.

    out = flash_attention(q, k, v, is_causal=True)

  Each tile of queries visits the blocks of keys one after another, with an online
  softmax. The backward pass recomputes each block from the log-sum-exp of its rows
  (`attention.softmax.tiles`). Masks, biases and segments are read block by block along
  the axes that they have. A causal call skips the blocks above the diagonal.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    block_mask: the result of `make_block_mask(mask_mod, …)`. The call skips the blocks
      that it excludes, and uses its block size.
    block_size: (C, D), the queries and keys of a block, or one int for both. Only
      'xla' supports it. None means the choice of `attention.platform.backend.block`.
    implementation: 'xla' is the loop over blocks, which works everywhere. 'cudnn' is
      NVIDIA's GPU kernel, called through `jax.nn`; 'tokamax' is a GPU or TPU kernel
      of the optional package of that name. None uses cuDNN on a GPU if it supports
      the call, and 'xla' otherwise.
    axis_name: mesh axis inside `jax.shard_map`, with 'xla' only.
    in_parts: the algorithm for sequence shards: 'ring', 'balanced' (zigzag order) or
      'all_to_all'; see `sharding.attend_to_shards`.
    visible: the visible pairs, in addition to the other masking options.
    logits: the options for logits as one value, in place of the keywords.
    return_lse: whether to return the log-sum-exp of the logits as well.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees only keys s ≤ t, even if T ≠ S, as in `dense_attention`.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    scale: factor of the logits; None means 1/√H.
    relative_bias: `[N, 2L+1]`, added to the logits by clipped distance.
    relative_keys: `[2L+1, H]` or `[N, 2L+1, H]`, keys by clipped distance.
    relative_queries: `[2L+1, H]` or `[N, 2L+1, H]`, queries by clipped distance.
    sinks: `[N]`, one more logit per head, which has no value.
    logits_soft_cap: c; logits become c · tanh(x / c), before masks and biases.
    log_forget: `[B, T, N]`, logarithms of forget gates, at most 0.
    score_mod: `(score, b, n, t, s) -> score`, as in FlexAttention.
    mask_mod: `(b, n, t, s) -> bool`, True = attend, in addition to `mask`.
    bias: added to the scaled logits, broadcastable to `[B, N, T, S]`.
    dropout_rate: fraction of the attention weights that are set to zero.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; with `return_lse` also `[B, T, N]` in
    float32, −∞ for a query that sees no key. Both have gradients, so that results
    over disjoint sets of keys can be merged (`attention.softmax.rows.merge`).

  Raises:
    ValueError: `implementation` does not support the call.

  Cost, for blocks of C queries and D keys: time T·S·N·(H+V), half of it if
  causal. Memory in addition to the arrays B·N·C·D float32. No array is T×S, forward
  or backward, except a bias of that size and its gradient. cuDNN converts a mask to a
  bias, which is T×S for each example with its own mask.

  Differs from the paper in that `attention.platform.backend` chooses the block size,
  not a GPU's on-chip memory, and in that dropout of a pair depends on its positions,
  not on the state of a generator.

  Papers: FlashAttention, arXiv:2205.14135. Sinks: gpt-oss, arXiv:2508.10925. Soft
  caps: Gemma 2, arXiv:2408.00118. Forget gates: Forgetting transformer,
  arXiv:2503.02130. Mods: Flex attention, arXiv:2412.05496.
  """
  sizes = checks.block_sizes(block_size)
  if visible.block_mask and sizes not in (None, visible.block_mask.block_size):
    raise ValueError(
      f"block_size: expected None with a block_mask, which has blocks of "
      f"{visible.block_mask.block_size}, got {sizes}"
    )
  out = kernels.kernel_output(
    implementation,
    query,
    key,
    value,
    visible,
    logits,
    dropout_rate=dropout_rate or None,
    block_size=block_size,
    axis_name=axis_name,
    return_lse=return_lse or None,
  )
  if out is not None:
    return out
  run: Any = attend
  if axis_name is not None:
    run = partial(attend_to_shards, axis_name=axis_name, in_parts=in_parts)
  out, lse = run(
    query,
    key,
    value,
    visible,
    logits,
    block=sizes,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
  )
  return (out, lse) if return_lse else out


@attention_factory
def flash(
  block_size: int | tuple[int, int] | None = None,
  implementation: Implementation | None = None,
  in_parts: InParts = "ring",
  sinks: bool | Literal["inputs"] = False,
  logits_soft_cap: float | None = None,
  forget: bool = False,
) -> Attention:
  """The mechanism of `flash_attention`.

  It decodes as dense attention does, because there is only one query.

  Args:
    block_size: as in `flash_attention`.
    implementation: as in `flash_attention`. On a GPU, 'cudnn' and 'tokamax' support
      only float16 and bfloat16, and no `block_size`.
    in_parts: as in `flash_attention`.
    sinks: as in `dense`.
    logits_soft_cap: as in `dense`.
    forget: as in `dense`.

  Returns:
    An `Attention` that decodes with the cache of dense attention.
  """
  own = own_logits.OwnLogits(sinks, logits_soft_cap, forget)
  function = partial(
    flash_attention,
    block_size=block_size,
    implementation=implementation,
    in_parts=in_parts,
  )
  exact = dense(sinks, logits_soft_cap, forget)
  return exact._replace(apply=own.make_apply("flash", function))
