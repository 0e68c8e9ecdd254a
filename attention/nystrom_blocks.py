"""The three loops over a sequence behind `nystrom_attention`.

Each loop has its own backward, visits blocks of C positions, and holds one
block times L landmarks, nothing longer:

  landmark_means   Q̃, K̃: position t adds to one of L sums
  few_queries      softmax(Q̃ Kᵀ) V, L queries and all keys, by online softmax
  few_keys         softmax(Q K̃ᵀ) U, all queries and L keys

Logits come without a factor: the caller scales the landmarks. Everything in a
block is float32. Of a softmax-weighted sum out = p·v with cotangent g,

  dv = pᵀ g      ds = p · (g vᵀ - δ), δ = Σ g·out      dq = ds k     dk = dsᵀ q

where `few_queries` has out and the log-sum-exp of its L rows from the forward
and `few_keys`, which sees whole rows, keeps nothing.

The last block moves back to end with the sequence, so nothing is padded. What
is written twice is written alike; what is summed over the sequence counts the
positions that the block before had only once.

Speed. Heads go next to batch inside a block only. Scores are [keys, rows] in
the backward, so that of its five products only one has not the form
'nqd,nkd->nqk' or 'nqk,nkd->nqd', which XLA:CPU sends to its fast kernel. The
means are a product with a matrix of zeros and ones: a scatter is slower.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 256


def _blocks(length: int) -> tuple[int, int]:
  """The size of a block, and their number."""
  size = min(BLOCK, length)
  return size, -(-length // size)


def _starts(i: Array, size: int, length: int) -> tuple[Array, Array]:
  """Where block i starts, and which of its positions no block had before."""
  start = jnp.minimum(i * size, length - size)
  return start, start + jnp.arange(size) >= i * size


def _slice(x: Array, start: Array, size: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, start, size, 1)


def _write(total: Array, block: Array, start: Array) -> Array:
  return jax.lax.dynamic_update_slice_in_dim(
    total, block.astype(total.dtype), start, 1
  )


def _heads_first(x: Float[Array, "B C N H"]) -> Float[Array, "B N C H"]:
  return jnp.swapaxes(x, 1, 2).astype(jnp.float32)


def _heads_last(x: Float[Array, "B N C H"]) -> Float[Array, "B C N H"]:
  return jnp.swapaxes(x, 1, 2)


def _grouped(x: Float[Array, "B N Q D"], heads: int) -> Float[Array, "B K P D"]:
  """The N/K heads that share a key head become rows of one product."""
  return x.reshape(x.shape[0], heads, -1, x.shape[3])


def _dot(spec: str, left: Array, right: Array) -> Float[Array, "..."]:
  return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def landmark_means(
  num_landmarks: int,
  x: Float[Array, "B T K H"],
  groups: Int[Array, "B T"],
  counts: Int[Array, "B L"],
) -> Float[Array, "B K L H"]:
  """Means over the positions of each landmark, in float32.

  Args:
    num_landmarks: L.
    x: what to average.
    groups: the landmark of every position; L for a position of none, which is
      not read.
    counts: the number of positions of every landmark; one of none gets zeros.

  Cost: time T·L·K·H.
  """
  batch, length, heads, features = x.shape
  size, num_blocks = _blocks(length)

  def step(i, total):
    start, is_new = _starts(i, size, length)
    group = jnp.where(is_new, _slice(groups, start, size), num_landmarks)
    member = _members(group, num_landmarks)
    block = _slice(x, start, size).astype(jnp.float32)
    block = jnp.where(group[..., None, None] < num_landmarks, block, 0.0)
    return total + _dot("blc,bcx->blx", member, block.reshape(batch, size, -1))

  sums = jax.lax.fori_loop(
    0,
    num_blocks,
    step,
    jnp.zeros((batch, num_landmarks, heads * features), jnp.float32),
  )
  means = sums / jnp.maximum(counts, 1)[:, :, None]
  means = means.reshape(batch, num_landmarks, heads, features)
  return jnp.swapaxes(means, 1, 2)


def _members(
  group: Int[Array, "B C"], num_landmarks: int
) -> Float[Array, "B L C"]:
  """1 where position c belongs to landmark l."""
  landmarks = jnp.arange(num_landmarks)[None, :, None]
  return (group[:, None, :] == landmarks).astype(jnp.float32)


def _means_fwd(num_landmarks, x, groups, counts):
  # The dtype and shape of x, without x: an empty slice is no memory.
  like = jnp.zeros((0,), x.dtype)
  means = landmark_means(num_landmarks, x, groups, counts)
  return means, (like, groups, counts)


def _means_bwd(num_landmarks, residuals, cotangent):
  like, groups, counts = residuals
  batch, heads, _, features = cotangent.shape
  length = groups.shape[1]
  size, num_blocks = _blocks(length)
  each = jnp.swapaxes(cotangent, 1, 2).reshape(batch, num_landmarks, -1)
  each = each / jnp.maximum(counts, 1)[:, :, None]

  def step(i, total):
    start, _ = _starts(i, size, length)
    member = _members(_slice(groups, start, size), num_landmarks)
    block = _dot("bcl,blx->bcx", jnp.swapaxes(member, 1, 2), each)
    return _write(total, block.reshape(batch, size, heads, features), start)

  dx = jnp.zeros((batch, length, heads, features), like.dtype)
  return jax.lax.fori_loop(0, num_blocks, step, dx), None, None


landmark_means.defvjp(_means_fwd, _means_bwd)


def _masked_block(
  x: Float[Array, "B S K H"],
  keep: Bool[Array, "B S"] | None,
  start: Array,
  size: int,
) -> Float[Array, "B K C H"]:
  """A block, heads first; what is masked is zero, so that no NaN gets on."""
  block = _slice(x, start, size)
  if keep is not None:
    block = jnp.where(_slice(keep, start, size)[..., None, None], block, 0)
  return _heads_first(block)


@jax.custom_vjp
def few_queries(
  query: Float[Array, "B N L H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  keep: Bool[Array, "B S"] | None,
) -> Float[Array, "B N L V"]:
  """softmax(Q Kᵀ) V for L queries: softmax attention, keys in blocks.

  Args:
    query: scaled, heads first.
    key: N is a multiple of K.
    value: `[B, S, K, V]`.
    keep: False hides a key from every query.

  Returns:
    float32; zeros where every key is hidden.

  Cost: time S·L·N·(H+V), memory B·N·L·C.
  """
  return _few_queries(query, key, value, keep)[0]


def _few_queries(query, key, value, keep):
  """The output, and the log-sum-exp of every row."""
  length, heads, width = value.shape[1:]
  size, num_blocks = _blocks(length)
  lowest = jnp.finfo(jnp.float32).min
  rows = _grouped(query, heads)

  def step(i, carry):
    maximum, total, result = carry
    start, is_new = _starts(i, size, length)
    allowed = is_new[None]
    if keep is not None:
      allowed = allowed & _slice(keep, start, size)
    scores = _dot(
      "bkqh,bksh->bkqs", rows, _masked_block(key, keep, start, size)
    )
    scores = jnp.where(allowed[:, None, None], scores, lowest)
    higher = jnp.maximum(maximum, jnp.max(scores, -1, keepdims=True))
    shrink = jnp.exp(maximum - higher)
    p = jnp.exp(scores - higher)
    more = _dot("bkqs,bksv->bkqv", p, _masked_block(value, keep, start, size))
    total = total * shrink + jnp.sum(p, -1, keepdims=True)
    return higher, total, result * shrink + more

  # Not below lowest/2: all exponentials of an empty row are 0, not exp(0).
  first = (
    jnp.full((*rows.shape[:3], 1), lowest / 2, jnp.float32),
    jnp.zeros((*rows.shape[:3], 1), jnp.float32),
    jnp.zeros((*rows.shape[:3], width), jnp.float32),
  )
  maximum, total, result = jax.lax.fori_loop(0, num_blocks, step, first)
  empty = total == 0.0
  out = result / jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, jnp.inf, maximum + jnp.log(total))
  return out.reshape(*query.shape[:3], width), lse


def _few_queries_fwd(query, key, value, keep):
  out, lse = _few_queries(query, key, value, keep)
  return out, (query, key, value, keep, out, lse)


def _few_queries_bwd(residuals, cotangent):
  query, key, value, keep, out, lse = residuals
  length, heads = key.shape[1:3]
  size, num_blocks = _blocks(length)
  rows, g = _grouped(query, heads), _grouped(cotangent, heads)
  delta = jnp.sum(g * _grouped(out, heads), -1, keepdims=True)
  delta, lse = jnp.swapaxes(delta, 2, 3), jnp.swapaxes(lse, 2, 3)

  def step(i, totals):
    d_rows, d_key, d_value = totals
    start, is_new = _starts(i, size, length)
    k = _masked_block(key, keep, start, size)
    v = _masked_block(value, keep, start, size)
    p = jnp.exp(_dot("bksh,bkqh->bksq", k, rows) - lse)
    if keep is not None:
      allowed = _slice(keep, start, size)[:, None, :, None]
      p = jnp.where(allowed, p, 0.0)
    ds = p * (_dot("bksv,bkqv->bksq", v, g) - delta)
    d_key = _write(d_key, _heads_last(_dot("bksq,bkqh->bksh", ds, rows)), start)
    d_value = _write(d_value, _heads_last(_dot("bksq,bkqv->bksv", p, g)), start)
    ds = jnp.where(is_new[None, None, :, None], ds, 0.0)
    return d_rows + _dot("bksq,bksh->bkqh", ds, k), d_key, d_value

  d_rows, d_key, d_value = jax.lax.fori_loop(
    0,
    num_blocks,
    step,
    (jnp.zeros_like(rows), jnp.zeros_like(key), jnp.zeros_like(value)),
  )
  return d_rows.reshape(query.shape), d_key, d_value, None


few_queries.defvjp(_few_queries_fwd, _few_queries_bwd)


@jax.custom_vjp
def few_keys(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B K L H"],
  value: Float[Array, "B N L V"],
  keep: Bool[Array, "B L"],
) -> Float[Array, "B T N V"]:
  """softmax(Q Kᵀ) V for L keys: softmax attention, queries in blocks.

  Args:
    query: N is a multiple of K.
    key: scaled, heads first.
    value: one a query head.
    keep: False hides a key from every query.

  Returns:
    In the dtype of `query`; zeros where every key is hidden.

  Cost: time T·L·N·(H+V), memory B·N·C·L.
  """
  length = query.shape[1]
  batch, num_heads, _, width = value.shape
  size, num_blocks = _blocks(length)

  def step(i, out):
    start, _ = _starts(i, size, length)
    rows = _grouped(_heads_first(_slice(query, start, size)), key.shape[1])
    scores = _dot("bkqh,bklh->bkql", rows, key)
    p = _softmax(scores, keep[:, None, None, :], -1)
    p = p.reshape(batch, num_heads, size, -1)
    return _write(out, _heads_last(_dot("bnql,bnlv->bnqv", p, value)), start)

  out = jnp.zeros((batch, length, num_heads, width), query.dtype)
  return jax.lax.fori_loop(0, num_blocks, step, out)


def _softmax(scores: Array, allowed: Array, axis: int) -> Array:
  """Softmax among `allowed`; zeros where nothing is."""
  lowest = jnp.finfo(jnp.float32).min
  scores = jnp.where(allowed, scores, lowest)
  maximum = jnp.max(scores, axis, keepdims=True)
  p = jnp.exp(scores - jnp.maximum(maximum, lowest / 2))
  total = jnp.sum(p, axis, keepdims=True)
  return p / jnp.where(total == 0.0, 1.0, total)


def _few_keys_fwd(query, key, value, keep):
  return few_keys(query, key, value, keep), (query, key, value, keep)


def _few_keys_bwd(residuals, cotangent):
  query, key, value, keep = residuals
  length, num_heads = query.shape[1:3]
  batch, heads, num_keys, _ = key.shape
  size, num_blocks = _blocks(length)

  def step(i, totals):
    d_query, d_key, d_value = totals
    start, is_new = _starts(i, size, length)
    rows = _heads_first(_slice(query, start, size))
    g = _heads_first(_slice(cotangent, start, size))
    each = jnp.repeat(key, num_heads // heads, axis=1)
    scores = _dot("bnlh,bnqh->bnlq", each, rows)
    p = _softmax(scores, keep[:, None, :, None], 2)
    dp = _dot("bnlv,bnqv->bnlq", value, g)
    ds = p * (dp - jnp.sum(p * dp, 2, keepdims=True))
    dq = _dot("bnlq,bnlh->bnqh", ds, each)
    d_query = _write(d_query, _heads_last(dq), start)
    is_new = is_new[None, None, None, :]
    p, ds = jnp.where(is_new, p, 0.0), jnp.where(is_new, ds, 0.0)
    d_value = d_value + _dot("bnlq,bnqv->bnlv", p, g)
    return d_query, d_key + _dot("bnlq,bnqh->bnlh", ds, rows), d_value

  d_query, d_key, d_value = jax.lax.fori_loop(
    0,
    num_blocks,
    step,
    (
      jnp.zeros_like(query),
      jnp.zeros((batch, num_heads, num_keys, key.shape[3]), jnp.float32),
      jnp.zeros_like(value),
    ),
  )
  d_key = d_key.reshape(batch, heads, -1, *key.shape[2:])
  return d_query, jnp.sum(d_key, 2), d_value, None


few_keys.defvjp(_few_keys_fwd, _few_keys_bwd)
