"""Attention over a sequence-sharded input, one shard per device in `jax.shard_map`.

For exact attention, devices pass keys and values along a ring, or exchange positions
for heads (`attend_to_shards`). For queries that all devices have, such as global
tokens, `merge_over_devices` merges the results of the devices. A window needs some
positions of neighbouring shards (`exchange_halo`).

Papers: Ring attention with blockwise transformers, arXiv:2310.01889; zigzag order:
Llama 3, section 3.3.2, arXiv:2407.21783, which gathers all keys and values instead of
passing them along a ring; all_to_all: DeepSpeed-Ulysses, arXiv:2309.14509.
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
    logits: the options for logits; only a scale and distance tables are supported.
    axis_name: the mesh axis of the devices, inside `jax.shard_map`.
    in_parts: 'ring'; 'balanced', a ring in zigzag order, which gives all devices the
      same work in a causal call and needs an even T; or 'all_to_all', in which each
      device gets all positions of N/D heads and sends the results back, for D that
      divides K.
    dropout_rate: as in `tiles.attend`.
    dropout_rng: as in `tiles.attend`.
    block: as in `tiles.attend`.

  Raises:
    ValueError: shards do not support an option, or `in_parts` does not support the
      call.

  Cost: time T·(D·S)·N·(H+V) on each of D devices; half of it in a causal call, except
  for the last device of a 'ring'. Memory of `flash_attention` on shards, or with
  'all_to_all' on N/D heads of the whole sequence. Each device sends D − 1 shards of
  keys and values; 'balanced' also one shard of all arrays; 'all_to_all' (D − 1)/D of
  its queries, keys, values and results instead.
  """
  has_window = visible.left is not None or visible.right not in (None, 0)
  check_shards(query, key, visible, logits, window=has_window or None)
  options: dict[str, Any] = {"axis_name": axis_name, "block": block}
  if in_parts == "all_to_all":
    if dropout_rate:
      raise ValueError(
        "dropout_rate: expected 0.0 with 'all_to_all', whose devices draw for "
        f"some heads only, got {dropout_rate}; use 'ring'"
      )
    return _all_to_all(query, key, value, visible, logits, **options)
  options |= {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
  is_balanced = in_parts == "balanced"
  return _ring(
    query, key, value, visible, logits, is_balanced=is_balanced, **options
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
    "visible": visible.bands or visible.positions,
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
  """`tiles.attend` to the keys of all D devices, which pass them along a ring.

  Keys and values, with their masks and segments, move from device r to r + 1, D − 1
  times, and the (out, lse) of all shards are merged. The backward pass moves them
  again, together with their gradients. Gradients are computed from the log-sum-exp over
  all keys, so a device never holds more than one shard of the keys.

  In a causal call, the last device works D times as long as the first. Zigzag order
  ('balanced') cuts the sequence into 2D chunks and gives chunks r and 2D − 1 − r to
  device r. All late queries then see all early keys; in addition, early queries see the
  early keys of earlier devices, and late queries see the late keys of later devices.

  Returns:
    Out and lse of this device's queries. Each device sends D − 1 shards of keys,
    values, masks and segments, and in the backward pass also D shards of float32
    gradients.

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

  def scan(
    self, body: Callable[..., tuple[Any, Any]], shard: Any
  ) -> tuple[Any, Any]:
    """Runs `shard, carry = body(i, shard, carry)` on the shard of each of D devices.

    i = 0 … D − 1 is the number of hops of the shard; the first `carry` is None.
    """

    def step(loop_carry, i):
      shard, carry = loop_carry
      return body(i, from_previous_device(shard, self.axis_name), carry), None

    size = jax.lax.axis_size(self.axis_name)
    loop_carry = body(0, shard, None)
    if size > 1:
      loop_carry, _ = jax.lax.scan(step, loop_carry, jnp.arange(1, size))
    return loop_carry

  def chunk_pairs(
    self, i: Array | int, inputs: Any, keys: Any
  ) -> Iterator[tuple[int, int, Visible, tuple[Any, ...]]]:
    """The visible pairs of chunks after i hops of the keys, with their inputs."""
    queries, _, scores, rng = inputs
    # JAX would hoist values common to all hops and store them for every tile.
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
      key, value = visible.readable(key), visible.readable(value)
      constants = tiles.Constants(visible, None, rng)
      arrays = query, key, value, scores, constants
      yield a, b, visible, match_varying(arrays)


def _ring_forward(ring, inputs):
  """(out, lse) of each query chunk, twice: as the result and for the backward pass."""
  queries, keys, *_ = inputs

  def body(i, keys, results):
    results: list[Any] = list(results or (None,) * len(queries))
    for a, _, _, pair_inputs in ring.chunk_pairs(i, inputs, keys):
      (out, lse), _ = tiles.forward(ring.tiling, pair_inputs)
      new = out.astype(jnp.float32), lse
      results[a] = new if results[a] is None else merge(results[a], new)
    return keys, tuple(results)

  _, results = ring.scan(body, keys)
  dtype = queries[0][0].dtype
  results = tuple((out.astype(dtype), lse) for out, lse in results)
  return results, results


def _ring_backward(ring, inputs, results, cotangents):
  """Gradients of the inputs; the gradient of a non-float array is the array itself."""
  queries, keys, _, rng = inputs

  def body(i, shard, carry):
    keys, key_grads = shard[0], list(shard[1])
    query_grads, score_grads = carry or (no_grads, None)
    query_grads = list(query_grads)
    for a, b, visible, pair_inputs in ring.chunk_pairs(i, inputs, keys):
      dquery, *dkeys, dscores, _ = tiles.backward(
        ring.tiling, pair_inputs, results[a], cotangents[a]
      )
      dkeys = tuple(visible.readable(x) for x in dkeys)
      query_grads[a] = _accumulate(query_grads[a], dquery)
      key_grads[b] = _accumulate(key_grads[b], dkeys)
      score_grads = _accumulate(score_grads, dscores)
    return (keys, tuple(key_grads)), (tuple(query_grads), score_grads)

  no_grads = (None,) * len(queries)
  (_, key_grads), carry = ring.scan(body, (keys, no_grads))
  key_grads = from_previous_device(key_grads, ring.axis_name)
  query_grads, score_grads = carry
  return (
    tuple((x, ids) for x, (_, ids) in zip(query_grads, queries, strict=True)),
    tuple((*x, *y[2:]) for x, y in zip(key_grads, keys, strict=True)),
    score_grads,
    rng,
  )


def _accumulate(total: Any, grads: Any) -> Any:
  """Adds gradients to a total in float32; a total of None means 0."""
  grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
  return grads if total is None else jax.tree.map(jnp.add, total, grads)


def from_previous_device(tree: Any, axis_name: str) -> Any:
  """Receives the tree of the previous device; the last device precedes the first."""
  size = jax.lax.axis_size(axis_name)
  hops = [(i, (i + 1) % size) for i in range(size)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, hops), tree)


def _to_zigzag(tree: Any, axis_name: str) -> tuple[Any, ...]:
  """Rearranges shards in zigzag order; returns this device's early and late chunk."""
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
      x,
      axis_name,
      [(target, source) for source, target in _chunk_moves(size, i)],
    )
    for i, x in enumerate(_swap_by_parity((early, late), rank))
  ]
  return jnp.concatenate(halves, axis=1)


def _chunk_moves(size: int, parity: int) -> list[tuple[int, int]]:
  """The (source, target) devices of the even or the odd chunks."""
  numbers = range(parity, 2 * size, 2)
  return [(n // 2, min(n, 2 * size - 1 - n)) for n in numbers]


def _swap_by_parity(pair, rank):
  """Converts the (even, odd) chunks of a device to (early, late), or back."""
  first, second = pair
  is_even = rank % 2 == 0
  return jnp.where(is_even, first, second), jnp.where(is_even, second, first)


def _all_to_all(query, key, value, visible, logits, *, axis_name, block):
  """(out, lse) of a device that gets all positions of some heads."""
  size = jax.lax.axis_size(axis_name)
  num_heads, kv_heads = query.shape[2], key.shape[2]
  if kv_heads % size:
    raise ValueError(
      f"in_parts: 'all_to_all' gives each of {size} devices a share of the heads, "
      f"got {num_heads} heads of queries and {kv_heads} of keys; use 'ring'"
    )
  share = num_heads // size
  heads = jax.lax.axis_index(axis_name) * share + jnp.arange(share)

  def gather(x, axis):
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)

  visible = dataclasses.replace(
    visible,
    masks=tuple(gather(mask, 3) for mask in visible.masks),
    segments=tuple((gather(x, 1), gather(y, 1)) for x, y in visible.segments),
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
  """`rows.merge` of the results that all devices have for the same queries."""
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
  """Extends a shard with positions of neighbouring shards.

  Args:
    x: this device's T positions, which follow those of the previous device.
    left: the number of earlier positions, from as many devices as needed.
    right: the number of later positions.
    axis_name: the mesh axis of the devices, inside `jax.shard_map`; None means one device.

  Returns:
    U = left + T + right positions, with zeros beyond the ends of the sequence. Each
    device receives left + right positions.
  """
  size = 1 if axis_name is None else jax.lax.axis_size(axis_name)
  length = x.shape[1]
  others = (size - 1) * length
  num_left, num_right = min(left, others), min(right, others)

  def from_device(offset, rows):
    """Receives `rows` of the device at rank + offset; zeros if there is none."""
    pairs = [(i, i - offset) for i in range(size) if 0 <= i - offset < size]
    return jax.lax.ppermute(rows, axis_name, pairs)

  before = [
    from_device(-(i // length) - 1, x[:, max(length + i - num_left, 0) :])
    for i in range(0, num_left, length)
  ]
  after = [
    from_device(i // length + 1, x[:, : num_right - i])
    for i in range(0, num_right, length)
  ]
  x = jnp.concatenate([*reversed(before), x, *after], axis=1)
  padding = left - num_left, right - num_right
  return jnp.pad(x, [(0, 0), padding] + [(0, 0)] * (x.ndim - 2))
