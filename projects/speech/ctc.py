"""Connectionist temporal classification: loss and greedy decoding.

Symbol 0 is the blank. There are logits for every ⌈S/T⌉-th of S frames.

Paper: Graves et al. 2006, Connectionist temporal classification.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLANK = 0


def subsample_mask(mask: jax.Array, length: int) -> jax.Array:
  """Returns the mask of `length` logits that belong to frames without padding.

  Args:
    mask: [B, S], True at frames that are not padding; S is a multiple of `length`.
    length: T.

  Raises:
    ValueError: S is not a multiple of T.
  """
  if mask.shape[1] % length:
    raise ValueError(
      f"expected logits of every frame, every second and so on, got {length} of "
      f"{mask.shape[1]} frames"
    )
  return mask[:, :: mask.shape[1] // length]


def loss(
  logits: jax.Array, mask: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns Σ −log p(targets) over rows, and the number of their symbols.

  Args:
    logits: [B, T, V].
    mask: [B, T], True at logits that are not padding.
    targets: [B, U] ids from 1.
    weights: [B, U], 1 for ids and 0 after the last; a row of zeros is ignored.
  """
  losses = optax.ctc_loss(
    logits.astype(jnp.float32),
    1.0 - mask.astype(jnp.float32),
    targets,
    1.0 - weights,
    blank_id=BLANK,
  )
  has_any = jnp.any(weights > 0, axis=1)
  return jnp.sum(jnp.where(has_any, losses, 0.0)), jnp.sum(weights)


def greedy(logits: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the most probable symbol of each frame, or the blank for a repetition.

  Args:
    logits: [B, T, V].
    mask: [B, T], True at logits that are not padding.

  Returns:
    [B, T] ids; the recognised symbols are those that are not blank.
  """
  best = jnp.where(mask, jnp.argmax(logits, axis=-1), BLANK)
  previous = jnp.pad(best, ((0, 0), (1, 0)))[:, :-1]
  return jnp.where(best == previous, BLANK, best)


def edit_distance(
  hypotheses: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
  """Counts insertions, deletions and substitutions between hypotheses and targets.

  Args:
    hypotheses: [B, T] ids; blanks are skipped.
    targets: [B, U] ids.
    weights: [B, U], 1 for ids and 0 after the last.

  Returns:
    [B] int32. Cost: B·T·U additions and comparisons.
  """
  columns = jnp.arange(targets.shape[1] + 1)[None, :]

  def step(row, ids):
    # row[j] is the distance from the first j targets to the hypothesis so far.
    substitution = row[:, :-1] + (targets != ids[:, None])
    new = jnp.minimum(row[:, 1:] + 1, substitution)
    new = jnp.concatenate([row[:, :1] + 1, new], axis=1)
    # Any number of deletions may follow.
    new = columns + jax.lax.cummin(new - columns, axis=1)
    return jnp.where(ids[:, None] == BLANK, row, new), None

  first = jnp.broadcast_to(columns, (len(targets), columns.shape[1]))
  last, _ = jax.lax.scan(step, first, jnp.moveaxis(hypotheses, 1, 0))
  lengths = jnp.sum(weights > 0, axis=1)
  return jnp.take_along_axis(last, lengths[:, None], axis=1)[:, 0]


def text(ids: np.ndarray, symbols: str) -> str:
  """Returns the text of a row of `greedy`.

  Args:
    ids: [T].
    symbols: the symbol of id i is at index i − 1.
  """
  return "".join(symbols[int(i) - 1] for i in ids if i != BLANK)
