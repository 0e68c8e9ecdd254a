"""Exact attention in blocks, linear in memory (FlashAttention, Dao 2022)."""

from functools import partial

from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.core import implementations, loop, platform, relative, visibility
from attention.core.implementations import Implementation
from attention.core.tile import Product
from attention.dense import dense
from attention.flash.blocks import Arrays, Blocks, Limits


def flash_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  bias: Float[Array, "..."] | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "E H"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | tuple[int, int] | None = None,
  implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
  """`dense_attention` without its T×S matrix: softmax(scale · Q Kᵀ + bias) V.

  Tiles of queries walk over blocks of keys with an online softmax, and the
  backward recomputes each block from the log-sum-exp of its rows (`core.tile`,
  `core.loop`). Masks, biases and segments are read block by block along the axes
  that they have. Causal blocks above the diagonal are not visited.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; N is a multiple of K, query head n reads key head
      n // (N/K).
    value: `[B, S, K, V]`.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    bias: added to the scaled logits, broadcastable to `[B, N, T, S]`.
    relative_bias: `[N, 2L+1]`, added by clipped distance, see `relative`.
    relative_keys: `[2L+1, H]`, Shaw's keys by clipped distance.
    dropout_rate: share of attention weights set to zero; the others are
      divided by 1 - rate. Which ones depends on `block_size`.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.
    block_size: queries and keys in a block; one int for both. Only 'xla' takes
      it. None is the choice of `core.platform`.
    implementation: 'xla' is the block loop here and works everywhere. 'cudnn'
      is the kernel of NVIDIA's GPUs, by `jax.nn`; 'tokamax' is a kernel for a
      GPU or a TPU, by the optional package of that name. None takes cuDNN on a
      GPU where it can serve the call, and 'xla' elsewhere.

  Returns:
    `[B, T, N, V]` in the dtype of `query`.

  Raises:
    ValueError: arguments do not fit together, or `implementation` cannot serve
      them.

  Cost, C × D a block: time T·S·N·(H+V), half of it if causal; forward twice as
  much for C queries of which one has a logit above 40 or so, or none above -40.
  Memory beside the arrays B·N·C·D float32. Nothing is T×S, forward or backward,
  but a bias of that size and its gradient. cuDNN turns any mask into a bias,
  which is T×S for each example that has a mask of its own.

  Departs from its paper in that blocks are sized for a CPU's cache, not for a
  GPU's on-chip memory, the running maximum is taken only where sums would leave
  the range without, and dropout draws a key per block instead of keeping
  generator states.

  Paper: FlashAttention, arXiv:2205.14135.
  """
  arguments.check_pairs(
    query,
    key,
    value,
    mask=mask,
    bias=bias,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
  )
  batch, length, num_heads, head_dim = query.shape
  tables = relative.check(relative_bias, relative_keys, query)
  sizes = arguments.block_sizes(block_size)

  chosen = implementations.choose(
    implementation,
    query,
    key,
    value,
    mask,
    bias,
    without={
      "query_segment_ids": query_segment_ids is not None,
      "relative_bias": relative_bias is not None,
      "relative_keys": relative_keys is not None,
      "dropout_rate": dropout_rate > 0.0,
      "block_size": block_size is not None,
    },
  )
  if chosen != "xla":
    return implementations.call(
      chosen,
      query,
      key,
      value,
      mask,
      bias,
      is_causal=is_causal,
      scale=arguments.softmax_scale(scale, head_dim),
    )
  query, scale = arguments.scaled_query(query, scale)
  sees = visibility.of_call(mask, query_segment_ids, key_segment_ids, is_causal)
  rows, width = sizes or platform.block(
    4 * batch * num_heads,
    platform.LEAST_ROWS,
    # Narrower blocks waste less of what lies above the diagonal.
    platform.LEAST_ROWS // (2 if is_causal else 1),
  )
  source_length, kv_heads = key.shape[1:3]
  source = Blocks(
    rows=min(rows, length),
    width=min(width, source_length),
    kv_heads=kv_heads,
    num_heads=num_heads,
    score=Product(scale),
    by_data=sees.by_data,
    source_length=source_length,
    is_causal=is_causal,
    dropout_rate=dropout_rate,
  )
  limits = Limits(sees, dropout_rng)
  return loop.attend(source, query, Arrays(key, value, bias), tables, limits)


def flash(
  block_size: int | tuple[int, int] | None = None,
  implementation: Implementation | None = None,
) -> plug.Attention:
  """The plug of `flash_attention`.

  Decoding is that of dense attention: one query has no blocks.

  Args:
    block_size: queries and keys in a block; None is the function's choice.
    implementation: 'xla', 'cudnn', 'tokamax', or None to choose; on a GPU the
      last two take float16 and bfloat16 only, and no `block_size`.

  Raises:
    ValueError: an argument is out of range.
  """
  arguments.block_sizes(block_size)
  implementations.check_name(implementation)

  function = partial(
    flash_attention, block_size=block_size, implementation=implementation
  )

  def apply(variables, query, key, value, **call):
    del variables
    call = arguments.accepted_options("flash", function, call)
    return function(query, key, value, **call)

  return dense()._replace(apply=apply)
