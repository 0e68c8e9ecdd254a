"""Preparation of sentence pairs and of their vocabulary."""

import pathlib
import subprocess
import sys
import threading

import pytest

import tasks
from tasks import builders, cache
from tasks.vocabulary import Subwords, train_subwords
from tests.tasks.translation_cases import files, make


def test_changed_files_are_prepared_again(folder, empty_cache):
  make(**files(folder))
  prepared = set(empty_cache.iterdir())
  make(**files(folder))
  assert set(empty_cache.iterdir()) == prepared
  (folder / "val.de").write_text("neu\n" * 20)
  task = make(**files(folder))
  assert len(set(empty_cache.iterdir()) - prepared) == 1
  [first, *_] = task.decode_batches("validation")
  assert set(first.references) == {"neu"}


def test_a_broken_preparation_leaves_nothing(folder, empty_cache, monkeypatch):
  def fail(self, pairs):
    yield 0, {"en": "a", "de": "b"}
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(builders.AlignedText, "_generate_examples", fail)
    with pytest.raises(KeyboardInterrupt):
      make(**files(folder))
  assert not list(empty_cache.iterdir())
  make(**files(folder))


def test_a_killed_preparation_is_not_taken_for_a_finished_one(
  folder, empty_cache
):
  code = """
import os, pathlib
from tasks import builders
def write(scratch):
  (pathlib.Path(scratch) / "finished").mkdir()
  os.kill(os.getpid(), 9)
builders.prepare("k", write)
"""
  result = subprocess.run([sys.executable, "-c", code])
  assert result.returncode == -9
  [left] = empty_cache.iterdir()
  assert left.name.startswith(".preparing-")

  def write(scratch):
    finished = pathlib.Path(scratch) / "finished"
    finished.mkdir()
    return finished

  assert builders.prepare("k", write) == empty_cache / "k"


def test_two_preparations_at_once(folder, empty_cache):
  barrier = threading.Barrier(2)

  def write(scratch):
    finished = pathlib.Path(scratch) / "finished"
    finished.mkdir()
    (finished / "content").write_text("whole")
    barrier.wait(10)
    return finished

  paths = []
  threads = [
    threading.Thread(target=lambda: paths.append(builders.prepare("k", write)))
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
  with pytest.raises(
    tasks.DataError, match="ATTENTION_LAB_CACHE names another"
  ):
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
  with pytest.raises(
    tasks.DataError, match=r"^task\.vocab_size: 6 pieces are too few .* \d+$"
  ):
    make(**files(folder, vocab_size=6))


def test_the_vocabulary_reads_the_training_split_only(folder):
  (folder / "val.en").write_text("Ω\n" * 20)
  task = make(**files(folder))
  pieces = task.labels(range(task.target_vocab_size))
  assert not any("Ω" in piece for piece in pieces)
  assert "⁇" in task.decode(task.encode("Ω"))


# TFDS
