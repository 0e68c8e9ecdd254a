"""Global tokens of `sliding_window_attention`.

A global token is seen by every query and, as a query, sees every key. The first
half joins the block loop: the tokens' keys are hidden from the windows and
handed to every block as G extra keys, so a token inside a window is in the
union once. The second half is dense attention of G queries over all keys, whose
rows replace those of the loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.dense import dense_attention


class Rules(NamedTuple):
  """Who may see whom, whatever the window.

  Attributes:
    is_causal: query t sees keys s ≤ t.
    key_mask: False hides a key.
    query_segments: a query sees keys of its own segment only.
    key_segments: goes with `query_segments`.
  """

  is_causal: bool
  key_mask: Bool[Array, "B S"] | None
  query_segments: Int[Array, "B T"] | None
  key_segments: Int[Array, "B S"] | None


class Tokens(NamedTuple):
  """The global tokens; where not `valid`, `index` is some legal position."""

  index: Int[Array, "B G"]
  valid: Bool[Array, "B G"]


def unique_tokens(indices: Int[Array, "B G"], length: int) -> Tokens:
  """Each position of [0, T) at most once, everything else not valid."""
  indices = jnp.sort(indices, axis=1)
  previous = jnp.pad(indices[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  valid = (indices >= 0) & (indices < length) & (indices != previous)
  return Tokens(jnp.clip(indices, 0, length - 1), valid)


def hide(tokens: Tokens, length: int) -> Bool[Array, "B S"]:
  """False at the tokens' positions."""
  position = jnp.arange(length)[None, :, None]
  here = (tokens.index[:, None, :] == position) & tokens.valid[:, None, :]
  return ~jnp.any(here, axis=-1)


def global_keys(
  tokens: Tokens,
  rules: Rules,
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
) -> tuple[
  Float[Array, "B G K H"], Float[Array, "B G K V"], Bool[Array, "B T G"]
]:
  """The tokens' keys and values, and which of them each query sees."""
  seen = _pairs(rules, _positions(key), tokens.index)
  seen &= tokens.valid[:, None, :]
  # As in the block loop, what no query sees is not read either.
  read = jnp.any(seen, axis=1)[:, :, None, None]
  return (
    jnp.where(read, _take(key, tokens.index), 0),
    jnp.where(read, _take(value, tokens.index), 0),
    seen,
  )


def replace_rows(
  out: Float[Array, "B T N V"],
  tokens: Tokens,
  rules: Rules,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  scale: float,
  dropout_rate: float,
  dropout_rng: Array | None,
) -> Float[Array, "B T N V"]:
  """Puts in the rows of the global queries, which see all keys."""
  seen = _pairs(rules, tokens.index, _positions(key))
  rows = dense_attention(
    _take(query, tokens.index),
    key,
    value,
    mask=seen[:, None],
    scale=scale,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
  )
  return jax.vmap(
    lambda old, slot, new: old.at[slot].set(
      new, mode="drop", unique_indices=True
    )
  )(out, _slots(tokens, out.shape[1]), rows)


def _slots(tokens: Tokens, length: int) -> Int[Array, "B G"]:
  """Where to write: positions, all different, those beyond T being dropped."""
  beyond = length + jnp.arange(tokens.index.shape[1])
  return jnp.where(tokens.valid, tokens.index, beyond[None, :])


def _positions(x: Float[Array, "B S K H"]) -> Int[Array, "B S"]:
  return jnp.broadcast_to(jnp.arange(x.shape[1])[None, :], x.shape[:2])


def _take(x: Array, index: Int[Array, "B G"]) -> Array:
  """Rows of `x [B, T, …]` by example: `[B, G, …]`."""
  return jax.vmap(lambda rows, i: rows[i])(x, index)


def _pairs(
  rules: Rules,
  query_position: Int[Array, "B X"],
  key_position: Int[Array, "B Y"],
) -> Bool[Array, "B X Y"]:
  """Which of these keys each of these queries may see."""
  batch, rows = query_position.shape
  allowed = jnp.ones((batch, rows, key_position.shape[1]), bool)
  if rules.is_causal:
    allowed &= key_position[:, None, :] <= query_position[:, :, None]
  if rules.key_mask is not None:
    allowed &= _take(rules.key_mask, key_position)[:, None, :]
  if rules.query_segments is not None and rules.key_segments is not None:
    of_query = _take(rules.query_segments, query_position)
    of_key = _take(rules.key_segments, key_position)
    allowed &= of_query[:, :, None] == of_key[:, None, :]
  return allowed
