"""Softmax attention of a sequence in parts, one a device: keys go round a ring.

Each of D devices keeps its queries. Keys and values, with their
masks and segment ids, go from device r to r + 1, D − 1 times, so that every device
sees every part once; what a part gives, (out, lse), is merged. The backward sends
keys and values round again, and their gradients with them: each device adds the
share of its queries, from the log-sum-exp of all keys, and after D steps the
gradients are where the keys came from.

In a causal call the last device would work D times as long as the first. 'balanced'
cuts the whole into 2D chunks, and for the time of the call device r has the chunks r
and 2D − 1 − r, an early one and a late one. The late queries see every early key;
besides, early queries see early keys of devices before, and late queries late keys of
devices behind: two pairs of chunks on every device at every step.

Papers: Ring attention with blockwise transformers, arXiv:2310.01889; balance: Llama 3,
section 3.3.2, arXiv:2407.21783.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import loop
from attention.layout import alike
from attention.loop import merge
from attention.tiles import Grid, grid_of
from attention.visible import Visible


class _Ring(NamedTuple):
  """What of a call is known while tracing.

  Attributes:
    axis_name: of the devices.
    grid: of a pair of chunks.
    pairs: which chunks of queries, of a device, meet which of keys, of any.
    is_causal: whether queries see no later keys.
  """

  axis_name: str
  grid: Grid
  pairs: tuple[tuple[int, int], ...]
  is_causal: bool

  def numbers(self, device: Array) -> list[Array]:
    """Which chunks of the whole a device has."""
    size = jax.lax.axis_size(self.axis_name)
    late = 2 * size - 1 - device
    return [device] if len(self.pairs) == 1 else [device, late]

  def meeting(
    self, a: int, b: int, owner: Array, queries: Any, moving: Any
  ) -> Visible:
    """Which pairs of query chunk a and key chunk b of device `owner` count."""
    (query, query_ids), (key, _, mask, key_ids) = queries[a], moving[b]
    rank = jax.lax.axis_index(self.axis_name)
    return Visible(
      masks=() if mask is None else (mask,),
      segments=() if key_ids is None else ((query_ids, key_ids),),
      right=0 if self.is_causal else None,
      query_start=self.numbers(rank)[a] * query.shape[1],
      key_start=self.numbers(owner)[b] * key.shape[1],
    )


def ring(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  axis_name: str,
  logits: Any,
  mask: Bool[Array, "#B 1 1 S"] | None = None,
  is_causal: bool = False,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  is_balanced: bool = False,
  block: tuple[int | None, int | None] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
  """`loop.attend` on the keys of all devices, inside `jax.shard_map`.

  Args:
    query: this device's.
    key: this device's.
    value: this device's.
    axis_name: of the devices, whose parts follow one another.
    logits: how pairs are scored, the same on every device.
    mask: this device's part of a key mask.
    is_causal: queries see no later keys.
    query_segment_ids: of this device's queries.
    key_segment_ids: of its keys.
    dropout_rate: share of weights set to zero.
    dropout_rng: the same on every device.
    is_balanced: whether a causal call exchanges chunks.
    block: (C, D) of a tile; None is the platform's choice.

  Returns:
    Out and lse of this device's queries. What crosses: D − 1 parts of keys, values
    and what hides them; backward also D parts of gradients in float32.

  Raises:
    ValueError: a balanced call of an odd number of positions.
  """
  arrays: Any = (
    (query, query_segment_ids),
    (key, value, mask, key_segment_ids),
  )
  size = jax.lax.axis_size(axis_name)
  is_balanced = is_balanced and is_causal and size > 1
  if is_balanced and query.shape[1] % 2:
    raise ValueError(
      "implementation: 'balanced' needs an even number of positions on a "
      f"device, got {query.shape[1]}; use 'ring'"
    )
  if is_balanced:
    *others, mask, ids = arrays[1]
    flat = None if mask is None else mask[:, 0, 0]
    arrays = _exchanged((arrays[0], (*others, flat, ids)), axis_name)
    if flat is not None:
      keys = tuple((*x[:2], x[2][:, None, None], x[3]) for x in arrays[1])
      arrays = arrays[0], keys
  else:
    arrays = tuple((x,) for x in arrays)
  first = arrays[0][0][0]
  causal = Visible(right=0 if is_causal else None)
  grid = grid_of(first, arrays[1][0][1], causal, block, dropout_rate)
  shape = (len(query), query.shape[2], grid.rows, grid.width)
  _, scores, fixed = logits.scores(first, causal, shape)
  queries = tuple(
    (logits.scores(x, causal, shape)[0], ids) for x, ids in arrays[0]
  )
  del fixed  # A score_mod has no form in parts.
  pairs = ((0, 0), (1, 0), (1, 1)) if is_balanced else ((0, 0),)
  rng = dropout_rng if dropout_rate else None
  inputs = jax.tree.map(jnp.asarray, (queries, arrays[1], scores, rng))
  rank = jax.lax.axis_index(axis_name)
  inputs = alike(inputs, (inputs, rank))
  results = _ring(_Ring(axis_name, grid, pairs, is_causal), *inputs)
  if not is_balanced:
    return results[0]
  out, lse = (_back(x, axis_name) for x in zip(*results, strict=True))
  return out, lse


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring, queries, keys, scores, rng):
  """(out, lse) of each chunk of queries."""
  size = jax.lax.axis_size(ring.axis_name)
  rank = jax.lax.axis_index(ring.axis_name)

  def meet(owner, moving, results):
    results = list(results)
    for a, b in ring.pairs:
      visible = ring.meeting(a, b, owner, queries, moving)
      key, value = (visible.readable(x) for x in moving[b][:2])
      others = loop.Others(visible, (), rng)
      arguments = alike((queries[a][0], key, value, scores, others))
      results[a] = merge(results[a], loop.forward(ring.grid, *arguments))
    return tuple(results)

  def step(carry, i):
    moving, results = carry
    moving = passed_on(moving, ring.axis_name)
    return (moving, meet((rank - i) % size, moving, results)), None

  def nothing(query):
    shape = (*query.shape[:3], keys[0][1].shape[3])
    lse = jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    return jnp.zeros(shape, jnp.float32), lse

  results = tuple(nothing(query) for query, _ in queries)
  results = meet(rank, keys, alike(results, (queries, keys)))
  if size > 1:
    (_, results), _ = jax.lax.scan(step, (keys, results), jnp.arange(1, size))
  dtype = queries[0][0].dtype
  return tuple((out.astype(dtype), lse) for out, lse in results)


def _ring_fwd(ring, queries, keys, scores, rng):
  results = _ring(ring, queries, keys, scores, rng)
  return results, (queries, keys, scores, rng, results)


def _ring_bwd(ring, residuals, cotangents):
  queries, keys, scores, rng, results = residuals
  size = jax.lax.axis_size(ring.axis_name)
  rank = jax.lax.axis_index(ring.axis_name)

  def meet(owner, moving, gradients):
    query_grads, key_grads, score_grads = gradients
    query_grads, key_grads = list(query_grads), list(key_grads)
    for a, b in ring.pairs:
      visible = ring.meeting(a, b, owner, queries, moving)
      key, value = (visible.readable(x) for x in moving[b][:2])
      others = loop.Others(visible, (), rng)
      arguments = alike((queries[a][0], key, value, scores, others))
      dquery, dkey, dvalue, dscores = loop.backward(
        ring.grid, *arguments, *results[a], *cotangents[a]
      )
      dkey, dvalue = visible.readable(dkey), visible.readable(dvalue)
      query_grads[a] = query_grads[a] + dquery
      key_grads[b] = _sum(key_grads[b], (dkey, dvalue))
      score_grads = _sum(score_grads, dscores)
    return tuple(query_grads), tuple(key_grads), score_grads

  def step(carry, i):
    moving, (query_grads, key_grads, score_grads) = carry
    moving, key_grads = passed_on((moving, key_grads), ring.axis_name)
    gradients = query_grads, key_grads, score_grads
    return (moving, meet((rank - i) % size, moving, gradients)), None

  primals = (tuple(x[0] for x in queries), tuple(x[:2] for x in keys), scores)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), primals)
  gradients = meet(rank, keys, alike(zeros, (queries, keys)))
  if size > 1:
    (_, gradients), _ = jax.lax.scan(
      step, (keys, gradients), jnp.arange(1, size)
    )
    query_grads, key_grads, score_grads = gradients
    key_grads = passed_on(key_grads, ring.axis_name)
    gradients = query_grads, key_grads, score_grads
  query_grads, key_grads, score_grads = jax.tree.map(
    lambda grad, x: grad.astype(x.dtype), gradients, primals
  )
  return (
    tuple((grad, None) for grad in query_grads),
    tuple((*grads, None, None) for grads in key_grads),
    score_grads,
    None,
  )


_ring.defvjp(_ring_fwd, _ring_bwd)


def _sum(total, more):
  return jax.tree.map(jnp.add, total, more)


def passed_on(tree: Any, axis_name: str) -> Any:
  """What the device before this one has."""
  size = jax.lax.axis_size(axis_name)
  around = [(i, (i + 1) % size) for i in range(size)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, around), tree)


def _exchanged(tree, axis_name):
  """Of each tree of the tuple, that of the early and that of the late chunk."""
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  # Of r and 2D − 1 − r one is even and one is odd.
  is_even = rank % 2 == 0

  def chunk(x, late):
    first, second = jnp.split(x, 2, axis=1)
    even = jax.lax.ppermute(first, axis_name, _moves(size, 0))
    odd = jax.lax.ppermute(second, axis_name, _moves(size, 1))
    return jnp.where(is_even ^ late, even, odd)

  return tuple(
    tuple(
      jax.tree.map(lambda x, late=late: chunk(x, late), arrays)
      for late in (False, True)
    )
    for arrays in tree
  )


def _back(
  chunks: tuple[Shaped[Array, "B C *A"], Shaped[Array, "B C *A"]],
  axis_name: str,
) -> Shaped[Array, "B T *A"]:
  """Undoes `_exchanged`."""
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  is_even = rank % 2 == 0
  even = jnp.where(is_even, *chunks)
  odd = jnp.where(is_even, chunks[1], chunks[0])
  halves = [
    jax.lax.ppermute(x, axis_name, [(to, of) for of, to in _moves(size, i)])
    for i, x in enumerate((even, odd))
  ]
  return jnp.concatenate(halves, axis=1)


def _moves(size: int, parity: int) -> list[tuple[int, int]]:
  """From which device to which the even or the odd chunks go."""
  numbers = range(parity, 2 * size, 2)
  return [(n // 2, min(n, 2 * size - 1 - n)) for n in numbers]
