"""The copy task: layouts, splits and determinism."""

import numpy as np
import pytest

from tasks.copy import EOS, FIRST_SYMBOL, SEP, CopyConfig
from tests.tasks import generated_cases
from tests.tasks.generated_cases import assert_refused

KINDS = [
  ("encoder_decoder", "copy"),
  ("encoder_decoder", "reverse"),
  ("decoder", "copy"),
  ("decoder", "reverse"),
  ("decoder", "duplicate"),
  ("encoder", "copy"),
  ("encoder", "reverse"),
]


def make(kind, task_kind="copy", **options):
  options = {"max_length": 7, "eval_size": 40} | options
  return generated_cases.make("copy", kind, **{"kind": task_kind} | options)


def words(batch):
  """The rows of an encoder-decoder batch as tuples of symbols."""
  return [tuple(row[row >= FIRST_SYMBOL].tolist()) for row in batch["source"]]


@pytest.mark.parametrize(("kind", "task_kind"), KINDS)
def test_layout(kind, task_kind):
  task = make(kind, task_kind)
  batch = task.train_batch(3)
  assert batch["weights"].dtype == np.float32
  assert {str(v.dtype) for k, v in batch.items() if k != "weights"} == {"int32"}
  assert batch["targets"].shape == (16, task.max_target_length)
  assert ("source" in batch) == (kind != "decoder")
  assert ("inputs" in batch) == (kind != "encoder")
  check_copied(task, kind, task_kind, batch)
  for i in range(16):
    targets = batch["targets"][i]
    at = np.flatnonzero(batch["weights"][i])
    assert 1 <= len(at) - (kind != "encoder") <= 7
    if kind != "encoder":
      assert targets[at[-1]] == EOS
      inputs = batch["inputs"][i]
      # What is read at t + 1 is what was to be predicted at t, and after the
      # last weighted target everything is padding.
      np.testing.assert_array_equal(inputs[1 : at[-1] + 1], targets[: at[-1]])
      assert not inputs[at[-1] + 1 :].any()
      assert not targets[at[-1] + 1 :].any()
    if kind == "encoder_decoder":
      source = batch["source"][i]
      assert (inputs[0], source[(source != 0).sum() - 1]) == (1, EOS)
    if kind == "decoder":
      assert inputs[at[0]] == SEP
      assert (inputs[0] == SEP) == (task_kind == "duplicate")


@pytest.mark.parametrize("vocab_size", [2, 3, 32])
def test_held_out_sequences_are_never_trained(vocab_size):
  task = make(
    "encoder_decoder", vocab_size=vocab_size, max_length=4, batch_size=64
  )
  trained = {w for step in range(50) for w in words(task.train_batch(step))}
  held_out = {
    w for batch in task.eval_batches("validation") for w in words(batch) if w
  }
  assert held_out
  assert not trained & held_out


def test_symbols_and_lengths_are_uniform():
  task = make("encoder_decoder", vocab_size=8, batch_size=500)
  batches = [words(task.train_batch(step)) for step in range(20)]
  drawn = [word for batch in batches for word in batch]
  lengths = np.bincount([len(word) for word in drawn])[1:] / len(drawn)
  np.testing.assert_allclose(lengths, 1 / 7, atol=0.02)
  for position in (0, 3):
    symbols = [w[position] for w in drawn if len(w) > position and len(w) > 1]
    counts = np.bincount(symbols)[FIRST_SYMBOL:] / len(symbols)
    np.testing.assert_allclose(counts, 1 / 8, atol=0.02)


def test_one_fixed_length_gives_the_shape_of_the_paper():
  task = make("decoder", "duplicate", min_length=31, max_length=31)
  batch = task.train_batch(0)
  assert batch["inputs"].shape == (16, 64)
  np.testing.assert_array_equal(batch["weights"].sum(axis=1), 32)
  assert (batch["weights"][:, 32:] == 1).all()  # the second half
  assert task.max_target_length == 64


def test_a_seed_keeps_its_sequences():
  task = make("encoder_decoder", batch_size=3)
  held_out = next(task.eval_batches("validation"))
  for batch, expected in (
    (task.train_batch(0), ["9 29", "19 31 6 28 8 19 8", "16"]),
    (held_out, ["15 10 8 24 10 29 21", "5 7 10 20 24 31 17", "28 2"]),
  ):
    assert [task.decode(row) for row in batch["source"]] == expected


@pytest.mark.parametrize(("kind", "task_kind"), KINDS)
@pytest.mark.parametrize("lengths", [(3, 12), (3,)])
def test_a_split_of_another_length_has_words_of_that_length(
  kind, task_kind, lengths
):
  task = make(kind, task_kind, min_length=5, eval_lengths=lengths)
  assert task.eval_splits == ("validation", *(f"length_{n}" for n in lengths))
  widths = []
  for split in ("validation", *task.eval_splits[1:]):
    batches = list(task.eval_batches(split))
    widths.append(batches[0]["targets"].shape[1])
    weights = np.concatenate([batch["weights"] for batch in batches])
    counted = weights.sum(axis=1)[:40] - (kind != "encoder")
    if split == "validation":
      assert set(counted) == {5, 6, 7}
    else:
      assert set(counted) == {int(split.removeprefix("length_"))}
      assert list(task.decode_batches(split)) == []
    for batch in batches:
      check_copied(task, kind, task_kind, batch)
  assert max(widths) == task.max_target_length
  assert task.max_source_length == (
    None if kind == "decoder" else task.max_target_length
  )


def check_copied(task, kind, task_kind, batch):
  """Every answer is what is read before it, or that back to front."""
  read = batch["inputs" if kind == "decoder" else "source"]
  for ids, targets, weights in zip(
    read, batch["targets"], batch["weights"], strict=True
  ):
    answer = task.decode(targets[weights > 0]).split()
    if kind == "decoder":
      ids = ids[: weights.argmax()]  # Without the separator, and what follows.
    word = [s for s in task.decode(ids).split() if s != "|"]
    assert answer == (word[::-1] if task_kind == "reverse" else word)


def test_splits_share_no_sequence():
  task = make("encoder_decoder", min_length=6, eval_lengths=(4, 5, 12, 13))
  # The first symbol follows from the others.
  starts = [
    tuple(row[1:4])
    for split in task.eval_splits
    for batch in task.eval_batches(split)
    for row in batch["source"]
    if row.any()
  ]
  assert len(starts) == 5 * 40
  assert len(set(starts)) > 195  # Two of 32³ may be alike by chance.


@pytest.mark.parametrize(("kind", "task_kind"), KINDS)
def test_decode_batches_ask_for_the_targets(kind, task_kind):
  task = make(kind, task_kind)
  batches = list(task.decode_batches("validation"))
  if kind == "encoder":
    assert batches == []
    return
  assert task.score(["1 2", "3"], ["1 2", "4"]) == {"exact_match": 0.5}
  assert task.score([], []) == {}
  references = [r for batch in batches for r in batch.references]
  expected = [
    task.decode(row[weights > 0])
    for batch in task.eval_batches("validation")
    for row, weights in zip(batch["targets"], batch["weights"], strict=True)
    if weights.any()
  ]
  assert references == expected
  for batch in batches:
    assert all(len(array) == 16 for array in batch.inputs.values())
    longest = max(len(r.split()) for r in batch.references) + 1
    assert longest <= batch.max_length
    if kind == "decoder":
      prompt = batch.inputs["prompt"].shape[1]
      assert prompt - 1 + batch.max_length == task.max_target_length
      lengths = (batch.inputs["prompt"] != 0).sum(axis=1)
      np.testing.assert_array_equal(batch.inputs["prompt_length"], lengths)


@pytest.mark.parametrize(("kind", "task_kind"), KINDS)
def test_encode_gives_what_a_batch_has(kind, task_kind):
  task = make(kind, task_kind)
  ids = task.encode("3 17 5")
  expected = {
    "encoder_decoder": "3 17 5 <eos>",
    "encoder": "3 17 5",
    "decoder": "| 3 17 5 |" if task_kind == "duplicate" else "3 17 5 |",
  }[kind]
  assert " ".join(task.labels(ids)) == expected


@pytest.mark.parametrize("kind", ["encoder_decoder", "decoder"])
def test_encode_target_gives_what_a_batch_weights(kind):
  task = make(kind)
  batch = task.train_batch(0)
  for targets, weights in zip(batch["targets"], batch["weights"], strict=True):
    answer = targets[weights > 0].tolist()
    assert task.encode_target(task.decode(answer)) == answer
  with pytest.raises(ValueError, match=r"^expected 1 to 7 symbols"):
    task.encode_target("1 " * 8)


@pytest.mark.parametrize(
  ("line", "lengths", "message"),
  [
    ("3 32", {}, "symbols 0 to 31, got '32'"),
    ("3 x", {}, "symbols 0 to 31, got 'x'"),
    ("1 " * 8, {}, "1 to 7 symbols (task.max_length), got 8"),
    ("", {}, "1 to 7 symbols (task.max_length), got 0"),
    # A line may be as long as the longest sequence of any split.
    ("1 " * 13, {"eval_lengths": (12,)}, "1 to 12 symbols (task.eval_lengths)"),
    (
      "1 " * 8,
      {"min_length": 7, "eval_lengths": (3,)},
      "1 to 7 symbols (task.",
    ),
  ],
)
def test_encode_refuses(line, lengths, message):
  task = make("encoder_decoder", **lengths)
  assert len(task.encode("1 " * (task.max_source_length - 1))) > 7
  with pytest.raises(ValueError) as error:
    task.encode(line)
  assert str(error.value).startswith(f"expected {message}")


def test_config_refuses():
  assert_refused(
    CopyConfig,
    *({"kind": "swap"}, {"vocab_size": 1}, {"max_length": 0}),
    {"min_length": 17},
    *({"eval_lengths": x} for x in ((16,), (8,), (0,), (32, 32))),
    {"eval_size": 0},
  )


@pytest.mark.parametrize("kind", ["encoder_decoder", "encoder"])
def test_duplicate_is_for_decoders(kind):
  with pytest.raises(
    ValueError, match=r"model\.kind: .*duplicate.* supports decoder"
  ):
    make(kind, "duplicate")
