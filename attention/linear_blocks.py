"""The loop over blocks behind linear attention, with its own backward.

The mathematics are in `linear_state`, the causal form in `linear_causal`. One
pass over blocks of keys fills the state, one over blocks of queries reads it;
backward, one over queries and one over keys. Kept for it are the arguments, the
result, the state and one normaliser a query. Features are made anew in every
block, forward and backward, and never exist for the whole sequence.

Block i holds the positions [a, a+C), a = min(i·C, L−C): the last block moves
back to end at L, so that no array is padded. Keys which it shares with the
block before do not count again; of queries n = ∞ takes the gradient away.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import linear_state
from attention.blocks import (
  add,
  cut,
  dot,
  heads_first,
  heads_last,
  inner,
  put,
  turned,
)

CHUNK = 256
"""C: positions at a time. XLA:CPU multiplies terms by values over 256 keys at
nearly twice the rate of 128; the whole takes 0.87 of the time."""


class FeatureMap(NamedTuple):
  """What is known of a feature map while tracing.

  Attributes:
    function: `(x [H], *constants) -> [M]`, features φ or their logarithms.
    is_log: it returns logarithms.
    size: M.
  """

  function: Callable[..., Array]
  is_log: bool
  size: int


class Operands(NamedTuple):
  """The arrays that have a derivative.

  `constants` are what the feature map closes over.
  """

  query: Float[Array, "B T N H"]
  key: Float[Array, "B S K H"]
  value: Float[Array, "B S K V"]
  constants: list[Any]


def feature_map(
  function: Callable[[Array], Array], head_dim: int, is_log: bool = False
) -> tuple[FeatureMap, list[Any]]:
  """Turns a function `[..., H]` to `[..., M]` inside out.

  What it closes over becomes an argument, so that gradients reach it.

  Raises:
    ValueError: it returns something else.
  """
  vector = jax.ShapeDtypeStruct((head_dim,), jnp.float32)
  shape = jax.eval_shape(function, vector).shape
  if len(shape) != 1:
    raise ValueError(
      "feature_map: expected a function of [..., H] to [..., M], got "
      f"{shape} for [{head_dim}]; it must keep the axes before the last"
    )
  converted, constants = jax.closure_convert(function, vector)
  return FeatureMap(converted, is_log, shape[0]), constants


def features_of(
  features: FeatureMap, x: Float[Array, "A C H"], constants: list[Any]
) -> Float[Array, "A C M"]:
  """Features of every row, as one product over all rows at once."""
  rows = jax.vmap(lambda row: features.function(row, *constants))(
    x.reshape(-1, x.shape[-1])
  )
  return rows.astype(jnp.float32).reshape(*x.shape[:-1], -1)


class KeyBlock(NamedTuple):
  """One block of keys as the products want it; `keep` None: all count."""

  start: Int[Array, ""]
  key: Float[Array, "A C H"]
  value: Float[Array, "A C V"]
  keep: Bool[Array, "A C 1"] | None


def to_rows(x: Float[Array, "B C N D"], kv_heads: int) -> Float[Array, "A Q D"]:
  """`heads_first` in float32."""
  return heads_first(x, kv_heads).astype(jnp.float32)


def sizes(length: int, chunk: int) -> tuple[int, int]:
  """C and the number of blocks; a short sequence is one block."""
  chunk = min(chunk, length)
  return chunk, -(-length // chunk)


def cut_keys(
  operands: Operands,
  keep: Bool[Array, "B S"] | None,
  first: Int[Array, ""],
  size: int,
  is_whole: bool,
) -> KeyBlock:
  """Cuts a block of `size` keys, of which those before `first` do not count.

  `is_whole` says that there are none before it, in any block.
  """
  batch, length, num_kv_heads, _ = operands.key.shape
  start = jnp.minimum(first, length - size)
  key, value = (
    to_rows(cut(x, start, size), num_kv_heads)
    for x in (operands.key, operands.value)
  )
  kept = None if is_whole else (start + jnp.arange(size) >= first)[None]
  if keep is not None:
    masked = cut(keep, start, size)
    kept = masked if kept is None else masked & kept
  if kept is None:
    return KeyBlock(start, key, value, None)
  kept = jnp.broadcast_to(kept[:, None], (batch, num_kv_heads, size))
  kept = kept.reshape(-1, size, 1)
  # Zeroed as well, so that not even nan gets through a product.
  key, value = (jnp.where(kept, x, 0.0) for x in (key, value))
  return KeyBlock(start, key, value, kept)


def cut_cotangent(
  cotangent: Float[Array, "B T N V"],
  out: Float[Array, "B T N V"],
  norm: Float[Array, "B T N 1"],
  first: Int[Array, ""],
  size: int,
  num_kv_heads: int,
) -> tuple[Float[Array, "A Q X"], Float[Array, "A Q 1"]]:
  """(g, δ) of a block of queries and their n, ∞ for those before `first`."""
  length = out.shape[1]
  start = jnp.minimum(first, length - size)
  g, out, norm = (
    to_rows(cut(x, start, size), num_kv_heads) for x in (cotangent, out, norm)
  )
  if length % size:
    is_new = start + jnp.arange(g.shape[1]) % size >= first
    norm = jnp.where(is_new[None, :, None], norm, jnp.inf)
  delta = -inner(g, out)
  return jnp.concatenate([g, delta], axis=-1), norm


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def bidirectional(
  features: FeatureMap, operands: Operands, keep: Bool[Array, "B S"] | None
) -> Float[Array, "B T N V"]:
  """Linear attention of every query to every key; `keep`: which count."""
  return _forward(features, operands, keep)[0]


def _forward(features, operands, keep):
  """The result, the state, and n `[B, T, N, 1]`."""
  query, key, value, constants = operands
  batch, length = query.shape[:2]
  source_length, num_kv_heads = key.shape[1:3]
  size, num_blocks = sizes(source_length, CHUNK)

  def fill(i, state):
    block = cut_keys(operands, keep, i * size, size, source_length % size == 0)
    key_features = features_of(features, block.key, constants)
    return linear_state.absorb(state, key_features, block.value, block.keep)

  state = linear_state.empty_state(
    (batch * num_kv_heads,), features.size, value.shape[-1], features.is_log
  )
  state = jax.lax.fori_loop(0, num_blocks, fill, state)
  size, num_blocks = sizes(length, CHUNK)

  def answer(i, carry):
    start = jnp.minimum(i * size, length - size)
    rows = to_rows(cut(query, start, size), num_kv_heads)
    sums, scale = linear_state.read(
      state, features_of(features, rows, constants)
    )
    return tuple(
      put(whole, heads_last(x, batch, size), start)
      for whole, x in zip(carry, linear_state.finish(sums, scale), strict=True)
    )

  out = jnp.zeros((*query.shape[:3], value.shape[-1]), query.dtype)
  norm = jnp.zeros((*query.shape[:3], 1), jnp.float32)
  out, norm = jax.lax.fori_loop(0, num_blocks, answer, (out, norm))
  return out, state, norm


def _bidirectional_fwd(features, operands, keep):
  out, state, norm = _forward(features, operands, keep)
  return out, (operands, keep, out, state, norm)


def _bidirectional_bwd(features, residuals, cotangent):
  operands, keep, out, state, norm = residuals
  query, key, value, constants = operands
  batch, length = query.shape[:2]
  source_length, num_kv_heads = key.shape[1:3]
  to_features = partial(features_of, features)
  size, num_blocks = sizes(length, CHUNK)

  def ask(i, carry):
    d_query, d_sums, d_constants = carry
    start = jnp.minimum(i * size, length - size)
    g, n = cut_cotangent(cotangent, out, norm, i * size, size, num_kv_heads)
    rows = to_rows(cut(query, start, size), num_kv_heads)
    query_features, pullback = jax.vjp(to_features, rows, constants)
    terms = linear_state.read_again(state, query_features, n)
    d_terms = dot("aqv,avm->aqm", g, state.sums)
    d_sums += dot("avq,aqm->avm", turned(g), terms)
    d_features = terms * d_terms if features.is_log else d_terms / n
    d_rows, more = pullback(d_features)
    d_rows = heads_last(d_rows, batch, size)
    place = put if length % size == 0 else add
    return (
      place(d_query, d_rows, start),
      d_sums,
      jax.tree.map(jnp.add, d_constants, more),
    )

  zeros = partial(jax.tree.map, jnp.zeros_like)
  d_query, d_sums, d_constants = jax.lax.fori_loop(
    0, num_blocks, ask, zeros((query, state.sums, constants))
  )
  size, num_blocks = sizes(source_length, CHUNK)

  def tell(i, carry):
    d_key, d_value, d_constants = carry
    block = cut_keys(operands, keep, i * size, size, source_length % size == 0)
    key_features, pullback = jax.vjp(to_features, block.key, constants)
    terms = linear_state.key_terms(state.log_scale, key_features, block.keep)
    d_features, d_rows = told(features, terms, block, d_sums)
    d_keys, more = pullback(d_features)
    return (
      *add_keys(d_key, d_value, d_keys, d_rows, block),
      jax.tree.map(jnp.add, d_constants, more),
    )

  d_key, d_value, d_constants = jax.lax.fori_loop(
    0, num_blocks, tell, (*zeros((key, value)), d_constants)
  )
  return Operands(d_query, d_key, d_value, d_constants), None


bidirectional.defvjp(_bidirectional_fwd, _bidirectional_bwd)


def told(
  features: FeatureMap,
  terms: Float[Array, "A C M"],
  block: KeyBlock,
  d_sums: Float[Array, "A X M"],
) -> tuple[Float[Array, "A C M"], Float[Array, "A C V"]]:
  """Gradients of a block's features and values from that of the sums."""
  values = linear_state.with_ones(block.value)
  d_features = dot("acv,avm->acm", values, d_sums)
  if features.is_log:
    d_features *= terms
  elif block.keep is not None:
    d_features = jnp.where(block.keep, d_features, 0.0)
  return d_features, dot("acm,avm->acv", terms, d_sums[:, :-1])


def add_keys(
  d_key: Float[Array, "B S K H"],
  d_value: Float[Array, "B S K V"],
  key_rows: Float[Array, "A C H"],
  value_rows: Float[Array, "A C V"],
  block: KeyBlock,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
  """Adds the gradients of a block; nothing for keys that do not count."""
  place = put if block.keep is None else add
  batch, size = d_key.shape[0], key_rows.shape[1]
  if block.keep is not None:
    key_rows, value_rows = (
      jnp.where(block.keep, x, 0.0) for x in (key_rows, value_rows)
    )
  return (
    place(d_key, heads_last(key_rows, batch, size), block.start),
    place(d_value, heads_last(value_rows, batch, size), block.start),
  )
