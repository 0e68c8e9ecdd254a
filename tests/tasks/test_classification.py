"""Classification of texts: files, splits, rows, faults."""

import csv
import gzip
import math

import numpy as np
import pytest
import tensorflow_datasets as tfds

import tasks
from tasks.classification import ClassificationConfig, read_rows
from tests.tasks import generated_cases
from tests.tasks.generated_cases import assert_refused
from tests.tasks.text_cases import BERT, GPT, words_tokenizer

CLS, SEP = 3, 4
NAMES = ["colour", "number"]


def rows(count=60):
  """Labels and texts of 1 to 9 words."""
  words = {"colour": ["red", "green", "blue"], "number": ["one", "two", "six"]}
  for i in range(count):
    label = NAMES[i % 2]
    yield label, " ".join(words[label][(i + j) % 3] for j in range(1 + i % 9))


@pytest.fixture
def path(tmp_path):
  file = tmp_path / "rows.tsv"
  file.write_text("".join(f"{label}\t{text}\n" for label, text in rows()))
  return file


def make(path="", **options):
  leaves = {"path": str(path), "max_length": 16, "vocabulary": "characters"}
  options = {"batch_size": 4} | leaves | options
  return generated_cases.make("classification", "encoder", **options)


def decoded(task, batch):
  """(label, text) of each row that is there."""
  for row in np.flatnonzero(batch["weights"].any(axis=1)):
    ids = batch["source"][row][batch["source_mask"][row]]
    yield task.names[batch["targets"][row, 0]], task.decode(ids[1:-1])


def epoch(task, size):
  batches = (task.train_batch(step) for step in range(size))
  return [row for batch in batches for row in decoded(task, batch)]


def validation(task):
  batches = task.eval_batches("validation")
  return [row for batch in batches for row in decoded(task, batch)]


def test_a_text_may_be_as_long_as_the_limit(path):
  """With [CLS] before it and [SEP] behind it."""
  assert len(make(path).encode("red green blue")) == 16
  told = r"^expected at most 16 characters \(task\.max_length\), got 17$"
  with pytest.raises(ValueError, match=told):
    make(path).encode("red green blues")


def test_a_batch_has_the_label_at_the_first_position(path):
  task = make(path)
  assert task.target_vocab_size == 2
  assert not task.shared_vocabulary
  batch = task.train_batch(0)
  for name in ("source", "source_mask", "targets", "weights"):
    assert batch[name].shape == (4, 16)
  assert batch["source"].dtype == batch["targets"].dtype == np.int32
  assert (batch["source"][:, 0] == CLS).all()
  last = batch["source_mask"].sum(axis=1) - 1
  assert (batch["source"][np.arange(4), last] == SEP).all()
  assert (batch["source"][~batch["source_mask"]] == 0).all()
  assert (batch["weights"] == [1] + [0] * 15).all()


def test_rows_are_trained_once_an_epoch_and_a_tenth_is_held_out(path):
  task = make(path, batch_size=6)
  cut = [(label, text[:14]) for label, text in rows()]
  held_out = validation(task)
  first, second = epoch(task, 9), epoch(task, 18)[54:]
  assert len(held_out) == 6
  assert sorted(first + held_out) == sorted(second + held_out) == sorted(cut)
  assert first != second
  # Which are held out depends on the file alone.
  assert held_out == validation(make(path, batch_size=6, seed=1))


def test_values_between_commas(tmp_path, path):
  file = tmp_path / "rows.csv"
  lines = (f'"{label}","{text}, ""so"""\n' for label, text in rows())
  file.write_text("".join(lines))
  found = epoch(make(file, max_length=99), 9)
  assert all(text.endswith(', "so"') for _, text in found)
  assert {label for label, _ in found} == set(NAMES)


@pytest.mark.parametrize(
  ("name", "header", "row"),
  [
    ("rows.csv", "label,text", "{0},{1}"),
    ("rows.CSV", " Label ,TEXT", "{0},{1}"),
    ("rows.csv", "text,label", "{1},{0}"),
    ("rows.csv.gz", "id,text,score,label", "7,{1},0.5,{0}"),
    ("rows.csv", "\nlabel,text", "\n{0},{1}"),
    ("rows.tsv", "Label\ttext", "{0}\t{1}"),
  ],
)
def test_a_header_is_no_row(path, tmp_path, name, header, row):
  lines = [header, *(row.format(label, text) for label, text in rows())]
  content = "".join(f"{line}\n" for line in lines).encode()
  file = tmp_path / name
  file.write_bytes(gzip.compress(content) if ".gz" in name else content)
  found, wanted = make(file), make(path)
  assert found.names == wanted.names == NAMES
  for one, other in zip(
    [found.train_batch(0), *found.eval_batches("validation")],
    [wanted.train_batch(0), *wanted.eval_batches("validation")],
    strict=True,
  ):
    generated_cases.assert_same(one, other)


def test_a_label_of_one_row_alone_is_no_header_elsewhere(tmp_path):
  lines = ["a\tx"] * 9 + ["b\ty"] * 9
  file = tmp_path / "rows.tsv"
  for place in (1, 18):
    file.write_text("\n".join([*lines[:place], "rare\tz", *lines[place:]]))
    assert make(file).names == ["a", "b", "rare"]


@pytest.mark.parametrize(
  "content",
  [
    "a\tx\nb\ty\nc\tz\nd\tw\n",  # Of four rows, nothing is told.
    "a\tx\na\ty\na\tz\nb\tx\nc\ty\nd\tz\n",  # Half of them are alone.
    "rare\tx\na\ty\na\tz\n",  # There is but one other label.
  ],
)
def test_labels_that_may_be_labels(tmp_path, content):
  file = tmp_path / "rows.tsv"
  file.write_text(content)
  found = read_rows(str(file), 0.1)
  assert len(found.validation) == 1
  assert len(found.train) == len(content.splitlines()) - 1


def test_a_cell_may_be_long(tmp_path):
  file = tmp_path / "rows.csv"
  long = "y" * 140_000
  file.write_text("a,x\n" * 9 + f"b,{long}\n" * 9)
  assert set(read_rows(str(file), 0.1).train) == {("a", "x"), ("b", long)}
  assert csv.field_size_limit() == 131_072


@pytest.mark.parametrize("content", ["[" * 200_000, "{}", "[1]", "a"])
def test_labels_of_a_run_that_are_damaged_are_one_line(path, tmp_path, content):
  make(path).save(tmp_path / "run")
  (tmp_path / "run/vocabulary/labels.json").write_text(content)
  with pytest.raises(tasks.DataError, match=r"^labels\.json of ") as info:
    make(path, workdir=tmp_path / "run", restore=True)
  assert "\n" not in str(info.value)


@pytest.mark.parametrize("first", [0, 5])
def test_a_tokenizer_of_bert_is_used_as_it_is(path, tmp_path, first):
  (tmp_path / "tokenizer.json").write_bytes(words_tokenizer(BERT, first))
  task = make(path, tokenizer=str(tmp_path))
  batch = task.train_batch(0)
  assert (batch["source"][:, 0] == task.source_vocab_size - 3).all()
  padding = batch["source"][~batch["source_mask"]]
  assert (padding == task.source_vocab_size - 4).all()
  assert padding.size


def test_a_tokenizer_without_a_first_token_is_told(path, tmp_path):
  (tmp_path / "tokenizer.json").write_bytes(words_tokenizer(GPT))
  with pytest.raises(tasks.DataError, match=r"no token <cls> or \[CLS\]"):
    make(path, tokenizer=str(tmp_path))


@pytest.mark.parametrize("vocabulary", ["characters", "subwords"])
def test_save_and_restore_without_the_file(path, tmp_path, vocabulary):
  leaves = {"vocabulary": vocabulary, "vocab_size": 266}
  task = make(path, **leaves)
  run = tmp_path / "run"
  task.save(run)
  make(path, workdir=run, **leaves)
  path.write_text(path.read_text() + "word\tone\n" * 30)
  with pytest.raises(tasks.DataError, match="does not fit the data"):
    make(path, workdir=run, **leaves)
  path.unlink()
  restored = make(path, workdir=run, restore=True, **leaves)
  assert restored.encode("two six") == task.encode("two six")
  assert restored.target_vocab_size == 2
  assert restored.encode_target("number") == [1]
  with pytest.raises(ValueError, match="expected a label, one of colour, numb"):
    restored.encode_target("word")
  with pytest.raises(ValueError, match="expected at most"):
    restored.encode("two six " * 9)


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("rows.tsv", None, "no such file (task.path)"),
    ("rows.tsv", "", "empty train split"),
    ("rows.tsv", "a\tx\n", "empty train split"),
    ("rows.tsv", "a\tx\nno tab\n", "line 2: expected LABEL<tab>TEXT"),
    ("rows.tsv", "a\tx\n\tx\n", "line 2: expected LABEL<tab>TEXT"),
    ("rows.tsv", "a\tx\n\n", "line 2: expected LABEL<tab>TEXT"),
    ("rows.tsv", "a\tx\n" * 9, "expected at least 2 labels among 8 training"),
    ("rows.csv", "a,x\na,x,y\n", "line 2: expected LABEL,TEXT, got 3 columns"),
    ("rows.csv", 'a,x\na,"x\n', "line 2: unexpected end of data"),
    ("rows.csv", "text,label,id\nx,a\n", "line 2: expected LABEL,TEXT, got"),
    ("rows.csv", "label,text\n" + "a,x\n" * 9, "expected at least 2 labels am"),
    ("rows.tsv", "label\ttext\n" + "a\tx\n" * 9, "expected at least 2 labels"),
    ("rows.tsv", "text\tlabel\nx\ta\n", "line 1: expected label<tab>text, got"),
    ("rows.csv", "sentiment,review\n" + "a,x\nb,y\n" * 9, "first row: "),
    (
      "rows.csv",
      "review,sentiment\n1,a\n2,b\n3,a\n3,a",
      "4 labels in 5 rows, such as '3'; a label precedes its text",
    ),
    (
      "rows.tsv",
      "sentiment\treview\n" + "a\tx\nb\ty\n" * 9,
      "first row: no other row has its label 'sentiment', so it seems to be a header",
    ),
  ],
)
def test_faults_are_one_line(tmp_path, name, content, message):
  file = tmp_path / name
  if content is not None:
    file.write_text(content)
  with pytest.raises(tasks.DataError) as error:
    make(file)
  assert message in str(error.value)
  assert str(file) in str(error.value)
  assert "\n" not in str(error.value)


def test_config_refuses():
  assert_refused(
    ClassificationConfig,
    *({"path": ""}, {"path": "a", "dataset": "b"}),
    *({"held_out": 0.0, "path": "a"}, {"held_out": math.nan, "path": "a"}),
    *({"max_length": 2, "path": "a"}, {"vocabulary": "x", "path": "a"}),
  )


class TinyReviews(tfds.core.GeneratorBasedBuilder):
  """A real TFDS builder, as small as can be."""

  VERSION = tfds.core.Version("1.0.0")
  SPLITS: tuple[str, ...] = ("train", "test")
  FEATURE = "text"
  LABEL: tfds.features.FeatureConnector = tfds.features.ClassLabel(names=NAMES)

  def _info(self):
    features = {self.FEATURE: tfds.features.Text(), "label": self.LABEL}
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict(features)
    )

  def _split_generators(self, dl_manager):
    return {name: self._generate_examples(name) for name in self.SPLITS}

  def _generate_examples(self, split):
    for i, (label, text) in enumerate(rows(60 if split == "train" else 10)):
      yield i, {"label": label, self.FEATURE: text}


class OneSplitReviews(TinyReviews):
  """A training split and nothing else."""

  SPLITS = ("train",)


class WordReviews(TinyReviews):
  """Labels are texts and not numbers."""

  LABEL = tfds.features.Text()


class HiddenReviews(TinyReviews):
  """The labels of the test split are not published."""

  def _generate_examples(self, split):
    for i, example in super()._generate_examples(split):
      yield i, example | ({"label": -1} if split == "test" else {})


class TitledReviews(TinyReviews):
  """Without the feature that is read."""

  FEATURE = "title"


@pytest.mark.parametrize(
  ("dataset", "trained", "held_out"),
  [
    ("tiny_reviews", 60, 10),
    ("one_split_reviews", 54, 6),
    ("word_reviews", 60, 10),
  ],
)
def test_a_tfds_set_by_name(empty_cache, dataset, trained, held_out):
  task = make(dataset=dataset, batch_size=2, max_length=99)
  found = epoch(task, trained // 2) + validation(task)
  assert len(found) == trained + held_out
  assert set(found) == set(rows())


def test_a_set_without_what_is_read_is_told(empty_cache):
  with pytest.raises(tasks.DataError, match=r"^task.dataset: titled_reviews"):
    make(dataset="titled_reviews")
  with pytest.raises(tasks.DataError, match=r"without a label .* 'test'"):
    make(dataset="hidden_reviews")
