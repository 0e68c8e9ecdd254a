"""BigBird: a window, global blocks and random blocks (Zaheer et al., 2020)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import arguments, dropout, halo, platform, plug
from attention import sharded as flash_parts
from attention.logits import Logits
from attention.loop import attend
from attention.softmax import block_attention, in_steps, padded
from attention.visible import Visible, key_mask, segments


@arguments.attention_function(
  num_random="draw them, random_blocks=bigbird_random_blocks(key, num_heads=…, "
  "num_blocks=…, num_random=…), or make the mechanism, bigbird(num_random=…)",
)
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
) -> Float[Array, "B T N V"]:
  """Every block of queries attends to near, global and random blocks of keys.

  Positions are in blocks of C = `block_size`, b(t) = t // C. The last block
  L = ceil(T/C) - 1 may be shorter.

    out[t] = softmax over s in A(t) of (scale · query[t] · key[s]), times value
    A(t) = {s : b(s) ∈ {0, L, b(t)-1, b(t), b(t)+1} ∪ random_blocks[b(t)-1]}
    A(t) = all s                                       where b(t) ∈ {0, L}

  for each head. A block that is listed twice, or is also near or global, counts
  once. Every pair is further limited by `mask` and the segments. A query that
  sees no key gets zeros. The content of a masked key changes nothing.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, S = T; N is a multiple of K, query head n reads key
      head n // (N/K).
    value: `[B, S, K, V]`.
    block_size: C.
    random_blocks: `[N, M, R]`, the numbers of R blocks for each query head and
      each of the M = max(L - 1, 0) blocks between the first and the last. A
      number outside [0, L], such as -1, names no block.
      `bigbird_random_blocks` draws them.
    mask: key mask, broadcastable to `[B, 1, 1, S]`, True = attend.
    is_causal: must be False, because the last block is global, and random
      blocks may be later than the query.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    dropout_rate: share of attention weights set to zero; the others are
      divided by 1 - rate.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.

  Returns:
    `[B, T, N, V]` in the dtype of `query`.

  Raises:
    ValueError: arguments do not fit together, or `is_causal`.

  Cost: time T·(5+R)·C·N·(H+V), and 2C·T·N·(H+V) for the global queries. Memory
  in addition to the arrays: a copy of key and value, and B·T·N·(C+H+V) for the
  blocks of one of 2·(5+R) steps; with gradients some more of both. Nothing is T×S.

  Departs from its paper in that every length is allowed, down to one partial
  block, in that the union is exact for any random blocks, and in that each head
  has its own random blocks (as in the paper's code).

  Paper: Big Bird: transformers for longer sequences, section 2 and appendix D
  (internal transformer construction, ITC), arXiv:2007.14062.
  """
  arguments.check_qkv(query, key, value)
  _check_call(query, key, is_causal)
  length = query.shape[1]
  arguments.check_at_least("block_size", block_size, 1)
  keep = arguments.key_mask(
    mask, query, key, "dense attention takes masks that vary"
  )
  arguments.check_segment_ids(query_segment_ids, key_segment_ids, query, key)
  arguments.check_dropout(dropout_rate, dropout_rng)
  count = -(-length // block_size)
  expected = query.shape[2], max(count - 2, 0)
  is_integer = jnp.issubdtype(random_blocks.dtype, jnp.integer)
  if (
    random_blocks.ndim != 3
    or random_blocks.shape[:2] != expected
    or not is_integer
  ):
    raise ValueError(
      f"random_blocks: expected integers of shape [{expected[0]}, "
      f"{expected[1]}, R], got {random_blocks.dtype} {random_blocks.shape}"
    )
  scale = arguments.softmax_scale(scale, query.shape[-1])
  block_rng = global_rng = None
  if dropout_rng is not None and dropout_rate > 0.0:
    block_rng, global_rng = jax.random.split(dropout_rng)

  def attend_to_all(query, ids):
    visible = Visible() if keep is None else key_mask(keep)
    if ids is not None and key_segment_ids is not None:
      visible &= segments(ids, key_segment_ids)
    return attend(
      query,
      key,
      value,
      visible,
      Logits(scale=scale),
      dropout_rate=dropout_rate,
      dropout_rng=global_rng,
    )[0]

  if count <= 2:
    return attend_to_all(query, query_segment_ids)

  def ends(x):
    parts = x[:, :block_size], x[:, (count - 1) * block_size :]
    return jnp.concatenate(parts, axis=1)

  cut = partial(_blocks, size=block_size)
  tokens = jnp.ones((1, length), bool) if keep is None else keep
  ids = query_segment_ids
  rows = attend_to_all(ends(query), None if ids is None else ends(ids))
  if keep is not None:
    key, value = (jnp.where(keep[..., None, None], x, 0) for x in (key, value))
  blocks, seen = _blocks_seen(random_blocks, count)
  out = _attend_to_blocks(
    cut(query)[:, 1 : count - 1],
    None if ids is None else cut(ids)[:, 1 : count - 1],
    jnp.moveaxis(cut(key), 3, 1),
    jnp.moveaxis(cut(value), 3, 1),
    cut(tokens)[:, None],
    None if key_segment_ids is None else cut(key_segment_ids)[:, None],
    blocks,
    seen,
    scale=scale,
    dropout_rate=dropout_rate,
    dropout_rng=block_rng,
  )
  parts = rows[:, :block_size], out, rows[:, block_size:]
  return jnp.concatenate(parts, axis=1)


def _blocks(x: Shaped[Array, "B T *F"], size: int) -> Shaped[Array, "B X C *F"]:
  """Blocks of C positions; the last is filled up with zeros."""
  x = padded(x, -x.shape[1] % size)
  return x.reshape(len(x), -1, size, *x.shape[2:])


def _blocks_seen(
  random_blocks: Int[Array, "N M R"], count: int
) -> tuple[Int[Array, "N M W"], Bool[Array, "N M W"]]:
  """The W = 5 + R blocks of each block between the globals, and which count.

  They are the first, the last, the block before, the block itself, the block
  behind, and the random ones. Every block counts once: a near block that is
  global does not, nor a random one that is global, near, listed before or no
  block. The block itself takes its place, so that no other block is read.
  """
  own = jnp.arange(1, count - 1)
  near = jnp.stack([own - 1, own, own + 1], -1)
  ends = jnp.stack([0 * own, 0 * own + count - 1], -1)
  always = jnp.concatenate([ends, near], -1)
  is_between = (near > 0) & (near < count - 1)
  counts = jnp.pad(is_between, ((0, 0), (2, 0)), constant_values=True)

  own = own[None, :, None]
  seen = (random_blocks > 0) & (random_blocks < count - 1)
  seen &= jnp.abs(random_blocks - own) > 1
  same = random_blocks[..., :, None] == random_blocks[..., None, :]
  before = jnp.tri(random_blocks.shape[2], k=-1, dtype=bool)[None, None]
  seen &= ~jnp.any(same & before, axis=-1)

  def joined(x, random):
    x = jnp.broadcast_to(x[None], (len(random), *x.shape))
    return jnp.concatenate([x, random], axis=-1)

  blocks = joined(always, jnp.where(seen, random_blocks, own))
  return blocks, joined(counts, seen)


def _taken(
  x: Shaped[Array, "B K X C *F"], blocks: Int[Array, "N G W"]
) -> Shaped[Array, "B N G D *F"]:
  """The blocks that each query head asks for, D = W·C.

  Heads are a batch axis of the gather. If they were one of its indices, arrays
  that are sharded by head would first be gathered whole.
  """

  def of_head(x, blocks):
    return x.at[:, blocks].get(mode="promise_in_bounds")

  taken = jax.vmap(of_head, (1, 0), 1)(x, blocks.reshape(x.shape[1], -1))
  return taken.reshape(len(x), *blocks.shape[:2], -1, *x.shape[4:])


def _attend_to_blocks(
  query: Float[Array, "B M C N H"],
  query_ids: Int[Array, "B M C"] | None,
  key: Float[Array, "B K X C H"],
  value: Float[Array, "B K X C V"],
  mask: Bool[Array, "#B #K X C"],
  key_ids: Int[Array, "B #K X C"] | None,
  blocks: Int[Array, "N M W"],
  seen: Bool[Array, "N M W"],
  *,
  scale: float | Float[Array, ""],
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
) -> Float[Array, "B Q N V"]:
  """Every block of queries attends to its W blocks of the X blocks of keys.

  K may be N, and what is known of keys may have one head for all. Keys that
  `mask` hides are zero. The result has the Q = M·C queries one after another.
  """
  batch, middle, size, num_heads, head_dim = query.shape
  width = blocks.shape[2] * size

  def step(query, query_ids, blocks, seen, number):
    visible = jnp.repeat(seen, size, axis=2)[None] & _taken(mask, blocks)
    visible = visible[:, :, :, None, None, :]
    if query_ids is not None and key_ids is not None:
      ids = _taken(key_ids, blocks)[:, :, :, None, None, :]
      visible &= query_ids[:, None, :, None, :, None] == ids
    kept = None
    if dropout_rate:
      shape = (batch, num_heads, 1, size, width)
      kept = jax.vmap(
        lambda i: dropout.kept(dropout_rng, dropout_rate, shape, i), out_axes=2
      )(number[0])
    out = block_attention(
      jnp.moveaxis(query, 3, 1)[:, :, :, None],
      _taken(key, blocks),
      _taken(value, blocks),
      scale=scale,
      visible=visible,
      kept=kept,
    )
    return jnp.moveaxis(out[:, :, :, 0], 1, 3).astype(query.dtype)

  # The gradient of a step is as large as all keys, so there are few steps.
  pair_bytes = 4 * batch * num_heads * width
  at_once = max(
    platform.tiles_at_once(
      pair_bytes * (size + head_dim + value.shape[-1]), middle
    ),
    -(-middle // (2 * blocks.shape[2])),
  )
  number = jnp.arange(middle)[None]
  out = in_steps(step, at_once, query, query_ids, blocks, seen, number)
  return out.reshape(batch, middle * size, num_heads, -1)


def _attend_in_parts(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  axis_name: str,
  block_size: int,
  random_blocks: Int[Array, "N M R"],
  mask: Bool[Array, "#B 1 1 T"] | None = None,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  **others: Any,
) -> Float[Array, "B T N V"]:
  """`bigbird_attention` of the whole, of which each of D devices has a part.

  A device needs the blocks beside its own part (a halo), the global blocks (one
  sum over the devices), and the random blocks of its queries. Which these are is
  known only while the program runs, so all keys go round the ring, and every
  device keeps what its queries ask for. Time and memory are those of T positions,
  with keys for each query head; what crosses is what dense attention sends.
  """
  ids = query_segment_ids
  call = mask, False, ids, key_segment_ids, others
  flash_parts.check(query, key, value, *call)
  length, num_heads = query.shape[1:3]
  if length % block_size:
    raise ValueError(
      f"block_size: expected a divisor of the {length} positions of a device, "
      f"got {block_size}; a block of a sequence in parts lies on one device"
    )
  rank, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  own, num_random = length // block_size, random_blocks.shape[2]
  keep = jnp.ones((1, length), bool) if mask is None else mask[:, 0, 0]
  keep = jnp.broadcast_to(keep, key.shape[:2])
  blocks, seen = (
    jax.lax.dynamic_slice_in_dim(
      jnp.pad(x, ((0, 0), (1, 1), (0, 0))), rank * own, own, axis=1
    )
    for x in _blocks_seen(random_blocks, size * own)
  )
  asked = blocks[:, :, 5:].reshape(num_heads, -1)

  def ends(x):
    """The first and the last block of the whole, on every device."""
    number = x.astype(jnp.int32) if x.dtype == bool else x
    first = jnp.where(rank == 0, number[:, :block_size], 0)
    last = jnp.where(rank == size - 1, number[:, -block_size:], 0)
    both = jax.lax.psum(jnp.concatenate([first, last], axis=1), axis_name)
    return both.astype(x.dtype)

  def here(x):
    """All that queries here may read: halo and part, globals, random blocks."""
    x = x if x.ndim == 4 else x[:, :, None]

    def cut(x):
      return jnp.moveaxis(_blocks(x, block_size), 3, 1)

    near = cut(halo.reached(x, block_size, block_size, axis_name))
    shared = jnp.concatenate([near, cut(ends(x))], axis=2)
    shared = jnp.repeat(shared, num_heads // shared.shape[1], axis=1)
    far = _collected(cut(x), asked, axis_name)
    return jnp.concatenate([shared, far], axis=2)

  number = jnp.arange(own)
  always = [0 * number + own + 2, 0 * number + own + 3]
  always = jnp.stack([*always, number, number + 1, number + 2], -1)
  random = own + 4 + jnp.arange(own * num_random).reshape(own, num_random)
  places = jnp.concatenate([always, random], -1)
  out = _attend_to_blocks(
    _blocks(query, block_size),
    None if ids is None else _blocks(ids, block_size),
    here(jnp.where(keep[..., None, None], key, 0)),
    here(jnp.where(keep[..., None, None], value, 0)),
    here(keep),
    None if key_segment_ids is None else here(key_segment_ids),
    jnp.broadcast_to(places[None], blocks.shape),
    seen,
    scale=arguments.softmax_scale(scale, query.shape[-1]),
  )
  rows = flash_parts.attention_of_few(
    ends(query),
    key,
    value,
    axis_name=axis_name,
    mask=keep[:, None, None],
    scale=scale,
    query_segment_ids=None if ids is None else ends(ids),
    key_segment_ids=key_segment_ids,
  )
  first, last = rows[:, :block_size], rows[:, block_size:]
  first = jnp.where(rank == 0, first, out[:, :block_size])
  out = jnp.concatenate([first, out[:, block_size:]], axis=1)
  last = jnp.where(rank == size - 1, last, out[:, -block_size:])
  return jnp.concatenate([out[:, :-block_size], last], axis=1)


def _collected(
  x: Shaped[Array, "B K X C *F"], asked: Int[Array, "N Y"], axis_name: str
) -> Shaped[Array, "B N Y C *F"]:
  """The blocks of the whole that each head asks for, out of the ring."""
  rank, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
  number, owner = asked % x.shape[2], asked // x.shape[2]
  onward = [(i, (i + 1) % size) for i in range(size)]

  def take(moving):
    taken = _taken(moving, number[:, None])
    return taken.reshape(len(x), *asked.shape, *x.shape[3:])

  def step(carry, hop):
    moving, taken = carry
    moving = jax.lax.ppermute(moving, axis_name, onward)
    is_here = owner == (rank - hop) % size
    is_here = is_here.reshape(1, *asked.shape, *[1] * (x.ndim - 3))
    return (moving, jnp.where(is_here, take(moving), taken)), None

  (_, taken), _ = jax.lax.scan(step, (x, take(x)), jnp.arange(1, size))
  return taken


def bigbird_random_blocks(
  key: Array, *, num_heads: int, num_blocks: int, num_random: int
) -> Int[Array, "N M R"]:
  """Draws the random blocks of every head and query block.

  Each of the M = max(blocks - 2, 0) query blocks i between the first and the
  last gets R blocks, drawn uniformly and without replacement from all blocks
  except the first, the last, i-1, i and i+1, which i attends to in any case, by
  Floyd's algorithm: with m candidates, for j = m-R … m-1 draw u from 0 … j and
  take u, or j where u was taken before.

  Args:
    key: a JAX random key.
    num_heads: N ≥ 1.
    num_blocks: ceil(T/C) ≥ 1.
    num_random: R ≥ 0.

  Returns:
    `[N, M, R]` int32. Where there are fewer than R candidates, the rest is -1.

  Raises:
    ValueError: a size is out of range.

  Cost: time N·M·R², memory N·M·R.
  """
  arguments.check_at_least("num_heads", num_heads, 1)
  arguments.check_at_least("num_blocks", num_blocks, 1)
  arguments.check_at_least("num_random", num_random, 0)
  middle = max(num_blocks - 2, 0)
  shape = (num_random, num_heads, middle)
  if not (num_random and middle):
    return jnp.zeros((num_heads, middle, num_random), jnp.int32)
  # Counted from the first block between the globals, the excluded blocks are a
  # run of neighbours, which is shorter at both ends.
  i = jnp.arange(middle)
  run_start = jnp.maximum(i - 1, 0)
  run_length = jnp.minimum(i + 1, middle - 1) - run_start + 1
  candidates = jnp.broadcast_to(middle - run_length, shape)
  highest = candidates - num_random + jnp.arange(num_random)[:, None, None]
  # Uniform up to num_blocks / 2³².
  choices = jnp.maximum(highest + 1, 1).astype(jnp.uint32)
  draws = (jax.random.bits(key, shape) % choices).astype(jnp.int32)

  def take(k, taken):
    again = jnp.any(taken == draws[k][None], axis=0)
    choice = jnp.where(again, highest[k], draws[k])
    return taken.at[k].set(jnp.where(highest[k] < 0, -1, choice))

  taken = jax.lax.fori_loop(0, num_random, take, jnp.full(shape, -1, jnp.int32))
  past = taken + jnp.where(taken < run_start[None, None], 0, run_length)
  return jnp.moveaxis(jnp.where(taken < 0, -1, past + 1), 0, 2)


def _check_call(query: Array, key: Array, is_causal: bool) -> None:
  """Refuses causal calls and keys of another sequence."""
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True, but every query sees the last "
      "block and random blocks ahead; sliding_window attention has a causal "
      "form, and so have flash and dense"
    )
  if key.shape[1] != query.shape[1]:
    raise ValueError(
      f"key: expected the length of query, {query.shape[1]}, for both are cut "
      f"into the same blocks, got {key.shape[1]}; use dense attention across"
    )


def bigbird(block_size: int = 64, num_random: int = 3) -> plug.Attention:
  """The plug of `bigbird_attention`.

  The number of blocks depends on the length of a call, so each call draws its
  blocks from random bits in `constants`, always the same ones for the same length.
  A call may pass its own `random_blocks`.

  Args:
    block_size: C.
    num_random: R, the random blocks of each head and query block.

  Returns:
    An `Attention` with `key`, the raw data of a random key, in `constants`.

  Raises:
    ValueError: `block_size` < 1 or `num_random` < 0.
  """
  arguments.check_at_least("block_size", block_size, 1)
  arguments.check_at_least("num_random", num_random, 0)
  function = partial(bigbird_attention, block_size=block_size)

  def options(variables, query, length, call):
    """The options of a call on `length` positions, with random blocks."""
    call = arguments.accepted_options("bigbird", function, call)
    if call.get("random_blocks") is None:
      count = -(-length // block_size)
      call["random_blocks"] = bigbird_random_blocks(
        jax.random.wrap_key_data(variables["constants"]["key"]),
        num_heads=query.shape[2],
        num_blocks=count,
        # More would find no block that is not taken.
        num_random=min(num_random, count),
      )
    return call

  def apply(variables, query, key, value, **call):
    arguments.check_qkv(query, key, value)
    call = options(variables, query, query.shape[1], call)
    return function(query, key, value, **call)

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    arguments.check_qkv(query, key, value)
    devices = jax.lax.axis_size(axis_name)
    if devices == 1:
      return apply(variables, query, key, value, **call)
    call = options(variables, query, devices * query.shape[1], call)
    _check_call(query, key, call.pop("is_causal", False))
    return _attend_in_parts(
      query, key, value, axis_name=axis_name, block_size=block_size, **call
    )

  return plug.Attention(
    # Raw bits, because a checkpoint can hold them.
    init=lambda key, dims: {"constants": {"key": jax.random.key_data(key)}},
    apply=apply,
    init_cache=None,
    decode=None,
    apply_sharded=apply_sharded,
    ignores_padding=False,
    supports=frozenset({"mask", "segments", "dropout", "sequence"}),
    approximates="dense",
    cost="linear",
    sizes=plug.Sizes(short={"block_size": 2, "num_random": 1}),
  )
