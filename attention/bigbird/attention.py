"""BigBird: a window, global blocks and random blocks (Zaheer et al., 2020).

What a block between the first and the last sees is in `blocks`. The queries of
the first and the last block see all keys, through `flash_attention`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.bigbird import parts
from attention.bigbird.blocks import (
  Arrays,
  Blocks,
  Known,
  Limits,
  distinct_blocks,
  ends,
)
from attention.core import loop, visibility
from attention.core.relative import Relative
from attention.core.tile import Product
from attention.flash import flash_attention


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

  for each head. It is one softmax over the union: a block that is listed twice,
  or is also near or global, counts once. Every pair is further limited by
  `mask` and the segments. A query that sees no key gets zeros and passes no
  gradient. The content of a masked key changes nothing.

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
  in addition to the arrays: a copy of key and value, and B·N·(5+R)·C·(C+H+V)
  for each block that is computed at the same time; with gradients a float32
  array more for key and for value. Nothing is T×S.

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
  key_mask = arguments.key_mask(
    mask, query, key, "dense attention takes masks that vary"
  )
  arguments.check_segment_ids(query_segment_ids, key_segment_ids, query, key)
  arguments.check_dropout(dropout_rate, dropout_rng)
  blocks = -(-length // block_size)
  _check_random_blocks(random_blocks, query.shape[2], max(blocks - 2, 0))
  query, scale = arguments.scaled_query(query, scale)
  middle_rng = global_rng = None
  if dropout_rng is not None and dropout_rate > 0.0:
    middle_rng, global_rng = jax.random.split(dropout_rng)
  attend_to_all = partial(
    flash_attention,
    mask=None if key_mask is None else key_mask[:, None, None, :],
    scale=scale,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_rng=global_rng,
  )
  if blocks <= 2:
    return attend_to_all(query, key, value, query_segment_ids=query_segment_ids)
  of_ends = attend_to_all(
    ends(query, block_size),
    key,
    value,
    query_segment_ids=None
    if query_segment_ids is None
    else ends(query_segment_ids, block_size),
  )
  out = _between(
    query,
    key,
    value,
    block_size=block_size,
    random_blocks=random_blocks,
    key_mask=key_mask,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    scale=scale,
    dropout_rate=dropout_rate,
    dropout_rng=middle_rng,
  )
  first, last = of_ends[:, :block_size], of_ends[:, block_size:]
  return jnp.concatenate([first, out, last], axis=1)


def _between(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  block_size: int,
  random_blocks: Int[Array, "N M R"],
  key_mask: Bool[Array, "B T"] | None,
  query_segment_ids: Int[Array, "B T"] | None,
  key_segment_ids: Int[Array, "B T"] | None,
  scale: float,
  dropout_rate: float,
  dropout_rng: Array | None,
) -> Float[Array, "B Q N V"]:
  """The results of the Q = M·C queries between the global blocks."""
  batch, _, num_heads, head_dim = query.shape
  middle, num_random = random_blocks.shape[1:]
  near = slice(block_size, (middle + 1) * block_size)

  def known(x):
    """Arrays by position in the form that `Blocks` reads."""
    if x is None:
      return None
    x = x[:, None, :, None]
    return Known(x, ends(x, block_size, axis=2))

  def by_head(x):
    x = jnp.swapaxes(visibility.keys(key_mask).readable(x, 0), 1, 2)
    return x, ends(x, block_size, axis=2)

  (keys, global_keys), (values, global_values) = by_head(key), by_head(value)
  random, seen = distinct_blocks(random_blocks)
  width = global_keys.shape[2] + (min(3, middle) + num_random) * block_size
  features = block_size + head_dim + value.shape[3]
  source = Blocks(
    rows=block_size,
    at_once=loop.at_once(
      middle * block_size, block_size, 4 * batch * num_heads * width * features
    ),
    kv_heads=num_heads,
    score=Product(scale),
    by_data=key_mask is not None or query_segment_ids is not None,
    middle=middle,
    dropout_rate=dropout_rate,
  )
  limits = Limits(
    random,
    seen,
    known(key_mask),
    None if query_segment_ids is None else query_segment_ids[:, near],
    known(key_segment_ids),
    dropout_rng,
  )
  arrays = Arrays(keys, values, global_keys, global_values)
  return loop.attend(source, query[:, near], arrays, Relative(), limits)


def bigbird_random_blocks(
  key: Array, *, num_heads: int, num_blocks: int, num_random: int
) -> Int[Array, "N M R"]:
  """Draws the random blocks of every head and query block.

  Each of the M = max(blocks - 2, 0) query blocks i between the first and the
  last gets R blocks, drawn uniformly and without replacement from all blocks
  except the first, the last, i-1, i and i+1, which i attends to in any case.

  Floyd's algorithm: with m candidates, for j = m-R … m-1 draw u from 0 … j and
  take u, or j where u was taken before. No list of candidates is made.

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
  # The remainder of 32 bits is uniform up to num_blocks / 2³².
  choices = jnp.maximum(highest + 1, 1).astype(jnp.uint32)
  draws = (jax.random.bits(key, shape) % choices).astype(jnp.int32)

  def take(k, taken):
    again = jnp.any(taken == draws[k][None], axis=0)
    choice = jnp.where(again, highest[k], draws[k])
    return taken.at[k].set(jnp.where(highest[k] < 0, -1, choice))

  taken = jax.lax.fori_loop(0, num_random, take, jnp.full(shape, -1, jnp.int32))
  past = taken + jnp.where(taken < run_start[None, None], 0, run_length)
  return jnp.moveaxis(jnp.where(taken < 0, -1, past + 1), 0, 2)


def _check_call(
  query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], is_causal: bool
) -> None:
  """Refuses causal calls and keys of another sequence."""
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True, but every query sees the last "
      "block and random blocks ahead; sliding_window attention has a causal "
      "form, and so have flash and dense"
    )
  length = query.shape[1]
  if key.shape[1] != length:
    raise ValueError(
      f"key: expected the length of query, {length}, for both are cut into the "
      f"same blocks, got {key.shape[1]}; use dense attention across"
    )


def _check_random_blocks(
  random_blocks: Int[Array, "N M R"], num_heads: int, middle: int
) -> None:
  """Checks the shape and dtype of `random_blocks`."""
  if (
    random_blocks.ndim != 3
    or random_blocks.shape[:2] != (num_heads, middle)
    or not jnp.issubdtype(random_blocks.dtype, jnp.integer)
  ):
    raise ValueError(
      f"random_blocks: expected integers of shape [{num_heads}, {middle}, R], "
      f"got {random_blocks.dtype} {random_blocks.shape}"
    )


def bigbird(block_size: int = 64, num_random: int = 3) -> plug.Attention:
  """The plug of `bigbird_attention`.

  The number of blocks depends on the length of a call. So `init` keeps random
  bits in `constants`, from which each call draws its blocks, always the same
  ones for the same length. A call may pass its own `random_blocks`.

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

  def init(key, dims):
    del dims
    # Raw bits, because a checkpoint can hold them.
    return {"constants": {"key": jax.random.key_data(key)}}

  def options(variables, query, length, call):
    """The options of a call on `length` positions, with random blocks."""
    call = arguments.accepted_options("bigbird", function, call)
    if call.get("random_blocks") is None:
      num_blocks = -(-length // block_size)
      call["random_blocks"] = bigbird_random_blocks(
        jax.random.wrap_key_data(variables["constants"]["key"]),
        num_heads=query.shape[2],
        num_blocks=num_blocks,
        # More would find no block that is not taken.
        num_random=min(num_random, num_blocks),
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
    length = devices * query.shape[1]
    call = options(variables, query, length, call)
    _check_call(query, key, call.pop("is_causal", False))
    return parts.attention_in_parts(
      query, key, value, axis_name=axis_name, block_size=block_size, **call
    )

  return plug.Attention(
    init=init,
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
