"""Additive attention (Bahdanau et al., 2015).

Queries and keys are projected here, and the scores of a tile have a rule of their
own. Everything else is the loop of all softmaxes, `attention.loop`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, layout, own_logits, platform, plug, sharded
from attention.dense import dense
from attention.logits import Scores
from attention.loop import Output, attend
from attention.ring import ring
from attention.visible import Visible, visible_from_options


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
  visible: Visible | None = None,
  return_lse: bool = False,
) -> Output:
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
    visible: which pairs count, in addition to the options that say so.
    return_lse: whether to return the log-sum-exp of the scores, too.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; with `return_lse` also `[B, T, N]` in
    float32, −∞ for a query that sees nothing.

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
    bias=bias,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
  )
  _check_kernels(query, query_kernel, key_kernel, score_kernel)
  sizes = arguments.block_sizes(block_size)
  sees = visible_from_options(
    query,
    key,
    mask=mask,
    is_causal=is_causal,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    visible=visible,
  )
  for one in sees.masks:
    # A key that no query sees is also set to zero, so that a NaN in it does not
    # get through.
    seen = jnp.any(one, axis=(1, 2))[:, :, None, None]
    key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)
  out, lse = _attend(
    _projected(query, query_kernel),
    _projected(key, key_kernel),
    value,
    sees,
    _Logits(_scaled(score_kernel, scale, query), bias),
    sizes,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
  )
  out = out.astype(query.dtype)
  return (out, lse) if return_lse else out


def _attend(query, key, value, visible, logits, sizes=None, **dropout):
  """Additive attention of projected queries and keys, in float32."""
  sizes = sizes or _block(query, key)
  return attend(query, key, value, visible, logits, block=sizes, **dropout)


def _block(query, key) -> tuple[int, int]:
  """(C, D) of a tile."""
  batch, length, num_heads, width = query.shape
  # For each pair: the hidden units, and in the backward their gradients.
  pair_bytes = 2 * 4 * batch * num_heads * width
  # These tiles stay in cache, see benchmarks/README.md.
  return platform.block(pair_bytes, 16, 64, length, key.shape[1])


def _scaled(score_kernel, scale, query):
  score_kernel = score_kernel.astype(jnp.float32)
  if scale is None:
    return score_kernel
  return score_kernel * arguments.softmax_scale(scale, query.shape[-1])


class _Logits(NamedTuple):
  """Takes the place of `attention.logits.Logits` in the loop.

  Attributes:
    score_kernel: v, `[N, A]`.
    bias: `[#B, #N, #T, #S]`.
  """

  score_kernel: Float[Array, "N A"]
  bias: Float[Array, "..."] | None = None
  sinks: None = None

  def scores(self, query, visible, shape):
    """See `attention.logits.Logits.scores`."""
    del visible, shape
    kernel = self.score_kernel
    scores = _Scores(1.0, None, bias=self.bias, score_kernel=kernel)
    return query, scores, ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Scores(Scores):
  """The scores of a tile from a = W q and c = U k, with dx their cotangent.

    z = tanh(a_t + c_s)        x_ts = v · z
    dz = dx · v · (1 − z²)     da_t = Σ_s dz     dc_s = Σ_t dz     dv = Σ_ts dx · z

  Arrays of C·D·A numbers exist for one tile only. Every query head has its own keys
  `[B, N, D, A]`, also where query heads share their values.
  """

  score_kernel: Any = None

  def added(self, tile, start, first):
    """See `Scores`."""
    totals: Any = super().added(tile, start, first)
    kernel = self.score_kernel + tile.score_kernel
    return dataclasses.replace(totals, score_kernel=kernel)

  def of_tile(self, query, key, rows, positions, fixed):
    """See `Scores`."""
    x = self._of_hidden(self._hidden(query, key, rows), query)
    return self._after(x, query, rows, positions, fixed)

  def vjp(self, query, key, rows, positions, fixed):
    """See `Scores`."""
    z = self._hidden(query, key, rows)
    x, pull_after = jax.vjp(
      lambda x, scores: scores._after(x, query, rows, positions, fixed),
      self._of_hidden(z, query),
      self,
    )

    def pull(dx):
      dx, dscores = pull_after(dx)
      dx = dx.reshape(z.shape[:4])
      pairs = z.reshape(*z.shape[:2], -1, z.shape[4])
      dkernel = jnp.einsum("bnx,bnxa->na", dx.reshape(pairs.shape[:3]), pairs)
      dz = dx[..., None] * (1.0 - z * z)
      # v does not depend on t and s, so it multiplies the sums, not every pair.
      factor = self.score_kernel[None, :, None]
      dquery = (jnp.sum(dz, 3) * factor).reshape(query.shape)
      dkey = jnp.swapaxes(jnp.sum(dz, 2) * factor, 2, 3)
      return dquery, dkey, dataclasses.replace(dscores, score_kernel=dkernel)

    return x, pull

  def _hidden(self, query, key, rows):
    """The hidden units z of every pair, `[B, N, C, D, A]`."""
    query = query.reshape(query.shape[0], -1, rows, query.shape[3])
    return jnp.tanh(query[:, :, :, None] + key[:, :, None])

  def _of_hidden(self, z, query):
    """The scores v · z `[B, K, Q, D]`, as a product: a sum is slower."""
    pairs = z.reshape(*z.shape[:2], -1, z.shape[4])
    # Repeated for every example, so that the factors share a batch axis.
    v = jnp.broadcast_to(self.score_kernel, (len(z), *self.score_kernel.shape))
    x = jnp.einsum("bnxa,bna->bnx", pairs, v)
    return x.reshape(*query.shape[:3], -1)


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

  Projected keys and values go round the ring of `attention.ring`: D − 1 parts of
  S·(N·A + K·V) numbers.
  """
  options = {
    "mask": mask,
    "is_causal": is_causal,
    "query_segment_ids": query_segment_ids,
    "key_segment_ids": key_segment_ids,
  }
  sharded.check(query, key, value, **options, others=others)
  arguments.check_dropout(dropout_rate, dropout_rng)
  if mask is not None:
    seen = mask[:, 0, 0, :, None, None]
    key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)
  projected = _projected(query, query_kernel), _projected(key, key_kernel)
  out, _ = ring(
    *projected,
    value,
    axis_name=axis_name,
    logits=_Logits(_scaled(score_kernel, scale, query)),
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
    block=_block(*projected),
    **options,
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


def _projected(
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
  keys = _projected(key, variables["params"]["key_kernel"])
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
  score_kernel = _scaled(params["score_kernel"], scale, query)
  slots = jnp.arange(cache.key.shape[1])[None, :]
  here = slots == cache.index[:, None]
  keys = layout.written(cache.key, _projected(key, params["key_kernel"]), here)
  values = layout.written(cache.value, value, here)
  seen = (slots <= cache.index[:, None])[:, None, None, :]
  out, _ = _attend(
    _projected(query, params["query_kernel"]),
    keys,
    values,
    Visible(masks=(seen,)),
    _Logits(score_kernel),
  )
  out = out.astype(query.dtype)
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

  def apply(variables, query, key, value, **call) -> Any:
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
