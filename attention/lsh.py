"""LSH attention: tokens in the same hash bucket attend to each other (Reformer).

Each round sorts the tokens of a head by (segment, bucket, position) and cuts them
into chunks of C; a chunk attends to itself and to the chunk before it. The rounds
are merged by the log-sum-exp of their logits (`attention.softmax.rows.merge`).

The paper weighs a pair that occurs in N_ij rounds by 1 / N_ij in each. Here the first
of these rounds counts it with weight 1, which gives the same sum. A comparison of
integers, 0 ≤ code_i − code_j < width, decides which pairs occur in a round. With p the
place of a token in the sorted order and f that of the first token of its bucket,

  both directions:  code = p // C + 2·f, width = 2
  causal:           code = p + C·f,      width = C
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention, Hyperparameters, accepted_options
from attention.platform import backend, layout
from attention.softmax import dropout
from attention.softmax.cache import prompt_rows
from attention.softmax.hashing import (
  check_buckets,
  hash_buckets,
  lsh_rotations,
  sort_by_bucket,
  unsort,
)
from attention.softmax.rows import (
  Output,
  block_attention,
  masked_softmax,
  merge,
)


@attention_function
def lsh_attention(
  query: Float[Array, "B T N H"],
  value: Float[Array, "B T K V"],
  *,
  rotations: Float[Array, "rounds H half"],
  chunk_size: int,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  return_lse: bool = False,
) -> Output:
  r"""Each token attends to nearby tokens of its hash bucket, in several rounds.

    out = lsh_attention(q, v, rotations=rotations, chunk_size=64)

    out_i = Σ_{j∈P_i} exp(scale · q_i·k_j) v_j / Σ_{j∈P_i} exp(scale · q_i·k_j)
    k_j = q_j / |q_j|  (0 for q_j = 0),    P_i = ∪_r P_i^(r) \ {i}

  Round r gives token j the bucket h_r(j) = argmax [q_j R_r; -q_j R_r] and sorts
  the tokens by (bucket, position). P_i^(r) are the tokens of i's bucket in i's
  chunk of C sorted tokens and in the chunk before it. The first chunk has no
  chunk before it. Each head has its own buckets and chunks. A token that sees
  no other token sees itself.

  Causal: j is in P_i^(r) iff both are in one bucket, j < i, and fewer than
  C - 1 tokens of that bucket lie between them.

  Segments: tokens are sorted by (segment, bucket, position), and i and j must agree in
  segment and bucket. In causal calls, a packed example gives the same result as alone.
  In both directions it does only if the number of unmasked tokens with lower segment
  ids is a multiple of C; otherwise it may lose or gain a few pairs.

  Args:
    query: `[B, T, N, H]`, queries and, normalised, keys.
    value: `[B, S, K, V]`, S = T; N is a multiple of K.
    rotations: R, `[rounds, H, buckets/2]`, drawn by `lsh_rotations` and the same for
      all heads; a last axis of 0 is one bucket. Evaluation may use more rounds than
      training.
    chunk_size: C ≥ 1; the paper uses twice the mean size of a bucket.
    mask: token mask, broadcastable to `[B, 1, 1, T]`, True = attend. No token sees a
      masked token, and masked tokens do not affect the chunks of others. They output
      zeros, because query and key are one array.
    is_causal: token i sees j ≤ i only.
    scale: factor of the logits; None means 1/√H, as in the paper's formulas. Since keys
      have length 1, weights in a bucket are then nearly uniform until training
      lengthens the queries; the authors' code uses 1.
    query_segment_ids: `[B, T]`; a token sees tokens of its own segment only.
    key_segment_ids: the same ids. A token whose two ids differ sees no token.
    dropout_rate: fraction of the attention weights that are set to zero; this
      includes a token's weight for itself.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    `[B, T, N, V]` in the dtype of `query`, with `return_lse` also the log-sum-exp
    `[B, T, N]`, as in `flash_attention`. Buckets have no derivative. The gradient
    of a query is the sum of that as a query and that as a key.

  Cost: time T·N·(C·(H+V) + H·buckets + log T) a round, so it is linear in T
  only for a fixed number of buckets. Memory in addition to the arguments: a few
  arrays of B·T·N·(H+V) float32, B·T·N·V float32 for each round, and for a step of G
  chunks of every head B·N·G·2C·(C+H+V) float32, which `attention.platform.backend` bounds.

  Differs from the paper in the causal form. The paper cuts chunks from the sorted
  sequence of all tokens, so that future tokens in earlier buckets decide which past
  tokens share a chunk with i. Here distance is counted inside the bucket, which costs
  the same and depends only on the past, so decoding is exact. In the paper's code, but
  not in its text, the first chunk attends to the last.

  Paper: Reformer, the efficient transformer, section 2, arXiv:2001.04451.
  """
  if rotations.shape[0] < 1:
    raise ValueError(
      f"rotations: expected at least one round, got shape {rotations.shape}"
    )
  length, num_heads, head_dim = query.shape[1:]
  instead = "tokens are sorted once; dense attention supports masks that vary"
  keep = checks.key_mask(mask, query, query, instead)
  query, value = (layout.zero_masked(x, keep) for x in (query, value))
  factor = _key_factors(query, checks.softmax_scale(scale, head_dim))
  bucket = hash_buckets(jax.lax.stop_gradient(query), rotations)
  order, rank = sort_by_bucket(bucket, key_segment_ids, keep)
  place = jnp.broadcast_to(jnp.arange(length), order.shape)
  chunk_size = min(chunk_size, length)
  width = chunk_size if is_causal else 2
  code = (place if is_causal else place // chunk_size) + width * (place - rank)
  # All codes are below 0, the code of padding, and no token sees a larger code.
  code = unsort(code - jnp.iinfo(code.dtype).max, order)
  attend = partial(
    _attend_round,
    (query, factor, value, code.transpose(1, 3, 2, 0)),
    chunk_size,
    width,
    (dropout_rate, dropout_rng),
  )
  results = jax.lax.map(
    jax.checkpoint(attend, prevent_cse=False),
    (jnp.arange(len(order)), order, unsort(place, order)),
  )
  results = merge(*zip(*results, strict=True))
  out, lse = (jnp.swapaxes(x, 1, 2) for x in results)
  is_alone = lse == -jnp.inf
  # The weight of a token for itself: 1, or NaN if the token is NaN.
  own = jnp.exp(factor - factor)
  if dropout_rate:
    own *= dropout.factors(dropout_rng, dropout_rate, own.shape, len(order), 0)
  value = jnp.repeat(value, num_heads // value.shape[2], axis=2)
  out = jnp.where(is_alone[..., None], own[..., None] * value, out)
  squares = jnp.sum(jnp.square(query.astype(jnp.float32)), axis=-1)
  lse = jnp.where(is_alone, factor * squares, lse)
  if query_segment_ids is not None and key_segment_ids is not None:
    same_segment = query_segment_ids == key_segment_ids
    keep = same_segment if keep is None else keep & same_segment
  if keep is not None:
    out = jnp.where(keep[:, :, None, None], out, 0)
    lse = jnp.where(keep[:, :, None], lse, -jnp.inf)
  out = out.astype(query.dtype)
  return (out, lse) if return_lse else out


def _attend_round(
  tokens: tuple[Array, ...],
  chunk_size: int,
  width: int,
  dropout_options: tuple[float, Array | None],
  round_: tuple[Int[Array, ""], Int[Array, "B N T"], Int[Array, "B N T"]],
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
  """(out, lse) of the pairs that occur in this round for the first time.

  Args:
    tokens: queries, factors of keys, values and codes of all rounds.
    chunk_size: C.
    width: a token sees another if its code is larger by less than this.
    dropout_options: the rate and the key.
    round_: its number, the token at each place, and the place of each token.
  """
  r, order, place = round_
  rate, rng = dropout_options
  batch, num_heads, length = order.shape
  widest = max(chunk_size, tokens[0].shape[-1], tokens[2].shape[-1])
  row_bytes = 4 * batch * num_heads * 2 * widest
  most = max(backend.rows_per_tile(row_bytes, length) // chunk_size, 1)
  count = -(-length // chunk_size)
  steps = -(-count // most)
  chunks_per_step = -(-count // steps)
  rows = chunks_per_step * chunk_size
  padding = ((0, 0), (0, 0), (0, steps * rows - length))
  index = jnp.pad(order, padding, constant_values=length)
  index = index.reshape(batch, num_heads, steps, chunks_per_step, chunk_size)
  # B and N stay separate axes, after steps.
  chunks = [
    jax.vmap(partial(layout.head_rows, x))(jnp.moveaxis(index, 2, 0))
    for x in tokens
  ]
  numbers = jnp.arange(steps * chunks_per_step).reshape(steps, chunks_per_step)
  not_self = ~jnp.eye(chunk_size, 2 * chunk_size, chunk_size, dtype=bool)

  def is_near(code):
    difference = code[..., chunk_size:, None] - code[..., None, :]
    return (difference >= 0) & (difference < width)

  @partial(jax.checkpoint, prevent_cse=False)
  def step(previous, inputs):
    numbers, own = inputs
    query, factor, value, code = (
      jnp.concatenate([jnp.concatenate([x[:, :, None], y[:, :, :-1]], 2), y], 3)
      for x, y in zip(previous, own, strict=True)
    )
    visible = is_near(code[..., r]) & not_self[None, None, None]
    for earlier in range(code.shape[-1] - 1):
      visible &= ~is_near(code[..., earlier]) | (earlier >= r)
    factors = None
    if rate:
      shape = (batch, num_heads, 1, chunk_size, 2 * chunk_size)
      # Drawn for each chunk, because the number of chunks of a step depends on the
      # platform.
      draw = partial(dropout.factors, rng, rate, shape, r)
      factors = jax.vmap(draw, out_axes=2)(numbers)
    # Every query head has its own keys.
    results = block_attention(
      query[:, :, :, chunk_size:, None],
      query[:, :, :, None],
      value[:, :, :, None],
      scale=factor[:, :, :, None, None, None],
      visible=visible[:, :, :, None, None],
      dropout_factors=factors if factors is None else factors[:, :, :, None],
    )
    return [x[:, :, -1] for x in own], [
      x.reshape(batch, num_heads, rows, *x.shape[5:]) for x in results
    ]

  *first, code = (x[0, :, :, 0] for x in chunks)
  first.append(jnp.maximum(code, 0))
  _, results = jax.lax.scan(step, first, (numbers, chunks))

  def unsort(x, place):
    rows_at = x.at[place // rows, place % rows]
    return rows_at.get(mode="promise_in_bounds", unique_indices=True)

  unsort_all = jax.vmap(jax.vmap(unsort, (1, 0)), (1, 0))
  return unsort_all(results[0], place), unsort_all(results[1], place)


def _key_factors(
  vector: Float[Array, "B T N H"], scale: float | Float[Array, ""]
) -> Float[Array, "B T N"]:
  """The factor that turns x_i·x_j into a logit: scale / |x_j|, or 0 for x_j = 0."""
  squares = jnp.sum(jnp.square(vector.astype(jnp.float32)), axis=-1)
  # The inner `where` keeps the derivative of the root finite at 0.
  norm = jnp.sqrt(jnp.where(squares == 0.0, 1.0, squares))
  return jnp.where(squares == 0.0, 0.0, scale / norm)


class LshCache(NamedTuple):
  """The tokens seen so far; S = max_length. Rows from `index` on are unset.

  Attributes:
    vector: `[B, S, N, H]`, queries and keys.
    value: `[B, S, K, V]`.
    bucket: `[B, S, N, rounds]`.
    rank: `[B, S, N, rounds]`, the number of earlier tokens in the same bucket.
    index: `[B]`, the number of positions seen.
  """

  vector: Float[Array, "B S N H"]
  value: Float[Array, "B S K V"]
  bucket: Int[Array, "B S N rounds"]
  rank: Int[Array, "B S N rounds"]
  index: Int[Array, "B"]
  grows = True


@attention_factory
def lsh(
  num_rounds: int = 4, num_buckets: int | None = None, chunk_size: int = 64
) -> Attention:
  """The mechanism of `lsh_attention`; the query array is also the key array.

  Args:
    num_rounds: the number of hash rounds.
    num_buckets: an even number, or 1; None means 2·⌈max_length / chunk_size⌉, so that a
      chunk is twice the mean size of a bucket, as in the paper. Hashing then
      costs T·H·T/C: set a number to keep time linear in T.
    chunk_size: C.

  Returns:
    An `Attention` whose rotations are drawn by `init` and stored in `constants`. Its
    `apply` and `decode` expect None as `key`. A decoding step takes time
    S·N·(H+V+rounds) at any position.
  """
  check_buckets(num_buckets or 1)
  function = partial(lsh_attention, chunk_size=chunk_size)

  def init(key, dims):
    if num_buckets == 1:  # One bucket needs no rotations.
      return {}
    buckets = num_buckets or 2 * -(-dims.max_length // chunk_size)
    rotations = lsh_rotations(
      key, num_rounds=num_rounds, head_dim=dims.head_dim, num_buckets=buckets
    )
    return {"constants": {"rotations": rotations}}

  def get_rotations(variables, query):
    if num_buckets == 1:
      return jnp.zeros((num_rounds, query.shape[-1], 0), jnp.float32)
    return variables["constants"]["rotations"]

  def apply(variables, query, key, value, **call) -> Any:
    _check_key(key)
    call = accepted_options("lsh", function, call, own=("rotations",))
    rotations = get_rotations(variables, query)
    return function(query, value, rotations=rotations, **call)

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    tokens = batch, max_length
    ranks = jnp.zeros((*tokens, dims.num_heads, num_rounds), jnp.int32)
    return LshCache(
      jnp.zeros((*tokens, dims.num_heads, dims.head_dim), dtype),
      jnp.zeros((*tokens, dims.num_kv_heads, dims.values), dtype),
      bucket=ranks,
      rank=ranks,
      index=jnp.zeros((batch,), jnp.int32),
    )

  def prefill(variables, cache, query, key, value, lengths, *, scale=None):
    del scale  # The cache stores no logits.
    _check_key(key)
    query, value = (prompt_rows(x, lengths) for x in (query, value))
    bucket = hash_buckets(query, get_rotations(variables, query))
    order, rank = sort_by_bucket(bucket)
    rank = unsort(rank, order)
    prompt = query, value, *(x.transpose(1, 3, 2, 0) for x in (bucket, rank))
    rows = map(layout.put, cache[:4], prompt, (0,) * 4)
    return LshCache(*rows, index=lengths)

  def decode(variables, cache, query, key, value, *, scale=None):
    _check_key(key)
    # A past token is visible iff, in some round, it is in the same bucket and its rank
    # is lower by less than `chunk_size`.
    bucket = hash_buckets(query, get_rotations(variables, query))
    bucket = bucket.transpose(1, 3, 2, 0)
    positions = jnp.arange(cache.vector.shape[1])[None, :]
    index = cache.index[:, None]
    same_bucket = cache.bucket == bucket
    same_bucket &= (positions < index)[..., None, None]
    rank = jnp.sum(same_bucket, axis=1, keepdims=True, dtype=jnp.int32)
    visible = jnp.any(same_bucket & (rank - cache.rank < chunk_size), axis=-1)
    is_new = positions == index
    visible |= is_new[..., None] & ~jnp.any(visible, axis=1, keepdims=True)
    token = query, value, bucket, rank
    rows = map(layout.write, cache[:4], token, (is_new,) * 4)
    cache = LshCache(*rows, index=cache.index + 1)
    scale = checks.softmax_scale(scale, query.shape[-1])
    logits = layout.dot("BTNH,BSNH->BNTS", query, cache.vector)
    factor = _key_factors(cache.vector, scale)
    factor, visible = (
      jnp.moveaxis(x, 1, 2)[:, :, None] for x in (factor, visible)
    )
    weights = masked_softmax(logits * factor, visible).astype(value.dtype)
    batch, num_heads, _, length = weights.shape
    weights = weights.reshape(batch, value.shape[2], -1, length)
    values = cache.value.astype(value.dtype)
    out = layout.dot("BKJS,BSKV->BKJV", weights, values)
    return out.reshape(batch, 1, num_heads, -1).astype(query.dtype), cache

  return Attention(
    init=init,
    apply=apply,
    supports=frozenset(
      {"causal", "mask", "segments", "dropout", "decode", "shared_qk"}
    ),
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    approximates="shared_qk",
    cost="linear",
    sizes=Hyperparameters(short={"chunk_size": 8}),
  )


def _check_key(key: Array | None) -> None:
  if key is not None:
    raise ValueError(
      "key: expected None, as lsh attention has one array for query and key; pass "
      "it as query, or use dense attention for separate keys"
    )
