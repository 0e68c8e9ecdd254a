"""A trained run at work: lines of text in, lines of text out."""

from collections.abc import Iterable, Mapping, Sequence
import pathlib
from typing import Any

import jax
import numpy as np

from process.errors import ConfigError
from training.checkpoint import Checkpoints
from training.experiment import Experiment

_BATCH_SIZE = 64
_ROUND_TO = 16


def restore_variables(
  experiment: Experiment, workdir: pathlib.Path
) -> Mapping[str, Any]:
  """Variables of the newest intact checkpoint.

  Raises:
    ConfigError: there is none.
  """
  if not (workdir / "checkpoints").is_dir():
    raise ConfigError(f"workdir: no checkpoint in {workdir}; train it first")
  checkpoints = Checkpoints(workdir, read_only=True)
  try:
    restored = checkpoints.restore(experiment.shapes)
  finally:
    checkpoints.close()
  if restored is None:
    raise ConfigError(f"workdir: no checkpoint in {workdir}; train it first")
  return jax.device_put(restored[0].variables)


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
  **options: Any,
) -> list[str]:
  """Decodes every line, in batches of lines of like length.

  Args:
    experiment: made with `restore=True`.
    variables: of the model.
    lines: sources, or prompts for a decoder-only model.
    max_length: most tokens of an output; default what the model allows.
    seed: of sampling.
    **options: of `models.generate`.

  Returns:
    One output a line, in order; empty where the line is.

  Raises:
    ConfigError: a line that the model cannot read, by its number.
  """
  task = experiment.task
  has_source = _has_source(experiment)
  ids = {}
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      ids[number] = task.encode(line)
    except ValueError as error:
      raise ConfigError(f"line {number}: {error}") from error
    if not has_source and len(ids[number]) > task.max_target_length:
      raise ConfigError(
        f"line {number}: {len(ids[number])} tokens are too long; the model "
        f"reads {task.max_target_length}"
      )
  if not ids:
    return [""] * len(lines)
  longest = max(map(len, ids.values()))
  # What is generated last is never read, so a full prompt leaves room for one.
  room = task.max_target_length - (0 if has_source else longest - 1)
  if max_length is not None and max_length > room:
    raise ConfigError(
      f"--max_length: the model allows {room} tokens here, got {max_length}"
    )
  outputs = dict.fromkeys(range(1, len(lines) + 1), "")
  # Of like length, so that little is padding; the last batch is filled up, so
  # that each shape compiles once.
  order = sorted(ids, key=lambda number: len(ids[number]))
  key = jax.random.key(seed)
  for start in range(0, len(order), _BATCH_SIZE):
    numbers = order[start : start + _BATCH_SIZE]
    filled = numbers + numbers[-1:] * (_BATCH_SIZE - len(numbers))
    rows = [ids[number] for number in filled]
    if has_source:
      limit = task.max_source_length or longest
      inputs = {"source": pad(rows, task.pad_id, limit)}
    else:
      # One length for all, as the room behind a prompt depends on it.
      inputs = {
        "prompt": pad(rows, task.pad_id, longest, longest),
        "prompt_length": np.array([len(row) for row in rows], np.int32),
      }
    try:
      generated = experiment.generate(
        variables,
        inputs,
        max_length=max_length or room,
        rng=jax.random.fold_in(key, start),
        **options,
      )
    except ValueError as error:  # An option that the method does not have.
      raise ConfigError(str(error)) from error
    tokens = np.asarray(generated.tokens)
    for number, row in zip(numbers, tokens, strict=False):
      outputs[number] = task.decode(row).replace("\n", "\\n")
  return list(outputs.values())


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


def _has_source(experiment: Experiment) -> bool:
  kind = experiment.config.model.kind
  if kind == "encoder":
    raise ConfigError(
      "config.model.kind: an encoder alone cannot generate; expected "
      "'encoder_decoder', 'seq2seq' or 'decoder'"
    )
  return kind != "decoder"
