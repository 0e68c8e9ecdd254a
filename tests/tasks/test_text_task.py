"""Language modelling of a text: windows, splits, vocabulary, faults."""

import functools
import math
import pathlib

import numpy as np
import pytest
import tokenizers

import tasks
from tasks import vocabularies
from tasks.characters import Bytes
from tasks.text import TextConfig
from tests.tasks import text_cases
from tests.tasks.generated_cases import assert_refused
from tests.tasks.text_cases import HELD_OUT, TEXT

SHAKESPEARE = (
  pathlib.Path(__file__).parents[2] / "../shared/data/tinyshakespeare.txt"
)
make = functools.partial(text_cases.make, kind="decoder")


def test_train_batch_is_shifted_text_of_the_first_nine_tenths(path):
  task = make(path)
  train = TEXT[: int(0.9 * len(TEXT))]
  for step in range(20):
    batch = task.train_batch(step)
    assert batch["inputs"].shape == (4, 16)
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(
      batch["inputs"][:, 1:], batch["targets"][:, :-1]
    )
    assert (batch["weights"] == 1).all()
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
      assert task.decode(inputs) + task.decode(targets[-1:]) in train


def test_the_last_characters_of_the_training_part_are_trained(path):
  class Last:
    def integers(self, high, size):
      return np.full(size, high - 1)

  task = make(path)
  for row in task._windows(Last(), 7):
    assert task.decode(row) == TEXT[: int(0.9 * len(TEXT))][-7:]


def test_evaluation_predicts_every_held_out_character_once(path):
  task = make(path)
  batches = list(task.eval_batches("validation"))
  inputs, targets = (
    "".join(
      task.decode(row[weights > 0])
      for batch in batches
      for row, weights in zip(batch[name], batch["weights"], strict=True)
    )
    for name in ("inputs", "targets")
  )
  assert targets == HELD_OUT[1:]
  assert inputs == HELD_OUT[:-1]
  assert all(batch["inputs"].shape == (4, 16) for batch in batches)
  assert sum(b["weights"].sum() for b in batches) == len(HELD_OUT) - 1
  few = make(path, eval_batches=2).eval_batches("validation")
  assert len(list(few)) == 2


@pytest.mark.parametrize("before", ["A", "A B", "A B A"])
def test_windows_begin_as_the_tokenizer_says(tmp_path, before):
  """In place of their first token; each other token is predicted once."""
  import tokenizers

  words = {f"w{i}": i for i in range(40)}
  words |= {"A": 40, "B": 41, "<|endoftext|>": 42}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single=f"{before} $A B", special_tokens=[("A", 40), ("B", 41)]
  )
  file, text = tmp_path / "tokenizer.json", tmp_path / "input.txt"
  tokenizer.save(str(file))
  ids = [i * i % 37 for i in range(400)]
  text.write_text(" ".join(f"w{i}" for i in ids))
  task = make(text, tokenizer=str(file), context=8)
  prefix = [words[x] for x in before.split()]
  extra = len(prefix) - 1
  held_out, predicted = ids[-len(task.tokens("validation")) :], []
  for batch in task.eval_batches("validation"):
    assert batch["inputs"].shape == (4, 8)
    for x, y, w in zip(*(batch[n] for n in batch), strict=True):
      if not w.any():
        continue
      assert x[: len(prefix)].tolist() == prefix
      assert not w[:extra].any()
      count = int(w.sum())
      assert (w[extra : extra + count] == 1).all()
      # Each from the one before it, the first from the prefix alone.
      row = y[extra : extra + count].tolist()
      assert x[len(prefix) : extra + count].tolist() == row[:-1]
      predicted += row
  assert predicted == held_out[1:]
  batch = task.train_batch(3)
  assert (batch["inputs"][:, : len(prefix)] == prefix).all()
  assert (batch["weights"] == ([0] * extra + [1] * (8 - extra))).all()
  read, answers = batch["inputs"][:, extra + 1 :], batch["targets"][:, extra:-1]
  np.testing.assert_array_equal(read, answers)
  assert task.encode("w3 w4") == [*prefix, 3, 4]
  assert task.encode_target("w3 w4") == [3, 4]
  decoded = next(iter(task.decode_batches("validation")))
  prompt = decoded.inputs["prompt"][0].tolist()
  assert prompt == [*prefix, *held_out[len(prefix) : 4]]
  assert decoded.references[0] == " ".join(f"w{i}" for i in held_out[4:8])


def test_ids_round_trip_and_reserve_the_first_three(path):
  task = make(path)
  assert task.decode(task.encode("good 'ä' €")) == "good 'ä' €"
  assert min(task.encode("good 'ä' €")) >= 3
  assert task.target_vocab_size == 3 + len(set(TEXT))
  assert task.labels(task.encode("a d\n")[1:]) == ["␣", "d", "⏎"]
  assert task.encode("") == task.encode("\n")
  # What goes on after a prompt has no end of its own, and any length.
  assert task.decode(task.encode_target("men" * 9)) == "men" * 9
  with pytest.raises(ValueError, match=r"^'Z' does not occur"):
    task.encode_target("Z")


def bits(task):
  """Bits per character of a loss of one bit per token."""
  return task.summarize({"loss": (math.log(2), 1.0)})["bits_per_character"]


def test_bits_per_character(path):
  task = make(path)
  assert task.summarize({"loss": (10 * math.log(2), 5.0)}) == {
    "loss": pytest.approx(2 * math.log(2)),
    "bits_per_character": pytest.approx(2),
    **task.baselines,
  }


def test_the_end_of_what_is_held_out_can_be_a_split_of_its_own(path):
  task = make(path, test_share=0.25)
  assert task.eval_splits == ("validation", "test")
  cut = len(HELD_OUT) - len(HELD_OUT) // 4
  for split, text in (("validation", HELD_OUT[:cut]), ("test", HELD_OUT[cut:])):
    assert task.decode(task.tokens(split)) == text
    batches = list(task.eval_batches(split))
    assert sum(b["weights"].sum() for b in batches) == len(text) - 1
    # What counting reaches is that of the same split.
    alone, sums = make(path), {"loss": (1.0, 1.0)}
    alone._held_out["validation"] = task.tokens(split)
    assert task.summarize(sums, split) == alone.summarize(sums)
  with pytest.raises(tasks.DataError, match="empty test split"):
    make(path, test_share=1 / len(HELD_OUT))


@pytest.mark.parametrize("eval_batches", [0, 2])
def test_bits_per_character_of_subwords(path, eval_batches):
  task = make(
    path, vocabulary="subwords", vocab_size=280, eval_batches=eval_batches
  )
  batches = list(task.eval_batches("validation"))
  tokens = sum(batch["weights"].sum() for batch in batches)
  text = "".join(
    task.decode(row[weights > 0])
    for batch in batches
    for row, weights in zip(batch["targets"], batch["weights"], strict=True)
  )
  assert tokens < 0.9 * len(text)
  assert bits(task) == pytest.approx(tokens / len(text), rel=1e-6)


def test_bits_per_character_of_documents(tmp_path):
  """Of the 70 held-out ids the first is not predicted, and 6 others are ends."""
  vocabulary = Bytes()
  vocabularies.save_vocabulary(vocabulary, tmp_path / "run")
  end = vocabulary.special.eos
  rows = "an end.\n", "Ω is a longer one.\n", "ε\n", "", "the €nd of it all"
  held_out = [i for row in rows for i in (end, *vocabulary.encode_text(row))]
  held_out += [*vocabulary.encode_text(", which is on"), end, end]
  ids = np.array([*vocabulary.encode_text("a" * 630), *held_out], np.uint16)
  ids.tofile(tmp_path / "a.bin")
  options = {"tokenizer": str(tmp_path / "run"), "context": 23}
  task = make(tmp_path / "a.bin", **options)
  np.testing.assert_array_equal(task.tokens("validation"), held_out)
  # 8 + 19 + 2 + 30 characters, of which three have 2, 2 and 3 bytes.
  assert bits(task) == pytest.approx(69 / 59)
  # The first 46 predictions go to "the €nd o": 8 + 19 + 2 + 9 characters.
  few = make(tmp_path / "a.bin", **options, eval_batches=1, batch_size=2)
  assert bits(few) == pytest.approx(46 / 38)
  # Ends alone have no characters.
  np.full(200, 2, np.uint16).tofile(tmp_path / "a.bin")
  task = make(tmp_path / "a.bin", tokenizer=str(tmp_path / "run"))
  assert "bits_per_character" not in task.summarize({"loss": (1.0, 1.0)})


def test_bits_per_character_are_of_the_text_before_a_normalizer(tmp_path):
  """WordPiece writes in lower case, without accents, with spaces of its own."""
  words = ["don", "'", "t", "stop", ",", "the", "cafe", "##s", "!"]
  names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
  ids = {name: i for i, name in enumerate(names)}
  model = tokenizers.models.WordPiece(ids, unk_token="[UNK]")
  library = tokenizers.Tokenizer(model)
  library.normalizer = tokenizers.normalizers.BertNormalizer()
  library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  library.decoder = tokenizers.decoders.WordPiece()
  (tmp_path / "tokenizer.json").write_text(library.to_str())
  line = "Don't STOP,  the Cafe\u0301s! Queer\n"
  (tmp_path / "text.txt").write_text(line * 20)
  task = make(tmp_path / "text.txt", context=7, tokenizer=str(tmp_path))
  ids = task.tokens("validation")
  labels = ["don", "'", "t", "stop", ",", "the", "cafe", "##s", "!", "[UNK]"]
  assert task.labels(ids) == labels * 2
  # All of two lines but "Don", by 19 tokens.
  assert bits(task) == pytest.approx(19 / (2 * len(line) - 3))


def test_decode_batches_continue_the_held_out_text(path):
  task = make(path, batch_size=6)
  [batch] = task.decode_batches("validation")
  assert batch.inputs["prompt"].shape == (6, 8)
  assert 8 + batch.max_length <= task.max_target_length
  assert len(batch.references) == 4
  assert batch.inputs["prompt_length"].tolist() == [8] * 6
  for number, (prompt, reference) in enumerate(
    zip(batch.inputs["prompt"], batch.references, strict=False)
  ):
    start = number * ((len(HELD_OUT) - 16) // 4)
    text = HELD_OUT[start : start + 16]
    assert (task.decode(prompt), reference) == (text[:8], text[8:])
  assert task.score(batch.references, batch.references) == {}


def test_a_run_continues_only_on_the_same_characters(path, tmp_path):
  make(path).save(tmp_path / "run")
  make(path, workdir=tmp_path / "run")
  path.write_text(TEXT + "ß", encoding="utf-8")
  with pytest.raises(tasks.DataError, match=r"characters\.json does not fit"):
    make(path, workdir=tmp_path / "run")


def test_line_ends_of_dos_and_a_byte_order_mark_are_no_characters(tmp_path):
  file = tmp_path / "text.txt"
  file.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode("utf-8"))
  assert make(file).target_vocab_size == 3 + len(set(TEXT))


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (None, "no such file (task.path)"),
    (b"", "the file is empty"),
    (b"abcdabcd", "empty validation split"),
    (b"short", "5 characters, 90 % of them for training, are too few for"),
    (b"a" * 17 + b"\n" + b"b" * 17, None),
    (b"fine\nfine \xe9\n" * 9, "line 2: byte 0xe9 is not UTF-8"),
    (b"\xef\xbb\xbffine\nfine\n\xff\n", "line 3: byte 0xff is not UTF-8"),
  ],
)
def test_faults_are_one_line(tmp_path, content, message):
  file = tmp_path / "text.txt"
  if content is not None:
    file.write_bytes(content)
  if message is None:
    make(file)
    return
  with pytest.raises(tasks.DataError) as error:
    make(file, context=2 if content == b"abcdabcd" else 16)
  assert message in str(error.value)
  assert str(file) in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("a" * 17, "expected at most 16 characters (task.context=16), got 17"),
    ("Z", "'Z' does not occur in the training text"),
  ],
)
def test_encode_refuses(path, line, message):
  with pytest.raises(ValueError) as error:
    make(path).encode(line)
  assert str(error.value) == message


def test_config_refuses():
  assert_refused(
    TextConfig,
    *({"path": ""}, {"context": 1, "path": "a"}),
    *({"eval_batches": -1, "path": "a"}, {"vocabulary": "words", "path": "a"}),
    {"vocab_size": 0, "path": "a"},
    *({"mask_rate": x, "path": "a"} for x in (0.0, 1.0, math.nan)),
    *({"mean_span_length": x, "path": "a"} for x in (0.5, math.nan)),
  )


@pytest.mark.skipif(
  not SHAKESPEARE.exists(), reason=f"{SHAKESPEARE} is not there"
)
def test_tiny_shakespeare_is_split_as_in_nanogpt():
  task = make(SHAKESPEARE, context=64, batch_size=12)
  assert task.target_vocab_size == 3 + 65
  batches = list(task.eval_batches("validation"))
  assert sum(b["weights"].sum() for b in batches) == 111_540 - 1
