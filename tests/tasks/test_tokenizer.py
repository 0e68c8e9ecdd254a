"""Subwords: trained here, or read from the files of other projects."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

import tasks
from tasks import vocabularies
from tasks.tokenizer import Tokenizer, train_tokenizer
from tests.tasks.text_cases import (
  BERT,
  GPT,
  HELD_OUT,
  TEXT,
  make,
  words_tokenizer,
)


def test_added_tokens_beyond_the_model_count():
  """Llama's files list special tokens that the model's vocabulary lacks."""
  content = json.loads(words_tokenizer(()))
  words = len(content["model"]["vocab"])
  content["added_tokens"] = [
    {
      "id": words + i,
      "content": name,
      "special": True,
      **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    }
    for i, name in enumerate(("<s>", "</s>"))
  ]
  tokenizer = Tokenizer(json.dumps(content).encode(), "file")
  assert tokenizer.size == words + 2
  assert (tokenizer.special.bos, tokenizer.special.eos) == (words, words + 1)
  assert {*tokenizer.ordinary.tolist()} == {*range(words)}


def test_a_text_in_parts_is_the_text(monkeypatch):
  tokenizer = train_tokenizer(TEXT, 300)
  whole = tokenizer.encode_text(TEXT)
  monkeypatch.setattr("tasks.tokenizer._PART", 100)
  np.testing.assert_array_equal(tokenizer.encode_text(TEXT), whole)
  assert train_tokenizer(TEXT, 300).content() == tokenizer.content()


def test_training_gives_the_same_bytes_in_another_process(path):
  code = (
    "import hashlib, pathlib, sys; from tasks.tokenizer import train_tokenizer;"
    "text = pathlib.Path(sys.argv[1]).read_text('utf-8');"
    "print(hashlib.sha256(train_tokenizer(text, 320).content()).hexdigest())"
  )
  command = [sys.executable, "-c", code, str(path)]
  found = subprocess.check_output(command, text=True).strip()
  here = train_tokenizer(TEXT, 320).content()
  assert found == hashlib.sha256(here).hexdigest()


def test_special_tokens_come_first_and_sizes_are_kept(path):
  for kind, special in (
    ("decoder", ["<pad>", "<bos>", "<eos>"]),
    ("encoder", ["<pad>", "<bos>", "<eos>", "<cls>", "<sep>", "<mask>"]),
    ("encoder_decoder", ["<pad>", "<bos>", "<eos>", "<extra_id_0>"]),
  ):
    task = make(path, kind, vocabulary="subwords", vocab_size=300)
    assert task.target_vocab_size == 300
    assert (task.pad_id, task.bos_id, task.eos_id) == (0, 1, 2)
    assert task.labels(range(len(special))) == special


def test_the_vocabulary_is_that_of_the_training_part(tmp_path):
  file = tmp_path / "text.txt"
  file.write_text("ab" * 450 + "xyxyxyxy" * 12 + "zzzz")
  task = make(file, "decoder", vocabulary="subwords", vocab_size=262)
  assert not any(
    "x" in label and len(label) > 1 for label in task.labels(range(262))
  )
  assert any("ab" in label for label in task.labels(range(262)))


def test_labels_show_what_cannot_be_seen():
  tokenizer = train_tokenizer(TEXT, 300)
  labels = tokenizer.labels(tokenizer.encode_text("now is\n"))
  assert "".join(labels) == "now␣is⏎"
  # Half of a character is shown by its bytes.
  assert len(tokenizer.labels(tokenizer.encode_text("日"))) == 3
  assert "\ufffd" not in "".join(tokenizer.labels(range(300)))


@pytest.mark.parametrize(
  ("size", "message"),
  [
    (258, "expected at least 259 subwords, which are 256 bytes and 3 special "),
    (100_000, "expected at most "),
    (2**70, "expected at most "),
  ],
)
def test_a_size_that_the_text_does_not_have_is_told(size, message):
  with pytest.raises(tasks.DataError) as error:
    train_tokenizer(TEXT, size)
  told = str(error.value)
  assert told.startswith(f"task.vocab_size: {message}")
  assert told.endswith(f"got {size}")
  if "at most" in message:  # Which can be had.
    most = int(told.split("at most ")[1].split()[0])
    assert train_tokenizer(TEXT, most).size == most


def test_a_tokenizer_of_gpt_is_used_as_it_is(path, tmp_path):
  """Its one special token is the end, the beginning and the padding."""
  (tmp_path / "tokenizer.json").write_bytes(words_tokenizer(GPT))
  task = make(path, "decoder", context=8, tokenizer=str(tmp_path))
  end = task.target_vocab_size - 1
  assert (task.pad_id, task.bos_id, task.eos_id) == (end,) * 3
  batches = task.eval_batches("validation")
  words = np.concatenate([x["targets"][x["weights"] > 0] for x in batches])
  # Not cut to 8 tokens, as the file says.
  assert task.labels(words) == HELD_OUT.split()[1:]
  assert task.decode([*task.encode("the time"), end, 3]) == "the time"
  assert task.encode("time <|endoftext|>")[-1] == end
  with pytest.raises(ValueError, match="at least one token"):
    task.encode("")


def test_a_run_keeps_the_file(path, tmp_path):
  file = tmp_path / "tokenizer.json"
  file.write_bytes(words_tokenizer(BERT))
  leaves = {"tokenizer": str(file)}
  task = make(path, "encoder", **leaves)
  run = tmp_path / "run"
  task.save(run)
  assert (run / "vocabulary/tokenizer.json").read_bytes() == file.read_bytes()
  make(path, "encoder", workdir=run, **leaves)
  file.write_bytes(words_tokenizer(BERT, 3))
  with pytest.raises(tasks.DataError, match=r"tokenizer\.json does not fit"):
    make(path, "encoder", workdir=run, **leaves)
  file.unlink()
  restored = make(path, "encoder", workdir=run, restore=True, **leaves)
  assert restored.encode("the time") == task.encode("the time")


@pytest.mark.parametrize("vocabulary", ["characters", "subwords", "bytes"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_decoder"])
def test_save_and_restore_without_the_text(path, tmp_path, kind, vocabulary):
  leaves = {"vocabulary": vocabulary, "vocab_size": 300}
  task, run = make(path, kind, **leaves), {"workdir": tmp_path / "run"}
  batch = task.train_batch(0)
  assert batch["targets"].max() < task.target_vocab_size
  assert task.baselines["unigram_loss"] > 0
  task.save(run["workdir"])
  # The folder of a run has a tokenizer for others.
  again = make(path, kind, tokenizer=str(run["workdir"]))
  np.testing.assert_array_equal(
    again.train_batch(0)["targets"], batch["targets"]
  )
  path.unlink()
  # Bytes stay what they are, whatever the config says.
  others = {"characters"} if vocabulary == "bytes" else set()
  for other in {vocabulary, *others}:
    options = leaves | {"vocabulary": other}
    restored = make(path, kind, restore=True, **run, **options)
    for name in ("target_vocab_size", "max_source_length", "max_target_length"):
      assert getattr(restored, name) == getattr(task, name)
    special = {"encoder": "<mask>", "encoder_decoder": "<extra_id_0>"}
    line = f"the {special.get(kind, 'a')}ood"
    ids = task.encode(line)
    assert restored.encode(line) == ids
    assert line in task.decode(ids)
    with pytest.raises(ValueError, match="expected at most"):
      restored.encode("the time " * 9)
    assert restored.decode(restored.encode_target("good")).startswith("good")
    assert restored.baselines == {}
    assert not list(restored.eval_splits)
  if vocabulary == "bytes":
    found = vocabularies.find(run["workdir"])
    assert json.loads(found.read_text())[:3] == ["<pad>", "<bos>", "<eos>"]


def test_a_decoder_needs_an_end(path, tmp_path):
  file = tmp_path / "tokenizer.json"
  file.write_bytes(words_tokenizer(["<pad>"]))
  with pytest.raises(tasks.DataError, match=r"has no token <eos> or </s> or "):
    make(path, "decoder", tokenizer=str(file))


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b"[1, 2"])
def test_a_file_that_is_no_tokenizer_is_told(path, tmp_path, content):
  file = tmp_path / "tokenizer.json"
  if content is not None:
    file.write_bytes(content)
  with pytest.raises(tasks.DataError) as error:
    make(path, "decoder", tokenizer=str(tmp_path))
  assert str(file) in str(error.value)
  assert "task.tokenizer" in str(error.value)
  assert "\n" not in str(error.value)


def test_the_size_counts_ids_and_not_tokens():
  content = json.loads(words_tokenizer(BERT, first=7))
  words = len(content["model"]["vocab"])
  tokenizer = Tokenizer(json.dumps(content).encode())
  assert tokenizer.size == 7 + words
  assert tokenizer.ordinary.tolist() == list(range(7, 7 + words - 4))


def test_a_folder_without_a_tokenizer(tmp_path):
  with pytest.raises(tasks.DataError, match=r"tokenizer\.json: no such file"):
    vocabularies.open_file(str(tmp_path), ())
