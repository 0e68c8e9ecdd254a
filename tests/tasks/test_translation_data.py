"""Preparation of sentence pairs and of their vocabulary."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from settings import cache
import tasks
from tasks import numbers, translation
from tasks.vocabulary import PAD, Subwords, train_subwords
from tests.tasks.generated_cases import assert_same
from tests.tasks.translation_cases import files, make


def test_changed_files_are_read_again(folder):
  make(**files(folder))
  (folder / "val.de").write_text("neu\n" * 20)
  task = make(**files(folder))
  [first, *_] = task.decode_batches("validation")
  assert set(first.references) == {"neu"}


def test_numbers_are_spelled_once(empty_cache, monkeypatch):
  sizes = {"num_train": 50, "num_validation": 5, "max_number": 999}
  batch = make(**sizes).train_batch(0)
  prepared = set(empty_cache.iterdir())
  monkeypatch.setattr(numbers, "number_pairs", None)
  assert_same(batch, make(**sizes).train_batch(0))
  assert set(empty_cache.iterdir()) == prepared


def test_a_broken_preparation_leaves_nothing(empty_cache):
  def fail(scratch):
    (scratch / "half").mkdir()
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    cache.prepare(empty_cache / "k", fail)
  assert not list(empty_cache.iterdir())


def test_a_killed_preparation_is_not_taken_for_a_finished_one(empty_cache):
  code = """
import os
from settings import cache
def write(scratch):
  (scratch / "finished").mkdir()
  os.kill(os.getpid(), 9)
cache.prepare(cache.folder("datasets") / "k", write)
"""
  result = subprocess.run([sys.executable, "-c", code])
  assert result.returncode == -9
  [left] = empty_cache.iterdir()
  assert left.name.startswith(".preparing-")

  def write(scratch):
    finished = scratch / "finished"
    finished.mkdir()
    return finished

  assert cache.prepare(empty_cache / "k", write) == empty_cache / "k"


def test_two_preparations_at_once(empty_cache):
  barrier = threading.Barrier(2)

  def write(scratch):
    finished = scratch / "finished"
    finished.mkdir()
    (finished / "content").write_text("whole")
    barrier.wait(10)
    return finished

  paths = []
  threads = [
    threading.Thread(
      target=lambda: paths.append(cache.prepare(empty_cache / "k", write))
    )
    for _ in range(2)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert paths == [empty_cache / "k"] * 2
  assert (empty_cache / "k/content").read_text() == "whole"
  assert [p.name for p in empty_cache.iterdir()] == ["k"]


def test_a_cache_that_cannot_be_written(folder, monkeypatch, tmp_path):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file/cache"))
  with pytest.raises(tasks.DataError, match="ATTENTION_LAB_CACHE"):
    make(**files(folder))


# Vocabulary


def test_the_vocabulary_is_deterministic():
  lines = [f"word{i} and word{i * 7 % 50}" for i in range(200)]
  assert train_subwords(lines, 80) == train_subwords(iter(lines), 80)


def test_a_small_text_supports_fewer_pieces():
  vocabulary = Subwords(train_subwords(["a small text", "of two lines"], 8000))
  assert 15 < vocabulary.size < 100
  assert vocabulary.decode(vocabulary.encode(["a text"])[0]) == "a text"


def test_a_vocabulary_smaller_than_the_alphabet(folder):
  with pytest.raises(tasks.DataError, match=r"^task\.vocab_size: 6 pieces"):
    make(**files(folder, vocab_size=6))


def test_the_vocabulary_reads_the_training_split_only(folder):
  (folder / "val.en").write_text("Ω\n" * 20)
  task = make(**files(folder))
  pieces = task.labels(range(task.target_vocab_size))
  assert not any("Ω" in piece for piece in pieces)
  assert "⁇" in task.decode(task.encode("Ω"))


def test_sources_are_decoded_at_the_middle_the_last_and_the_longest_width(
  monkeypatch,
):
  """Training has the widths 4, 6, 9, 14; the batches have up to 8 … 19 ids."""
  shapes = np.array([[4, 30], [6, 30], [9, 30], [14, 30]])
  monkeypatch.setattr(translation, "choose_shapes", lambda *_: shapes)
  sizes = {"num_train": 50, "num_validation": 80, "max_number": 99_999}
  task = make(**sizes, max_length=60)
  batches = list(task.decode_batches("validation"))
  sources = [batch.inputs["source"] for batch in batches]
  longest = [(source != PAD).sum(axis=1).max() for source in sources]
  assert longest == [8, 10, 12, 14, 19]
  assert [source.shape[1] for source in sources] == [9, 14, 14, 14, 60]
  assert [batch.max_length for batch in batches] == [59, 60, 60, 60, 60]
