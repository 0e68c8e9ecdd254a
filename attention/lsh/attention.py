"""LSH attention: tokens of one hash bucket attend to each other (Reformer).

The buckets and their sorted order are in `hash`, what a chunk sees in `chunks`,
the sum over rounds in `rounds`, decoding in `cache`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.lsh import cache as lsh_cache
from attention.lsh import chunks as lsh_chunks
from attention.lsh import hash as lsh_hash
from attention.lsh import rounds as lsh_rounds


@arguments.attention_function(
  num_rounds="draw them, rotations=lsh_rotations(key, num_rounds=…, head_dim=…, "
  "num_buckets=…), or make the mechanism, lsh(num_rounds=…)",
  num_buckets="draw them, rotations=lsh_rotations(key, num_rounds=…, head_dim=…, "
  "num_buckets=…), or make the mechanism, lsh(num_buckets=…)",
)
def lsh_attention(
  query: Float[Array, "B T N H"],
  value: Float[Array, "B S K V"],
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
) -> Float[Array, "B T N V"]:
  r"""Every token attends to near tokens of its own bucket, in several rounds.

    out_i = Σ_{j∈P_i} exp(scale · q_i·k_j) v_j / Σ_{j∈P_i} exp(scale · q_i·k_j)
    k_j = q_j / |q_j|  (0 for q_j = 0),    P_i = ∪_r P_i^(r) \ {i}

  Round r gives token j the bucket h_r(j) = argmax [q_j R_r; -q_j R_r] and sorts
  the tokens by (bucket, position). P_i^(r) are the tokens of i's bucket in i's
  chunk of C sorted tokens and in the chunk before it. The first chunk has no
  chunk before it. Each head has its own buckets and chunks. A token that sees
  no other token sees itself.

  Causal: j is in P_i^(r) iff both are in one bucket, j < i, and fewer than
  C - 1 tokens of that bucket lie between them.

  Segments: tokens are sorted by (segment, bucket, position), and i and j must
  agree in segment as well as in bucket. In the causal form, a packed example
  therefore gives the same result as alone. In both directions, it sees nothing
  of the other examples, and their content changes no bit of its result. But
  chunks are cut from the sorted tokens of all examples. The result is the same
  as alone where the number of (unmasked) tokens of lower segment ids is a
  multiple of C. Elsewhere a few pairs of the example may be missed or gained.

  Args:
    query: `[B, T, N, H]`, queries and, normalised, keys.
    value: `[B, S, K, V]`, S = T; N is a multiple of K, head n reads head
      n // (N/K).
    rotations: R, `[rounds, H, buckets/2]`, as `lsh_rotations` draws them, the
      same for all heads; a last axis of 0 is one bucket. The number of rounds
      is free, so a model may be evaluated with more than in training.
    chunk_size: C ≥ 1; the paper takes twice the mean size of a bucket.
    mask: token mask, broadcastable to `[B, 1, 1, T]`, True = attend. No token
      sees a masked token, and it moves no other token to another chunk. Its own
      output is zeros, because query and key are one.
    is_causal: token i sees j ≤ i only.
    scale: factor of the logits; None is 1/√H, as in the paper's formulas. Keys
      have length 1, so weights in a bucket are then nearly even until training
      lengthens the queries; the authors' code has 1.
    query_segment_ids: `[B, T]`; a token sees tokens of its own segment only. It
      sees itself only if it sees no other token.
    key_segment_ids: `[B, T]`, the same ids again, because query and key are
      one. A token whose two ids differ is in neither segment and sees nothing.
    dropout_rate: share of attention weights set to zero, a token's weight for
      itself included; the others are divided by 1 - dropout_rate.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. Buckets have no derivative. The
    gradient of a query is the sum of that as a query and that as a key.

  Raises:
    ValueError: arguments do not fit together.

  Cost: time T·N·(C·(H+V) + H·buckets + log T) a round, so it is linear in T
  only for a fixed number of buckets. Memory in addition to the arguments: a few
  arrays of B·T·N·(H+V) float32, B·T·N·2C bytes, B·T·N int32 for each round, and
  for a step of G chunks of every head B·N·G·2C·(C+H+V) float32, which
  `attention.platform` bounds. Nothing is T×T, forward or backward.

  Departs from its paper in the causal form. In the paper, the chunks are cut
  from the sorted sequence of all tokens, so the number of future tokens in
  earlier buckets decides which past tokens share a chunk with i. Here, distance
  is counted inside the bucket, which costs the same and depends on the past
  alone (up to the order of float sums, 1e-6), so decoding is exact. A pair that
  two rounds show is counted in the first round instead of half in each, which
  is the same sum. The code of the paper lets the first chunk look at the last;
  its text and this function do not.

  Paper: Reformer, the efficient transformer, section 2, arXiv:2001.04451.
  """
  arguments.check_qkv(query, query, query)
  _check_value(query, value)
  _check_rotations(query, rotations)
  arguments.check_at_least("chunk_size", chunk_size, 1)
  arguments.check_segment_ids(query_segment_ids, key_segment_ids, query, query)
  arguments.check_dropout(dropout_rate, dropout_rng)
  scale = arguments.softmax_scale(scale, query.shape[-1])
  keep = arguments.key_mask(
    mask,
    query,
    query,
    "buckets are sorted once for all queries; dense attention takes masks that "
    "vary",
  )
  if keep is not None:
    # Also set to zero, so that a NaN in a masked token does not get through.
    query = jnp.where(keep[:, :, None, None], query, 0)
    value = jnp.where(keep[:, :, None, None], value, 0)
  chunks = lsh_chunks.cut(query, value, chunk_size, is_causal=is_causal)
  plan = lsh_hash.plan(
    chunks,
    lsh_hash.buckets(jax.lax.stop_gradient(query), rotations),
    keep,
    segments=key_segment_ids,
    num_buckets=max(1, 2 * rotations.shape[-1]),
  )
  operands = lsh_rounds.Operands(
    vector=query, factor=lsh_cache.key_factors(query, scale), value=value
  )
  rounds = lsh_rounds.Rounds(chunks, dropout_rate)
  out = lsh_rounds.attend(rounds, operands, plan, dropout_rng)
  if keep is not None:
    out = jnp.where(keep[:, :, None, None], out, 0)
  if query_segment_ids is not None and key_segment_ids is not None:
    is_one = (query_segment_ids == key_segment_ids)[:, :, None, None]
    out = jnp.where(is_one, out, 0)
  return out


def lsh_rotations(
  key: Array, *, num_rounds: int, head_dim: int, num_buckets: int
) -> Float[Array, "rounds H half"]:
  """Draws the random rotations of the hash, standard normal.

  Args:
    key: a JAX random key.
    num_rounds: the number of hash rounds, at least 1.
    head_dim: H ≥ 1.
    num_buckets: even, or 1 for no hashing at all.

  Returns:
    `[rounds, H, buckets/2]` float32, its last axis 0 for one bucket.

  Raises:
    ValueError: a number is out of range.

  Paper: arXiv:2001.04451, section 2, "Locality sensitive hashing".
  """
  _check_numbers(num_rounds, num_buckets)
  arguments.check_at_least("head_dim", head_dim, 1)
  return jax.random.normal(key, (num_rounds, head_dim, num_buckets // 2))


def _check_value(query: Array, value: Array) -> None:
  if value.ndim != 4 or value.shape[:2] != query.shape[:2]:
    raise ValueError(
      f"value: expected {(*query.shape[:2], 'K', 'V')} to go with query "
      f"{query.shape}, got {value.shape}; lsh attention is among the tokens of "
      "one sequence, dense attention reads another"
    )
  num_kv_heads = value.shape[2]
  arguments.check_qkv(query, query[:, :, :num_kv_heads], value)


def _check_rotations(query: Array, rotations: Array) -> None:
  head_dim = query.shape[-1]
  if (
    rotations.ndim != 3
    or rotations.shape[0] < 1
    or rotations.shape[1] != head_dim
    or not jnp.issubdtype(rotations.dtype, jnp.floating)
  ):
    raise ValueError(
      f"rotations: expected floats [rounds, {head_dim}, buckets/2] to go with "
      f"query {query.shape}, got {rotations.dtype} {rotations.shape}"
    )


def _check_numbers(num_rounds: int, num_buckets: int) -> None:
  arguments.check_at_least("num_rounds", num_rounds, 1)
  arguments.check_at_least("num_buckets", num_buckets, 1)
  if num_buckets > 1 and num_buckets % 2:
    raise ValueError(
      "num_buckets: expected an even number, as the hash takes a direction and "
      f"its opposite, or 1, got {num_buckets}"
    )


def lsh(
  num_rounds: int = 4, num_buckets: int | None = None, chunk_size: int = 64
) -> plug.Attention:
  """The plug of `lsh_attention`; query and key are one array, given as query.

  Args:
    num_rounds: the number of hash rounds.
    num_buckets: even, or 1; None is 2·⌈max_length / chunk_size⌉, so that a
      chunk is twice the mean size of a bucket, as in the paper. Hashing then
      costs T·H·T/C: fix the number where time must stay linear in T.
    chunk_size: C.

  Returns:
    An `Attention` whose rotations are in `constants`, drawn by `init`. Its
    `apply` and `decode` expect None as `key`.

  Raises:
    ValueError: a number is out of range; by `init`, rounds or rotations that
      take more than `arguments.MOST_BYTES`.
  """
  _check_numbers(num_rounds, 1 if num_buckets is None else num_buckets)
  arguments.check_at_least("chunk_size", chunk_size, 1)
  function = partial(lsh_attention, chunk_size=chunk_size)

  def init(key, dims):
    # Each round sorts the tokens of every head.
    numbers = num_rounds * dims.num_heads * dims.max_length
    arguments.check_memory("num_rounds", num_rounds, numbers)
    if num_buckets == 1:  # One bucket needs no rotations.
      return {}
    buckets = num_buckets or 2 * -(-dims.max_length // chunk_size)
    numbers = num_rounds * dims.head_dim * buckets // 2
    arguments.check_memory("num_buckets", buckets, numbers)
    rotations = lsh_rotations(
      key,
      num_rounds=num_rounds,
      head_dim=dims.head_dim,
      num_buckets=buckets,
    )
    return {"constants": {"rotations": rotations}}

  def rotations_of(variables, query):
    if num_buckets == 1:
      return jnp.zeros((num_rounds, query.shape[-1], 0), jnp.float32)
    return variables["constants"]["rotations"]

  def apply(variables, query, key, value, **call):
    _check_key(key)
    call = arguments.accepted_options("lsh", function, call, own=("rotations",))
    rotations = rotations_of(variables, query)
    return function(query, value, rotations=rotations, **call)

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    return lsh_cache.init_cache(num_rounds, batch, max_length, dims, dtype)

  def prefill(variables, cache, query, key, value, lengths, *, scale=None):
    del scale  # The cache has no logits.
    _check_key(key)
    rotations = rotations_of(variables, query)
    return lsh_cache.prefill(rotations, cache, query, value, lengths)

  def decode(variables, cache, query, key, value, *, scale=None):
    _check_key(key)
    rotations = rotations_of(variables, query)
    return lsh_cache.decode(rotations, chunk_size, cache, query, value, scale)

  return plug.Attention(
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
    sizes=plug.Sizes(short={"chunk_size": 8}),
  )


def _check_key(key: Array | None) -> None:
  if key is not None:
    raise ValueError(
      "key: lsh attention has one array for query and key, expected None; pass "
      "it as query, or use dense attention for keys of their own"
    )
