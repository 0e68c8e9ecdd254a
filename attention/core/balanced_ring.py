"""Causal attention round a ring, with the same work on every device.

The whole is cut into 2D chunks, two neighbouring ones on each of D devices. For
the time of the call they are exchanged, so that device r has the chunks r and
2D − 1 − r, an early one and a late one. Whichever device's chunks come by, exactly
two pairs of chunks have something to see:

    owner before r     its early chunk is seen by both chunks here
    owner behind r     both its chunks are seen by the late chunk here

The late chunk here always sees the early one there; the second pair is chosen by
`where`, so that every step is the same program. Compared with `core.ring`, a call
takes half the time, and a part of queries, keys, values and results crosses more.

Paper: Striped attention, arXiv:2311.09431, has the problem and another order; this
one is that of Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from attention.core import loop, ring
from attention.core.ring import Hidden


def attend(
  source: Any,
  axis_name: str,
  query: Float[Array, "B T N H"],
  arrays: Any,
  parameters: Any,
  hidden: Hidden,
) -> Float[Array, "B T N V"]:
  """`ring.attend` of a causal call, of parts with an even number of positions.

  Args:
    source: of a pair of chunks, T/2 positions each; see `ring.attend`.
    axis_name: of the devices, whose parts follow one another.
    query: this device's.
    arrays: this device's keys and values.
    parameters: of the score, the same on every device.
    hidden: this device's.

  Returns:
    In the dtype of `query`. Time of T/D queries and S/2 keys on every device;
    memory of `ring.attend`. What crosses: D − 1 parts of `arrays` and, once there
    and once back, all of a device's queries, keys and values, and results.
  """
  mask, *ids, rng = hidden
  exchanged = partial(_exchanged, axis_name=axis_name)
  masks = (None, None) if mask is None else exchanged(mask[:, 0, 0])
  masks = [m if m is None else m[:, None, None] for m in masks]
  of_chunks = [exchanged(x) if x is not None else (None, None) for x in ids]
  out = _attend(
    source,
    axis_name,
    exchanged(query),
    jax.tree.transpose(
      jax.tree.structure(arrays),
      jax.tree.structure((0, 0)),
      jax.tree.map(exchanged, arrays),
    ),
    parameters,
    tuple(
      Hidden(mask, of_query, of_key, rng)
      for mask, of_query, of_key in zip(masks, *of_chunks, strict=True)
    ),
  )
  return _back(out, axis_name)


def _exchanged(x, axis_name):
  """The early and the late chunk of this device, out of neighbouring ones."""
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  first, second = jnp.split(x, 2, axis=1)
  even = jax.lax.ppermute(first, axis_name, _moves(size, 0))
  odd = jax.lax.ppermute(second, axis_name, _moves(size, 1))
  # Of r and 2D − 1 − r one is even and one is odd.
  is_even = rank % 2 == 0
  return jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(source, axis_name, queries, arrays, parameters, hidden):
  """Results of the early and the late chunk; pairs of each throughout."""
  return _forward(source, axis_name, queries, arrays, parameters, hidden)[0]


def _forward(source, axis_name, queries, arrays, parameters, hidden):
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  early, late = rank, 2 * size - 1 - rank

  def see(number, query, of_query, owner, keys, is_own, before):
    found = loop.forward(
      *ring.between(
        source, query, keys, of_query, number, owner, is_own, parameters
      )
    )
    return ring.joined(before, found)

  def step(carry, i):
    moving, (of_early, of_late) = carry
    moving = ring.passed_on(moving, axis_name, size)
    owner = (rank - i) % size
    of_late = see(late, queries[1], hidden[1], owner, moving[0], False, of_late)
    is_before, pair = _second_pair(rank, owner, size, queries, hidden, moving)
    found = see(*pair, False, _either(is_before, of_early, of_late))
    return (
      moving,
      (_either(is_before, found, of_early), _either(is_before, of_late, found)),
    ), None

  moving = _moving(arrays, hidden)
  nothing = ring.nothing_yet(source, queries[0], moving[0], parameters)
  of_early = see(early, queries[0], hidden[0], early, moving[0], True, nothing)
  of_late = see(late, queries[1], hidden[1], early, moving[0], False, nothing)
  of_late = see(late, queries[1], hidden[1], late, moving[1], True, of_late)
  found = of_early, of_late
  if size > 1:
    (_, found), _ = jax.lax.scan(step, (moving, found), jnp.arange(1, size))
  found = [ring.finished(x, queries[0].dtype) for x in found]
  return tuple(out for out, _ in found), tuple(lse for _, lse in found)


def _attend_fwd(source, axis_name, queries, arrays, parameters, hidden):
  out, lse = _forward(source, axis_name, queries, arrays, parameters, hidden)
  return out, (queries, arrays, parameters, hidden, out, lse)


def _attend_bwd(source, axis_name, residuals, cotangents):
  queries, arrays, parameters, hidden, out, lse = residuals
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  early, late = rank, 2 * size - 1 - rank
  of_rows = tuple(zip(out, lse, cotangents, strict=True))

  def pull(number, query, of_query, owner, keys, rows, is_own):
    of_pair = ring.between(
      source, query, keys, of_query, number, owner, is_own, parameters
    )
    return loop.backward(*of_pair, *rows)

  def step(carry, i):
    (moving, dmoving), (of_early, of_late), dparameters = carry
    moving, dmoving = ring.passed_on((moving, dmoving), axis_name, size)
    owner = (rank - i) % size
    of_query, of_keys, more = pull(
      late, queries[1], hidden[1], owner, moving[0], of_rows[1], False
    )
    of_late = _sum(of_late, of_query)
    dparameters = _sum(dparameters, more)
    first, second = _sum(dmoving[0], of_keys), dmoving[1]
    is_before, pair = _second_pair(rank, owner, size, queries, hidden, moving)
    rows = _either(is_before, *of_rows)
    of_query, of_keys, more = pull(*pair, rows, False)
    zeros = jax.tree.map(jnp.zeros_like, (of_query, of_keys))
    of_here, of_there = _either(is_before, (of_query, of_keys), zeros)
    of_early, first = _sum(of_early, of_here), _sum(first, of_there)
    of_here, of_there = _either(is_before, zeros, (of_query, of_keys))
    of_late, second = _sum(of_late, of_here), _sum(second, of_there)
    dparameters = _sum(dparameters, more)
    return (
      (moving, (first, second)),
      (of_early, of_late),
      dparameters,
    ), None

  moving = _moving(arrays, hidden)
  of_early, first, of_first = pull(
    early, queries[0], hidden[0], early, moving[0], of_rows[0], True
  )
  of_late, more, of_second = pull(
    late, queries[1], hidden[1], early, moving[0], of_rows[1], False
  )
  to_itself, second, of_third = pull(
    late, queries[1], hidden[1], late, moving[1], of_rows[1], True
  )
  wide = partial(jax.tree.map, lambda x: x.astype(jnp.float32))
  dqueries = wide((of_early, _sum(wide(of_late), to_itself)))
  dmoving = wide((_sum(wide(first), more), second))
  dparameters = _sum(_sum(wide(of_first), of_second), of_third)
  if size > 1:
    ((_, dmoving), dqueries, dparameters), _ = jax.lax.scan(
      step,
      ((moving, dmoving), dqueries, dparameters),
      jnp.arange(1, size),
    )
    dmoving = ring.passed_on(dmoving, axis_name, size)
  cast = jax.tree.map(
    lambda d, x: d.astype(x.dtype),
    (dqueries, dmoving, dparameters),
    (queries, arrays, parameters),
  )
  return *cast, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _moving(arrays, hidden):
  """What goes round the ring, chunk by chunk."""
  return tuple(zip(arrays, (x.of_keys for x in hidden), strict=True))


def _second_pair(rank, owner, size, queries, hidden, moving):
  """Whether the owner is before, and the pair of chunks that depends on it."""
  is_before = owner < rank
  late = 2 * size - 1
  number = jnp.where(is_before, rank, late - rank)
  of_keys = jnp.where(is_before, owner, late - owner)
  query = _either(is_before, *queries)
  first, second = (x._replace(rng=None) for x in hidden)
  of_query = _either(is_before, first, second)._replace(rng=hidden[0].rng)
  return is_before, (
    number,
    query,
    of_query,
    of_keys,
    _either(is_before, *moving),
  )


def _either(condition, x, y):
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


def _sum(total, more):
  return jax.tree.map(jnp.add, total, more)
