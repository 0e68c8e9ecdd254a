"""TFDS sets by name, and what is said where there is no network."""

import threading
import time

import pytest
import tensorflow_datasets as tfds

import tasks
from tasks import catalog
from tests.tasks.generated_cases import assert_same
from tests.tasks.translation_cases import make


class TinyTalks(tfds.core.GeneratorBasedBuilder):
  """A real TFDS builder, as small as can be."""

  VERSION = tfds.core.Version("1.0.0")
  SPLITS: tuple[str, ...] = ("train", "validation", "test")

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.Translation(("pt", "en"))
    )

  def _split_generators(self, dl_manager):
    return {name: self._generate_examples(name) for name in self.SPLITS}

  def _generate_examples(self, split):
    for i in range(200 if split == "train" else 10):
      yield i, {"pt": f"olá mundo {i} {split}", "en": f"hello world {i}"}


class OneSplitTalks(TinyTalks):
  """Like opus: a training split and nothing else."""

  SPLITS = ("train",)


def tiny(dataset="tiny_talks", **fields):
  languages = {"source_language": "pt", "target_language": "en"}
  set_of = {"source": "tfds", "dataset": dataset, "vocab_size": 60}
  return languages | set_of | fields


def test_a_tfds_set_by_name(empty_cache):
  task = make(**tiny())
  assert task.eval_splits == ("validation", "test")
  batch = task.train_batch(0)
  assert task.decode(batch["source"][0]).startswith("olá mundo")
  assert task.decode(batch["targets"][0]).startswith("hello world")
  assert (empty_cache / "tfds-tiny_talks-1.0.0").is_dir()
  assert_same(batch, make(**tiny()).train_batch(0))


def test_a_tfds_folder_that_has_it_prepared(tmp_path):
  builder = TinyTalks(data_dir=tmp_path / "mine", file_format="array_record")
  builder.download_and_prepare()
  task = make(**tiny(path=str(tmp_path / "mine")))
  assert len(next(iter(task.decode_batches("test"))).references) == 10
  with pytest.raises(tasks.DataError, match=r"no prepared tiny_talks/1\.0\.0"):
    make(**tiny(path=str(tmp_path / "other")))


def test_a_tfds_set_with_one_split_holds_out_its_end():
  batches = make(**tiny("one_split_talks")).eval_batches("validation")
  assert sum(b["weights"].any(axis=1).sum() for b in batches) == 2


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (tiny("no_such_set"), "task.dataset: TFDS has no 'no_such_set'; see"),
    (tiny(source_language="fr"), "task.source_language: tiny_talks has en"),
    (tiny("ted_hrlr_translate/xx_to_en"), "task.dataset: ted_hrlr_translate/"),
  ],
)
def test_tfds_faults(fields, message):
  with pytest.raises(tasks.DataError) as error:
    make(**fields)
  assert str(error.value).startswith(message)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "name", ["ted_hrlr_translate/pt_to_en", "wmt14_translate/de-en"]
)
def test_sets_of_the_catalogue_are_found(name, tmp_path):
  builder = catalog._find(name, str(tmp_path))
  assert "en" in builder.info.features
  assert builder.url_infos


def test_offline_is_said_at_once(monkeypatch, empty_cache):
  def unreachable(address, timeout):
    raise OSError("Network is unreachable")

  monkeypatch.setattr("socket.create_connection", unreachable)
  start = time.monotonic()
  with pytest.raises(tasks.DataError) as error:
    make(**tiny("ted_hrlr_translate/pt_to_en"))
  assert "this machine seems to be offline" in str(error.value)
  assert "\n" not in str(error.value)
  assert time.monotonic() - start < 10


def test_a_host_that_never_answers(monkeypatch):
  over = threading.Event()

  def silent(address, timeout):
    over.wait(60)
    raise OSError("timed out")

  monkeypatch.setattr("socket.create_connection", silent)
  start = time.monotonic()
  with pytest.raises(tasks.DataError, match="this machine seems to be offline"):
    catalog._check_network("x", ["https://a.example/b"], "", timeout=0.2)
  over.set()
  assert time.monotonic() - start < 5


def test_one_answer_is_enough(monkeypatch):
  class Connection:
    def close(self):
      pass

  def connect(address, timeout):
    if address[0] == "up.example":
      return Connection()
    raise OSError

  monkeypatch.setattr("socket.create_connection", connect)
  urls = [f"https://{host}.example/x" for host in ("down", "up", "gone")]
  catalog._check_network("x", urls, "task.path")


# Configs, kinds, imports


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY"])
def test_behind_a_proxy_only_the_proxy_has_to_answer(monkeypatch, name):
  asked = []

  def connect(address, timeout):
    asked.append(address)
    raise OSError

  monkeypatch.setattr("socket.create_connection", connect)
  for variable in ("https_proxy", "HTTPS_PROXY"):
    monkeypatch.delenv(variable, raising=False)
  monkeypatch.setenv(name, "http://proxy.example:3128")
  with pytest.raises(tasks.DataError):
    catalog._check_network("x", ["https://a.example/b"], "", timeout=0.2)
  assert asked == [("proxy.example", 3128)]
