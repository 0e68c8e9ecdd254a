"""BigBird: a window, global blocks and random blocks (Zaheer et al., 2020)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention, Hyperparameters
from attention.platform import backend, layout
from attention.platform.blocks import split_blocks
from attention.platform.derivative import match_varying
from attention.platform.programs import axis_size
from attention.softmax import dropout, sharding
from attention.softmax.logits import PLAIN, Logits
from attention.softmax.mods import BlockMask
from attention.softmax.tiles import attend
from attention.softmax.visible import Visible, key_mask, segments


@attention_function
def bigbird_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  block_size: int,
  random_blocks: Int[Array, "N M R"],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  axis_name: str | None = None,
  return_lse: bool = False,
) -> Float[Array, "B T N V"] | tuple[Array, Array]:
  """Each block of queries attends to neighbouring, global and random blocks of keys.

    out = bigbird_attention(q, k, v, block_size=64, random_blocks=blocks)

  Positions are divided into blocks of C = `block_size`, b(t) = t // C. The last block,
  L = ceil(T/C) - 1, may be shorter.

    out[t] = softmax over s in A(t) of (scale · query[t] · key[s]), times value
    A(t) = {s : b(s) ∈ {0, L, b(t)-1, b(t), b(t)+1} ∪ random_blocks[b(t)-1]}
    A(t) = all s                                       where b(t) ∈ {0, L}

  for each head. A random block that is repeated, neighbouring or global counts once.
  `mask` and the segments restrict the pairs further.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    block_size: C.
    random_blocks: `[N, M, R]`, the indices of R blocks for each query head and each of
      the M = max(L - 1, 0) blocks between the first and the last, as drawn by
      `bigbird_random_blocks`. Indices outside [0, L], such as -1, are ignored.
    mask: key mask, `[B, 1, 1, S]`.
    is_causal: must be False, because the last block is global, and random blocks may
      be later than the query.
    axis_name: mesh axis inside `jax.shard_map`, for a `block_size` that divides T.
      Block indices refer to the whole sequence. Dropout is not supported.
    scale: factor of the logits; None means 1/√H.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    dropout_rate: fraction of the attention weights that are set to zero.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    `[B, T, N, V]`, with `return_lse` also the log-sum-exp `[B, T, N]`, as
    `flash_attention`.

  Raises:
    ValueError: a causal call.

  Cost: time T·(5+R)·C·N·(H+V), and 2C·T·N·(H+V) for the global queries. Memory
  in addition to the arrays: a copy of each, and B·N·C·(C+H+V) for each block that is
  computed at the same time, which is one on a CPU. No array is T×S.

  Differs from the paper in that every length is allowed, down to one partial
  block, in that the union is exact for any random blocks, and in that each head
  has its own random blocks (as in the paper's code).

  Paper: Big Bird: transformers for longer sequences, section 2 and appendix D
  (internal transformer construction, ITC), arXiv:2007.14062.
  """
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True; every query sees the last block "
      "and random later blocks; sliding_window, flash and dense attention "
      "have causal forms"
    )
  if key.shape[1] != query.shape[1]:
    raise ValueError(
      f"key: expected the length of query, {query.shape[1]}, because both are "
      f"divided into the same blocks, got {key.shape[1]}; for cross-attention use "
      "dense"
    )
  length, num_heads = query.shape[1:3]
  keep = checks.key_mask(mask, query, key)
  devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
  count = -(-devices * length // block_size)
  expected = num_heads, max(count - 2, 0)
  if random_blocks.shape[:2] != expected:
    raise ValueError(
      f"random_blocks: expected integers of shape [{expected[0]}, "
      f"{expected[1]}, R], got {random_blocks.dtype} {random_blocks.shape}"
    )
  if axis_name is not None and devices > 1:
    visible, rate = _visible(keep), dropout_rate or None
    sharding.check_shards(query, key, visible, PLAIN, dropout_rate=rate)
    keys = key, value, keep, key_segment_ids
    results = _attend_to_shards(
      query,
      query_segment_ids,
      keys,
      _visible_blocks(random_blocks, count),
      axis_name=axis_name,
      block_size=block_size,
      scale=scale,
    )
    return results if return_lse else results[0]
  block_rng = global_rng = None
  if dropout_rng is not None and dropout_rate > 0.0:
    block_rng, global_rng = dropout.split(dropout_rng, 2)

  def attend_to_all(query, ids):
    return attend(
      query,
      key,
      value,
      _visible(keep, ids, key_segment_ids),
      Logits(scale=scale),
      dropout_rate=dropout_rate,
      dropout_rng=global_rng,
    )

  if count <= 2:
    results = attend_to_all(query, query_segment_ids)
    return results if return_lse else results[0]
  last = (count - 1) * block_size
  rows = query, query_segment_ids
  ends = jax.tree.map(
    lambda x: jnp.concatenate([x[:, :block_size], x[:, last:]], axis=1), rows
  )
  middle, ids = jax.tree.map(lambda x: x[:, block_size:last], rows)
  others = _attend_to_blocks(
    middle,
    ids,
    (key, value, keep, key_segment_ids),
    _visible_blocks(random_blocks, count),
    block_size=block_size,
    scale=scale,
    dropout_rate=dropout_rate,
    dropout_rng=block_rng,
  )
  out, lse = (
    jnp.concatenate([x[:, :block_size], y, x[:, block_size:]], axis=1)
    for x, y in zip(attend_to_all(*ends), others, strict=True)
  )
  return (out, lse) if return_lse else out


def _visible(
  keep: Bool[Array, "B S"] | None,
  query_ids: Int[Array, "B T"] | None = None,
  key_ids: Int[Array, "B S"] | None = None,
) -> Visible:
  """Unmasked keys of the query's own segment."""
  visible = Visible() if keep is None else key_mask(keep)
  if query_ids is not None and key_ids is not None:
    visible &= segments(query_ids, key_ids)
  return visible


def _visible_blocks(
  random_blocks: Int[Array, "N M R"], count: int
) -> Int[Array, "N M W"]:
  """The W = 5 + R key blocks of each non-global query block, in ascending order.

  A query block attends to the first and the last block, itself, its two neighbours and
  its random blocks. `count` replaces repeated and invalid numbers.
  """
  own = jnp.arange(1, count - 1)
  fixed = jnp.stack([0 * own, 0 * own + count - 1, own - 1, own, own + 1], -1)
  fixed = jnp.broadcast_to(fixed, (len(random_blocks), *fixed.shape))
  blocks = jnp.sort(jnp.concatenate([fixed, random_blocks], axis=-1))
  is_new = jnp.diff(blocks, prepend=-1) > 0
  return jnp.where(is_new & (blocks >= 0), jnp.minimum(blocks, count), count)


def _attend_to_blocks(
  query: Float[Array, "B Q N H"],
  query_ids: Int[Array, "B Q"] | None,
  keys: tuple[Any, Any, Any, Any],
  blocks: Int[Array, "N M W"],
  *,
  block_size: int,
  scale: float | Float[Array, ""] | None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  axis_name: str | None = None,
) -> tuple[Float[Array, "B Q N V"], Float[Array, "B Q N"]]:
  """Each of M blocks of queries attends to its W blocks of keys.

  `keys` has key, value, mask and segment ids; with `axis_name`, of this device's shard.
  """
  batch, length, num_heads, head_dim = query.shape
  row_bytes = 4 * batch * num_heads * (block_size + head_dim + keys[1].shape[3])
  count = length // block_size
  tiles_per_step = backend.tiles_per_step(row_bytes * block_size, count)

  def attend_head(query, blocks, rng, key, value):
    keys = key, value, mask, key_ids
    if axis_name is not None:
      keys = jax.tree.map(
        lambda x: _gather_blocks(x, blocks, block_size, axis_name), keys
      )
      is_none = blocks == count * jax.lax.axis_size(axis_name)
      own = jnp.arange(blocks.size).reshape(blocks.shape)
      blocks = jnp.where(is_none, blocks.size, own)
    key, value, keep, ids = keys
    table = BlockMask(
      (block_size, block_size),
      length,
      key.shape[1],
      visited=blocks,
      tiles_per_step=tiles_per_step,
    )
    results = attend(
      query[:, :, None],
      key[:, :, None],
      value[:, :, None],
      Visible(block_mask=table) & _visible(keep, query_ids, ids),
      Logits(scale=scale),
      dropout_rate=dropout_rate,
      dropout_rng=rng,
    )
    return tuple(x[:, :, 0] for x in results)

  # Heads are a batch axis, so arrays that are sharded by head are not moved.
  key, value, mask, key_ids = keys
  heads = key.shape[2], num_heads // key.shape[2]
  rngs = None
  if dropout_rng is not None:
    rngs = dropout.split(dropout_rng, heads, heads_differ=True)
  attend_group = jax.vmap(attend_head, (2, 0, 0, None, None), 2)
  results = jax.vmap(attend_group, (2, 0, 0, 2, 2), 2)(
    query.reshape(batch, length, *heads, head_dim),
    blocks.reshape(*heads, *blocks.shape[1:]),
    rngs,
    key,
    value,
  )
  return jax.tree.map(
    lambda x: x.reshape(batch, length, num_heads, *x.shape[4:]), results
  )


def _attend_to_shards(
  query: Float[Array, "B T N H"],
  query_ids: Int[Array, "B T"] | None,
  keys: tuple[Any, Any, Any, Any],
  blocks: Int[Array, "N M W"],
  *,
  axis_name: str,
  block_size: int,
  scale: float | Float[Array, ""] | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """(out, lse) of `bigbird_attention` for the shards of D devices.

  The blocks that a device needs are known only at run time. So the devices pass all
  keys along a ring, and each keeps the blocks of its queries. Time and memory are
  those of T positions, with 5 + R keys for each query and head. Devices exchange the
  same arrays as in dense attention, and one sum for the global queries.
  """
  length = query.shape[1]
  if length % block_size:
    raise ValueError(
      f"block_size: expected a divisor of the {length} positions of a device, "
      f"got {block_size}; every block must lie on one device"
    )
  rank, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  own = length // block_size
  blocks = jnp.pad(blocks, ((0, 0), (1, 1), (0, 0)), constant_values=size * own)
  results = _attend_to_blocks(
    query,
    query_ids,
    keys,
    layout.cut(blocks, rank * own, own),
    block_size=block_size,
    scale=scale,
    axis_name=axis_name,
  )

  def ends(x):
    """The first and the last block of the whole sequence, on every device."""
    first = jnp.where(rank == 0, x[:, :block_size], 0)
    last = jnp.where(rank == size - 1, x[:, -block_size:], 0)
    return jax.lax.psum(jnp.concatenate([first, last], axis=1), axis_name)

  key, value, keep, key_ids = keys
  visible = _visible(keep, jax.tree.map(ends, query_ids), key_ids)
  rows = attend(ends(query), key, value, visible, Logits(scale=scale))
  rows = sharding.merge_over_devices(axis_name, *rows)

  def set_ends(x, rows):
    x = jnp.where(rank == 0, layout.put(x, rows[:, :block_size], 0), x)
    last = layout.put(x, rows[:, block_size:], length - block_size)
    return jnp.where(rank == size - 1, last, x)

  out, lse = map(set_ends, results, rows)
  return out, lse


def _gather_blocks(
  x: Shaped[Array, "B T *F"],
  blocks: Int[Array, "M W"],
  block_size: int,
  axis_name: str,
) -> Shaped[Array, "B S *F"]:
  """Collects the M·W blocks that this device needs from all devices, S = M·W·C."""
  rank, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  x = split_blocks(x, block_size)
  owner, number = jnp.divmod(blocks.reshape(-1), x.shape[1])

  def take(shard):
    return shard.at[:, number].get(mode="promise_in_bounds")

  def step(carry, hop):
    shard, gathered = carry
    shard = sharding.from_previous_device(shard, axis_name)
    is_owner = owner == (rank - hop) % size
    is_owner = is_owner.reshape(1, -1, *[1] * (x.ndim - 2))
    return (shard, jnp.where(is_owner, take(shard), gathered)), None

  start = match_varying((x, take(x)), (x, rank))
  (_, gathered), _ = jax.lax.scan(step, start, jnp.arange(1, size))
  return gathered.reshape(x.shape[0], -1, *x.shape[3:])


def bigbird_random_blocks(
  key: Array, *, num_heads: int, num_blocks: int, num_random: int
) -> Int[Array, "N M R"]:
  """Draws the random key blocks of each head and query block.

  Each of the M = max(blocks - 2, 0) query blocks i between the first and the last gets
  R blocks, drawn uniformly and without replacement from all blocks except those to
  which it always attends: the first, the last, i-1, i and i+1. Floyd's algorithm draws
  them: with m candidates, for j = m-R … m-1, draw u from 0 … j and take u, or j if u is
  already taken.

  Args:
    key: a JAX random key.
    num_heads: N ≥ 1.
    num_blocks: ceil(T/C) ≥ 1.
    num_random: R ≥ 0.

  Returns:
    `[N, M, R]` int32. If there are fewer than R candidates, the others are -1.

  Raises:
    ValueError: a size is out of range.

  Cost: time N·M·R², memory N·M·R.
  """
  checks.check_at_least("num_heads", num_heads, 1)
  checks.check_at_least("num_blocks", num_blocks, 1)
  checks.check_at_least("num_random", num_random, 0)
  middle = max(num_blocks - 2, 0)
  shape = (num_random, num_heads, middle)
  if not (num_random and middle):
    return jnp.zeros((num_heads, middle, num_random), jnp.int32)
  # The excluded blocks that are not global are consecutive. There are three, and fewer
  # at both ends.
  i = jnp.arange(middle, dtype=jnp.int32)
  excluded_start = jnp.maximum(i - 1, 0)
  num_excluded = jnp.minimum(i + 1, middle - 1) - excluded_start + 1
  candidates = jnp.broadcast_to(middle - num_excluded, shape)
  draw = jnp.arange(num_random, dtype=jnp.int32)[:, None, None]
  highest = candidates - num_random + draw
  # The remainder is uniform up to num_blocks / 2³².
  choices = jnp.maximum(highest + 1, 1).astype(jnp.uint32)
  draws = (jax.random.bits(key, shape, jnp.uint32) % choices).astype(jnp.int32)

  def take(k, taken):
    is_taken = jnp.any(taken == draws[k][None], axis=0)
    choice = jnp.where(is_taken, highest[k], draws[k])
    return taken.at[k].set(jnp.where(highest[k] < 0, -1, choice))

  taken = jax.lax.fori_loop(0, num_random, take, jnp.full(shape, -1, jnp.int32))
  block = taken + jnp.where(taken < excluded_start[None, None], 0, num_excluded)
  return jnp.moveaxis(jnp.where(taken < 0, -1, block + 1), 0, 2)


@attention_factory
def bigbird(block_size: int = 64, num_random: checks.FromZero = 3) -> Attention:
  """The mechanism of `bigbird_attention`.

  The number of blocks depends on the length of a call, so each call draws its blocks,
  from a random key in `constants`: the same blocks for the same length. A call may pass
  `random_blocks` instead.

  Args:
    block_size: C.
    num_random: R, the random blocks of each head and query block.

  Returns:
    An `Attention` with `key`, the raw data of a random key, in `constants`.

  Raises:
    ValueError: `block_size` < 1 or `num_random` < 0.
  """
  function = partial(bigbird_attention, block_size=block_size)

  def apply(variables, query, key, value, **call) -> Any:
    checks.check_qkv(query, key, value)
    if call.get("random_blocks") is None:
      axis_name = call.get("axis_name")
      devices = 1 if axis_name is None else axis_size(axis_name)
      count = -(-devices * query.shape[1] // block_size)
      call["random_blocks"] = bigbird_random_blocks(
        jax.random.wrap_key_data(variables["constants"]["key"]),
        num_heads=query.shape[2],
        num_blocks=count,
        # There are at most `count` blocks to draw.
        num_random=min(num_random, count),
      )
    return function(query, key, value, **call)

  return Attention(
    # Raw bits, which a checkpoint can store.
    init=lambda key, dims: {"constants": {"key": jax.random.key_data(key)}},
    apply=apply,
    init_cache=None,
    decode=None,
    ignores_padding=False,
    supports=frozenset({"mask", "segments", "dropout", "sequence"}),
    approximates="dense",
    cost="linear",
    sizes=Hyperparameters(short={"block_size": 2, "num_random": 1}),
  )
