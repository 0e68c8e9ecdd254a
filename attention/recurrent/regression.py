"""Ridge regression from keys to values at each position, chunk by chunk.

For each head, with log decay g and weights β,

    S_kk ← e^g_t S_kk + β_t k_t k_tᵀ        S_kv ← e^g_t S_kv + β_t k_t v_tᵀ
    out_t = S_kvᵀ x_t

where x_t is a solution of a system with S_kk and the query, which differs between
mechanisms. Both sums are in one array, the state of gated linear attention with values
[k, v]. S_kk is only computed at the start of each chunk; `Gram` multiplies by it at the
other positions.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import checks
from attention.recurrent import packing, recurrence
from attention.recurrent.arrays import (
  chunks,
  prepare_arrays,
  repeat_heads,
  unchunk,
  unit_length,
)
from attention.recurrent.scan import (
  chunk_prefixes,
  chunk_size,
  chunks_per_step,
  is_sequence_sharded,
  scan,
)
from attention.recurrent.triangular import decay_to_end, pair_decays

# The residual is only as exact as its products, which a GPU rounds below float32.
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class PositionGram(NamedTuple):
  """S_kk of one position, as a matrix.

  Attributes:
    matrix: S_kk.
  """

  matrix: Float[Array, "*A H H"]

  def times(self, x: Float[Array, "*A 1 H"]) -> Float[Array, "*A 1 H"]:
    """S_kk x."""
    return _product("...ij,...cj->...ci", self.matrix, x)

  def square_norm(self) -> Float[Array, "*A 1 1"]:
    """The squared Frobenius norm of S_kk."""
    return jnp.sum(jnp.square(self.matrix), axis=(-2, -1), keepdims=True)


class Gram(NamedTuple):
  """S_kk of each position of chunks of C.

  Attributes:
    key: k.
    scaled_key: β k.
    decays: e^(Σ g) from each position to each later one, 0 above the diagonal.
    from_start: e^(Σ g) from the start of the chunk.
    before: S_kk before the chunk; None means 0.
  """

  key: Float[Array, "*A C H"]
  scaled_key: Float[Array, "*A C H"]
  decays: Float[Array, "*A C C"]
  from_start: Float[Array, "*A C 1"]
  before: PositionGram | None

  def times(self, x: Float[Array, "*A C H"]) -> Float[Array, "*A C H"]:
    """S_kk x for each row of x."""
    scores = self.decays * _product("...cj,...sj->...cs", x, self.key)
    out = _product("...cs,...si->...ci", scores, self.scaled_key)
    if self.before is not None:
      out += self.from_start * self.before.times(x)
    return out

  def square_norm(self) -> Float[Array, "*A C 1"]:
    """The squared Frobenius norm of S_kk at each position."""
    scores = _product("...cj,...sj->...cs", self.scaled_key, self.key)
    scores = scores * jnp.swapaxes(scores, -2, -1)
    own = _product("...cs,...sd->...cd", self.decays, scores) * self.decays
    total = jnp.sum(own, axis=-1, keepdims=True)
    if self.before is not None:
      cross = self.before.times(self.key) * self.scaled_key
      cross = jnp.sum(cross, axis=-1, keepdims=True)
      cross = _product("...cs,...si->...ci", self.decays, cross)
      first = self.before.square_norm()
      total += self.from_start * (2.0 * cross + self.from_start * first)
    return total


Solve = Callable[..., Float[Array, "*A C H"]]
"""`(params, gram, query, *rows) -> x`, for chunks `[B, N, G, C, ·]`."""


def regression_attention(
  solve: Solve,
  params: Any,
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  beta: Float[Array, "B T N"],
  initial_state: Float[Array, "B *G N H X"] | None,
  rows: Sequence[Float[Array, "B T N"]] = (),
  is_sequential: bool = False,
  num_segments: int | None = None,
  normalize_keys: bool = False,
  scale: float | Float[Array, ""] = 1.0,
  return_state: bool = True,
  **options: Any,
) -> Any:
  """The recurrence of `mesa_attention`, which may be sequence-sharded.

  Args:
    solve: computes x; must not close over arrays.
    params: a pytree that `solve` gets.
    query: `[B, T, Q, H]`; `solve` gets scale · q.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    beta: β, at least 0.
    initial_state: [S_kk, S_kv] before the first position, X = H+V; None means 0.
    rows: additional arrays for `solve`, 0 at masked positions.
    is_sequential: whether a CPU computes calls without derivatives position by
      position.
    num_segments: as in `mesa_attention`.
    normalize_keys: whether to normalise queries and keys by `unit_length`.
    scale: factor of the queries.
    return_state: whether to return the last state as well.
    **options: log decays, mask, segments and `axis_name`, as in `prepare_arrays`.
  """
  query = repeat_heads(query, key, value)
  length, num_heads, head_dim = query.shape[1:]
  packed = None
  if num_segments is not None:
    packed = packing.make_packing(query, num_segments, options)
  arrays = key, value, *(x[..., None] for x in (beta, *rows))
  arrays, log_decay, _ = prepare_arrays(query, arrays, **options)
  key, value, beta, *rows = arrays
  dtype, query = query.dtype, query.astype(jnp.float32)
  if normalize_keys:
    query, key = map(unit_length, (query, key))
  value, scaled_key = jnp.concatenate([key, value], axis=3), beta * key
  shape = num_heads, head_dim, value.shape[3]
  state = packing.first_state(
    initial_state, value, shape, "N, H, H+V", num_segments
  )
  axis_name = options.get("axis_name")
  is_sharded = is_sequence_sharded(axis_name)
  if is_sequence_sharded(axis_name):
    state = recurrence.state_before(scaled_key, value, log_decay, axis_name)
  query *= checks.softmax_scale(scale, head_dim)
  size = chunk_size(length) if packed is None else packed.size
  numbers = 2 * size + 6 * head_dim + value.shape[3]
  position = functools.partial(_position, solve) if is_sequential else None

  def attend(inputs, state, resets=None):
    count = chunks_per_step(inputs[0], size, numbers)
    return scan(
      functools.partial(_step, count, solve),
      params,
      state,
      (*inputs, resets and packing.pad_to_steps(resets, count)),
      size=size * count,
      is_empty=initial_state is None and not is_sharded and resets is None,
      position=position if resets is None else None,
    )

  inputs = query, scaled_key, value, log_decay, *rows
  out, state = packing.results(attend, packed, inputs, state)
  out = out.astype(dtype)
  return (out, state) if return_state else out


def _position(solve, params, state, inputs):
  """The step of one position `[B, N, ·]`."""
  query, scaled_key, value, log_decay, *rows = (
    x[:, :, None, None]
    for x in inputs[:-1]  # The last is `resets`.
  )
  update = jnp.swapaxes(scaled_key, -2, -1) @ value
  state = jnp.exp(log_decay)[:, :, 0] * state + update[:, :, 0]
  gram, memory = jnp.split(state[:, :, None], [query.shape[-1]], axis=-1)
  x = solve(params, PositionGram(gram), query, *rows)
  return state, (x @ memory)[:, :, 0, 0]


def _step(count, solve, params, state, inputs):
  """The step of `count` consecutive chunks `[B, N, count, C, ·]`."""
  *arrays, resets = inputs
  query, scaled_key, value, log_decay, *rows = chunks(arrays, count)
  from_start = jnp.exp(jnp.cumsum(log_decay, axis=3))
  decayed = scaled_key * jnp.exp(decay_to_end(log_decay))
  update = jnp.swapaxes(decayed, -2, -1) @ value
  after, before = update, None
  if state is not None:
    own = from_start[..., -1:, :], update
    first = jnp.zeros_like(own[0][:, :, :1]), state[:, :, None]
    resets = packing.head_resets(resets, own[0])
    _, before = chunk_prefixes(recurrence.join_states, first, own, resets)
    after += own[0] * before
  decays = jnp.tril(pair_decays(log_decay))
  head_dim = query.shape[-1]
  key = value[..., :head_dim]
  first = None if before is None else PositionGram(before[..., :head_dim])
  gram = Gram(key, scaled_key, decays, from_start, first)
  x = solve(params, gram, query, *rows)
  scores = decays * (x @ jnp.swapaxes(scaled_key, -2, -1))
  out = scores @ value[..., head_dim:]
  if before is not None:
    out += (from_start * x) @ before[..., head_dim:]
  out = unchunk(out)
  if resets is not None:
    out = packing.with_states(out, after)
  return after[:, :, -1], out
