"""Softmax attention of a sequence in parts, one a device: keys go round a ring.

Each of D devices keeps its queries. Keys and values, with their masks and segment
ids, go from device r to r + 1, D − 1 times, so that every device sees every part
once. What a part gives, (out_i, lse_i), is joined by

    lse = log Σ_i e^lse_i        out = Σ_i e^(lse_i − lse) out_i

The backward sends keys and values round again, and their gradients with them: each
device adds the share of its queries, from the log-sum-exp of all keys, and after D
steps the gradients are where the keys came from.

In a causal call a device does nothing with parts behind its own. The last device
then works D times as long as the first; `core.balanced_ring` divides the work
evenly.

Paper: Ring attention with blockwise transformers, arXiv:2310.01889.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.core import loop, visibility
from attention.core.visibility import Visibility


class Causal(Protocol):
  """A `loop.Source`, a frozen dataclass, that may see earlier keys alone."""

  is_causal: bool


class Hidden(NamedTuple):
  """What hides pairs: parts of a key mask and of segment ids, or None.

  And the key of dropout, the same on every device.
  """

  mask: Bool[Array, "#B 1 1 S"] | None
  of_query: Int[Array, "B T"] | None
  of_key: Int[Array, "B S"] | None
  rng: Array | None = None

  @property
  def of_keys(self) -> "Hidden":
    """What goes round with the keys."""
    return Hidden(self.mask, None, self.of_key)


class Limits(NamedTuple):
  """Which pairs count, the key of the dropout, and where the keys stand.

  Attributes:
    sees: which pairs count.
    rng: of the dropout.
    shift: position of the first key less that of the first query, where these
      are parts of a sequence.
    origin: position of the first query then.
  """

  sees: Visibility
  rng: Array | None = None
  shift: Int[Array, ""] | int = 0
  origin: Int[Array, ""] | int = 0


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
  source: Any,
  axis_name: str,
  query: Float[Array, "B T N H"],
  arrays: Any,
  parameters: Any,
  hidden: Hidden,
) -> Float[Array, "B T N V"]:
  """`loop.attend` on the keys of all devices, inside `jax.shard_map`.

  Args:
    source: of a pair of parts, see `loop.Source` and `Causal`; `limit` and
      `gather` get `Limits`.
    axis_name: of the devices, whose parts follow one another.
    query: this device's.
    arrays: this device's keys and values.
    parameters: of the score, the same on every device.
    hidden: this device's.

  Returns:
    In the dtype of `query`. What crosses: D − 1 parts of `arrays` and of what
    hides keys; backward also D parts of gradients in float32. Time of T/D queries
    and S keys; memory that of `loop.attend` on parts, and one more part.
  """
  return _forward(source, axis_name, query, arrays, parameters, hidden)[0]


def _forward(source, axis_name, query, arrays, parameters, hidden):
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

  def attend_pair(moving, owner, before, is_own):
    found = loop.forward(
      *between(source, query, moving, hidden, rank, owner, is_own, parameters)
    )
    return joined(before, found)

  def step(carry, i):
    moving, before = carry
    moving = passed_on(moving, axis_name, size)
    owner = (rank - i) % size
    after = _where_seen(
      source.is_causal,
      owner < rank,
      lambda before: attend_pair(moving, owner, before, False),
      before,
    )
    return (moving, after), None

  moving = (arrays, hidden.of_keys)
  nothing = nothing_yet(source, query, moving, parameters)
  found = attend_pair(moving, rank, nothing, True)
  if size > 1:
    (_, found), _ = jax.lax.scan(step, (moving, found), jnp.arange(1, size))
  return finished(found, query.dtype)


def _attend_fwd(source, axis_name, query, arrays, parameters, hidden):
  out, lse = _forward(source, axis_name, query, arrays, parameters, hidden)
  return out, (query, arrays, parameters, hidden, out, lse)


def _attend_bwd(source, axis_name, residuals, cotangent):
  query, arrays, parameters, hidden, out, lse = residuals
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

  def pull_pair(moving, owner, gradients, is_own):
    of_pair = between(
      source, query, moving, hidden, rank, owner, is_own, parameters
    )
    found = loop.backward(*of_pair, out, lse, cotangent)
    return jax.tree.map(lambda total, x: total + x, gradients, found)

  def step(carry, i):
    moving, (dquery, darrays, dparameters) = carry
    moving, darrays = passed_on((moving, darrays), axis_name, size)
    owner = (rank - i) % size
    gradients = _where_seen(
      source.is_causal,
      owner < rank,
      lambda gradients: pull_pair(moving, owner, gradients, False),
      (dquery, darrays, dparameters),
    )
    return (moving, gradients), None

  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, jnp.float32), (query, arrays, parameters)
  )
  moving = (arrays, hidden.of_keys)
  gradients = pull_pair(moving, rank, zeros, True)
  if size > 1:
    (_, gradients), _ = jax.lax.scan(
      step, (moving, gradients), jnp.arange(1, size)
    )
    dquery, darrays, dparameters = gradients
    gradients = dquery, passed_on(darrays, axis_name, size), dparameters
  cast = jax.tree.map(
    lambda d, x: d.astype(x.dtype), gradients, (query, arrays, parameters)
  )
  return *cast, None


attend.defvjp(_attend_fwd, _attend_bwd)


def between(
  source: Any,
  query: Float[Array, "B T N H"],
  moving: tuple[Any, Hidden],
  hidden: Hidden,
  number: Array | int,
  owner: Array | int,
  is_own: bool,
  parameters: Any,
) -> tuple[Any, Any, Any, Any, Any]:
  """The arguments of `loop.forward` for the queries of one part and a part's keys.

  Args:
    source: of a pair of parts.
    query: those of one part.
    moving: keys and values of a part of the same length, and what hides them.
    hidden: of the queries.
    number: of the queries' part.
    owner: number of the keys' part.
    is_own: whether the two are the same, so that keys may be later.
    parameters: of the score.
  """
  arrays, of_keys = moving
  is_causal = source.is_causal and is_own
  sees = visibility.of_call(
    of_keys.mask, hidden.of_query, of_keys.of_key, is_causal
  )
  length = jax.tree.leaves(arrays)[0].shape[1]
  origin = number * query.shape[1]
  limits = Limits(sees, hidden.rng, owner * length - origin, origin)
  of_pair = dataclasses.replace(source, is_causal=is_causal)
  return of_pair, query, arrays, parameters, limits


def nothing_yet(
  source: Any, query: Float[Array, "B T N H"], moving: Any, parameters: Any
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"]]:
  """Result and log-sum-exp of queries that have seen no key."""
  rng = jax.random.key(0)  # Of no use, as only shapes are.
  hidden = Hidden(None, None, None, rng)
  of_pair = between(source, query, moving, hidden, 0, 0, True, parameters)
  found = jax.eval_shape(lambda: loop.forward(*of_pair)[0])
  return (
    jnp.zeros(found.shape, jnp.float32),
    jnp.full((*found.shape[:3], 1), -jnp.inf, jnp.float32),
  )


def finished(
  found: tuple[Array, Array], dtype: Any
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"]]:
  """As `loop.forward` returns them: +∞ where a query has seen no key."""
  out, lse = found
  return out.astype(dtype), jnp.where(lse == -jnp.inf, jnp.inf, lse)


def joined(
  before: tuple[Array, Array], found: Any
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"]]:
  """Results of some keys and of others as those of both."""
  out, lse = before
  more, of_more = found
  of_more = jnp.where(jnp.isinf(of_more), -jnp.inf, of_more)
  total = jnp.logaddexp(lse, of_more)
  # −∞ less −∞ is nan: a row that has seen nothing yet.
  finite = jnp.where(total == -jnp.inf, 0.0, total)
  out = out * jnp.exp(lse - finite)
  return out + more.astype(jnp.float32) * jnp.exp(of_more - finite), total


def passed_on(tree: Any, axis_name: str, size: int) -> Any:
  """What the device before this one has."""
  around = [(i, (i + 1) % size) for i in range(size)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, around), tree)


def _where_seen(is_causal, is_seen, function, carry):
  """`function(carry)`, in a causal call only where a part is not behind."""
  if not is_causal:
    return function(carry)
  return jax.lax.cond(is_seen, function, lambda carry: carry, carry)
