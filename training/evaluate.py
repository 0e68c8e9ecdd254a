"""Evaluation on held-out data: metrics with teacher forcing, and scores of outputs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import functools
import json
import pathlib
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

import models
from settings.errors import RunError, one_line
import tasks
from training.devices import parallel
from training.experiment import Experiment

T = TypeVar("T")

SENTENCES = "sentences.json"
"""File in a workdir with the BLEU statistics of each sentence of the last split."""


class Sample(NamedTuple):
  """One decoded example, as text."""

  source: str
  reference: str
  output: str


def evaluate(
  eval_step: Any,
  mesh: jax.sharding.Mesh,
  variables: Mapping[str, Any],
  task: tasks.Task,
  split: str,
) -> dict[str, float]:
  """Computes the metrics of one split: sums over all batches, divided once.

  Args:
    eval_step: from `step.make_eval_step`.
    mesh: the mesh of `eval_step`.
    variables: the variables of the model.
    task: the task of the run.
    split: one of `task.eval_splits`.

  Returns:
    Maps metric names to values; 'loss' is the cross-entropy in nats.

  Raises:
    RunError: the data cannot be read.
  """
  # Sums are fetched after the last batch, so that devices never wait for the host.
  pending = [
    eval_step(variables, parallel.place_batch(mesh, batch))
    for batch in _check_items(task.eval_batches(split), split)
  ]
  totals: dict[str, np.ndarray] = {}
  for sums in jax.device_get(pending):
    for name, pair in sums.items():
      totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair)
  return task.summarize(
    {name: (float(x), float(count)) for name, (x, count) in totals.items()},
    split,
  )


def generate(
  experiment: Experiment, variables: Mapping[str, Any], split: str
) -> tuple[list[Sample], dict[str, float | str]]:
  """Decodes one split, or plays in the task's environment, and scores the result.

  Returns:
    All examples with a reference as text, in order, and a mapping from metric names to
    values. Both are empty if the task neither decodes nor has an environment.

  Raises:
    RunError: the data cannot be read.
  """
  task = experiment.task
  method = experiment.config.train.decode_method
  samples = []
  for batch in _check_items(task.decode_batches(split), split):
    generated = experiment.generate(
      variables, batch.inputs, max_length=batch.max_length, method=method
    )
    tokens = np.asarray(generated.tokens)
    for row, reference in enumerate(batch.references):
      if "source" in batch.inputs:
        source = batch.inputs["source"][row]
      else:
        length = batch.inputs["prompt_length"][row]
        source = batch.inputs["prompt"][row, :length]
      samples.append(
        Sample(task.decode(source), reference, task.decode(tokens[row]))
      )
  values = {}
  if hasattr(task, "play"):
    predict = jax.jit(functools.partial(models.forward, experiment.model))
    values = task.play(
      lambda batch: np.asarray(predict(variables, batch)), split
    )
  if samples:
    outputs, references = (
      [s.output for s in samples],
      [s.reference for s in samples],
    )
    values |= task.score(outputs, references)
  return samples, values


def _check_items(items: Iterable[T], split: str) -> Iterator[T]:
  """Yields the items, and raises an error in reading them as a RunError."""
  try:
    yield from items
  except Exception as error:
    raise RunError(
      f"split {split!r}: data cannot be read: {one_line(error)}"
    ) from error


def write_samples(
  path: pathlib.Path, samples: Sequence[Sample], num: int = 64
) -> None:
  """Writes the first `num` samples, three lines each, with line breaks escaped."""
  blocks = []
  for sample in samples[:num]:
    source, reference, output = (s.replace("\n", "\\n") for s in sample)
    blocks.append(
      f"source     {source}\nreference  {reference}\noutput     {output}\n"
    )
  path.write_text("\n".join(blocks), "utf-8")


def write_sentences(
  path: pathlib.Path, task: tasks.Task, samples: Sequence[Sample]
) -> None:
  """Writes the statistics of each sample, in order, from which scores are computed.

  It writes nothing if the task has no method `sentence_statistics`.
  """
  if not hasattr(task, "sentence_statistics"):
    return
  statistics = task.sentence_statistics(
    [s.output for s in samples], [s.reference for s in samples]
  )
  if statistics:
    path.write_text(json.dumps({"statistics": statistics}) + "\n", "utf-8")
