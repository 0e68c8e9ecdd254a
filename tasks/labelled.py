"""Texts with one label each: a file of rows, or a TFDS set by name."""

from collections.abc import Iterator, Sequence
import csv
import pathlib
from typing import NamedTuple

import numpy as np

from tasks.base import DataError
from tasks.files import read_lines, typed_path

Row = tuple[str, str]
"""Label and text."""

FEATURES = ("text", "label")
"""The names of text and label in a TFDS set."""


class Labelled(NamedTuple):
  """Rows that are trained and rows that are held out.

  Attributes:
    train: at least one.
    validation: at least one.
  """

  train: Sequence[Row]
  validation: Sequence[Row]

  def names(self) -> list[str]:
    """The labels, sorted; a label's place is its id."""
    return sorted({label for rows in self for label, _ in rows})


def read_rows(path: str, held_out: float) -> Labelled:
  """Reads a file of a label and a text in each row, without a header.

  A name that ends in `.csv` or `.csv.gz` is read as comma-separated values with
  quotes; any other file has a tab behind the label.

  Args:
    path: as it was typed.
    held_out: share of rows that are held out: which, follows from their number
      alone.

  Raises:
    DataError: a missing or undecodable file, a row without a label or text, or
      too few rows.
  """
  file = typed_path(path)
  if not file.is_file():
    problem = "a folder, expected a file" if file.is_dir() else "no such file"
    raise DataError(f"{file}: {problem} (task.path)")
  is_csv = file.name.removesuffix(".gz").endswith(".csv")
  rows = list(_csv(file) if is_csv else _tabbed(file))
  return _split(rows, held_out, str(file))


def read_named(name: str, held_out: float) -> Labelled:
  """Reads a set of the TFDS catalogue that has the features text and label.

  Its validation split is held out, or else its test split, or else a share of
  its training split.

  Raises:
    DataError: in one line, what is wrong with the set.
  """
  from tasks import catalog

  builder = catalog.prepare_named(
    name,
    "",
    [("dataset", feature) for feature in FEATURES],
    instead="task.path",
  )
  held_out_split = catalog.held_out_split(builder, name)
  names = getattr(builder.info.features["label"], "names", None)

  def read(split: str) -> Iterator[Row]:
    for example in builder.as_data_source(split=split):
      label, text = example["label"], example["text"]
      # A test set may be published without its labels.
      if isinstance(label, bytes):
        label = label.decode()
      yield names[int(label)] if names else str(label), text.decode()

  train = [*read("train")]
  if held_out_split is None:
    return _split(train, held_out, name)
  return _checked(Labelled(train, [*read(held_out_split)]), name)


def _split(rows: list[Row], held_out: float, where: str) -> Labelled:
  """Holds out a share of the rows, at least one."""
  order = np.random.default_rng(0).permutation(len(rows))
  count = max(1, round(held_out * len(rows)))
  validation, train = np.sort(order[:count]), np.sort(order[count:])
  labelled = Labelled([rows[i] for i in train], [rows[i] for i in validation])
  return _checked(labelled, where)


def _checked(labelled: Labelled, where: str) -> Labelled:
  for split, rows in zip(labelled._fields, labelled, strict=True):
    if not rows:
      raise DataError(f"{where}: empty {split} split")
  known = {label for label, _ in labelled.train}
  if len(known) < 2:
    raise DataError(
      f"{where}: expected at least 2 labels among {len(labelled.train)} rows "
      f"that are trained, got {', '.join(map(repr, known))}"
    )
  return labelled


def _tabbed(file: pathlib.Path) -> Iterator[Row]:
  for number, line in enumerate(read_lines(file), 1):
    label, tab, text = line.partition("\t")
    if not tab or not label or not text.strip():
      raise DataError(f"{file}, line {number}: expected LABEL<tab>TEXT")
    yield label, text


def _csv(file: pathlib.Path) -> Iterator[Row]:
  lines = (line + "\n" for line in read_lines(file))
  reader = csv.reader(lines, strict=True)
  try:
    for row in reader:
      if len(row) != 2 or not row[0] or not row[1].strip():
        raise DataError(
          f"{file}, line {reader.line_num}: expected LABEL,TEXT, got "
          f"{len(row)} columns"
        )
      yield row[0], row[1]
  except csv.Error as error:
    raise DataError(f"{file}, line {reader.line_num}: {error}") from error
