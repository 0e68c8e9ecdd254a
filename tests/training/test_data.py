"""A run goes on with the data that it began with; batches come ahead of time."""

import gzip
import threading
import time

import pytest

from settings.errors import ConfigError
from tasks import files
from tests.training.tiny import config
from training import experiment
from training.loop import prefetch

TEXT = "abcd efgh\n" * 40


def config_of(path):
  task = {"name": "text", "path": str(path), "context": 8}
  return config("decoder", task | {"vocabulary": "bytes"})


def test_other_data_are_refused(tmp_path):
  path, run = tmp_path / "text.txt", tmp_path / "run"
  path.write_text(TEXT)
  given = config_of(path)
  experiment.begin(given, run)
  experiment.begin(given, run)
  kept = (run / "vocabulary" / files.DATA).read_text()
  path.write_text(TEXT.replace("d", "e"))  # Of the same vocabulary and size.
  with pytest.raises(ConfigError, match=r"^config.task: .*text.txt"):
    experiment.begin(given, run)
  assert (run / "vocabulary" / files.DATA).read_text() == kept
  path.write_text(TEXT)
  experiment.begin(given, run)


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
  path, run = tmp_path / "text.txt", tmp_path / "run"
  path.write_text(TEXT)
  experiment.begin(config_of(path), run)
  (run / "vocabulary" / files.DATA).unlink()
  experiment.begin(config_of(path), run)
  assert (run / "vocabulary" / files.DATA).exists()


@pytest.mark.parametrize("number", [0, 1])
def test_files_whose_paths_end_alike_are_told_apart(tmp_path, number):
  paths = [tmp_path / x / "data/train.txt" for x in ("en", "de", "fr/de")]
  for path in paths:
    path.parent.mkdir(parents=True)
    path.write_text(TEXT)
  given, run = config_of(",".join(map(str, paths))), tmp_path / "run"
  experiment.begin(given, run)
  names = {
    "en/data/train.txt",
    f"{tmp_path.name}/de/data/train.txt",
    "fr/de/data/train.txt",
  }
  assert set(files.recorded_data(run)) == names
  paths[number].write_text(TEXT[::-1])
  with pytest.raises(ConfigError, match=r"^config.task: .*train.txt"):
    experiment.begin(given, run)
  # An earlier version kept the last of them, under two parts of its path.
  paths[number].write_text(TEXT)
  digest = files.recorded_data(run).popitem()[1]
  kept = run / "vocabulary" / files.DATA
  kept.write_text(f"{digest}  data/train.txt\n")
  experiment.begin(given, run)
  assert set(files.recorded_data(run)) == names


def test_what_is_noted_is_the_content(tmp_path):
  plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
  plain.write_text(TEXT)
  packed.write_bytes(gzip.compress(TEXT.encode()))
  with files.record_digests() as notes:
    for path in (plain, packed, plain):
      files.read_bytes(path)
  files.read_bytes(tmp_path / "a.txt")
  folder = tmp_path.name
  assert [*files.name_digests(notes)] == [
    f"{folder}/a.txt",
    f"{folder}/b.txt.gz",
  ]
  assert len(set(notes.values())) == 1


@pytest.mark.parametrize("count", [3, 1000, 1001])
@pytest.mark.parametrize("change", [{"f1": "x"}, {"more": "y"}, {"f2": None}])
def test_files_that_come_go_or_change(tmp_path, count, change):
  notes = {f"f{i}": f"{i}" for i in range(count)}
  path = tmp_path / "vocabulary" / files.DATA
  path.parent.mkdir()
  path.write_bytes(files.check_data(tmp_path, notes))
  assert len(path.read_text().splitlines()) == (count if count <= 1000 else 1)
  assert files.check_data(tmp_path, notes) == path.read_bytes()
  notes = {k: x for k, x in (notes | change).items() if x is not None}
  with pytest.raises(files.DataError, match=r"has changed since the run in"):
    files.check_data(tmp_path, notes)


def test_batches_come_in_order():
  assert list(prefetch(lambda i: i * i, 3, 9)) == [9, 16, 25, 36, 49, 64]
  assert list(prefetch(lambda i: i, 5, 5)) == []


def test_the_next_one_is_made_while_this_one_is_used():
  made = threading.Event()

  def make(index):
    if index == 1:
      made.set()
    return index

  batches = prefetch(make, 0, 3)
  assert next(batches) == 0
  assert made.wait(timeout=10)
  batches.close()


def test_two_are_made_ahead_at_most():
  made, third = [], threading.Event()

  def make(index):
    made.append(index)
    if index == 2:
      third.set()

  batches = prefetch(make, 0, 9)
  next(batches)
  assert third.wait(timeout=10)
  time.sleep(0.05)
  assert made == [0, 1, 2]
  batches.close()


def test_an_exception_comes_in_its_turn():
  def make(index):
    if index == 2:
      raise OSError("disk")
    return index

  batches = prefetch(make, 0, 5)
  assert [next(batches), next(batches)] == [0, 1]
  with pytest.raises(OSError, match="disk"):
    next(batches)
