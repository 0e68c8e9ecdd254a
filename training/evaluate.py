"""Held-out data: metrics under teacher forcing, then decoding and its score."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import json
import pathlib
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from settings.errors import RunError, one_line
import tasks
from training.parallel import Parallel

T = TypeVar("T")

SENTENCES = "sentences.json"
"""File of a run: what BLEU is made of, for each sentence of the last split."""


class Sample(NamedTuple):
  """One decoded example, as text."""

  source: str
  reference: str
  output: str


def evaluate(
  parallel: Parallel, variables: Mapping[str, Any], task: tasks.Task, split: str
) -> dict[str, float]:
  """Metrics of one split: sums over all batches, divided once.

  Args:
    parallel: the compiled functions.
    variables: of the model, on the devices.
    task: the data and the names of the metrics.
    split: one of `task.eval_splits`.

  Returns:
    metric name → value; 'loss' is the cross-entropy in nats.

  Raises:
    RunError: the data cannot be read.
  """
  # Fetched only after the last batch, so that devices never wait for us.
  pending = [
    parallel.evaluate(variables, parallel.place_batch(batch))
    for batch in _reading(task.eval_batches(split), split)
  ]
  totals: dict[str, np.ndarray] = {}
  for sums in jax.device_get(pending):
    for name, pair in sums.items():
      totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair)
  return task.summarize(
    {name: (float(total[0]), float(total[1])) for name, total in totals.items()}
  )


def decode(
  generate: Callable[..., Any],
  variables: Mapping[str, Any],
  task: tasks.Task,
  split: str,
) -> list[Sample]:
  """Decodes every example of one split that has a reference.

  Args:
    generate: `(variables, inputs, *, max_length) -> Generated`.
    variables: of the model.
    task: the examples.
    split: one of `task.eval_splits`.

  Returns:
    The examples as text, in order; none where the task decodes nothing.

  Raises:
    RunError: the data cannot be read.
  """
  samples = []
  for batch in _reading(task.decode_batches(split), split):
    generated = generate(variables, batch.inputs, max_length=batch.max_length)
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
  return samples


def play(
  forward: Callable[..., jax.Array],
  variables: Mapping[str, Any],
  task: tasks.Task,
  split: str,
) -> dict[str, float]:
  """Lets a model act in the environment of a task that has one.

  Args:
    forward: `(variables, batch, dropout_rng) -> logits`.
    variables: of the model.
    task: the environment, if it has a method `play`.
    split: one of `task.eval_splits`.

  Returns:
    metric name → value; none where the task has no environment.
  """
  if not hasattr(task, "play"):
    return {}
  predict = jax.jit(lambda variables, batch: forward(variables, batch, None))
  return task.play(lambda batch: np.asarray(predict(variables, batch)), split)


def _reading(items: Iterable[T], split: str) -> Iterator[T]:
  """Passes items on; what fails in reading them stops the run."""
  iterator = iter(items)
  while True:
    try:
      item = next(iterator)
    except StopIteration:
      return
    except Exception as error:
      raise RunError(
        f"split {split!r}: data cannot be read: {one_line(error)}"
      ) from error
    yield item


def write_samples(
  path: pathlib.Path, samples: Sequence[Sample], num: int = 64
) -> None:
  """Writes the first samples, three lines each; a line break is shown."""
  blocks = []
  for sample in samples[:num]:
    source, reference, output = (s.replace("\n", "\\n") for s in sample)
    blocks.append(
      f"source     {source}\nreference  {reference}\noutput     {output}\n"
    )
  path.write_text("\n".join(blocks))


def write_sentences(
  path: pathlib.Path, task: tasks.Task, samples: Sequence[Sample]
) -> None:
  """Writes what a score of the whole split is made of, for each of its samples.

  Args:
    path: `SENTENCES` in a run's folder.
    task: that has a method `sentence_statistics`; of any other nothing is written.
    samples: all of a split, in the order that all runs of the task have.
  """
  if not hasattr(task, "sentence_statistics"):
    return
  found = task.sentence_statistics(
    [s.output for s in samples], [s.reference for s in samples]
  )
  if found:
    path.write_text(json.dumps({"statistics": found}) + "\n")
