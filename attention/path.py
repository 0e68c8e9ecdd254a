"""PaTH attention (Yang et al., 2025): Householder products between key and query.

Let H_j = I − β_j w_j w_jᵀ. Within a block of C positions, with
A = (I + stril(diag(β) W Wᵀ))⁻¹ diag(β) and U = A W (the UT transform of `recurrence`),

    q_tᵀ H_t ⋯ H_1 = q_tᵀ − tril(Q Wᵀ)_t U
    H_C ⋯ H_{s+1} k_s = k_s − Wᵀ (A stril(W Kᵀ))_{·s}        H_C ⋯ H_1 = I − Wᵀ U

so the scores are tril(Q Kᵀ) − tril(Q Wᵀ) A stril(W Kᵀ). Queries then visit the blocks
to their left (`scan.scan_leftward`). At each block, they attend to its keys,
transformed to the end of the block, and are then multiplied by its product of H.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.dense import dense
from attention.mechanism import Attention
from attention.platform import backend
from attention.platform.blocks import block_map, join_blocks, split_blocks
from attention.platform.layout import dot, query_dot, zero_masked
from attention.recurrent import gates
from attention.recurrent.arrays import unit_length
from attention.recurrent.scan import chunk_size, scan_leftward
from attention.recurrent.triangular import inverse
from attention.softmax.forget_gates import forget_sums
from attention.softmax.rows import Output, merge, softmax_and_lse
from attention.softmax.visible import visible_in_tile

BLOCK = 128
"""The default of C on a CPU."""


@attention_function
def path_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  householder: Float[Array, "B T K H"],
  beta: Float[Array, "B T K"],
  log_forget: Float[Array, "B T N"] | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  block_size: int | None = None,
  return_lse: bool = False,
) -> Output:
  """Softmax attention that encodes positions by products of Householder matrices.

    out = path_attention(q, k, v, householder=w, beta=beta)

    score_ts = scale · q_tᵀ H_t H_{t−1} ⋯ H_{s+1} k_s + Σ_{s<u≤t} log f_u
    out_t = Σ_{s≤t} softmax_s(score_ts) v_s              H_j = I − β_j w_j w_jᵀ

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    householder: w for each key head. Products of H do not grow if β|w|² ≤ 2, for
      example with |w| = 1 and β up to 2. With β = 0, H is the identity.
    beta: β.
    log_forget: log f ≤ 0 of forget gates, as in `dense_attention` (PaTH-FoX).
    mask: key mask `[B, 1, 1, T]`. At a masked position, H is the identity and the
      forget gate is 1.
    is_causal: must be True, because products are over positions before the query.
    block_size: C, rounded up to a power of two; it affects only rounding. None means at
      most `BLOCK` on a CPU, and the choice of `backend` elsewhere.
    scale: factor of the logits; None means 1/√H.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, T]`.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Results and errors: as in `flash_attention`, and ValueError where
  `is_causal` is False. All positions between a query and a key affect their
  score, even those of other segments. All computation is in float32.

  Cost: time ½·T²·N·(2·H+V) and T·N·C·(C+3·H); memory T·N·(H+V) and T·K·H²/C, with
  gradients also T·N·(H+V) for one block of queries at a time.

  Extends the paper to masks. Papers: PaTH attention, arXiv:2505.16381; forget
  gates: Forgetting transformer, arXiv:2503.02130.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; products are over positions before the "
      "query; use dense attention in both directions"
    )
  keep = checks.key_mask(mask, query, key)
  length = query.shape[1]
  size = chunk_size(length, block_size or _block(query))
  scale = checks.softmax_scale(scale, query.shape[3])
  arrays = _zero_masked(
    (key, value, householder, beta[..., None], log_forget), keep
  )
  sums = None if log_forget is None else forget_sums(arrays[-1])
  ids = keep, query_segment_ids, key_segment_ids
  arrays = query.astype(jnp.float32) * scale, *arrays[:-1], sums, ids
  arrays = split_blocks(arrays, size)
  states, keys = block_map(_attend_own_block, 1, *arrays)
  rows = states, *arrays[-2:]
  states = scan_leftward(lambda rows: rows[0], _visit, rows, keys)
  _, out, lse = (join_blocks(x, length) for x in states)
  out = out.astype(query.dtype)
  return (out, lse) if return_lse else out


def _block(query: Array) -> int:
  """The default of C."""
  batch, length, num_heads, _ = query.shape
  # For each pair: two scores, a weight and an entry for the keys of the same block.
  pair_bytes = 4 * 16 * batch * num_heads
  return backend.block(pair_bytes, BLOCK, BLOCK, length, length)[0]


def _zero_masked(arrays: Any, keep: Bool[Array, "B T"] | None) -> Any:
  """All arrays in float32, 0 at masked positions."""
  return jax.tree.map(
    lambda x: zero_masked(x.astype(jnp.float32), keep), arrays
  )


def _block_transition(key, householder, beta):
  """Keys at the end of a block, its product of H, A stril(W Kᵀ) and U; heads first."""
  overlaps = dot("bkch,bkdh->bkcd", householder, householder)
  solution = inverse(jnp.tril(beta * overlaps, -1)[:, :, None])[:, :, 0]
  solution *= jnp.swapaxes(beta, 2, 3)
  dots = jnp.tril(dot("bkch,bkdh->bkcd", householder, key), -1)
  changes, kernel = solution @ dots, solution @ householder
  key = key - jnp.swapaxes(changes, 2, 3) @ householder
  product = jnp.swapaxes(householder, 2, 3) @ kernel
  unit = jnp.eye(key.shape[3], dtype=product.dtype)[None, None]
  return key, unit - product, changes, kernel


def _final_keys(key, householder, beta):
  """Each key times the Householder matrices of all later positions, `[B, T, K, H]`."""
  length = key.shape[1]
  size = chunk_size(length, BLOCK)

  def step(later, block):
    end, product, *_ = _block_transition(
      *(jnp.swapaxes(x, 1, 2) for x in block)
    )
    return later @ product, end @ jnp.swapaxes(later, 2, 3)

  blocks = split_blocks((key, householder, beta), size)
  blocks = [jnp.moveaxis(x, 1, 0) for x in blocks]
  unit = jnp.eye(key.shape[3], dtype=key.dtype)[None, None]
  unit += jnp.zeros_like(key[:, 0, :, :, None])
  _, keys = jax.lax.scan(step, unit, blocks, reverse=True)
  return join_blocks(jnp.moveaxis(keys, 0, 1), length)


def _attend_own_block(query, key, value, householder, beta, sums, ids):
  """The state of queries after their own block, and its arrays for later queries."""
  query, key, value, householder, beta = (
    jnp.swapaxes(x, 1, 2) for x in (query, key, value, householder, beta)
  )
  end, product, changes, kernel = _block_transition(key, householder, beta)
  dots = jnp.tril(query_dot("bkqh,bkdh->bkqd", query, householder))
  scores = query_dot("bkqh,bkdh->bkqd", query, key)
  scores -= query_dot("bkqd,bkde->bkqe", dots, changes)
  out, lse = _attend_block(scores, value, sums, sums, ids, ids, right=0)
  query -= query_dot("bkqd,bkdh->bkqh", dots, kernel)
  return (query, out, lse), (end, value, product, sums, ids)


def _visit(rows, state, keys):
  """The state of queries after another block of keys to their left."""
  _, sums, ids = rows
  key, value, product, key_sums, key_ids = keys
  query, *output = state
  scores = query_dot("bkqh,bkdh->bkqd", query, key)
  result = _attend_block(scores, value, sums, key_sums, ids, key_ids)
  query = query_dot("bkqh,bkhg->bkqg", query, product)
  return query, *merge(tuple(output), result)


def _attend_block(scores, value, sums, key_sums, ids, key_ids, right=None):
  """(out, lse) of queries over a block of keys."""
  if sums is not None:
    # Sums are pairs of numbers, whose differences lose no precision.
    log_forget = jnp.sum(sums[:, :, None] - key_sums[:, None], axis=4)
    scores += log_forget.transpose(0, 3, 1, 2)
  visible = visible_in_tile(
    scores.shape[3], key_ids[0], ids[1], key_ids[2], right
  )
  weights, lse = softmax_and_lse(scores, visible)
  return query_dot("bkqd,bkdv->bkqv", weights, value), lse


@attention_factory
def path(rank: int = 32, forget: bool = False) -> Attention:
  """The mechanism of `path_attention`, with w and β computed from the inputs.

    w_t = x_t W₁ W₂ / |x_t W₁ W₂|        β_t = 2 σ(x_t · W_β + b)

  Args:
    rank: R, of W₁ `[F, R]` and W₂ `[R, K, H]`.
    forget: whether each head has a forget gate, as in `dense` (PaTH-FoX).

  Returns:
    A causal `Attention` with `gates`. Its cache stores values, and keys in
    float32; each decoding step multiplies all keys by its H_t. Its parameters are
    `householder_down [F, R]`, `householder_up [R, K, H]`, `rate_kernel [F, K]` and
    `rate_bias [K]`, with `forget` also those of `dense`.

  Raises:
    ValueError: `rank` is not a positive int; by `init`, there are no features.

  Unlike in the paper, there is no convolution between W₂ and the norm.
  """
  exact: Any = dense(forget=forget)

  def init(key, dims):
    checks.check_features("path", dims.features)
    keys = jax.random.split(key, 4)
    features, heads = dims.features, dims.num_kv_heads
    params = {
      "householder_down": gates.kernel(keys[0], features, rank),
      "householder_up": gates.kernel(keys[1], rank, heads, dims.head_dim),
      "rate_kernel": gates.kernel(keys[2], features, heads),
      "rate_bias": jnp.zeros(heads),
    }
    return {"params": {**params, **exact.init(keys[3], dims).get("params", {})}}

  def compute_gates(variables, inputs):
    p = variables["params"]
    kernels = p["householder_down"], p["householder_up"]
    rate = gates.project(inputs, p["rate_kernel"]) + p["rate_bias"][None, None]
    arrays = exact.gates(variables, inputs) if exact.gates else {}
    arrays["householder"] = unit_length(gates.project(inputs, *kernels))
    return {**arrays, "beta": 2.0 * jax.nn.sigmoid(rate)}

  def attend(query, key, value, **call):
    if forget:
      gates.check_gates("path", call, "log_forget")
    return path_attention(query, key, value, **call)

  def init_cache(*args):
    cache = exact.init_cache(*args)
    return cache._replace(key=cache.key.astype(jnp.float32))

  def decode(
    variables, cache, *qkv, householder, beta, scale=None, log_forget=None
  ):
    options = {"scale": scale, "log_forget": log_forget}
    products = jnp.sum(cache.key * householder, axis=-1, keepdims=True)
    keys = cache.key - beta[..., None] * products * householder
    cache = cache._replace(key=keys.astype(cache.key.dtype))
    return exact.decode(variables, cache, *qkv, **options)

  def prefill(variables, cache, *arrays, householder, beta, **options):
    query, key, value, lengths = arrays
    in_prompt = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    keys = _final_keys(
      *_zero_masked((key, householder, beta[..., None]), in_prompt)
    )
    arrays = query, keys, value, lengths
    return exact.prefill(variables, cache, *arrays, **options)

  supports = {"causal", "mask", "segments", "log_forget", "decode"}
  return Attention(
    init=init,
    apply=make_apply("path", attend),
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    supports=frozenset(supports),
    causal_only=True,
    gates=compute_gates,
  )
