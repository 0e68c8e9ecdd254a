"""Generation: greedy, sampling and beam search, each one compiled loop."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from models.api import Model
from models.beam_search import beam_search
from models.transformer import check_length

METHODS = ("greedy", "sample", "beam")


class Generated(NamedTuple):
  """What `generate` returns.

  Attributes:
    tokens: `[B, max_length]` int32: what follows the prompt, with its
      end-of-sequence id where there is one, then padding.
    scores: `[B]` float32: the log-probability of `tokens`; of a beam search
      divided by its length penalty.
  """

  tokens: Int[Array, "B L"]
  scores: Float[Array, "B"]


def generate(
  model: Model,
  variables: Any,
  *,
  source: Int[Array, "B S"] | None = None,
  prompt: Int[Array, "B P"] | None = None,
  prompt_length: Int[Array, "B"] | None = None,
  max_length: int,
  bos_id: int,
  eos_id: int,
  pad_id: int = 0,
  method: str = "greedy",
  temperature: float = 1.0,
  top_k: int | None = None,
  beam_size: int = 4,
  length_penalty: float = 0.6,
  rng: Array | None = None,
) -> Generated:
  """Decodes a batch token by token over the mechanisms' caches.

  One compiled loop, once per model and shapes, that stops when every sequence
  has ended. The encoder runs once. A sequence ends with `eos_id` or after
  `max_length` tokens, and no sequence depends on the others in its batch.

  Args:
    model: from `create`, with a decoder.
    variables: from `initialize`, or trained.
    source: ids the encoder reads; for the encoder-decoder.
    prompt: ids the decoder reads first, the start symbol included; None is
      `bos_id` alone.
    prompt_length: how much of each row is prompt; None is all of it.
    max_length: tokens to generate at most.
    bos_id: starts a sequence without a prompt.
    eos_id: ends one.
    pad_id: fills rows after their end.
    method: 'greedy' takes the likeliest token, 'sample' draws one, 'beam'
      searches.
    temperature: of 'sample'; divides the logits.
    top_k: of 'sample'; draws among that many likeliest. None is all.
    beam_size: of 'beam'; hypotheses per sequence.
    length_penalty: of 'beam'; α in log P / ((5 + length) / 6)^α.
    rng: key of 'sample'.

  Returns:
    `Generated(tokens, scores)`.

  Raises:
    ValueError: the model or a mechanism cannot generate, or an argument does
      not fit the others.

  Cost: prompt + max_length steps of the decoder; beams share one copy of the
  encoder's keys and values.
  """
  config = model.config
  if config.kind == "encoder":
    raise ValueError(
      "model: kind 'encoder' cannot generate; use one with a decoder"
    )
  for decoder in config.attentions.get("decoder_attention", ()):
    if "decode" not in decoder.build().supports:
      raise ValueError(
        f"decoder_attention: {decoder.name} cannot decode token by token; "
        "generate with a mechanism whose `supports` has 'decode'"
      )
  if (source is None) != (config.kind == "decoder"):
    raise ValueError(
      f"source: kind '{config.kind}' "
      + ("has no encoder to read it" if source is not None else "needs it")
    )
  _check_method(
    method,
    {
      "temperature": (temperature, 1.0, "sample"),
      "top_k": (top_k, None, "sample"),
      "beam_size": (beam_size, 4, "beam"),
      "length_penalty": (length_penalty, 0.6, "beam"),
    },
  )
  vocab_size = model.target_vocab_size
  if not temperature > 0.0:
    raise ValueError(f"temperature: expected more than 0, got {temperature}")
  if top_k is not None and not 1 <= top_k <= vocab_size:
    raise ValueError(f"top_k: expected 1 to {vocab_size}, got {top_k}")
  if beam_size < 1:
    raise ValueError(f"beam_size: expected at least 1, got {beam_size}")
  if not length_penalty >= 0.0:
    raise ValueError(
      f"length_penalty: expected 0 or more, got {length_penalty}"
    )
  if method == "sample" and rng is None:
    raise ValueError("rng: method 'sample' needs a key, got None")
  if max_length < 1:
    raise ValueError(f"max_length: expected at least 1, got {max_length}")
  prompts, lengths = _prompt(source, prompt, prompt_length, bos_id)
  check_length(
    "max_length", prompts.shape[1] - 1 + max_length, model.max_target_length
  )
  return _run(
    model,
    variables,
    source,
    prompts,
    lengths,
    rng if method == "sample" else None,
    temperature,
    length_penalty,
    max_length=max_length,
    eos_id=eos_id,
    pad_id=pad_id,
    method=method,
    top_k=vocab_size if top_k is None else top_k,
    beam_size=beam_size,
  )


def _check_method(
  method: str, options: Mapping[str, tuple[Any, Any, str]]
) -> None:
  """Raises for an unknown method and for an option it would not read."""
  if method not in METHODS:
    raise ValueError(
      f"method: expected one of {', '.join(METHODS)}, got '{method}'"
    )
  for name, (value, default, reader) in options.items():
    if value != default and method != reader:
      raise ValueError(
        f"{name}: method '{method}' does not read it; use method '{reader}' "
        f"or leave it {default}, got {value}"
      )


def _prompt(
  source: Array | None,
  prompt: Array | None,
  prompt_length: Array | None,
  bos_id: int,
) -> tuple[np.ndarray, np.ndarray]:
  """The prompt [B, P] and its lengths [B], filled in and checked."""
  if prompt is None:
    if prompt_length is not None:
      raise ValueError("prompt_length: expected a prompt with it, got None")
    ids = np.full((1 if source is None else len(source), 1), bos_id, np.int32)
  else:
    ids = np.asarray(prompt, np.int32)
  batch, longest = ids.shape
  if source is not None and len(source) != batch:
    raise ValueError(
      f"prompt: expected {len(source)} rows, one a source, got {batch}"
    )
  lengths = np.full((batch,), longest, np.int32)
  if prompt_length is not None:
    lengths = np.asarray(prompt_length, np.int32)
  if lengths.shape != (batch,) or lengths.min() < 1 or lengths.max() > longest:
    raise ValueError(
      f"prompt_length: expected {batch} lengths of 1 to {longest}, got "
      f"{lengths.tolist()}"
    )
  return ids, lengths


@functools.partial(
  jax.jit,
  static_argnames=(
    "model",
    "max_length",
    "eos_id",
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
  prompt: Int[Array, "B P"],
  prompt_length: Int[Array, "B"],
  rng: Array | None,
  temperature: Float[Array, ""],
  length_penalty: Float[Array, ""],
  *,
  max_length: int,
  eos_id: int,
  pad_id: int,
  method: str,
  top_k: int,
  beam_size: int,
) -> Generated:
  """Starts the caches and runs the method's loop; no `rng` is greedy."""
  batch, longest = prompt.shape
  beams = beam_size if method == "beam" else 1
  _, state = model.apply(
    variables,
    source,
    batch * beams,
    longest - 1 + max_length,
    method="start",
    mutable=["cache", "memory"],
  )
  memory = state.get("memory", {})

  def decode(cache, tokens):
    now: dict[str, Any] = {**variables, "memory": memory, "cache": cache}
    logits, new = model.apply(now, tokens, method="decode", mutable=["cache"])
    return logits, new["cache"]

  common = (decode, state["cache"], prompt, prompt_length)
  sizes = {"max_length": max_length, "eos_id": eos_id, "pad_id": pad_id}
  if method == "beam":
    tokens, scores = beam_search(
      *common, length_penalty, beam_size=beam_size, **sizes
    )
    return Generated(tokens, scores)

  def choose(logits, step):
    if rng is None:
      return jnp.argmax(logits, axis=-1)
    largest, ids = jax.lax.top_k(logits, top_k)
    key = jax.random.fold_in(rng, step)
    drawn = jax.random.categorical(key, largest / temperature)
    return jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]

  return _extend(*common, choose, **sizes)


class _State(NamedTuple):
  """One sequence per row; `step` counts positions read, prompt included."""

  step: Int[Array, ""]
  current: Int[Array, "B"]
  tokens: Int[Array, "B L"]
  scores: Float[Array, "B"]
  ended: Bool[Array, "B"]
  cache: Any


def _extend(
  decode: Callable[[Any, Array], tuple[Array, Any]],
  cache: Any,
  prompt: Int[Array, "B P"],
  prompt_length: Int[Array, "B"],
  choose: Callable[[Array, Array], Array],
  *,
  max_length: int,
  eos_id: int,
  pad_id: int,
) -> Generated:
  """Extends each prompt by one chosen token at a time.

  All rows stand at one position. A row whose prompt is longer still reads it
  while others generate, and a row whose prompt is shorter ends earlier.
  """
  batch, longest = prompt.shape
  slots = jnp.arange(max_length)[None, :]

  def body(state: _State) -> _State:
    logits, cache = decode(state.cache, state.current)
    chosen = choose(logits, state.step).astype(jnp.int32)
    log_probs = jax.nn.log_softmax(logits)
    score = jnp.take_along_axis(log_probs, chosen[:, None], axis=1)[:, 0]
    slot = state.step + 1 - prompt_length
    active = (slot >= 0) & ~state.ended
    here = (slots == slot[:, None]) & active[:, None]
    given = prompt[:, jnp.minimum(state.step + 1, longest - 1)]
    last = (chosen == eos_id) | (slot == max_length - 1)
    return _State(
      step=state.step + 1,
      current=jnp.where(slot < 0, given, chosen),
      tokens=jnp.where(here, chosen[:, None], state.tokens),
      scores=state.scores + jnp.where(active, score, 0.0),
      ended=state.ended | (active & last),
      cache=cache,
    )

  state = jax.lax.while_loop(
    lambda state: ~jnp.all(state.ended),
    body,
    _State(
      step=jnp.int32(0),
      current=prompt[:, 0],
      tokens=jnp.full((batch, max_length), pad_id, jnp.int32),
      scores=jnp.zeros((batch,), jnp.float32),
      ended=jnp.zeros((batch,), bool),
      cache=cache,
    ),
  )
  return Generated(state.tokens, state.scores)
