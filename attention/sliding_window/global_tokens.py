"""Global tokens of `sliding_window_attention`.

A global token is seen by every query and, as a query, sees every key. The first
half is part of the loop over tiles: the keys of the tokens are hidden from the
windows and appended to every tile as G extra keys, so a token inside a window
is in the union once. The second half is dense attention of G queries over all
keys. Its rows replace those of the loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.core.visibility import Visibility, by_example
from attention.dense import dense_attention


class Tokens(NamedTuple):
  """The global tokens; where not `valid`, `index` is any position in [0, T)."""

  index: Int[Array, "B G"]
  valid: Bool[Array, "B G"]


def unique_tokens(indices: Int[Array, "B G"], length: int) -> Tokens:
  """The tokens of a call; valid once for each position in [0, T)."""
  indices = jnp.sort(indices, axis=1)
  previous = jnp.pad(indices[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  valid = (indices >= 0) & (indices < length) & (indices != previous)
  return Tokens(jnp.clip(indices, 0, length - 1), valid)


def others(tokens: Tokens, length: int) -> Bool[Array, "B S"]:
  """False at the positions of the tokens, True elsewhere."""
  position = jnp.arange(length)[None, :, None]
  here = (tokens.index[:, None, :] == position) & tokens.valid[:, None, :]
  return ~jnp.any(here, axis=-1)


def global_keys(
  tokens: Tokens,
  sees: Visibility,
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
) -> tuple[
  Float[Array, "B G K H"], Float[Array, "B G K V"], Bool[Array, "B T G"]
]:
  """Keys and values of the tokens, and which of them each query sees."""
  seen = sees.at(_positions(key), tokens.index) & tokens.valid[:, None, :]
  # A token that no query sees is set to zero, as in the loop over tiles.
  read = jnp.any(seen, axis=1)[:, :, None, None]
  return (
    jnp.where(read, by_example(key, tokens.index), 0),
    jnp.where(read, by_example(value, tokens.index), 0),
    seen,
  )


def replace_rows(
  out: Float[Array, "B T N V"],
  tokens: Tokens,
  sees: Visibility,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  scale: float,
  dropout_rate: float,
  dropout_rng: Array | None,
  sinks: Float[Array, "N"] | None = None,
  logits_soft_cap: float | None = None,
) -> Float[Array, "B T N V"]:
  """Replaces the rows of the global queries, which see all keys."""
  rows = dense_attention(
    by_example(query, tokens.index),
    key,
    value,
    mask=sees.at(tokens.index, _positions(key))[:, None],
    scale=scale,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
    sinks=sinks,
    logits_soft_cap=logits_soft_cap,
  )
  # Slots that are not valid get different indices beyond T and are dropped.
  beyond = out.shape[1] + jnp.arange(tokens.index.shape[1])
  slots = jnp.where(tokens.valid, tokens.index, beyond[None, :])
  return jax.vmap(
    lambda old, slot, new: old.at[slot].set(
      new, mode="drop", unique_indices=True
    )
  )(out, slots, rows)


def _positions(x: Float[Array, "B S K H"]) -> Int[Array, "B S"]:
  return jnp.broadcast_to(jnp.arange(x.shape[1])[None, :], x.shape[:2])
