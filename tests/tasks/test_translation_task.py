"""Translation from numbers, files and TFDS sets, end to end."""

import functools

import numpy as np
import pytest

from comparison.analysis import statistics
import tasks
from tasks import translation
from tasks.translation import TranslationConfig
from tasks.vocabulary import Subwords, train_subwords
from tests.tasks.generated_cases import assert_refused
from tests.tasks.translation_cases import files, make

NUMBERS = {"num_train": 900, "num_validation": 70, "max_number": 9999}


@functools.cache
def numbers():
  return make(**NUMBERS)


def test_layout():
  for step in range(60):
    batch = numbers().train_batch(step)
    assert all(len(array) == 16 for array in batch.values())
    source, inputs = batch["source"], batch["inputs"]
    targets, weights = batch["targets"], batch["weights"]
    assert source.dtype == inputs.dtype == targets.dtype == np.int32
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, targets != 0)
    assert (inputs[:, 0] == 1).all()
    shifted = np.where(targets[:, 1:] != 0, targets[:, :-1], 0)
    np.testing.assert_array_equal(inputs[:, 1:], shifted)
    for ids in (source, targets):
      last = (ids != 0).sum(axis=1) - 1
      assert (ids[np.arange(16), last] == 2).all()
      assert ((ids == 2).sum(axis=1) == 1).all()


def test_a_batch_holds_pairs_that_belong_together(folder):
  task = make(**files(folder))
  batch = task.train_batch(0)
  for source, target in zip(batch["source"], batch["targets"], strict=True):
    assert task.decode(source).replace("en", "de") == task.decode(target)


ODD = [
  "… ½ ＡＢ９ e\u0301 é ﬁ ² Å",
  "a <eos> b <pad><bos> <unk> <s> </s> ⁇ [SEP]",
  "  two  spaces\tand\u00a0a\u3000tab ",
  "▁ ▅ \ufeffx\u200by \x00 \x85\u2028z",
  "a \r b\r",
  "日本語のテキスト 🙂👩\u200d👩 العربية",
  "“Quotes” – ’dashes’ — Ｆｕｌｌ ｗｉｄｔｈ！",
  "long " * 1500 + "Ж",
]


@pytest.mark.parametrize("line", ODD)
def test_any_text_of_known_characters_comes_back(line):
  vocabulary = Subwords(train_subwords(ODD, 400))
  [ids] = vocabulary.encode([line])
  # It has no special token, and no unknown one.
  assert min(ids) >= 4
  assert vocabulary.decode([*ids, 2, 5]) == line


def test_references_have_the_bleu_of_a_perfect_translation(tmp_path):
  """Through the files, the vocabulary and sacrebleu with its defaults."""
  import sacrebleu

  lines = [x for x in ODD if "\r" not in x]
  for split, count in (("train", 4), ("val", 2)):
    for language in ("en", "de"):
      text = "".join(line + "\n" for line in lines * count)
      (tmp_path / f"{split}.{language}").write_bytes(text.encode())
  task = make(**files(tmp_path, vocab_size=400, max_length=4000))
  batches = [*task.decode_batches("validation")]
  references = [x for batch in batches for x in batch.references]
  assert sorted(references) == sorted(lines * 2)
  decoded = [
    task.decode(row)
    for batch in task.eval_batches("validation")
    for row in batch["targets"]
    if row.any()
  ]
  assert sorted(decoded) == sorted(references)
  score = sacrebleu.corpus_bleu(sorted(decoded), [sorted(references)])
  assert score.score == pytest.approx(100)


def test_few_shapes_and_little_padding():
  batches = [numbers().train_batch(step) for step in range(56)]
  shapes = {(b["source"].shape, b["targets"].shape) for b in batches}
  assert len(shapes) <= 6
  sizes = sum(b["source"].size + b["targets"].size for b in batches)
  padding = sum(
    (b["source"] == 0).sum() + (b["targets"] == 0).sum() for b in batches
  )
  assert padding / sizes < 0.2


def test_decode_batches():
  batches = list(numbers().decode_batches("validation"))
  assert len({b.inputs["source"].shape for b in batches}) <= 3
  for batch in batches:
    source = batch.inputs["source"]
    assert len(source) == 16
    assert source.any(axis=1).all()  # no row without a source
    # At most 50 tokens longer than the input: Vaswani et al. 2017, section 6.1.
    assert batch.max_length == min(source.shape[1] + 50, 128)
  references = [
    numbers().decode(row)
    for batch in numbers().eval_batches("validation")
    for row in batch["targets"]
    if row.any()
  ]
  decoded = [r for b in batches for r in b.references]
  assert sorted(references) == sorted(decoded)
  assert len(decoded) == 70


def test_ids_round_trip():
  line = "seven thousand, three hundred and forty-two"
  ids = numbers().encode(line)
  assert ids[-1] == 2
  assert numbers().decode(ids) == line
  assert numbers().labels(ids)[0].startswith("▁")
  assert numbers().labels([0, 1, 2]) == ["<pad>", "<bos>", "<eos>"]


def test_a_typed_target_has_the_ids_of_a_batch():
  batch = numbers().train_batch(0)
  for targets, weights in zip(batch["targets"], batch["weights"], strict=True):
    answer = targets[weights > 0].tolist()
    assert numbers().encode_target(numbers().decode(answer)) == answer


def test_a_line_longer_than_the_limit_is_refused(folder):
  line = "en1 " * 8
  ids = make(**files(folder)).encode(line)
  assert make(**files(folder, max_length=len(ids))).encode(line) == ids
  less = make(**files(folder, max_length=len(ids) - 1))
  told = f"^{len(ids)} tokens, more than task.max_length={len(ids) - 1}; split"
  with pytest.raises(ValueError, match=told):
    less.encode(line)


def test_pairs_are_trained_up_to_the_limit(folder, caplog):
  task = make(**files(folder, max_length=400))
  lengths = task._splits["train"].lengths
  assert "of 200 training pairs" not in caplog.text
  limit = int(np.sort(lengths.max(axis=1))[120])
  task = make(**files(folder, max_length=limit))
  kept = int((lengths.max(axis=1) <= limit).sum())
  left_out = f"omitted {200 - kept} of 200 training pairs"
  assert left_out in caplog.text
  assert f"(longest: {lengths.max()})" in caplog.text
  batches = [task.train_batch(step) for step in range(20)]
  names = ("source", "targets")
  assert max(b[name].shape[1] for b in batches for name in names) == limit
  with pytest.raises(tasks.DataError, match=r"^task\.max_length: none of 200"):
    make(**files(folder, max_length=2))


def test_a_pair_with_an_empty_side_is_not_trained(folder, caplog):
  lines = (folder / "train.en").read_text().splitlines()
  lines[3], lines[8] = "", " ".join(lines[8].split()[:1])
  (folder / "train.en").write_text("\n".join(lines) + "\n")
  make(**files(folder, max_length=400))
  assert (
    "omitted 1 of 200 training pairs: an empty side, or more" in caplog.text
  )


def test_score(folder):
  task = make(**files(folder))
  references = ["the cat sat on the mat today", "a b c d"]
  perfect = task.score(references, references)
  assert list(perfect) == ["bleu", "exact_match", "bleu_signature"]
  assert perfect["exact_match"] == 1.0
  assert perfect["bleu"] == pytest.approx(100)
  assert "tok:13a" in perfect["bleu_signature"]
  assert "version:" in perfect["bleu_signature"]
  half = task.score(["the cat sat on a mat today", "a b c d"], references)
  assert half["exact_match"] == 0.5
  # By hand: 10/11, 7/9, 4/7 and 2/5 of the n-grams of order 1 to 4.
  precisions = np.array([10 / 11, 7 / 9, 4 / 7, 2 / 5])
  assert half["bleu"] == pytest.approx(100 * precisions.prod() ** 0.25)
  assert "eff:no" in half["bleu_signature"]
  # No 4-gram is in the output; it counts only if the reference has one.
  assert task.score(["a b c"], ["a b c d"])["bleu"] == 0
  short = task.score(["a b"], ["a b c"])["bleu"]
  assert short == pytest.approx(100 * np.exp(1 - 3 / 2))
  assert task.score([], []) == {}


@pytest.mark.parametrize(
  ("references", "outputs"),
  [
    (
      ["The cat, a dog.", "a b c d e f", "x y z", "one two three four"],
      ["The cat, the dog!", "a b c d e", "", "four three two one zero"],
    ),
    # No 4-gram is right, and none is there at all.
    (["a b c d e", "f g h i"], ["a b c x e", "f"]),
    (["ein Hund", "zwei"], ["ein Hund", "drei"]),
    (["a b c d"], [""]),
  ],
)
def test_sentence_statistics_add_up_to_bleu(
  folder, caplog, references, outputs
):
  import sacrebleu

  task = make(**files(folder))
  found = task.sentence_statistics(outputs, references)
  assert not caplog.records
  assert len(found) == len(references)
  assert all(type(x) is int for sentence in found for x in sentence)
  score = task.score(outputs, references)
  sums = np.sum(found, axis=0).tolist()
  again = sacrebleu.BLEU.compute_bleu(
    correct=sums[:4],
    total=sums[4:8],
    sys_len=sums[8],
    ref_len=sums[9],
    smooth_method="exp",
    effective_order="eff:yes" in score["bleu_signature"],
  )
  assert again.score == score["bleu"]
  assert statistics.bleu(
    np.array(sums, float), "eff:yes" in score["bleu_signature"]
  ) == pytest.approx(score["bleu"])


def test_a_number_is_right_or_wrong():
  words, outputs = ["einhundertdrei", "zwei"], ["einhundertdrei", "drei"]
  assert numbers().score(outputs, words) == {"exact_match": 0.5}
  assert numbers().score([], []) == {}
  assert numbers().sentence_statistics(["eins"], ["zwei"]) == []


def test_score_of_references_too_short_for_four_grams(folder):
  task = make(**files(folder))
  words = ["einhundertdrei", "zwei"]
  perfect = task.score(words, words)
  assert perfect["bleu"] == pytest.approx(100)
  assert "eff:yes" in perfect["bleu_signature"]
  half = task.score(["einhundertdrei", "drei"], words)
  assert half["bleu"] == pytest.approx(50)


def chinese(folder, language):
  """The folder with Chinese as the target; its names are those of `language`."""
  sentences = [
    "今天天气很好。我们去公园散步吧。",
    "他昨天买了一本新书。",
    "这个问题很难回答。",
  ]
  for file in folder.glob("*.de"):
    count = len(file.read_text("utf-8").splitlines())
    text = "\n".join(sentences[i % 3] for i in range(count))
    file.with_suffix(f".{language}").write_text(text, "utf-8")
  return make(**files(folder, target_language=language)), sentences


@pytest.mark.parametrize("language", ["zh", "zh-CN", "zho_Hans"])
def test_bleu_of_a_language_without_spaces(folder, language):
  """By hand; characters are the tokens."""
  task, references = chinese(folder, language)
  outputs = [
    "今天天气很好。我们去公园走走吧。",
    "他昨天买了一本书。",
    "这个问题很难答。",
  ]
  found = task.score(outputs, references)
  assert "tok:zh" in found["bleu_signature"]
  assert "eff:no" in found["bleu_signature"]
  # Two of 33 characters are wrong, and one is missing in each of two sentences.
  precisions = np.array([31 / 33, 25 / 30, 19 / 27, 16 / 24])
  bleu = 100 * np.exp(1 - 35 / 33) * precisions.prod() ** 0.25
  assert found["bleu"] == pytest.approx(bleu)
  sums = np.sum(task.sentence_statistics(outputs, references), axis=0)
  assert statistics.bleu(sums.astype(float)) == pytest.approx(bleu)


def test_each_language_without_spaces_has_its_tokenizer(monkeypatch):
  import sacrebleu

  asked = []
  monkeypatch.setattr(
    sacrebleu, "BLEU", lambda tokenize: asked.append(tokenize)
  )
  for tokenizer, languages in (
    ("zh", "zh zho cmn yue cn zh-TW ZH_cn"),
    ("ja-mecab", "ja jpn jp ja-JP"),
    ("ko-mecab", "ko kor"),
    # Thai, Lao, Khmer, Burmese and Tibetan.
    ("char", "th tha lo lao km khm my mya bo bod bo_CN"),
    ("13a", "en de fra vi"),
  ):
    for language in languages.split():
      translation.bleu_metric(language)
      assert asked.pop() == tokenizer, language


def test_a_language_whose_tokenizer_is_missing_is_refused(folder, monkeypatch):
  """SacreBLEU's own default would count whole sentences as words."""
  import sacrebleu

  def missing(tokenize):
    assert tokenize == "ja-mecab"
    raise RuntimeError("Japanese tokenization requires extra dependencies")

  monkeypatch.setattr(sacrebleu, "BLEU", missing)
  with pytest.raises(
    tasks.DataError, match=r"^task\.target_language: .*\[ja\]"
  ):
    chinese(folder, "ja")


def test_save_and_restore_without_data(folder, tmp_path):
  task = make(**files(folder))
  task.save(tmp_path / "run")
  assert {p.name for p in (tmp_path / "run/vocabulary").iterdir()} == {
    "subwords.model",
    "subwords.txt",
  }
  config = files(tmp_path / "gone")
  restored = make(workdir=tmp_path / "run", restore=True, **config)
  assert restored.source_vocab_size == task.source_vocab_size
  assert restored.encode("en3 en4") == task.encode("en3 en4")
  assert restored.decode(restored.encode("en3 en4")) == "en3 en4"
  assert restored.max_source_length == task.max_source_length


def test_restore_needs_a_run(tmp_path):
  with pytest.raises(tasks.DataError, match="expected the workdir of a run"):
    make(workdir=tmp_path, restore=True)


def test_a_run_continues_only_on_the_same_vocabulary(folder, tmp_path):
  make(**files(folder)).save(tmp_path / "run")
  make(workdir=tmp_path / "run", **files(folder))
  with pytest.raises(tasks.DataError, match=r"subwords\.txt does not fit"):
    make(workdir=tmp_path / "run", **files(folder, vocab_size=30))


def test_long_pairs_are_dropped_from_training_and_reported(folder, caplog):
  task = make(**files(folder, max_length=24))
  assert "of 200 training pairs" in caplog.text
  assert "validation: " in caplog.text
  cut = (task._splits["validation"].lengths > 24).sum(axis=0)
  assert (
    f"validation: {cut[0]} sources and {cut[1]} targets cut to "
    "task.max_length=24 tokens"
  ) in caplog.text
  assert task.eval_splits == ("validation", "test_a")
  for step in range(20):
    batch = task.train_batch(step)
    assert batch["source"].shape[1] <= 24
    assert batch["targets"].shape[1] <= 24
  batches = list(task.eval_batches("validation"))
  assert sum(b["weights"].any(axis=1).sum() for b in batches) == 20
  for batch in batches:
    assert batch["source"].shape[1] <= 24
    rows = batch["source"].any(axis=1)
    assert ((batch["source"][rows] == 2).sum(axis=1) == 1).all()
  references = [
    r for b in task.decode_batches("validation") for r in b.references
  ]
  whole = (folder / "val.de").read_text().splitlines()
  assert sorted(references) == sorted(whole)


def test_held_out_pairs_longer_than_any_trained_one(folder):
  (folder / "val.en").write_text("en1 " * 60 + "\n")
  (folder / "val.de").write_text("de1 " * 60 + "\n")
  task = make(**files(folder, max_length=90))
  [batch] = task.eval_batches("validation")
  assert batch["source"].shape == batch["targets"].shape == (16, 90)
  [decode] = task.decode_batches("validation")
  assert decode.inputs["source"].shape == (16, 90)


def test_config_refuses():
  assert_refused(
    TranslationConfig,
    *({"source": "web"}, {"path": "", "source": "files"}),
    *({"dataset": "", "source": "tfds"}, {"source_language": ""}),
    *({"target_language": "en"}, {"vocab_size": 3}, {"max_length": 1}),
    *({"num_buckets": 0}, {"max_number": 10}, {"num_train": 0}),
    {"num_validation": 0},
  )


@pytest.mark.parametrize(
  ("source", "unread"),
  [
    ({"source": "numbers"}, ["path", "dataset"]),
    (
      {"source": "files", "path": "x"},
      ["dataset", "max_number", "num_train", "num_validation"],
    ),
    ({"source": "tfds"}, ["max_number", "num_train", "num_validation"]),
  ],
)
def test_what_a_source_does_not_read_is_refused(source, unread):
  given = {"path": "/nope", "dataset": "wmt14_translate/de-en"}
  given |= {"max_number": 9999, "num_train": 9, "num_validation": 9}
  cases = {name: source | {name: given.pop(name)} for name in unread}
  assert_refused(TranslationConfig, *cases.items())
  for name, value in given.items():
    config = TranslationConfig(**source | {name: value})
    assert getattr(config, name) == value


def test_a_vocabulary_has_the_size_of_its_source(monkeypatch, folder):
  """As the docstring of `vocab_size` says."""
  from tasks import corpora

  by_source = {"numbers": 128, "files": 4000, "tfds": 8000}
  assert by_source == corpora.AUTOMATIC_SIZES
  sizes = []

  def cached(lines, size, digest):
    sizes.append(size)
    return Subwords(train_subwords(lines, 100))

  monkeypatch.setattr(translation, "cached_subwords", cached)
  make(**NUMBERS)
  make(**files(folder, vocab_size=0))
  make(**files(folder, vocab_size=77))
  assert sizes == [128, 4000, 77]
