"""The interface of every task, and functions that tasks share.

A task owns its data, its vocabulary and its metrics, and creates NumPy batches. Tasks
do not depend on models, and models do not depend on tasks.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from settings import atomic
from settings.errors import DataError

Batch = dict[str, np.ndarray]
"""'source' [B, S], 'inputs' and 'targets' [B, T] int32, 'weights' [B, T].

'source_mask' [B, S] bool, if present, is True at tokens; otherwise padding is `PAD`.
Images have 'image' [B, H, W, C] float32 instead of 'source' and 'inputs';
recordings have 'frames' [B, S, M] float32 with 'source_mask'.
"""

PAD, BOS, EOS = 0, 1, 2
"""The first ids of every vocabulary that this package creates."""


class LayoutError(ValueError):
  """A task does not support the kind of model of a config."""


class DecodeBatch(NamedTuple):
  """Sequences to continue or to translate, with the expected answers.

  Attributes:
    inputs: {'source' [B, S]}, or {'prompt' [B, P], 'prompt_length' [B]}. B is
      always the batch size; rows past the last reference repeat an earlier one.
    references: the answers of the first `len(references)` rows.
    max_length: largest number of tokens to generate.
  """

  inputs: Batch
  references: list[str]
  max_length: int


class Task(Protocol):
  """Data, vocabulary and metrics of one experiment.

  A task may inherit from this class. The defaults suit a task whose answers are at
  known positions: one forward pass predicts them, and nothing is decoded.

  Attributes:
    source_vocab_size: size of the source vocabulary; None without an encoder.
    target_vocab_size: size of the target vocabulary.
    shared_vocabulary: whether source and target share one vocabulary.
    max_source_length: longest S of any batch; None without an encoder.
    max_target_length: longest T of any batch, including generated sequences.
    pad_id: fills rows up to a common length; its weight is 0.
    bos_id: the first input of a decoder without a prompt.
    eos_id: ends a sequence.
    eval_splits: held-out splits; the first is evaluated during training.
    continues: whether the generated text continues the prompt.
  """

  source_vocab_size: int | None = None
  target_vocab_size: int
  shared_vocabulary: bool = False
  max_source_length: int | None = None
  max_target_length: int
  pad_id: int = PAD
  bos_id: int = BOS
  eos_id: int = EOS
  eval_splits: tuple[str, ...]
  continues: bool = False

  @property
  def baselines(self) -> Mapping[str, float]:
    """Maps names of baselines to their loss on the first held-out split."""
    return {}

  @abc.abstractmethod
  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """The batch of a step: a pure function of (seed, step).

    `rows` selects rows by number, in order; None selects all.
    """

  @abc.abstractmethod
  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields every held-out example once; the last batch is padded with weight 0."""

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Maps metric names to [sum, count], without the loss; JAX can trace it."""
    accuracy = token_accuracy(logits, batch["targets"], batch["weights"])
    return {"accuracy": accuracy}

  def summarize(
    self, sums: Mapping[str, tuple[float, float]], split: str | None = None
  ) -> dict[str, float]:
    """Divides the total sums by the total counts, and adds derived metrics.

    `split` is the split of the sums; None is the first held-out split.
    """
    del split
    return {**divide(sums), **self.baselines}

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """Yields the held-out examples as inputs of generation; may be empty."""
    del split
    return iter(())

  def score(
    self, hypotheses: Sequence[str], references: Sequence[str]
  ) -> dict[str, float | str]:
    """Metrics of decoded text against its references, starting with the main one."""
    del hypotheses, references
    return {}

  @abc.abstractmethod
  def encode(self, line: str) -> list[int]:
    """Source or prompt ids of a user's line, or raises ValueError."""

  @abc.abstractmethod
  def encode_target(self, line: str) -> list[int]:
    """Ids that a decoder should output for a line, or raises ValueError."""

  @abc.abstractmethod
  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of generated ids, up to the first `eos_id`."""

  @abc.abstractmethod
  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """One printable label per id, for the axes of a picture."""

  @abc.abstractmethod
  def save(self, directory: pathlib.Path) -> None:
    """Writes the folder `directory/vocabulary`, which `restore=True` reads."""


class TaskEntry(NamedTuple):
  """An entry of `TASKS`.

  Attributes:
    config_type: frozen dataclass that validates itself. If models either solve the task
      or fail, the class has `solved_at`: the smallest value of the main metric with
      which the task is solved.
    make: `(config, *, kind, batch_size, seed, workdir=None, restore=False) ->
      Task`. `kind` is the `layout` of the model. All batches have `batch_size`
      rows and depend only on `seed`. The vocabulary of the run in `workdir`, if it
      has one, must fit the data; with `restore` that vocabulary is used and no data
      are read. Raises ValueError for a kind of model that the task does not
      support, and DataError for invalid data.
  """

  config_type: type
  make: Callable[..., Task]


def input_shapes(task: Task) -> Mapping[str, tuple[int, ...]]:
  """Maps the names of inputs that are not ids to the shape of one row."""
  return getattr(task, "input_shapes", {})


def layout(task: str, kind: str, supported: Sequence[str]) -> str:
  """Checks that a task supports a batch layout, and returns the layout.

  Args:
    task: name of the task, for the message.
    kind: the `layout` of the model's config.
    supported: the layouts that the task supports.

  Returns:
    `kind`.

  Raises:
    LayoutError: the task does not support this kind of model.
  """
  if kind not in supported:
    raise LayoutError(
      f"model.kind: {task} supports {', '.join(supported)}, got {kind!r}"
    )
  return kind


def token_accuracy(
  logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
  """[Σ weight of correct tokens, Σ weight]; logits [B, T, V], others [B, T]."""
  hits = (jnp.argmax(logits, axis=-1) == targets) * weights
  return jnp.stack([hits.sum(), weights.sum()])


def sequence_accuracy(
  logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
  """[rows whose weighted tokens are all correct, rows with any weight].

  Teacher forcing suffices: if every argmax given the true prefix is right, greedy
  decoding produces that prefix; if one is wrong, greedy decoding makes the same error.
  So this equals exact match of greedy decoding.
  """
  is_weighted = weights > 0
  is_right = jnp.argmax(logits, axis=-1) == targets
  rows = jnp.any(is_weighted, axis=-1)
  is_exact = jnp.all(is_right | ~is_weighted, axis=-1) & rows
  return jnp.stack([is_exact.sum(), rows.sum()]).astype(jnp.float32)


def last_accuracy(
  logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
  """[rows whose last weighted token is correct, rows with any weight].

  In a task with a target at every position, the last target is the answer for the whole
  sequence, whereas `token_accuracy` is a mean over all positions.
  """
  is_weighted = weights > 0
  rows = jnp.any(is_weighted, axis=-1)
  last = is_weighted.shape[-1] - 1 - jnp.argmax(is_weighted[:, ::-1], axis=-1)
  is_right = jnp.argmax(logits, axis=-1) == targets
  hits = jnp.take_along_axis(is_right, last[:, None], axis=-1)[:, 0] & rows
  return jnp.stack([hits.sum(), rows.sum()]).astype(jnp.float32)


def divide(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
  """Divides the sum of each metric by its count, without metrics whose count is 0."""
  return {
    name: float(total) / float(count)
    for name, (total, count) in sums.items()
    if count
  }


def epoch_order(
  indices: np.ndarray, num_examples: int, seed: int
) -> np.ndarray:
  """Shuffles N training examples anew in every epoch.

  Args:
    indices: numbers of the examples since the start of training, from 0.
    num_examples: N.
    seed: the order of an epoch depends only on this seed and on its number.

  Returns:
    Indices below N.
  """
  epochs, positions = np.divmod(indices, num_examples)
  for epoch in np.unique(epochs):
    order = np.random.default_rng((seed, int(epoch)))
    mask = epochs == epoch
    positions[mask] = order.permutation(num_examples)[positions[mask]]
  return positions


def indices(step: int, batch_size: int, rows: np.ndarray | None) -> np.ndarray:
  """Example numbers of a step, step · B … (step + 1) · B − 1, or of some rows."""
  offsets = np.arange(batch_size) if rows is None else rows
  return offsets + step * batch_size


def select_rows(batch: Batch, rows: np.ndarray | None) -> Batch:
  """Selects rows of a batch; None selects all."""
  if rows is None:
    return batch
  return {name: array[rows] for name, array in batch.items()}


def chunks(count: int, batch_size: int) -> Iterator[np.ndarray]:
  """Splits the numbers 0 … count − 1 into batches."""
  for start in range(0, count, batch_size):
    yield np.arange(start, min(start + batch_size, count))


def pad_rows(batch: Batch, batch_size: int) -> Batch:
  """Pads a batch to `batch_size` with rows of zeros, whose weight is 0."""
  return {
    name: np.pad(
      array, [(0, batch_size - len(array))] + [(0, 0)] * (array.ndim - 1)
    )
    for name, array in batch.items()
  }


def repeat_rows(count: int, batch_size: int) -> np.ndarray:
  """Row numbers 0 … count − 1, then the last one repeated up to `batch_size`."""
  return np.minimum(np.arange(batch_size), count - 1)


def until_eos(ids: Sequence[int] | np.ndarray) -> list[int]:
  """Ids before the first EOS, without PAD and BOS."""
  ids = [int(i) for i in ids]
  if EOS in ids:
    ids = ids[: ids.index(EOS)]
  return [i for i in ids if i not in (PAD, BOS)]


def check_vocabulary(
  workdir: pathlib.Path | None, name: str, content: bytes
) -> None:
  """Raises DataError if a run started with another vocabulary.

  If the ids changed their meaning, training would continue without an error, so a run
  with changed data stops here.
  """
  if workdir is None:
    return
  path = vocabulary_path(workdir, name)
  if path.exists() and path.read_bytes() != content:
    raise DataError(
      f"{path} does not fit the data: they changed since this run began; "
      "restore them or choose another workdir"
    )


def vocabulary_path(directory: pathlib.Path, name: str) -> pathlib.Path:
  """The path of a vocabulary file of a run."""
  return pathlib.Path(directory) / "vocabulary" / name


def load_vocabulary(workdir: pathlib.Path | None, name: str) -> bytes:
  """Reads a vocabulary file of a run, or raises DataError."""
  if workdir is None:
    raise DataError("restore=True: expected the workdir of a run")
  path = vocabulary_path(workdir, name)
  try:
    return path.read_bytes()
  except FileNotFoundError:
    raise DataError(
      f"{path}: no such file; expected the workdir of a run"
    ) from None


def save_vocabulary(
  directory: pathlib.Path, files: Mapping[str, bytes]
) -> None:
  """Writes the files of a vocabulary and creates their folder."""
  for name, content in files.items():
    path = vocabulary_path(directory, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Atomic, because a later start compares the file with its own vocabulary.
    atomic.write_bytes(path, content)
