"""Beam search over any decoder with a cache."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class _State(NamedTuple):
  """The hypotheses of each row; `step` is the number of tokens chosen so far.

  `scores` are log-probabilities of unfinished hypotheses. `finished_scores` are
  log-probabilities divided by the length penalty; -inf marks an empty entry.
  """

  step: Int[Array, ""]
  logits: Float[Array, "BA V"]
  tokens: Int[Array, "B A L"]
  scores: Float[Array, "B A"]
  finished_tokens: Int[Array, "B A L"]
  finished_scores: Float[Array, "B A"]
  ended: Bool[Array, "B"]
  cache: Any


def beam_search(
  decode: Callable[[Any, Array], tuple[Array, Any]],
  logits: Float[Array, "B V"],
  cache: Any,
  length_penalty: Float[Array, ""],
  *,
  beam_size: int,
  max_length: int,
  eos_ids: Collection[int],
  pad_id: int,
) -> tuple[Int[Array, "B L"], Float[Array, "B"]]:
  """Finds the continuation with the highest log P / ((5 + length) / 6)^α.

  Each step extends the A hypotheses of a row by every token and keeps the A most
  likely ones that have not ended. Those that have ended, and are among the A most
  likely of all, enter a pool of the A best by penalized score. A row ends when its
  pool is full, when no unfinished hypothesis can beat the best of the pool (which
  changes no result), or after `max_length` tokens. One beam is greedy decoding; as many
  beams as sequences are an exhaustive search.

  Args:
    decode: `(cache, tokens [B·A]) -> (logits [B·A, V], cache)`.
    logits: `[B, V]`, after the prompt of each row.
    cache: after the prompts; every array has leading axis B. In `decode` this axis is
      B·A, with adjacent beams of a row.
    length_penalty: α ≥ 0.
    beam_size: A.
    max_length: L, the largest number of tokens to generate.
    eos_ids: each ends a hypothesis.
    pad_id: fills rows after their end.

  Returns:
    `tokens [B, L]` and penalized scores `[B]` of the best finished hypothesis of each
    row, or of its best unfinished one if none has finished.

  Paper: Google's neural machine translation system, section 7,
  arXiv:1609.08144.
  """
  batch = logits.shape[0]
  steps = jnp.arange(max_length)[None, None, :]
  first_beam = (jnp.arange(batch) * beam_size)[:, None]

  def penalty(length):
    return ((5.0 + length) / 6.0) ** length_penalty

  def body(state: _State) -> _State:
    vocab_size = state.logits.shape[-1]
    log_probs = jax.nn.log_softmax(state.logits.astype(state.scores.dtype))
    log_probs = log_probs.reshape(batch, beam_size, -1)
    totals = (state.scores[:, :, None] + log_probs).reshape(batch, -1)
    # At most A of these end with each id, so at least A do not end.
    width = (1 + len(eos_ids)) * beam_size
    values, indices = jax.lax.top_k(totals, min(width, beam_size * vocab_size))
    parents, ids = indices // vocab_size, indices % vocab_size
    tokens = jnp.where(
      steps == state.step,
      ids[:, :, None],
      _take(state.tokens, parents),
    )

    ends = jnp.isin(ids, jnp.array(eos_ids))
    eligible = ends & (jnp.arange(ids.shape[1])[None, :] < beam_size)
    penalized = (values / penalty(state.step + 1)).astype(values.dtype)
    finished_scores, best = jax.lax.top_k(
      jnp.concatenate(
        [state.finished_scores, jnp.where(eligible, penalized, -jnp.inf)],
        axis=1,
      ),
      beam_size,
    )
    finished_tokens = _take(
      jnp.concatenate([state.finished_tokens, tokens], axis=1), best
    )

    scores, best = jax.lax.top_k(jnp.where(ends, -jnp.inf, values), beam_size)
    tokens, next_tokens = _take(tokens, best), _take(ids, best)
    parents = _take(parents, best)

    # With length, log-probabilities only decrease and the penalty only grows.
    upper_bound = scores[:, 0] / penalty(max_length)
    last = (
      jnp.all(jnp.isfinite(finished_scores), axis=1)
      | (finished_scores[:, 0] >= upper_bound)
      | (state.step == max_length - 1)
    )
    # Rows that have ended do not change.
    active = ~state.ended
    row, cell = active[:, None], active[:, None, None]
    parents = jnp.where(row, parents, jnp.arange(beam_size)[None, :])
    source_beams = (first_beam + parents).reshape(-1)
    cache = jax.tree.map(lambda x: x[source_beams], state.cache)
    logits, cache = decode(cache, next_tokens.reshape(-1))
    return _State(
      step=state.step + 1,
      logits=logits,
      tokens=jnp.where(cell, tokens, state.tokens),
      scores=jnp.where(row, scores, state.scores),
      finished_tokens=jnp.where(cell, finished_tokens, state.finished_tokens),
      finished_scores=jnp.where(row, finished_scores, state.finished_scores),
      ended=state.ended | (active & last),
      cache=cache,
    )

  empty = jnp.full((batch, beam_size, max_length), pad_id, jnp.int32)
  no_score = jnp.full((batch, beam_size), -jnp.inf, jnp.float32)
  state = jax.lax.while_loop(
    lambda state: ~jnp.all(state.ended),
    body,
    _State(
      step=jnp.int32(0),
      logits=jnp.repeat(logits, beam_size, axis=0),
      tokens=empty,
      # All beams have the same prompt, so only the first one is extended.
      scores=no_score.at[:, 0].set(0.0),
      finished_tokens=empty,
      finished_scores=no_score,
      ended=jnp.zeros((batch,), bool),
      cache=jax.tree.map(lambda x: jnp.repeat(x, beam_size, axis=0), cache),
    ),
  )
  finished = jnp.isfinite(state.finished_scores[:, 0])
  return (
    jnp.where(
      finished[:, None], state.finished_tokens[:, 0], state.tokens[:, 0]
    ),
    jnp.where(
      finished,
      state.finished_scores[:, 0],
      state.scores[:, 0] / penalty(max_length),
    ),
  )


def _take(array: Array, indices: Int[Array, "B A"]) -> Array:
  """Selects entries of `array [B, C, …]` along its second axis."""
  indices = indices.reshape(*indices.shape, *(1,) * (array.ndim - 2))
  return jnp.take_along_axis(array, indices, axis=1)
