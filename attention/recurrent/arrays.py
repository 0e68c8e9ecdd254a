"""Prepares the arrays of a recurrence: per head, in float32, masked and in chunks."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.platform import layout
from attention.recurrent.scan import is_sequence_sharded
from attention.recurrent.triangular import LOG_ZERO
from attention.softmax import sharding


def repeat_heads(
  x: Float[Array, "B T _ H"], *others: Float[Array, "B T _ _"]
) -> Float[Array, "B T _ H"]:
  """Repeats the heads of `x` to the largest number of heads of all arrays."""
  for other in others:
    x = jnp.repeat(x, max(1, other.shape[2] // x.shape[2]), axis=2)
  return x


def prepare_arrays(
  query: Float[Array, "B T N H"],
  arrays: tuple[Float[Array, "B T _ _"] | None, ...],
  *,
  log_decay: Float[Array, "..."] | None,
  mask: Bool[Array, "..."] | None,
  is_causal: bool,
  segment_ids: Int[Array, "B T"] | None = None,
  axis_name: str | None = None,
) -> tuple[tuple[Any, ...], Float[Array, "B T N _"], Array | None]:
  """Converts arrays to float32, repeats them per query head, and zeros masked
  positions.

  Returns:
    The `arrays` `[B, T, K or N, D]` as `[B, T, N, D]`, or None for None; the log decays
    `[B, T, N, 1 or H]`, which are `LOG_ZERO` at the start of a segment; and whether a
    segment starts at a position, `[B, T, 1, 1]`, or None without segments.

  Raises:
    ValueError: as in `recurrent_attention`.
  """
  heads = query.shape[:3]
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; a recurrence is causal by definition; "
      "use linear or dense attention in both directions"
    )
  if log_decay is None:
    log_decay = jnp.zeros(heads, jnp.float32)
  if log_decay.shape not in (heads, query.shape):
    raise ValueError(
      f"log_decay: expected [B, T, N] = {heads}, or [B, T, N, H] = "
      f"{query.shape}, got {log_decay.shape}"
    )
  keep = checks.key_mask(mask, query, query)

  def prepare(x):
    x = x.astype(jnp.float32)
    if keep is not None:
      x = layout.zero_masked(x, keep)
    return jnp.repeat(x, heads[2] // x.shape[2], axis=2)

  # Prevents constant folding: for constant decays, XLA:GPU would compute the decays of
  # all pairs during compilation, which takes minutes.
  log_decay = jax.lax.optimization_barrier(log_decay)
  log_decay, starts = prepare(log_decay.reshape(*heads, -1)), None
  if segment_ids is not None:
    starts = segment_starts(segment_ids, axis_name)[..., None, None]
    log_decay = jnp.where(starts, LOG_ZERO, log_decay)
  return jax.tree.map(prepare, arrays), log_decay, starts


def segment_starts(
  segment_ids: Int[Array, "B T"], axis_name: str | None
) -> Bool[Array, "B T"]:
  """Whether a segment starts; the first one continues from the initial state."""
  if is_sequence_sharded(axis_name):
    previous = sharding.exchange_halo(segment_ids, 1, 0, axis_name)[:, :-1]
  else:
    previous = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], 1)
  return segment_ids != previous


def unit_length(x: Float[Array, "*A H"]) -> Float[Array, "*A H"]:
  """Normalises to unit length, x / √(Σ x² + 10⁻⁶), along the last axis in float32."""
  x = x.astype(jnp.float32)
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(squares + 1e-6)


def chunks(arrays: Any, count: int) -> Any:
  """Reshapes arrays `[B, G·C, N, D]` to `[B, N, G, C, D]` with G = `count`."""

  def split(x):
    x = x.reshape(x.shape[0], count, -1, *x.shape[2:])
    return x.transpose(0, 3, 1, 2, 4)

  return jax.tree.map(split, arrays)


def unchunk(x: Float[Array, "B N G C D"]) -> Float[Array, "B T N D"]:
  """Inverts `chunks` for one array."""
  x = x.transpose(0, 2, 3, 1, 4)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
