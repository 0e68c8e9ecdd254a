"""Additive attention (Bahdanau et al., 2015).

Queries and keys are projected here. `score` computes the logits of a tile from
the projections, `flash.blocks` says which keys a tile sees, and `core.loop`
runs the tiles.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.additive.score import Additive
from attention.core import (
  layout,
  loop,
  own_logits,
  platform,
  ring,
  visibility,
)
from attention.core.ring import Limits
from attention.dense import dense
from attention.flash import parts
from attention.flash.blocks import Arrays, Blocks


@arguments.attention_function(
  width="give the arrays, query_kernel=[N, H, A], key_kernel=[N, H, A] and "
  "score_kernel=[N, A], or make the mechanism, additive(width=…)",
)
def additive_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  query_kernel: Float[Array, "N H A"],
  key_kernel: Float[Array, "N H A"],
  score_kernel: Float[Array, "N A"],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  bias: Float[Array, "..."] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | tuple[int, int] | None = None,
) -> Float[Array, "B T N V"]:
  """Scores from a network of one hidden layer: softmax(v·tanh(W q + U k)) V.

    score[t, s] = scale · Σ_a v[a] tanh((W query[t])[a] + (U key[s])[a]) + bias
    out[t] = softmax over the visible s of score[t], times value

  with W = `query_kernel`, U = `key_kernel` and v = `score_kernel`, one of each
  for every query head. Everything but the two projections is float32. A query
  that sees no key gets zeros and passes no gradient. The content of a key that
  no query may see changes nothing.

  Args:
    query: `[B, T, N, H]`; the paper's decoder state s_{i-1}.
    key: `[B, S, K, H]`; N is a multiple of K, query head n reads key head
      n // (N/K), through its own U. These are the paper's annotations h_j.
    value: `[B, S, K, V]`.
    query_kernel: W, `[N, H, A]`.
    key_kernel: U, `[N, H, A]`.
    score_kernel: v, `[N, A]`.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the scores; None is 1, as in the paper.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    bias: added to the scores, broadcastable to `[B, N, T, S]`.
    dropout_rate: share of attention weights set to zero; the others are
      divided by 1 - dropout_rate.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.
    block_size: queries and keys of a tile, one int for both; None is the
      platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`.

  Raises:
    ValueError: arguments do not fit together.

  Cost: time T·S·N·(A+V), nearly all of it T·S·N·A hyperbolic tangents, so
  many times that of dense attention; half of it if causal. Memory in addition
  to the arrays: B·(T+S)·N·A for the projections, forward and backward, and
  B·N·C·D·A for a tile of C queries and D keys. Nothing is T×S except a mask or
  bias that is given in that size.

  Departs from its paper in having heads, masks, and a value that is separate
  from the key (in the paper, both are h_j).

  Paper: Neural machine translation by jointly learning to align and translate,
  section A.1.2, arXiv:1409.0473.
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
  _check_kernels(query, query_kernel, key_kernel, score_kernel)
  sizes = arguments.block_sizes(block_size)
  if scale is not None:
    scale = arguments.softmax_scale(scale, query.shape[-1])
    score_kernel = score_kernel * scale
  if mask is not None:
    # A key that no query sees is also set to zero, so that a NaN in it does not
    # get through.
    seen = jnp.any(mask, axis=(1, 2))[:, :, None, None]
    key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)
  sees = visibility.of_call(mask, query_segment_ids, key_segment_ids, is_causal)
  out = _attend(
    _project(query, query_kernel),
    Arrays(_project(key, key_kernel), value, bias),
    score_kernel.astype(jnp.float32),
    Limits(sees, dropout_rng),
    is_causal=is_causal,
    dropout_rate=dropout_rate,
    sizes=sizes,
  )
  return out.astype(query.dtype)


def _attend(
  query: Float[Array, "B T N A"],
  arrays: Arrays,
  score_kernel: Float[Array, "N A"],
  limits: Limits,
  *,
  is_causal: bool = False,
  dropout_rate: float = 0.0,
  sizes: tuple[int, int] | None = None,
) -> Float[Array, "B T N V"]:
  """Additive attention of projected queries and keys, in float32."""
  source = _blocks(
    query, arrays.value, limits.sees.by_data, is_causal, dropout_rate, sizes
  )
  return loop.attend(source, query, arrays, score_kernel, limits)


def _blocks(
  query: Float[Array, "B T N A"],
  value: Float[Array, "B S K V"],
  by_data: bool,
  is_causal: bool,
  dropout_rate: float = 0.0,
  sizes: tuple[int, int] | None = None,
) -> Blocks:
  """How projected queries and keys are cut into tiles."""
  batch, length, num_heads, width = query.shape
  source_length, kv_heads = value.shape[1:3]
  # For each pair: the hidden units, and in the backward their gradients.
  pair_bytes = 2 * 4 * batch * num_heads * width
  # These tiles stay in cache, see benchmarks/README.md.
  rows, columns = sizes or platform.block(
    pair_bytes, 16, 64, length, source_length
  )
  return Blocks(
    rows=min(rows, length),
    width=min(columns, source_length),
    kv_heads=kv_heads,
    num_heads=num_heads,
    score=Additive(),
    by_data=by_data,
    source_length=source_length,
    is_causal=is_causal,
    dropout_rate=dropout_rate,
  )


def _attend_in_parts(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  axis_name: str,
  query_kernel: Float[Array, "N H A"],
  key_kernel: Float[Array, "N H A"],
  score_kernel: Float[Array, "N A"],
  mask: Bool[Array, "#B 1 1 S"] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`additive_attention` of the whole, of which each device has a part.

  Projected keys and values go round the ring of `core.ring`: D − 1 parts of
  S·(N·A + K·V) numbers.
  """
  parts.check(
    query,
    key,
    value,
    mask,
    is_causal,
    query_segment_ids,
    key_segment_ids,
    others,
  )
  if scale is not None:
    score_kernel = score_kernel * arguments.softmax_scale(scale, query.shape[3])
  if mask is not None:
    seen = mask[:, 0, 0, :, None, None]
    key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)
  projected = _project(query, query_kernel)
  arguments.check_dropout(dropout_rate, dropout_rng)
  rng = dropout_rng if dropout_rate else None
  hides = mask is not None or query_segment_ids is not None
  out = ring.attend(
    _blocks(projected, value, hides, is_causal, dropout_rate),
    axis_name,
    projected,
    Arrays(_project(key, key_kernel), value),
    score_kernel.astype(jnp.float32),
    ring.Hidden(mask, query_segment_ids, key_segment_ids, rng),
  )
  return out.astype(query.dtype)


def _check_kernels(
  query: Float[Array, "B T N H"], w: Array, u: Array, v: Array
) -> None:
  num_heads, head_dim = query.shape[2:]
  for name, kernel in (("query_kernel", w), ("key_kernel", u)):
    if kernel.ndim != 3 or kernel.shape[:2] != (num_heads, head_dim):
      raise ValueError(
        f"{name}: expected [N, H, A] = [{num_heads}, {head_dim}, A] to go with "
        f"query {query.shape}, got {kernel.shape}"
      )
  expected = (num_heads, w.shape[2])
  if u.shape[2] != expected[1]:
    raise ValueError(
      f"key_kernel: expected the width of query_kernel, {expected[1]}, got "
      f"{u.shape[2]}"
    )
  if v.shape != expected:
    raise ValueError(
      f"score_kernel: expected [N, A] = {list(expected)}, got {v.shape}"
    )


def _project(
  x: Float[Array, "B S K H"], kernel: Float[Array, "N H A"]
) -> Float[Array, "B S N A"]:
  """Projects, for every query head, the key head that it reads; float32."""
  batch, length, num_kv_heads, head_dim = x.shape
  num_heads, _, width = kernel.shape
  grouped = kernel.reshape(num_kv_heads, -1, head_dim, width).astype(x.dtype)
  projected = jnp.einsum(
    "BSKH,KJHA->BSKJA", x, grouped, preferred_element_type=jnp.float32
  )
  return projected.reshape(batch, length, num_heads, width)


class AdditiveCache(NamedTuple):
  """Projected keys and values of the positions seen so far.

  Attributes:
    key: U k, `[B, S, N, A]` float32, S = max_length; rows from `index` on are
      unset.
    value: `[B, S, K, H]`.
    index: `[B]`, the number of positions seen.
  """

  key: Float[Array, "B S N A"]
  value: Float[Array, "B S K V"]
  index: Int[Array, "B"]


def prefill(
  variables: plug.Variables,
  cache: AdditiveCache,
  query: Float[Array, "B P N H"],
  key: Float[Array, "B P K H"],
  value: Float[Array, "B P K V"],
  lengths: Int[Array, "B"],
  *,
  scale: float | None = None,
) -> AdditiveCache:
  """The cache after the first `lengths` of P positions; time P·N·H·A."""
  del query, scale
  keys = _project(key, variables["params"]["key_kernel"])
  return AdditiveCache(
    layout.put(cache.key, keys, 0), layout.put(cache.value, value, 0), lengths
  )


def decode(
  variables: plug.Variables,
  cache: AdditiveCache,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  *,
  scale: float | None = None,
) -> tuple[Float[Array, "B 1 N V"], AdditiveCache]:
  """One position of the causal call; time S·N·A at every position."""
  params = variables["params"]
  score_kernel = params["score_kernel"].astype(jnp.float32)
  if scale is not None:
    score_kernel = score_kernel * scale
  slots = jnp.arange(cache.key.shape[1])[None, :]
  here = slots == cache.index[:, None]
  keys = layout.written(cache.key, _project(key, params["key_kernel"]), here)
  values = layout.written(cache.value, value, here)
  seen = (slots <= cache.index[:, None])[:, None, None, :]
  out = _attend(
    _project(query, params["query_kernel"]),
    Arrays(keys, values),
    score_kernel,
    Limits(visibility.pairs(seen)),
  ).astype(query.dtype)
  return out, AdditiveCache(keys, values, cache.index + 1)


def additive(width: int = 64) -> plug.Attention:
  """The plug of `additive_attention`.

  Args:
    width: A, the hidden units of the alignment model, n' in the paper, which
      has 1000 for one head.

  Returns:
    An `Attention` whose kernels are trained: W and U are drawn from N(0, 1/H)
    and v from N(0, 1/A), so that scores start near 1.

  Raises:
    ValueError: `width` < 1; by `init`, kernels that take more than
      `arguments.MOST_BYTES`.
  """
  arguments.check_at_least("width", width, 1)

  def init(key, dims):
    numbers = dims.num_heads * (2 * dims.head_dim + 1) * width
    arguments.check_memory("width", width, numbers)
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

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "additive",
      additive_attention,
      call,
      own=("query_kernel", "key_kernel", "score_kernel"),
    )
    return additive_attention(query, key, value, **variables["params"], **call)

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    return _attend_in_parts(
      query, key, value, axis_name=axis_name, **variables["params"], **call
    )

  def init_cache(
    variables: plug.Variables,
    batch: int,
    max_length: int,
    dims: plug.Dims,
    dtype: Any,
  ) -> AdditiveCache:
    """An empty cache for `max_length` positions: B·S·(N·A + K·V) numbers."""
    del variables
    values = (batch, max_length, dims.num_kv_heads, dims.values)
    return AdditiveCache(
      key=jnp.zeros((batch, max_length, dims.num_heads, width), jnp.float32),
      value=jnp.zeros(values, dtype),
      index=jnp.zeros((batch,), jnp.int32),
    )

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    apply_sharded=apply_sharded,
    # Everything that dense attention supports, except tables by distance.
    supports=dense().supports - {"relative"} - own_logits.SUPPORTS,
    sizes=plug.Sizes(timed=lambda length: {"width": 16}),
  )
