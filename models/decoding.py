"""Greedy decoding, sampling and beam search, each as one compiled loop."""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.checks import check_at_least
from models.beam_search import beam_search
from models.decoding_checks import (
  check_int,
  check_method,
  check_model,
  eos_ids,
  prompt_ids,
  source_ids,
)
from models.kind import Model
from models.rows import where_rows
from models.sizes import check_length
from models.transformer import OPTIONAL
from settings.suggest import did_you_mean


class Generated(NamedTuple):
  """Generated sequences and their scores.

  Attributes:
    tokens: `[B, max_length]` int32: the continuation of the prompt, up to and
      including an end-of-sequence id, then padding.
    scores: `[B]` float32: the log-probability of `tokens`, which beam search divides
      by its length penalty.
  """

  tokens: Int[Array, "B L"]
  scores: Float[Array, "B"]


def generate(
  model: Model,
  variables: Any,
  *,
  source: Int[Array, "B S"] | None = None,
  source_mask: Bool[Array, "B S"] | None = None,
  prompt: Int[Array, "B P"] | None = None,
  prompt_length: Int[Array, "B"] | None = None,
  max_length: int,
  bos_id: int,
  eos_id: int | Sequence[int],
  pad_id: int = 0,
  method: str = "greedy",
  temperature: float = 1.0,
  top_k: int | None = None,
  beam_size: int = 4,
  length_penalty: float = 0.6,
  rng: Array | None = None,
  **embedded: Array,
) -> Generated:
  """Generates a batch of sequences token by token from the mechanisms' caches.

  Decoding is one loop, which is compiled once for a model and shapes and stops when all
  sequences have ended. The encoder runs once. A sequence ends with `eos_id` or after
  `max_length` tokens, and does not depend on the others in its batch.

  Args:
    model: from `create`, with a decoder.
    variables: from `initialize`, or trained.
    source: `[B, S]`, ids of the encoder; for an encoder-decoder.
    source_mask: `[B, S]`, as in `Transformer.__call__`.
    prompt: `[B, P]`, the first ids of the decoder, including the start symbol; None
      means only `bos_id`.
    prompt_length: `[B]`, the length of each prompt; None is P.
    max_length: the largest number of tokens to generate.
    bos_id: starts a sequence without a prompt.
    eos_id: the id that ends a sequence, or several such ids; -1 is none.
    pad_id: fills rows after their end.
    method: 'greedy' takes the most likely token, 'sample' samples one, and 'beam' is
      beam search.
    temperature: divides the logits, for 'sample'.
    top_k: samples from the k most likely tokens, for 'sample'; None is all.
    beam_size: hypotheses per sequence, for 'beam'.
    length_penalty: α in log P / ((5 + length) / 6)^α, for 'beam'.
    rng: random key, for 'sample'.
    **embedded: further inputs of the model that belong to the prompt.

  Returns:
    `Generated(tokens, scores)`.

  Raises:
    ValueError: the model or a mechanism cannot generate, an id is outside its
      vocabulary, or two arguments are incompatible.

  Cost: one call on the prompts and max_length steps of the decoder; beams share one
  copy of the encoder's keys and values.
  """
  check_model(model, source, source_mask)
  vocab_size = model.target_vocab_size
  check_method(
    method,
    vocab_size,
    temperature=temperature,
    top_k=top_k,
    beam_size=beam_size,
    length_penalty=length_penalty,
    rng=rng,
  )
  check_at_least("max_length", max_length, 1)
  check_int("pad_id", pad_id)
  source, source_mask = source_ids(model, source, source_mask)
  prompts, lengths = prompt_ids(
    source,
    prompt,
    prompt_length,
    bos_id,
    # With further inputs, some ids may be placeholders for them.
    None if embedded else vocab_size,
  )
  # The others are options of a whole batch.
  readable = [x for x in getattr(model, "optional", ()) if x not in OPTIONAL]
  for name in embedded:
    if name not in readable:
      known = [*inspect.signature(generate).parameters, *readable]
      raise ValueError(f"{name}: unknown; {did_you_mean(name, known)}")
    if prompt is None:
      raise ValueError(f"{name}: expected a prompt with placeholders for it")
  check_length(
    "max_length", prompts.shape[1] - 1 + max_length, model.max_target_length
  )
  return _run(
    model,
    variables,
    source,
    source_mask,
    prompts,
    lengths,
    embedded,
    rng if method == "sample" else None,
    temperature,
    length_penalty,
    max_length=max_length,
    eos_ids=eos_ids(eos_id, vocab_size),
    pad_id=pad_id,
    method=method,
    top_k=vocab_size if top_k is None else top_k,
    beam_size=beam_size,
  )


@functools.partial(
  jax.jit,
  static_argnames=(
    "model",
    "max_length",
    "eos_ids",
    "pad_id",
    "method",
    "top_k",
    "beam_size",
  ),
)
def _run(
  model: Model,
  variables: Any,
  source: Int[Array, "B S"] | None,
  source_mask: Bool[Array, "B S"] | None,
  prompt: Int[Array, "B P"],
  prompt_length: Int[Array, "B"],
  embedded: Mapping[str, Array],
  rng: Array | None,
  temperature: Float[Array, ""],
  length_penalty: Float[Array, ""],
  *,
  max_length: int,
  eos_ids: tuple[int, ...],
  pad_id: int,
  method: str,
  top_k: int,
  beam_size: int,
) -> Generated:
  """Creates the caches and runs the method's loop; without `rng`, it is greedy."""
  batch, longest = prompt.shape
  _, state = model.apply(
    variables,
    source,
    batch,
    longest - 1 + max_length,
    *(() if source_mask is None else (source_mask,)),
    method="start",
    mutable=["cache", "memory"],
  )
  memory = state.get("memory", {})

  def call(method, cache, *arguments, **options):
    collections: dict[str, Any] = {
      **variables,
      "memory": memory,
      "cache": cache,
    }
    logits, new = model.apply(
      collections, *arguments, **options, method=method, mutable=["cache"]
    )
    return logits, new["cache"]

  decode = functools.partial(call, "decode")
  if longest == 1:
    logits, cache = decode(state["cache"], prompt[:, 0])
  else:
    logits, cache = _read_prompt(
      model, call, state["cache"], prompt, prompt_length, embedded
    )
  sizes: dict[str, Any] = {
    "max_length": max_length,
    "eos_ids": eos_ids,
    "pad_id": pad_id,
  }
  if method == "beam":
    tokens, scores = beam_search(
      decode, logits, cache, length_penalty, beam_size=beam_size, **sizes
    )
    return Generated(tokens, scores)

  def choose(logits, step):
    if rng is None:
      return jnp.argmax(logits, axis=-1)
    largest, ids = jax.lax.top_k(logits, top_k)
    key = jax.random.fold_in(rng, step)
    sample = jax.random.categorical(key, largest / temperature)
    return jnp.take_along_axis(ids, sample[:, None], axis=1)[:, 0]

  return _extend(decode, logits, cache, choose, **sizes)


def _read_prompt(
  model: Model,
  call: Callable[..., tuple[Array, Any]],
  cache: Any,
  prompt: Int[Array, "B P"],
  prompt_length: Int[Array, "B"],
  embedded: Mapping[str, Array],
) -> tuple[Array, Any]:
  """Computes the logits after each prompt, and the cache with the prompts.

  A Transformer reads a prompt in one call, a recurrent model one id at a time.
  """
  if hasattr(model, "prefill"):
    return call("prefill", cache, prompt, prompt_length, **embedded)

  def step(carry, inputs):
    t, ids = inputs
    logits, new_cache = call("decode", carry[1], ids)
    new = (logits, new_cache)
    if carry[0] is None:
      return new, None
    return where_rows(t < prompt_length, new, carry), None

  # Every prompt has at least one id.
  first, _ = step((None, cache), (0, prompt[:, 0]))
  rest = (jnp.arange(1, prompt.shape[1]), prompt[:, 1:].T)
  return jax.lax.scan(step, first, rest)[0]


class _State(NamedTuple):
  """The sequence of each row; `step` is the number of tokens chosen so far."""

  step: Int[Array, ""]
  logits: Float[Array, "B V"]
  tokens: Int[Array, "B L"]
  scores: Float[Array, "B"]
  ended: Bool[Array, "B"]
  cache: Any


def _extend(
  decode: Callable[[Any, Array], tuple[Array, Any]],
  logits: Float[Array, "B V"],
  cache: Any,
  choose: Callable[[Array, Array], Array],
  *,
  max_length: int,
  eos_ids: tuple[int, ...],
  pad_id: int,
) -> Generated:
  """Extends each prompt by one chosen token at a time."""
  batch = logits.shape[0]
  steps = jnp.arange(max_length)[None, :]

  def body(state: _State) -> _State:
    next_tokens = choose(state.logits, state.step).astype(jnp.int32)
    log_probs = jax.nn.log_softmax(state.logits.astype(state.scores.dtype))
    score = jnp.take_along_axis(log_probs, next_tokens[:, None], axis=1)[:, 0]
    mask = (steps == state.step) & ~state.ended[:, None]
    ends = jnp.isin(next_tokens, jnp.array(eos_ids, jnp.int32))
    last = ends | (state.step == max_length - 1)
    logits, cache = decode(state.cache, next_tokens)
    return _State(
      step=state.step + 1,
      logits=logits,
      tokens=jnp.where(mask, next_tokens[:, None], state.tokens),
      scores=state.scores + jnp.where(state.ended, 0.0, score),
      ended=state.ended | last,
      cache=cache,
    )

  state = jax.lax.while_loop(
    lambda state: ~jnp.all(state.ended),
    body,
    _State(
      step=jnp.int32(0),
      logits=logits,
      tokens=jnp.full((batch, max_length), pad_id, jnp.int32),
      scores=jnp.zeros((batch,), jnp.float32),
      ended=jnp.zeros((batch,), bool),
      cache=cache,
    ),
  )
  return Generated(state.tokens, state.scores)
