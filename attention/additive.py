"""Additive attention (Bahdanau et al., 2014).

This file projects queries and keys and scores the pairs of a tile. The loop over tiles
is `attention.softmax.tiles`, as for all softmax attention.
"""

import dataclasses
from functools import partial
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.dense import dense
from attention.mechanism import Attention, Hyperparameters
from attention.platform import backend, layout
from attention.softmax import own_logits
from attention.softmax.logits import Scores
from attention.softmax.rows import Output
from attention.softmax.sharding import attend_to_shards
from attention.softmax.tiles import attend
from attention.softmax.visible import (
  EVERY_PAIR,
  Visible,
  VisibleOptions,
  key_mask,
)


@attention_function
def additive_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  query_kernel: Float[Array, "N H A"],
  key_kernel: Float[Array, "N H A"],
  score_kernel: Float[Array, "N A"],
  scale: float | Float[Array, ""] | None = None,
  bias: Float[Array, "..."] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | tuple[int, int] | None = None,
  axis_name: str | None = None,
  visible: Visible = EVERY_PAIR,
  return_lse: bool = False,
  **pairs: Unpack[VisibleOptions],
) -> Output:
  """Scores query-key pairs with one hidden layer: softmax(v·tanh(W q + U k)) V.

    out = additive_attention(q, k, v, query_kernel=w, key_kernel=u, score_kernel=s)

    score[t, s] = scale · Σ_a v[a] tanh((W query[t])[a] + (U key[s])[a]) + bias
    out[t] = softmax over the visible s of score[t], times value

  with W = `query_kernel`, U = `key_kernel` and v = `score_kernel`, one of each
  per query head. Everything except the two projections is float32. A query that
  sees no key outputs zeros and has zero gradients. Keys that are masked for every query
  never affect the output, even if they are NaN.

  Args:
    query: `[B, T, N, H]`; the paper's decoder state s_{i-1}.
    key: `[B, S, K, H]`, the paper's annotations h_j. N is a multiple of K; query
      head n uses key head n // (N/K), with its own U.
    value: `[B, S, K, V]`.
    query_kernel: W, `[N, H, A]`.
    key_kernel: U, `[N, H, A]`.
    score_kernel: v, `[N, A]`.
    scale: factor of the scores; None means 1, as in the paper.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees only keys s ≤ t.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    bias: added to the logits, broadcastable to `[B, N, T, S]`.
    dropout_rate: fraction of the attention weights that are set to zero.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.
    block_size: C, the number of rows computed at the same time.
    axis_name: mesh axis of a sequence-sharded call, inside `jax.shard_map`.
    visible: the visible pairs, in addition to the other masking options.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    `[B, T, N, V]`, with `return_lse` also the log-sum-exp `[B, T, N]` of the scores.

  Cost: time T·S·N·(A+V), half of it if causal. Most of it is spent on T·S·N·A
  hyperbolic tangents, so it is many times that of dense attention. Memory in addition
  to the arrays: B·(T+S)·N·A for the projections, forward and backward, and
  B·N·C·D·A for a tile of C queries and D keys. No array is T×S except a mask or
  bias that is given in that size. Shards exchange projected keys and values,
  S·(N·A + K·V) numbers each.

  Differs from the paper in having heads, masks, and a value that is separate
  from the key (in the paper, both are h_j).

  Paper: Neural machine translation by jointly learning to align and translate,
  section A.1.2, arXiv:1409.0473.
  """
  sizes = checks.block_sizes(block_size)
  for mask in visible.masks:
    # Masked keys are also set to zero, so that a NaN in them does not spread.
    is_visible = jnp.any(mask, axis=(1, 2))[:, :, None, None]
    key, value = (jnp.where(is_visible, x, 0) for x in (key, value))
  queries, keys = _project(query, query_kernel), _project(key, key_kernel)
  run: Any = attend
  if axis_name is not None:
    run = partial(attend_to_shards, axis_name=axis_name)
  out, lse = run(
    queries,
    keys,
    value,
    visible,
    _make_scores(score_kernel, scale, bias),
    block=sizes or _block(queries, keys),
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
  )
  out = out.astype(query.dtype)
  return (out, lse) if return_lse else out


def _block(query: Array, key: Array) -> tuple[int, int]:
  """The number of queries and of keys in a tile."""
  batch, length, num_heads, width = query.shape
  # For each pair: the hidden units, and in the backward pass their gradients.
  pair_bytes = 2 * 4 * batch * num_heads * width
  # These tiles stay in cache, see benchmarks/README.md.
  return backend.block(pair_bytes, 16, 64, length, key.shape[1])


def _make_scores(
  score_kernel: Float[Array, "N A"],
  scale: float | Float[Array, ""] | None,
  bias: Float[Array, "..."] | None = None,
) -> "_Scores":
  """The scores, with `scale` multiplied into the kernel."""
  kernel = score_kernel.astype(jnp.float32)
  if scale is not None:
    kernel *= checks.softmax_scale(scale, 1)
  return _Scores(1.0, None, bias=bias, score_kernel=kernel)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Scores(Scores):
  """The scores v · tanh(a_t + c_s) of a tile from a = W q and c = U k.

  It replaces `attention.softmax.logits.Logits` in the loop over tiles. Arrays of C·D·A
  numbers exist for one tile only. Every query head has its own keys
  `[B, N, D, A]`, even if query heads share their values.
  """

  score_kernel: Any = None
  sinks = None

  def scores(self, query, visible, shape):
    """See `Logits`."""
    del visible, shape
    return query, self, None

  def accumulate(self, tile, start, first):
    """See `Scores`."""
    totals: Any = super().accumulate(tile, start, first)
    kernel = self.score_kernel + tile.score_kernel
    return dataclasses.replace(totals, score_kernel=kernel)

  def product(self, query, key):
    """Replaces the product of `Scores`."""
    hidden = jnp.tanh(query[:, :, :, None] + key[:, :, None])
    # A product of matrices is faster than a sum.
    pairs = hidden.reshape(*hidden.shape[:2], -1, hidden.shape[4])
    kernel = self.score_kernel
    # Broadcast to every example, so that the factors share a batch axis.
    kernel = jnp.broadcast_to(kernel, (pairs.shape[0], *kernel.shape))
    x = jnp.einsum("bnxa,bna->bnx", pairs, kernel)
    return x.reshape(*query.shape[:3], -1)

  def vjp(self, query, key, places, score_arrays=None):
    """See `Scores`. Uses autodiff, because the scores are not a product of q and k."""
    return jax.vjp(
      lambda query, key, scores: scores.tile(query, key, places, score_arrays),
      query,
      key,
      self,
    )


def _project(
  x: Float[Array, "B S K H"], kernel: Float[Array, "N H A"]
) -> Float[Array, "B S N A"]:
  """Projects the shared head of every query head, in float32."""
  batch, length, num_kv_heads, head_dim = x.shape
  num_heads, _, width = kernel.shape
  grouped = kernel.reshape(num_kv_heads, -1, head_dim, width).astype(x.dtype)
  projected = jnp.einsum(
    "BSKH,KJHA->BSKJA", x, grouped, preferred_element_type=jnp.float32
  )
  return projected.reshape(batch, length, num_heads, width)


class AdditiveCache(NamedTuple):
  """Projected keys and values of the positions seen so far: B·S·(N·A + K·V).

  A step of decoding takes time S·N·A.

  Attributes:
    key: U k, `[B, S, N, A]` float32, S = max_length; rows from `index` on are
      unset.
    value: `[B, S, K, H]`.
    index: `[B]`, the number of positions seen.
  """

  key: Float[Array, "B S N A"]
  value: Float[Array, "B S K V"]
  index: Int[Array, "B"]
  grows = True


@attention_factory
def additive(width: int = 64) -> Attention:
  """The mechanism of `additive_attention`.

  Args:
    width: A, the number of hidden units of the alignment model; n' in the paper,
      which uses 1000 for one head.

  Returns:
    An `Attention` whose kernels are trained: W and U are drawn from N(0, 1/H)
    and v from N(0, 1/A), so that initial scores are of order 1.

  Raises:
    ValueError: `width` < 1.
  """

  def init(key, dims):
    keys = jax.random.split(key, 3)
    inner = (dims.num_heads, dims.head_dim, width)

    def draw(key, shape):
      return jax.random.normal(key, shape) / math.sqrt(shape[-2])

    return {
      "params": {
        "query_kernel": draw(keys[0], inner),
        "key_kernel": draw(keys[1], inner),
        "score_kernel": draw(keys[2], (dims.num_heads, width, 1))[..., 0],
      }
    }

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    values = (batch, max_length, dims.num_kv_heads, dims.values)
    return AdditiveCache(
      key=jnp.zeros((batch, max_length, dims.num_heads, width), jnp.float32),
      value=jnp.zeros(values, dtype),
      index=jnp.zeros((batch,), jnp.int32),
    )

  def prefill(variables, cache, query, key, value, lengths, *, scale=None):
    del query, scale
    keys = _project(key, variables["params"]["key_kernel"])
    return AdditiveCache(
      layout.put(cache.key, keys, 0), layout.put(cache.value, value, 0), lengths
    )

  def decode(variables, cache, query, key, value, *, scale=None):
    params = variables["params"]
    positions = jnp.arange(cache.key.shape[1])[None, :]
    is_new = positions == cache.index[:, None]
    key = _project(key, params["key_kernel"])
    keys = layout.write(cache.key, key, is_new)
    values = layout.write(cache.value, value, is_new)
    queries = _project(query, params["query_kernel"])
    out, _ = attend(
      queries,
      keys,
      values,
      key_mask(positions <= cache.index[:, None]),
      _make_scores(params["score_kernel"], scale),
      block=_block(queries, keys),
    )
    cache = AdditiveCache(keys, values, cache.index + 1)
    return out.astype(query.dtype), cache

  return Attention(
    init=init,
    apply=make_apply(
      "additive", additive_attention, lambda variables: variables["params"]
    ),
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    # Everything that dense attention supports, except tables by distance.
    supports=dense().supports - {"relative"} - own_logits.SUPPORTS,
    sizes=Hyperparameters(timed=lambda length: {"width": 16}),
  )
