"""Attention over a sequence-sharded input, one shard per device in `jax.shard_map`.

Exact attention sends keys and values around a ring of devices, or exchanges heads for
positions (`attend_to_shards`). For queries that all devices have, such as global
tokens, `merge_over_devices` merges the results of the devices. A window needs the positions
that it reaches beyond a shard (`exchange_halo`).

Papers: Ring attention with blockwise transformers, arXiv:2310.01889; zigzag order:
Llama 3, section 3.3.2, arXiv:2407.21783, whose devices gather all keys and values where
these send them around the ring; all_to_all: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from collections.abc import Callable, Iterator
import dataclasses
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from attention import checks
from attention.platform.derivative import match_varying, with_backward
from attention.softmax import tiles
from attention.softmax.kernels import InParts
from attention.softmax.rows import merge
from attention.softmax.tiles import Tiling, attend, make_tiling
from attention.softmax.visible import Visible


def attend_to_shards(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  visible: Visible,
  logits: Any,
  *,
  axis_name: str,
  in_parts: InParts = "ring",
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block: tuple[int | None, int | None] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """(out, lse) of exact attention where each device has a shard of the sequence.

  Queries, keys and values continue those of the previous device. Every array with an
  axis T or S is this device's shard; all others are the same on every device.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    visible: key masks and segments, and whether the call is causal, with T = S.
    logits: how pairs are scored: a scale and tables by distance.
    axis_name: the mesh axis of the devices, inside `jax.shard_map`.
    in_parts: 'ring'; 'balanced', a ring in zigzag order, which gives all devices the
      same work in a causal call and needs an even T; or 'all_to_all', in which each
      device gets all positions of N/D heads and sends the results back, for D that
      divides K.
    dropout_rate: as without shards.
    dropout_rng: likewise.
    block: as in `tiles.attend`.

  Raises:
    ValueError: shards do not support an option, or `in_parts` cannot serve the call.

  Cost: time T·(D·S)·N·(H+V) on each of D devices; half of it in a causal call, except
  for the last device of a 'ring'. Memory of `flash_attention` on shards, or with
  'all_to_all' on N/D heads of the whole sequence. Each device sends D − 1 shards of keys
  and values; 'balanced' also one shard of all arrays; 'all_to_all' (D − 1)/D of its
  queries, keys, values and results instead.
  """
  check_shards(query, key, visible, logits, window=visible.left)
  options = {"axis_name": axis_name, "block": block}
  if in_parts == "all_to_all":
    if dropout_rate:
      raise ValueError(
        "dropout_rate: expected 0.0 with 'all_to_all', whose devices draw for "
        f"some heads only, got {dropout_rate}; use 'ring'"
      )
    return _all_to_all(query, key, value, visible, logits, **options)
  return _ring(
    query,
    key,
    value,
    visible,
    logits,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
    is_balanced=in_parts == "balanced",
    **options,
  )


def check_shards(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  visible: Visible,
  logits: Any,
  **others: Any,
) -> None:
  """Raises ValueError for options that sequence shards do not support.

  These are a mask that varies along queries, a causal call with query and key shards of
  different lengths, most of `logits`, and every option in `others` that is not None.
  """
  for mask in visible.masks:
    checks.key_mask(mask, query, key, "sequence shards support no T×S mask")
  if visible.right is not None and query.shape[1] != key.shape[1]:
    raise ValueError(
      "is_causal: expected shards of equal length, got "
      f"{query.shape[1]} queries and {key.shape[1]} keys on a device"
    )
  refused = {
    "mask_mod": visible.mods or None,
    "visible": visible.bands or visible.positions or visible.query_start,
    "block_mask": visible.block_mask,
    "bias": logits.bias,
    "score_mod": logits.score_mod,
    "logits_soft_cap": logits.soft_cap,
    "sinks": logits.sinks,
    "log_forget": getattr(logits, "log_forget", None),
    **others,
  }
  for name, option in refused.items():
    if option is not None:
      raise ValueError(
        f"{name}: expected None for a sequence in shards; attend to the whole "
        "sequence on one device"
      )


def _ring(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  visible: Visible,
  logits: Any,
  *,
  axis_name: str,
  dropout_rate: float,
  dropout_rng: Array | None,
  is_balanced: bool,
  block: tuple[int | None, int | None] | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """`tiles.attend` to the keys of all D devices, which pass them around a ring.

  Keys and values, with their masks and segments, go from device r to r + 1, D − 1 times,
  and the (out, lse) of all shards are merged. The backward pass sends them around again
  together with their gradients. Each device adds the gradients of its queries, computed
  from the log-sum-exp over all keys, so it never holds more than one shard of the keys.

  In a causal call the last device works D times as long as the first. Zigzag order
  ('balanced') cuts the sequence into 2D chunks and gives device r the chunks r and
  2D − 1 − r. Late queries then see every early key; besides, early queries see early
  keys of earlier devices, and late queries see late keys of later devices.

  Returns:
    Out and lse of this device's queries. Each device sends D − 1 shards of keys, values,
    masks and segments, and in the backward pass also D shards of float32 gradients.

  Raises:
    ValueError: zigzag order with an odd number of positions.
  """
  is_causal = visible.right is not None
  is_balanced &= is_causal and jax.lax.axis_size(axis_name) > 1
  if is_balanced and query.shape[1] % 2:
    raise ValueError(
      "in_parts: 'balanced' needs an even number of positions on a device, got "
      f"{query.shape[1]}; use 'ring'"
    )
  query, scores, _ = logits.scores(query, Visible(), ())
  masks = [mask[:, 0, 0] for mask in visible.masks]
  keep = reduce(jnp.logical_and, masks) if masks else None
  queries: Any = query, tuple(ids for ids, _ in visible.segments)
  keys: Any = key, value, keep, tuple(ids for _, ids in visible.segments)
  if is_balanced:
    queries, keys = (_to_zigzag(x, axis_name) for x in (queries, keys))
  else:
    queries, keys = (queries,), (keys,)
  causal = Visible(right=0 if is_causal else None)
  tiling = make_tiling(queries[0][0], keys[0][1], causal, block, dropout_rate)
  rng = dropout_rng if dropout_rate else None
  inputs = jax.tree.map(jnp.asarray, (queries, keys, scores, rng))
  inputs = match_varying(inputs, (inputs, jax.lax.axis_index(axis_name)))
  plan = _Ring(axis_name, tiling, is_causal)
  run = with_backward(
    partial(_ring_forward, plan), partial(_ring_backward, plan)
  )
  results = run(inputs)
  if not is_balanced:
    return results[0]
  early, late = results
  out, lse = (
    _from_zigzag(x, y, axis_name) for x, y in zip(early, late, strict=True)
  )
  return out, lse


class _Ring(NamedTuple):
  """The static parameters of a ring.

  Attributes:
    axis_name: the mesh axis of the devices.
    tiling: the `Tiling` of a pair of chunks.
    is_causal: whether queries see no later keys.
  """

  axis_name: str
  tiling: Tiling
  is_causal: bool

  def round(self, meet: Callable[..., Any], moving: Any) -> tuple[Any, Any]:
    """Calls `meet(i, moving, resting)` after each of i = 0 … D − 1 hops of `moving`.

    `resting` is None in the first call; in the others it is what the previous call
    returned for it.
    """

    def step(carry, i):
      moving, resting = carry
      return meet(
        i, from_previous_device(moving, self.axis_name), resting
      ), None

    size = jax.lax.axis_size(self.axis_name)
    carry = meet(0, moving, None)
    if size > 1:
      carry, _ = jax.lax.scan(step, carry, jnp.arange(1, size))
    return carry

  def meetings(
    self, i: Array | int, inputs: Any, keys: Any
  ) -> Iterator[tuple[int, int, Visible, tuple[Any, ...]]]:
    """The pairs of chunks after i hops of the keys, with the loop's inputs for each."""
    queries, _, scores, rng = inputs
    # JAX would compute values common to all rounds ahead and store them for every tile.
    (queries, scores), i = jax.lax.optimization_barrier(((queries, scores), i))
    size = jax.lax.axis_size(self.axis_name)
    rank = jax.lax.axis_index(self.axis_name)
    owner = (rank - i) % size
    # Early queries see no late keys.
    pairs = ((0, 0), (1, 0), (1, 1)) if len(queries) == 2 else ((0, 0),)
    for a, b in pairs:
      (query, query_ids), (key, value, keep, key_ids) = queries[a], keys[b]
      # A device's second chunk is as far from the end as its first from the start.
      query_chunk = 2 * size - 1 - rank if a else rank
      key_chunk = 2 * size - 1 - owner if b else owner
      visible = Visible(
        masks=() if keep is None else (keep[:, None, None],),
        segments=tuple(zip(query_ids, key_ids, strict=True)),
        right=0 if self.is_causal else None,
        query_start=query_chunk * query.shape[1],
        key_start=key_chunk * key.shape[1],
      )
      key, value = visible.zero_masked(key), visible.zero_masked(value)
      constants = tiles.Constants(visible, None, rng)
      arrays = query, key, value, scores, constants
      yield a, b, visible, match_varying(arrays)


def _ring_forward(ring, inputs):
  """(out, lse) of each query chunk, twice: as the result and for the backward pass."""
  queries, keys, *_ = inputs

  def meet(i, moving, results):
    results: list[Any] = list(results or (None,) * len(queries))
    for a, _, _, given in ring.meetings(i, inputs, moving):
      (out, lse), _ = tiles.forward(ring.tiling, given)
      part = out.astype(jnp.float32), lse
      results[a] = part if results[a] is None else merge(results[a], part)
    return moving, tuple(results)

  _, results = ring.round(meet, keys)
  dtype = queries[0][0].dtype
  results = tuple((out.astype(dtype), lse) for out, lse in results)
  return results, results


def _ring_backward(ring, inputs, results, cotangents):
  """Gradients of the inputs; non-float arrays stand for their own gradients."""
  queries, keys, _, rng = inputs

  def meet(i, moving, resting):
    moving, key_grads = moving[0], list(moving[1])
    query_grads, score_grads = resting or (nothing, None)
    query_grads = list(query_grads)
    for a, b, visible, given in ring.meetings(i, inputs, moving):
      dquery, *dkeys, dscores, _ = tiles.backward(
        ring.tiling, given, results[a], cotangents[a]
      )
      dkeys = tuple(visible.zero_masked(x) for x in dkeys)
      query_grads[a] = _accumulate(query_grads[a], dquery)
      key_grads[b] = _accumulate(key_grads[b], dkeys)
      score_grads = _accumulate(score_grads, dscores)
    return (moving, tuple(key_grads)), (tuple(query_grads), score_grads)

  nothing = (None,) * len(queries)
  (_, key_grads), resting = ring.round(meet, (keys, nothing))
  key_grads = from_previous_device(key_grads, ring.axis_name)
  query_grads, score_grads = resting
  return (
    tuple((x, ids) for x, (_, ids) in zip(query_grads, queries, strict=True)),
    tuple((*x, *y[2:]) for x, y in zip(key_grads, keys, strict=True)),
    score_grads,
    rng,
  )


def _accumulate(total: Any, more: Any) -> Any:
  """Their sum in float32; a total of None is 0."""
  more = jax.tree.map(lambda x: x.astype(jnp.float32), more)
  return more if total is None else jax.tree.map(jnp.add, total, more)


def from_previous_device(tree: Any, axis_name: str) -> Any:
  """The tree of the previous device; the last device precedes the first."""
  size = jax.lax.axis_size(axis_name)
  around = [(i, (i + 1) % size) for i in range(size)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, around), tree)


def _to_zigzag(tree: Any, axis_name: str) -> tuple[Any, ...]:
  """This device's early chunk of the tree, and its late chunk."""
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

  def chunks(x):
    halves = [
      jax.lax.ppermute(half, axis_name, _chunk_moves(size, parity))
      for parity, half in enumerate(jnp.split(x, 2, axis=1))
    ]
    return _swap_by_parity(halves, rank)

  leaves, structure = jax.tree.flatten(tree)
  both = zip(*map(chunks, leaves), strict=True)
  return tuple(structure.unflatten(x) for x in both)


def _from_zigzag(
  early: Shaped[Array, "B C *A"], late: Shaped[Array, "B C *A"], axis_name: str
) -> Shaped[Array, "B T *A"]:
  """Undoes `_to_zigzag`."""
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  halves = [
    jax.lax.ppermute(
      x, axis_name, [(to, of) for of, to in _chunk_moves(size, i)]
    )
    for i, x in enumerate(_swap_by_parity((early, late), rank))
  ]
  return jnp.concatenate(halves, axis=1)


def _chunk_moves(size: int, parity: int) -> list[tuple[int, int]]:
  """The (source, destination) devices of the even or the odd ones of 2D chunks."""
  numbers = range(parity, 2 * size, 2)
  return [(n // 2, min(n, 2 * size - 1 - n)) for n in numbers]


def _swap_by_parity(pair, rank):
  """(even, odd) chunk as (early, late) or back: r is one, 2D − 1 − r the other."""
  one, other = pair
  is_even = rank % 2 == 0
  return jnp.where(is_even, one, other), jnp.where(is_even, other, one)


def _all_to_all(query, key, value, visible, logits, *, axis_name, block):
  """All positions of some heads, instead of some positions of all heads."""
  size = jax.lax.axis_size(axis_name)
  num_heads, kv_heads = query.shape[2], key.shape[2]
  if kv_heads % size:
    raise ValueError(
      f"in_parts: 'all_to_all' gives each of {size} devices a share of the heads, "
      f"got {num_heads} heads of queries and {kv_heads} of keys; use 'ring'"
    )
  share = num_heads // size
  heads = jax.lax.axis_index(axis_name) * share + jnp.arange(share)

  def whole(x, axis):
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)

  visible = dataclasses.replace(
    visible,
    masks=tuple(whole(mask, 3) for mask in visible.masks),
    segments=tuple((whole(x, 1), whole(y, 1)) for x, y in visible.segments),
  )
  query, key, value = (
    jax.lax.all_to_all(x, axis_name, 2, 1, tiled=True)
    for x in (query, key, value)
  )
  results = attend(
    query, key, value, visible, logits.select_heads(heads), block=block
  )
  out, lse = (
    jax.lax.all_to_all(x, axis_name, 1, 2, tiled=True) for x in results
  )
  return out, lse


def merge_over_devices(
  axis_name: str, out: Float[Array, "B T N V"], lse: Float[Array, "B T N"]
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """`rows.merge` over the devices, each of which has a result for the same queries."""
  largest = jax.lax.pmax(jax.lax.stop_gradient(lse), axis_name)
  largest = jnp.where(largest == -jnp.inf, 0.0, largest)
  share = jnp.exp(lse - largest)[..., None]
  sums = jnp.concatenate([share * out.astype(jnp.float32), share], axis=-1)
  sums = jax.lax.psum(sums, axis_name)
  total = sums[..., -1]
  sees_any = total > 0.0
  total = jnp.where(sees_any, total, 1.0)
  out = (sums[..., :-1] / total[..., None]).astype(out.dtype)
  return out, jnp.where(sees_any, largest + jnp.log(total), -jnp.inf)


def exchange_halo(
  x: Shaped[Array, "B T *A"], left: int, right: int, axis_name: str | None
) -> Shaped[Array, "B U *A"]:
  """This device's positions, with some before and after them.

  Args:
    x: this device's T positions, which follow those of the previous device.
    left: the number of positions to get from before, over as many devices as needed.
    right: the number of positions to get from after.
    axis_name: the mesh axis of the devices, inside `jax.shard_map`; None is one device.

  Returns:
    U = left + T + right positions, zeros beyond the ends of the sequence. Each device
    receives left + right positions.
  """
  size = 1 if axis_name is None else jax.lax.axis_size(axis_name)
  length = x.shape[1]
  elsewhere = (size - 1) * length
  near_left, near_right = min(left, elsewhere), min(right, elsewhere)

  def from_device(hop, part):
    """`part` from the device `hop` places further; zeros if there is none."""
    pairs = [(i, i - hop) for i in range(size) if 0 <= i - hop < size]
    return jax.lax.ppermute(part, axis_name, pairs)

  before = [
    from_device(-(i // length) - 1, x[:, max(length + i - near_left, 0) :])
    for i in range(0, near_left, length)
  ]
  behind = [
    from_device(i // length + 1, x[:, : near_right - i])
    for i in range(0, near_right, length)
  ]
  x = jnp.concatenate([*reversed(before), x, *behind], axis=1)
  rest = left - near_left, right - near_right
  return jnp.pad(x, [(0, 0), rest] + [(0, 0)] * (x.ndim - 2))
