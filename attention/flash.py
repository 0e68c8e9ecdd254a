"""Exact attention in blocks, linear in memory (Dao et al., 2022).

`visible` and `logits` are what a call says of pairs, `tiles` computes it, and
`softmax.kernels` says when a kernel of cuDNN or tokamax takes a call.
"""

from functools import partial
from typing import Any, Unpack

from jaxtyping import Array, Float

from attention import checks
from attention.decorators import applied, attention_factory, attention_function
from attention.dense import dense
from attention.mechanism import Attention
from attention.softmax import kernels, own_logits
from attention.softmax.kernels import Implementation, InParts
from attention.softmax.logits import PLAIN, Logits, SoftmaxOptions
from attention.softmax.mods import BlockMask
from attention.softmax.sharding import attend_to_shards
from attention.softmax.tiles import Output, attend
from attention.softmax.visible import EVERY_PAIR, Visible


class FlashOptions(SoftmaxOptions, total=False):
  """Those of `dense_attention`, and a table of blocks."""

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
  """`dense_attention` without its T×S matrix: softmax(scale · Q Kᵀ + bias) V.

    out = flash_attention(q, k, v, is_causal=True)

  Each tile of queries takes the blocks of keys one after another, with an
  online softmax. The backward computes each block again from the log-sum-exp of
  its rows (`attention.softmax.tiles`). Masks, biases and segments are read block by block
  along the axes that they have. In a causal call, blocks above the diagonal are not
  visited.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    block_mask: from `make_block_mask(mask_mod, …)`: blocks that it hides are never
      visited; its block size is taken.
    block_size: (C, D), the queries and keys of a block, or one int for both.
      Only 'xla' takes it. None is the choice of `attention.platform.backend.block`.
    implementation: 'xla' is the block loop here and works everywhere. 'cudnn'
      is the kernel of NVIDIA's GPUs, by `jax.nn`; 'tokamax' is a kernel for a
      GPU or a TPU, by the optional package of that name. None takes cuDNN on a
      GPU where it can serve the call, and 'xla' elsewhere.
    axis_name: as `dense_attention`, with 'xla' alone.
    in_parts: how the devices of `axis_name` attend: 'ring', 'balanced' or
      'all_to_all'; see `sharding.attend_to_shards`.
    visible: which pairs count, in addition to the options that say so.
    logits: how pairs are scored, in place of the options that say so.
    return_lse: whether to return the log-sum-exp of the logits, too.

  Other options: as `dense_attention`.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; with `return_lse` also `[B, T, N]` in
    float32, −∞ for a query that sees nothing. Both have gradients, so that results
    over disjoint sets of keys can be merged (`attention.softmax.tiles.merge`).

  Raises:
    ValueError: `implementation` cannot serve the call.

  Cost, for blocks of C queries and D keys: time T·S·N·(H+V), half of it if
  causal. Memory in addition to the arrays B·N·C·D float32. Nothing is T×S, forward
  or backward, except a bias of that size and its gradient. cuDNN turns any mask into
  a bias, which is T×S for each example that has its own mask.

  Departs from its paper in two points. The size of a block follows from
  `attention.platform.backend` and not from a GPU's on-chip memory. What dropout draws for a pair
  follows from its positions, instead of from the state of a generator.

  Papers: FlashAttention, arXiv:2205.14135. Sinks: gpt-oss, arXiv:2508.10925. Soft
  caps: Gemma 2, arXiv:2408.00118. Forget gates: Forgetting transformer,
  arXiv:2503.02130. Mods: Flex attention, arXiv:2412.05496.
  """
  sizes = checks.block_sizes(block_size)
  if visible.block_mask and sizes not in (None, visible.block_mask.block_size):
    raise ValueError(
      f"block_size: expected None with block_mask, whose blocks are "
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
  sinks: bool = False,
  logits_soft_cap: float | None = None,
  forget: bool = False,
) -> Attention:
  """The mechanism of `flash_attention`.

  It decodes as dense attention does, because one query has no blocks.

  Args:
    block_size: queries and keys in a block; None is the function's choice.
    implementation: 'xla', 'cudnn', 'tokamax', or None to choose. On a GPU,
      'cudnn' and 'tokamax' take float16 and bfloat16 only, and no `block_size`.
    in_parts: how several devices attend to a sequence of which each has a part:
      'ring', 'balanced' or 'all_to_all'; see `sharding.attend_to_shards`.
    sinks: as `dense` takes it.
    logits_soft_cap: likewise.
    forget: likewise.

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
  return exact._replace(apply=applied("flash", function, own.options))
