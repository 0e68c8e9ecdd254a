"""Classification of texts: one label per sequence."""

import collections
from collections.abc import Iterator, Sequence
import csv
import pathlib
from typing import Annotated, NamedTuple

from annotated_types import Ge
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, Share, check
from tasks import base, vocabularies
from tasks.base import Batch, DataError
from tasks.bucketing import Ragged
from tasks.files import existing_file, long_cells, read_lines, suffix
from tasks.generated import answers_at
from tasks.labelled import LabelledTask, load_names
from tasks.special_tokens import OWN_ENCODER
from tasks.vocabularies import Vocabulary

_HEADER = ["label", "text"]

Row = tuple[str, str]
"""Label and text."""


class LabelledTexts(NamedTuple):
  """The rows for training and the held-out rows.

  Attributes:
    train: training rows, at least one.
    validation: held-out rows, at least one.
  """

  train: Sequence[Row]
  validation: Sequence[Row]

  def names(self) -> list[str]:
    """The sorted labels; the index of a label is its id."""
    return sorted({label for rows in self for label, _ in rows})


@dataclass(frozen=True, config=STRICT)
class ClassificationConfig:
  """The source of texts and labels, and the tokenisation.

  Attributes:
    path: a file with rows LABEL<tab>TEXT, or a .csv file with rows LABEL,TEXT; the
      header `label,text` is optional.
    dataset: a name in the TFDS catalogue, instead of a file; the dataset needs the
      features 'text' and 'label'.
    held_out: share of rows that are held out if there is no held-out split.
    max_length: tokens of a text, with special tokens; longer texts are truncated.
    vocabulary: 'characters', 'bytes', or 'subwords', which are trained on the
      text.
    vocab_size: number of subwords, with special tokens.
    tokenizer: a vocabulary file or its folder, as in the task `text`; replaces
      `vocabulary` and `vocab_size`.
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
      f"a file of texts, or none with dataset={self.dataset!r}",
    )


class ClassificationTask(LabelledTask):
  """Texts, each with one of a few labels.

  encoder: source = `[CLS] text [SEP]`, padded; the target is the label at the first
  position, the only one with a weight. Labels have their own ids, so the output
  layer cannot share the embedding table of the source.
  """

  def __init__(
    self,
    config: ClassificationConfig,
    vocabulary: Vocabulary,
    names: Sequence[str],
    texts: LabelledTexts | None,
    *,
    batch_size: int,
    seed: int,
  ):
    """Creates the task; `texts` is None for a restored task, which only encodes."""
    splits = {} if texts is None else texts._asdict()
    counts = {split: len(rows) for split, rows in splits.items()}
    super().__init__(names, counts, batch_size=batch_size, seed=seed)
    self._config = config
    self._vocabulary = vocabulary
    special, file = vocabulary.special, vocabulary.file
    self.pad_id = special.need("pad", file, "classification")
    self._cls_id = special.need("cls", file, "classification")
    self._after = [] if special.sep is None else [special.sep]
    # The task generates nothing, so these ids are never used.
    self.bos_id = self._cls_id
    self.eos_id = self.pad_id if special.eos is None else special.eos
    self.source_vocab_size = vocabulary.size
    self.max_source_length = self.max_target_length = config.max_length
    self._splits = {s: self._encode(rows) for s, rows in splits.items()}

  def encode(self, line: str) -> list[int]:
    """Ids of a text between its special tokens."""
    ids = self._add_special(self._vocabulary.encode(line))
    if len(ids) > self._config.max_length:
      raise ValueError(
        f"expected at most {self._config.max_length} {self._vocabulary.unit} "
        f"(task.max_length), got {len(ids)}"
      )
    return ids

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids."""
    return self._vocabulary.decode(ids)

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each id of a source."""
    return self._vocabulary.labels(ids)

  def save(self, directory: pathlib.Path) -> None:
    """Writes the vocabulary, and the labels in the order of their ids."""
    vocabularies.save_vocabulary(self._vocabulary, directory)
    super().save(directory)

  def _encode(self, rows: Sequence[Row]) -> tuple[Ragged, np.ndarray]:
    """Texts as ids, truncated to `max_length`, and label ids."""
    limit = self._config.max_length - 1 - len(self._after)
    texts = [
      self._add_special(self._vocabulary.encode_text(text)[:limit].tolist())
      for _, text in rows
    ]
    label_ids = {name: i for i, name in enumerate(self.names)}
    labels = np.array([label_ids[label] for label, _ in rows], np.int32)
    return Ragged.stack(texts), labels

  def _add_special(self, ids: list[int]) -> list[int]:
    return [self._cls_id, *ids, *self._after]

  def _batch(self, split: str, indices: np.ndarray) -> Batch:
    (rows, labels), length = self._splits[split], self._config.max_length
    is_token = np.arange(length) < rows.lengths[indices, None]
    source = np.where(is_token, rows.pad(indices, length), self.pad_id)
    answers = labels[indices, None]
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
  """Reads texts, and trains or opens the vocabulary; see `TaskEntry`."""
  base.layout("classification", kind, ("encoder",))
  sizes = {"batch_size": batch_size, "seed": seed}
  if restore:
    vocabulary = vocabularies.restore_vocabulary(config, OWN_ENCODER, workdir)
    names = load_names(workdir)
    return ClassificationTask(config, vocabulary, names, None, **sizes)
  if config.path:
    texts = read_rows(config.path, config.held_out)
  else:
    texts = read_named(config.dataset, config.held_out)
  training, validation = ("\n".join(text for _, text in rows) for rows in texts)
  vocabulary = vocabularies.open_vocabulary(
    config, OWN_ENCODER, training + "\n" + validation, training, workdir
  )
  names = texts.names()
  task = ClassificationTask(config, vocabulary, names, texts, **sizes)
  task.check_run(workdir)
  return task


def read_rows(path: str, held_out: float) -> LabelledTexts:
  """Reads a file with a label and a text in each row.

  Files that end in `.csv` or `.csv.gz` are read as comma-separated values with
  quotes; other files have a tab after the label. A first row with the names `label`
  and `text` is a header, which determines the columns of a `.csv`.

  Args:
    path: the path in the config.
    held_out: share of rows that are held out; the choice depends only on the number
      of rows.

  Raises:
    DataError: the file is missing or undecodable, a row has no label or text, the
      first row seems to be a header with other names, or there are too few rows.
  """
  file = existing_file(path)
  rows = list(_csv(file) if suffix(file) == ".csv" else _read_tabbed(file))
  counts = collections.Counter(label for label, _ in rows)
  first, *other_counts = counts.values() or [0]
  if first == 1 and len(other_counts) > 1 and min(other_counts) > 1:
    raise DataError(
      f"{file}, first row: no other row has its label {rows[0][0]!r}, so it seems "
      "to be a header; name its columns label and text, or remove it"
    )
  num_single = sum(count == 1 for count in counts.values())
  if len(rows) > 4 and num_single > len(rows) / 2:
    raise DataError(
      f"{file}: expected labels that repeat, got {len(counts)} labels in "
      f"{len(rows)} rows, such as {rows[-1][0]!r:.40}; a label precedes its text, "
      "unless a header of a .csv file names the columns label and text"
    )
  return _split(rows, held_out, str(file))


def read_named(name: str, held_out: float) -> LabelledTexts:
  """Reads a TFDS dataset that has the features text and label.

  The validation split is held out, or else the test split, or else a share of the
  training split.

  Raises:
    DataError: the dataset is invalid; the message has one line.
  """
  # Imported late: TFDS takes a second to import, and most runs do not need it.
  from tasks import catalog

  builder = catalog.prepare(
    name,
    "",
    [("dataset", "text"), ("dataset", "label")],
    instead="task.path",
  )
  held_out_split = catalog.held_out_split(builder, name)
  names = getattr(builder.info.features["label"], "names", None)

  def read(split: str) -> Iterator[Row]:
    for example in builder.as_data_source(split=split):
      label, text = example["label"], example["text"]
      if names and label < 0:  # Some test sets are published without labels.
        raise DataError(
          f"task.dataset: {name} has rows without a label in its split {split!r}"
        )
      if isinstance(label, bytes):
        label = label.decode()
      yield names[int(label)] if names else str(label), text.decode()

  train = [*read("train")]
  if held_out_split is None:
    return _split(train, held_out, name)
  return _check(LabelledTexts(train, [*read(held_out_split)]), name)


def _split(rows: list[Row], held_out: float, where: str) -> LabelledTexts:
  """Holds out a share of the rows, at least one."""
  order = np.random.default_rng(0).permutation(len(rows))
  count = max(1, round(held_out * len(rows)))
  validation, train = np.sort(order[:count]), np.sort(order[count:])
  labelled = LabelledTexts(
    [rows[i] for i in train], [rows[i] for i in validation]
  )
  return _check(labelled, where)


def _check(labelled: LabelledTexts, where: str) -> LabelledTexts:
  for split, rows in zip(labelled._fields, labelled, strict=True):
    if not rows:
      raise DataError(f"{where}: empty {split} split")
  train_labels = {label for label, _ in labelled.train}
  if len(train_labels) < 2:
    raise DataError(
      f"{where}: expected at least 2 labels among {len(labelled.train)} training "
      f"rows, got {', '.join(map(repr, train_labels))}"
    )
  return labelled


def _read_tabbed(file: pathlib.Path) -> Iterator[Row]:
  for number, line in enumerate(read_lines(file), 1):
    label, tab, text = line.partition("\t")
    if not tab or not label or not text.strip():
      raise DataError(f"{file}, line {number}: expected LABEL<tab>TEXT")
    names = [cell.strip().lower() for cell in (label, text)]
    if number > 1 or sorted(names) != sorted(_HEADER):
      yield label, text
    elif names != _HEADER:
      raise DataError(f"{file}, line 1: expected label<tab>text, got {line!r}")


def _csv(file: pathlib.Path) -> Iterator[Row]:
  lines = (line + "\n" for line in read_lines(file))
  reader = csv.reader(lines, strict=True)
  width, columns = 0, (0, 1)
  try:
    with long_cells():
      for row in filter(None, reader):
        if not width:
          width, names = 2, [cell.strip().lower() for cell in row]
          if {*_HEADER} <= {*names}:
            width, columns = len(row), tuple(map(names.index, _HEADER))
            continue
        label, text = (
          (row[column] for column in columns) if len(row) == width else ("", "")
        )
        if not label or not text.strip():
          raise DataError(
            f"{file}, line {reader.line_num}: expected LABEL,TEXT, got "
            f"{len(row)} columns"
          )
        yield label, text
  except csv.Error as error:
    raise DataError(f"{file}, line {reader.line_num}: {error}") from error
