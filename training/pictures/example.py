"""Converts a user's text to a batch of one."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from settings.errors import ConfigError
import tasks
from training.experiment import Experiment
from training.inference import generation


def make_example(
  experiment: Experiment,
  variables: Mapping[str, Any],
  text: str,
  target: str | None = None,
) -> dict[str, np.ndarray]:
  """Creates a batch of one, in the layout of the model's kind.

  A source is padded as in `generate.py`, so that a picture shows the attention from
  which the output of generate.py is computed. The inputs of a decoder are not padded.

  Args:
    experiment: created with `restore=True`.
    variables: variables of the model.
    text: the source, or the prompt of a decoder-only model.
    target: the text that the decoder writes; None means the greedy output after a
      source, and nothing after a prompt.

  Returns:
    'source', 'inputs', 'targets' and 'weights', if the kind has them; a decoder-only
    model has only 'inputs'.

  Raises:
    ConfigError: the model cannot read or write a text.
  """
  task, kind = experiment.task, experiment.config.model.layout
  if kind == "encoder" and target is not None:
    raise ConfigError("target: this model is an encoder and writes nothing")
  ids = _encode("text", task.encode, text)
  answer = None
  if target is not None:
    answer = _encode("target", task.encode_target, target)
  if kind == "decoder":
    inputs = [*ids, *(answer or [])]
    if inputs[-1] == task.eos_id:  # EOS is generated, but never read.
      inputs.pop()
    return {"inputs": _decoder_row(inputs, task)}
  limit = task.max_source_length or len(ids)
  if len(ids) > limit:
    raise ConfigError(
      f"text: {len(ids)} tokens are too long; the model reads {limit}"
    )
  source = generation.pad([ids], task.pad_id, limit)
  if kind == "encoder":
    return {"source": source}
  if answer is None:
    answer = _generate(experiment, variables, source)
  return {
    "source": source,
    "inputs": _decoder_row([task.bos_id, *answer[:-1]], task),
    "targets": np.array([answer], np.int32),
    "weights": np.ones((1, len(answer)), np.float32),
  }


def _encode(
  name: str, encode: Callable[[str], list[int]], line: str
) -> list[int]:
  if not isinstance(line, str) or not line.strip():
    raise ConfigError(f"{name}: expected a text, got {line!r}")
  try:
    return encode(line)
  except ValueError as error:
    raise ConfigError(f"{name}: {error}") from error


def _decoder_row(ids: list[int], task: tasks.Task) -> np.ndarray:
  if len(ids) > task.max_target_length:
    raise ConfigError(
      f"target: {len(ids)} tokens are too long for a decoder that reads "
      f"{task.max_target_length}"
    )
  return np.array([ids], np.int32)


def _generate(
  experiment: Experiment, variables: Mapping[str, Any], source: np.ndarray
) -> list[int]:
  """Returns the greedy output of the model, up to and including EOS."""
  task = experiment.task
  try:
    generated = experiment.generate(
      variables, {"source": source}, max_length=task.max_target_length
    )
  except ValueError as error:  # The mechanism cannot decode.
    raise ConfigError(f"target: missing, and {error}") from error
  ids = np.asarray(generated.tokens)[0].tolist()
  return ids[: ids.index(task.eos_id) + 1] if task.eos_id in ids else ids
