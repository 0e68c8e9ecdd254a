"""A trained run at work: lines of text in, lines of text out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import itertools
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from settings.errors import ConfigError
import tasks
from training.checkpoint import Checkpoints
from training.experiment import Experiment
from training.workdir import last_step

_BATCH_SIZE = 64
_ROUND_TO = 16


def restore_variables(
  experiment: Experiment, workdir: pathlib.Path, step: int | None = None
) -> Mapping[str, Any]:
  """Variables of a checkpoint, by default of the newest intact one.

  Where the run keeps its best, that is the default. If a run has finished and that is not its last, one line on standard error says so.

  Raises:
    ConfigError: there is none, or none of this step.
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
  """Lines of UTF-8 without their ends.

  Raises:
    ConfigError: bytes that are not UTF-8, naming the line.
  """
  lines = []
  for number, raw in enumerate(stream, 1):
    try:
      lines.append(raw.decode("utf-8").rstrip("\r\n"))
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
  """Decodes every line, in batches of lines of like length.

  A decoder-only model goes on beyond its context: where that is full, it reads
  the last half of it again, as a new prompt. This is told on standard error.

  Args:
    experiment: made with `restore=True`.
    variables: of the model.
    lines: sources, or prompts for a decoder-only model.
    max_length: most tokens of an output; default what fits the context.
    seed: of sampling.
    batch_size: lines that are decoded at a time.
    **options: of `models.generate`.

  Returns:
    One output a line, in order; empty where the line is.

  Raises:
    ConfigError: a line that the model cannot read, by its number, or an option that
      it cannot take.
  """
  check_decodes(experiment)
  counts = {"max_length": max_length, "seed": seed, "batch_size": batch_size}
  _check_options(counts | options)
  task = experiment.task
  has_source = experiment.config.model.layout != "decoder"
  ids = _encode(task, lines, None if has_source else task.max_target_length)
  if not ids:
    return [""] * len(lines)
  longest = max(map(len, ids.values()))
  # What is generated last is never read, so a full prompt leaves room for one.
  room = task.max_target_length - (0 if has_source else longest - 1)
  beyond = max_length if max_length is not None and max_length > room else None
  if has_source and beyond is not None:
    raise ConfigError(
      f"max_length: the model allows {room} tokens here, got {max_length}"
    )

  def generate(inputs, length, rng):
    try:
      return experiment.generate(
        variables, inputs, max_length=length, rng=rng, **options
      ).tokens
    except ValueError as error:  # An option that the method does not have.
      raise ConfigError(str(error)) from error

  outputs = dict.fromkeys(range(1, len(lines) + 1), "")
  key = jax.random.key(seed)
  for start, numbers in _batches(ids, batch_size, equal=beyond is not None):
    filled = numbers + numbers[-1:] * (batch_size - len(numbers))
    rows = [ids[number] for number in filled]
    rng = jax.random.fold_in(key, start)
    if beyond is not None:
      tokens = _slide(generate, task, np.array(rows, np.int32), beyond, rng)
    elif has_source:
      limit = task.max_source_length or longest
      inputs = {"source": pad(rows, task.pad_id, limit)}
      tokens = generate(inputs, max_length or room, rng)
    else:
      # One length for all, as the room behind a prompt depends on it.
      prompts = pad(rows, task.pad_id, longest, longest)
      inputs = _prompts(prompts, [len(row) for row in rows])
      tokens = generate(inputs, max_length or room, rng)
    for number, row in zip(numbers, np.asarray(tokens), strict=False):
      text = task.decode(until_end(row.tolist(), task))
      outputs[number] = text.replace("\n", "\\n")
  if beyond is not None:
    context = task.max_target_length
    print(
      f"max_length={beyond}: the model reads {context} tokens at a time; "
      f"where they were full it read the last {context // 2} again and went on",
      file=sys.stderr,
    )
  return list(outputs.values())


_KINDS = {
  **dict.fromkeys(
    ("max_length", "seed", "batch_size", "top_k", "beam_size"), int
  ),
  **dict.fromkeys(("temperature", "length_penalty"), (int, float)),
}
"""Options of `generate_lines` that are numbers."""


def _check_options(options: Mapping[str, Any]) -> None:
  """Raises ConfigError for a number that is none."""
  for name, value in options.items():
    kind = _KINDS.get(name, object)
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if name in _KINDS and value is not None and not is_number:
      what = "a whole number" if kind is int else "a number"
      raise ConfigError(f"{name}: expected {what}, got {value!r}")
  most = options["max_length"]
  if most is not None and most < 1:
    raise ConfigError(f"max_length: expected at least 1, got {most}")
  for name, least in (("seed", 0), ("batch_size", 1)):
    if (value := options[name]) is None or not least <= value < 2**31:
      raise ConfigError(f"{name}: expected {least} to 2³¹ - 1, got {value}")


def check_decodes(experiment: Experiment) -> None:
  """Raises ConfigError for a model that cannot generate."""
  if experiment.config.model.layout == "encoder":
    raise ConfigError(
      "config.model.kind: an encoder alone cannot generate; expected a "
      "kind with a decoder, as 'encoder_decoder' or 'decoder'"
    )


def _encode(
  task: tasks.Task, lines: Sequence[str], limit: int | None
) -> dict[int, list[int]]:
  """Number of each line that is not empty -> its ids, at most `limit` of them."""
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
  """Place and numbers of the lines of each batch, by growing length.

  Of like length, so that little is padding; or of one length, so that all rows
  of a batch are at the same place of their context.
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
  """What a decoder reads: `prompts` [B, P], each of its length."""
  return {"prompt": prompts, "prompt_length": np.array(lengths, np.int32)}


def _slide(
  generate: Callable[..., Any],
  task: tasks.Task,
  prompts: np.ndarray,
  max_length: int,
  rng: Any,
) -> np.ndarray:
  """Tokens beyond the context, in stretches that each fill it.

  The last token of a stretch is written and not read; the next prompt, which is
  the last half of the context, ends with it.

  Returns:
    `[B, max_length]`, or fewer where every row has ended.
  """
  context, prefix = task.max_target_length, prefix_of(task)
  texts, start = prompts, prompts.shape[1]
  for stretch in itertools.count():
    rows, length = prompts.shape
    # The whole room each time, so that few shapes are compiled.
    tokens = generate(
      _prompts(prompts, [length] * rows),
      context - length + 1,
      jax.random.fold_in(rng, stretch),
    )
    texts = np.concatenate([texts, np.asarray(tokens)], axis=1)
    written = texts[:, start:]
    has_ended = np.isin(written, eos_ids(task)).any(axis=1).all()
    if has_ended or written.shape[1] >= max_length:
      break
    prompts = texts[:, -(context // 2) :].copy()
    prompts[:, : len(prefix)] = prefix
  return written[:, :max_length]


def eos_ids(task: tasks.Task) -> tuple[int, ...]:
  """The ids that end a text."""
  return getattr(task, "eos_ids", (task.eos_id,))


def prefix_of(task: tasks.Task) -> tuple[int, ...]:
  """The ids that begin every prompt, as the vocabulary says: BOS, or none."""
  return getattr(task, "prefix", ())


def until_end(ids: list[int], task: tasks.Task) -> list[int]:
  """What is before the end that an id other than `eos_id` makes."""
  others = {*eos_ids(task)} - {task.eos_id}
  ends = (place for place, token in enumerate(ids) if token in others)
  return ids[: next(ends, len(ids))]


def pad(
  rows: Sequence[Sequence[int]],
  pad_id: int,
  limit: int,
  multiple: int = _ROUND_TO,
) -> np.ndarray:
  """Pads rows to a multiple of `multiple`, so that shapes are few."""
  length = -(-max(map(len, rows)) // multiple) * multiple
  padded = np.full((len(rows), min(length, limit)), pad_id, np.int32)
  for i, row in enumerate(rows):
    padded[i, : len(row)] = row
  return padded
