"""Classification of texts: one label for a whole sequence."""

from collections.abc import Iterator, Sequence
import pathlib
from typing import Annotated

from annotated_types import Ge
import numpy as np
from pydantic.dataclasses import dataclass

from settings.checks import check
from settings.fields import STRICT, Count, Share
from tasks import base, label_names, vocabularies
from tasks.answers import AnswersInPlace
from tasks.base import Batch
from tasks.bucketing import Ragged
from tasks.generated import answers_at
from tasks.labelled import Labelled, Row, read_named, read_rows
from tasks.sizes import check_sizes
from tasks.special_tokens import OWN_ENCODER
from tasks.vocabularies import Vocabulary


@dataclass(frozen=True, config=STRICT)
class ClassificationConfig:
  """Where texts and labels come from, and in which tokens they are read.

  Attributes:
    path: a file of rows LABEL<tab>TEXT, or LABEL,TEXT where it ends in .csv.
    dataset: in place of a file, a name in the TFDS catalogue; the set needs the
      features 'text' and 'label'.
    held_out: share of rows that are held out, where there is no split for it.
    max_length: tokens of a text, special ones included; longer texts are cut.
    vocabulary: 'characters', 'bytes', or 'subwords', which are trained on the
      text.
    vocab_size: subwords, special tokens included.
    tokenizer: as in the task `text`: a file, or its folder; used as it is, in
      place of `vocabulary` and `vocab_size`.
  """

  path: str = ""
  dataset: str = ""
  held_out: Share = 0.1
  max_length: Annotated[int, Ge(3)] = 128
  vocabulary: vocabularies.Kind = "subwords"
  vocab_size: Count = 1024
  tokenizer: str = ""

  def __post_init__(self):
    check(
      self,
      "path",
      bool(self.path) != bool(self.dataset),
      f"a file of texts, or none where dataset={self.dataset!r} is given",
    )


class ClassificationTask(AnswersInPlace):
  """Texts, and one of a few labels as the answer.

  encoder: source = `[CLS] text [SEP]`, padded; the target is the label, at the
  first position, and only there is a weight. Labels have ids of their own, so
  the softmax cannot share the table of the source.

  `labelled` is None for a restored task, which encodes and decodes only.
  """

  shared_vocabulary = False
  eval_splits: tuple[str, ...]
  source_vocab_size: int | None
  max_source_length: int | None

  def __init__(
    self,
    config: ClassificationConfig,
    vocabulary: Vocabulary,
    names: Sequence[str],
    labelled: Labelled | None,
    *,
    batch_size: int,
    seed: int,
  ):
    self._config = config
    self._vocabulary = vocabulary
    self._names = list(names)
    self._batch_size = batch_size
    self._seed = seed
    special, file = vocabulary.special, vocabulary.file
    self.pad_id = special.need("pad", file, "classification")
    self._cls_id = special.need("cls", file, "classification")
    self._after = [] if special.sep is None else [special.sep]
    # Nothing is generated.
    self.bos_id = self._cls_id
    self.eos_id = self.pad_id if special.eos is None else special.eos
    self.source_vocab_size = vocabulary.size
    self.target_vocab_size = len(self._names)
    self.max_source_length = self.max_target_length = config.max_length
    self.eval_splits = () if labelled is None else ("validation",)
    if labelled is not None:
      self._train = self._encoded(labelled.train)
      self._validation = self._encoded(labelled.validation)

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """B rows: all of them once in an order of their own, then again."""
    ids, labels = self._train
    indices = base.indices(step, self._batch_size, rows)
    places = base.epoch_order(indices, len(labels), self._seed)
    return self._batch(ids, labels, places)

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Every held-out row once, in the order of the file."""
    if split not in self.eval_splits:
      raise KeyError(split)
    rows, labels = self._validation
    for start in range(0, len(labels), self._batch_size):
      places = np.arange(start, min(start + self._batch_size, len(labels)))
      batch = self._batch(rows, labels, places)
      yield base.pad_rows(batch, self._batch_size)

  def encode(self, line: str) -> list[int]:
    """Ids of a text between its special tokens."""
    ids = self._framed(self._vocabulary.encode(line))
    if len(ids) > self._config.max_length:
      raise ValueError(
        f"{len(ids)} {self._vocabulary.unit}, more than the model reads "
        f"(task.max_length={self._config.max_length})"
      )
    return ids

  def encode_target(self, line: str) -> list[int]:
    """The id of a label."""
    return [label_names.find(self._names, line)]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids."""
    return self._vocabulary.decode(ids)

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each id of a source."""
    return self._vocabulary.labels(ids)

  def save(self, directory: pathlib.Path) -> None:
    """Writes the vocabulary, and the labels in the order of their ids."""
    vocabularies.save_vocabulary(self._vocabulary, directory)
    label_names.save(self._names, directory)

  def _encoded(self, rows: Sequence[Row]) -> tuple[Ragged, np.ndarray]:
    """Texts as ids, cut to the longest that is read, and the ids of labels."""
    room = self._config.max_length - 1 - len(self._after)
    texts = [
      self._framed(self._vocabulary.encode_text(text)[:room].tolist())
      for _, text in rows
    ]
    place = {name: i for i, name in enumerate(self._names)}
    labels = np.array([place[label] for label, _ in rows], np.int32)
    return Ragged.stack(texts), labels

  def _framed(self, ids: list[int]) -> list[int]:
    return [self._cls_id, *ids, *self._after]

  def _batch(
    self, rows: Ragged, labels: np.ndarray, places: np.ndarray
  ) -> Batch:
    length = self._config.max_length
    is_token = np.arange(length) < rows.lengths[places, None]
    source = np.where(is_token, rows.pad(places, length), self.pad_id)
    answers = labels[places, None]
    return {
      "source": source.astype(np.int32),
      "source_mask": is_token,
      **answers_at(source.shape, np.zeros_like(answers), answers),
    }


def make(
  config: ClassificationConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> ClassificationTask:
  """Makes the task: reads texts, makes or opens the vocabulary.

  Args:
    config: which texts, in which tokens.
    kind: the `layout` of the model; 'encoder' only.
    batch_size: rows of every batch.
    seed: of the order of training.
    workdir: of a run; its vocabulary and labels must be the same.
    restore: take those of the run and read no data.

  Raises:
    ValueError: a kind of model that this task cannot feed.
    DataError: in one line, what is wrong with the data or the vocabulary.
  """
  base.layout("classification", kind, ("encoder",))
  check_sizes(
    batch_size,
    lengths={"max_length": config.max_length},
    symbols=vocabularies.symbols(config),
  )
  sizes = {"batch_size": batch_size, "seed": seed}
  if restore:
    vocabulary = vocabularies.restore_vocabulary(config, OWN_ENCODER, workdir)
    names = label_names.load(workdir)
    return ClassificationTask(config, vocabulary, names, None, **sizes)
  if config.path:
    labelled = read_rows(config.path, config.held_out)
  else:
    labelled = read_named(config.dataset, config.held_out)
  training, validation = (
    "\n".join(text for _, text in rows) for rows in labelled
  )
  vocabulary = vocabularies.open_vocabulary(
    config, OWN_ENCODER, training + "\n" + validation, training, workdir
  )
  names = labelled.names()
  label_names.check(names, workdir)
  return ClassificationTask(config, vocabulary, names, labelled, **sizes)
