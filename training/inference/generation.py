"""Text generation with a trained run: one output line per input line."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import itertools
from numbers import Integral, Real
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from settings.errors import ConfigError
from settings.suggest import did_you_mean
import tasks
from training.checkpoint import Checkpoints
from training.experiment import Experiment
from training.workdir import last_step

_BATCH_SIZE = 64
_ROUND_TO = 16


def restore_variables(
  experiment: Experiment, workdir: pathlib.Path, step: int | None = None
) -> Mapping[str, Any]:
  """Restores the variables of a checkpoint.

  The default is the newest intact checkpoint, or the best one if the run keeps it. If a
  finished run has lost its last checkpoint, one line on standard error says so.

  Raises:
    ConfigError: there is no checkpoint, or none of this step.
  """
  train, restored = experiment.config.train, None
  if (workdir / "checkpoints").is_dir():
    checkpoints = Checkpoints(workdir, train, read_only=True)
    try:
      restored = checkpoints.restore(experiment.shapes, step, best=True)
    finally:
      checkpoints.close()
  if restored is None:
    raise ConfigError(f"workdir: no checkpoint in {workdir}; train it first")
  state, last = restored[0], last_step(workdir, experiment.config)
  is_best = train.checkpoint_keep == "best"
  if step is None and not is_best and int(state.step) < last:
    print(
      f"{workdir}: the checkpoint of step {last}, with which this run finished, is "
      f"gone; the variables are those of step {int(state.step)}",
      file=sys.stderr,
    )
  return jax.device_put(state.variables)


def read_lines(stream: Iterable[bytes]) -> list[str]:
  """Reads lines of UTF-8, without their line ends.

  Raises:
    ConfigError: a line is not UTF-8; the message has its number.
  """
  lines = []
  for number, raw in enumerate(stream, 1):
    try:
      # As in a text file, a byte order mark does not belong to the first line.
      encoding = "utf-8-sig" if number == 1 else "utf-8"
      lines.append(raw.decode(encoding).rstrip("\r\n"))
    except UnicodeDecodeError as error:
      raise ConfigError(f"line {number}: not UTF-8 ({error.reason})") from error
  return lines


def generate_lines(
  experiment: Experiment,
  variables: Mapping[str, Any],
  lines: Sequence[str],
  *,
  max_length: int | None = None,
  seed: int = 0,
  batch_size: int = _BATCH_SIZE,
  **options: Any,
) -> list[str]:
  """Generates an output for every line, in batches of lines of similar length.

  A decoder-only model can generate beyond its context: when the context is full, the
  last half of it becomes a new prompt. A line on standard error says so.

  Args:
    experiment: created with `restore=True`.
    variables: variables of the model.
    lines: sources, or prompts for a decoder-only model.
    max_length: largest number of tokens in an output; None means as many as fit into
      the context.
    seed: seed of sampling.
    batch_size: number of lines that are decoded together.
    **options: `method`, `temperature`, `top_k`, `beam_size` and `length_penalty` of
      `models.generate`.

  Returns:
    One output per line, in order; the output of an empty line is empty.

  Raises:
    ConfigError: the model cannot read a line, or does not support an option; the
      message has the number of the line.
  """
  check_decodes(experiment)
  counts = {"max_length": max_length, "seed": seed, "batch_size": batch_size}
  check_options(counts | options)
  task = experiment.task
  has_source = experiment.config.model.layout != "decoder"
  ids = _encode(task, lines, _limit(experiment))
  if not ids:
    return [""] * len(lines)
  longest = max(map(len, ids.values()))
  # The last generated token is never read, so one token can follow a full prompt.
  room = task.max_target_length - (0 if has_source else longest - 1)
  is_beyond = max_length is not None and max_length > room
  if has_source and is_beyond:
    raise ConfigError(
      f"max_length: the model allows {room} tokens here, got {max_length}"
    )

  def generate(inputs, length, rng):
    try:
      return experiment.generate(
        variables, inputs, max_length=length, rng=rng, **options
      ).tokens
    except ValueError as error:  # The method does not support an option.
      raise ConfigError(str(error)) from error

  outputs = dict.fromkeys(range(1, len(lines) + 1), "")
  key = jax.random.key(seed)
  for start, numbers in _batches(ids, batch_size, equal=is_beyond):
    padded = numbers + numbers[-1:] * (batch_size - len(numbers))
    rows = [ids[number] for number in padded]
    rng = jax.random.fold_in(key, start)
    if is_beyond:
      assert max_length is not None
      prompts = np.array(rows, np.int32)
      tokens = _generate_contexts(generate, task, prompts, max_length, rng)
    elif has_source:
      limit = task.max_source_length or longest
      inputs = {"source": pad(rows, task.pad_id, limit)}
      tokens = generate(inputs, max_length or room, rng)
    else:
      # One prompt length for all lines, because the length of the output depends
      # on it.
      prompts = pad(rows, task.pad_id, longest, longest)
      inputs = _prompts(prompts, [len(row) for row in rows])
      tokens = generate(inputs, max_length or room, rng)
    for number, row in zip(numbers, np.asarray(tokens), strict=False):
      text = task.decode(until_end(row.tolist(), task))
      outputs[number] = text.replace("\n", "\\n")
  if is_beyond:
    context = task.max_target_length
    print(
      f"max_length={max_length}: the model reads {context} tokens at a time; when "
      f"they were full it read the last {context // 2} again and continued",
      file=sys.stderr,
    )
  return list(outputs.values())


_KINDS = {
  **dict.fromkeys(
    ("max_length", "seed", "batch_size", "top_k", "beam_size"), Integral
  ),
  **dict.fromkeys(("temperature", "length_penalty"), Real),
}
"""The numeric options of `generate_lines`."""


def check_options(options: Mapping[str, Any]) -> None:
  """Raises ConfigError for an unknown option, or a number that is not in its range."""
  for name, value in options.items():
    if name not in (*_KINDS, "method"):
      raise ConfigError(
        f"{name}: unknown; {did_you_mean(name, [*_KINDS, 'method'])}"
      )
    kind = _KINDS.get(name, object)
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if name in _KINDS and value is not None and not is_number:
      what = "a whole number" if kind is Integral else "a number"
      raise ConfigError(f"{name}: expected {what}, got {value!r}")
  max_length = options["max_length"]
  if max_length is not None and max_length < 1:
    raise ConfigError(f"max_length: expected at least 1, got {max_length}")
  for name, minimum in (("seed", 0), ("batch_size", 1)):
    if (value := options[name]) is None or not minimum <= value < 2**31:
      raise ConfigError(f"{name}: expected {minimum} to 2³¹ - 1, got {value}")


def unreadable(experiment: Experiment, lines: Sequence[str]) -> dict[int, str]:
  """Maps the numbers of lines that the model cannot read to the reasons.

  Raises:
    ConfigError: the model has no decoder.
  """
  check_decodes(experiment)
  limit, reasons = _limit(experiment), {}
  for number, line in enumerate(lines, 1):
    try:
      _encode(experiment.task, [line], limit)
    except ConfigError as error:
      reasons[number] = str(error).removeprefix("line 1: ")
  return reasons


def _limit(experiment: Experiment) -> int | None:
  """Returns the largest number of tokens of a prompt; None if lines are sources."""
  is_decoder = experiment.config.model.layout == "decoder"
  return experiment.task.max_target_length if is_decoder else None


def check_decodes(experiment: Experiment) -> None:
  """Raises ConfigError if the model has no decoder."""
  if experiment.config.model.layout == "encoder":
    raise ConfigError(
      "config.model.kind: an encoder-only model cannot generate; expected a "
      "kind with a decoder, such as 'encoder_decoder' or 'decoder'"
    )


def _encode(
  task: tasks.Task, lines: Sequence[str], limit: int | None
) -> dict[int, list[int]]:
  """Maps the number of each non-empty line to its ids, of which `limit` are allowed."""
  ids = {}
  for number, line in enumerate(lines, 1):
    if not isinstance(line, str):
      raise ConfigError(f"line {number}: expected a text, got {line!r}")
    if not line.strip():
      continue
    try:
      ids[number] = task.encode(line)
    except ValueError as error:
      raise ConfigError(f"line {number}: {error}") from error
    if limit is not None and len(ids[number]) > limit:
      raise ConfigError(
        f"line {number}: {len(ids[number])} tokens are too long; the model "
        f"reads {limit}"
      )
  return ids


def _batches(
  ids: Mapping[int, Sequence[int]], batch_size: int, equal: bool
) -> Iterator[tuple[int, list[int]]]:
  """Yields the start and the line numbers of each batch, sorted by length.

  The lines of a batch have similar lengths, so that there is little padding. With
  `equal`, they have the same length, so that all rows of a batch are at the same
  position in their context.
  """
  order = sorted(ids, key=lambda number: len(ids[number]))
  start = 0
  while start < len(order):
    numbers = order[start : start + batch_size]
    if equal:
      length = len(ids[numbers[0]])
      numbers = [number for number in numbers if len(ids[number]) == length]
    yield start, numbers
    start += len(numbers)


def _prompts(prompts: np.ndarray, lengths: Sequence[int]) -> dict[str, Any]:
  """Returns the inputs of a decoder: `prompts` [B, P] and the length of each."""
  return {"prompt": prompts, "prompt_length": np.array(lengths, np.int32)}


def _generate_contexts(
  generate: Callable[..., Any],
  task: tasks.Task,
  prompts: np.ndarray,
  max_length: int,
  rng: Any,
) -> np.ndarray:
  """Generates beyond the context, one full context at a time.

  The last token of a context is generated but not read. It is the last token of the
  next prompt, which is the last half of the context.

  Returns:
    `[B, max_length]` tokens, or fewer if all rows have ended.
  """
  context, prefix = task.max_target_length, prompt_prefix(task)
  texts, start = prompts, prompts.shape[1]
  for index in itertools.count():
    rows, length = prompts.shape
    remaining = max_length - (texts.shape[1] - start)
    # Beam search would prefer another hypothesis if it could go on longer.
    tokens = generate(
      _prompts(prompts, [length] * rows),
      min(context - length + 1, remaining),
      jax.random.fold_in(rng, index),
    )
    texts = np.concatenate([texts, np.asarray(tokens)], axis=1)
    generated = texts[:, start:]
    has_ended = np.isin(generated, eos_ids(task)).any(axis=1).all()
    if has_ended or generated.shape[1] == max_length:
      break
    prompts = texts[:, -(context // 2) :].copy()
    prompts[:, : len(prefix)] = prefix
  return generated


def eos_ids(task: tasks.Task) -> tuple[int, ...]:
  """Returns the ids that end a text."""
  return getattr(task, "eos_ids", (task.eos_id,))


def prompt_prefix(task: tasks.Task) -> tuple[int, ...]:
  """Returns the ids at the start of every prompt: BOS, or none without a BOS id."""
  return getattr(task, "prefix", ())


def until_end(ids: list[int], task: tasks.Task) -> list[int]:
  """Returns the ids before the first end id that is not `eos_id`."""
  others = {*eos_ids(task)} - {task.eos_id}
  indices = (i for i, token in enumerate(ids) if token in others)
  return ids[: next(indices, len(ids))]


def pad(
  rows: Sequence[Sequence[int]],
  pad_id: int,
  limit: int,
  multiple: int = _ROUND_TO,
) -> np.ndarray:
  """Pads rows to a multiple of `multiple`, so that there are few shapes."""
  length = -(-max(map(len, rows)) // multiple) * multiple
  padded = np.full((len(rows), min(length, limit)), pad_id, np.int32)
  for i, row in enumerate(rows):
    padded[i, : len(row)] = row
  return padded
