"""Span corruption: T5's numbers and segments, and nothing of a text is lost."""

import math

import numpy as np
import pytest

import tasks
from tasks.text import TextConfig
from tasks.text.span_corruption import (
  SpanSizes,
  corrupt,
  fitting_sizes,
  span_mask,
)
from tests.tasks.text_cases import HELD_OUT, T5, TEXT, make, words_tokenizer


def t5_sizes(inputs_length, rate, mean):
  """`random_spans_helper` of T5: (text, inputs, targets) for EOS at both ends.

  Its target has no last sentinel.
  """

  def lengths(tokens):
    noise = round(tokens * rate)
    spans = round(noise / mean)
    return tokens - noise + spans + 1, noise + spans + 1

  tokens = inputs_length
  while lengths(tokens + 1)[0] <= inputs_length:
    tokens += 1
  return tokens, *lengths(tokens)


@pytest.mark.parametrize("context", [31, 128, 512])
@pytest.mark.parametrize(
  ("rate", "mean"), [(0.15, 3.0), (0.3, 2.0), (0.2, 8.0)]
)
def test_lengths_are_those_of_t5(context, rate, mean):
  config = TextConfig(
    path="x", context=context, mask_rate=rate, mean_span_length=mean
  )
  sizes = fitting_sizes(config)
  text, source, target = t5_sizes(context, rate, mean)
  assert (sizes.text, sizes.source, sizes.target - 1) == (text, source, target)
  if (context, rate) == (512, 0.15):  # Those of the paper.
    assert (sizes, sizes.target) == (SpanSizes(568, 85, 28), 115)


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("mean", [1.0, 3.0, 1e30])
@pytest.mark.parametrize("context", [3, 7, 40])
def test_the_longest_piece_is_taken(rate, mean, context):
  sizes = fitting_sizes(
    TextConfig(path="x", context=context, mask_rate=rate, mean_span_length=mean)
  )
  assert sizes.source <= context
  assert SpanSizes.from_length(sizes.text + 1, rate, mean).source > context
  assert 1 <= sizes.spans <= min(sizes.noise, sizes.text - sizes.noise)


@pytest.mark.parametrize("length", [2, 3, 7, 31, 100])
@pytest.mark.parametrize(
  ("rate", "mean"), [(0.15, 3.0), (0.5, 1.0), (0.9, 2.0)]
)
def test_numbers_of_tokens_and_spans_are_fixed(length, rate, mean):
  sizes = SpanSizes.from_length(length, rate, mean)
  mask = span_mask(np.random.default_rng(0), 200, sizes)
  assert mask.shape == (200, length)
  assert (mask.sum(axis=1) == sizes.noise).all()
  assert not mask[:, 0].any()
  assert mask[:, -1].all()
  starts = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
  assert (starts.sum(axis=1) == sizes.spans).all()


def test_every_segmentation_is_as_likely():
  """6 tokens that stay and 3 that go, in 2 spans: 5 · 2 ways."""
  sizes = SpanSizes(9, 3, 2)
  mask = span_mask(np.random.default_rng(0), 20_000, sizes)
  ways, counts = np.unique(mask, axis=0, return_counts=True)
  assert len(ways) == math.comb(5, 1) * math.comb(2, 1)
  assert np.abs(counts / 20_000 - 0.1).max() < 5 * math.sqrt(0.09 / 20_000)


def joined(source, target, sentinels, eos):
  """The text, rebuilt from what is read and what is written."""
  spans, text = {}, []
  for token in target[:-1]:
    if token in sentinels:
      span = spans.setdefault(token, [])
    else:
      span.append(token)
  assert source[-1] == target[-1] == eos
  for token in source[:-1]:
    text += spans.pop(token) if token in spans else [token]
  assert list(spans.values()) == [[]]  # That of the last sentinel.
  return text


@pytest.mark.parametrize("length", [2, 7, 13, 64])
def test_source_and_target_rebuild_the_text(length):
  rng = np.random.default_rng(0)
  sizes = SpanSizes.from_length(length, 0.3, 2.0)
  sentinels = 1000 - np.arange(sizes.spans + 1)
  tokens = rng.integers(3, 100, (5, length))
  mask = span_mask(rng, 5, sizes)
  source, target = corrupt(tokens, mask, sentinels, eos_id=2)
  assert source.shape == (5, sizes.source)
  assert target.shape == (5, sizes.target)
  for i in range(5):
    written = [t for t in target[i] if t in sentinels]
    assert written == sentinels.tolist()
    assert [t for t in source[i] if t in sentinels] == written[:-1]
    assert joined(source[i], target[i], set(sentinels), 2) == list(tokens[i])


def test_a_corrupted_row_by_hand():
  mask = np.array([[False, False, True, True, False, True]])
  source, target = corrupt(
    np.arange(10, 16)[None], mask, np.array([90, 91, 92]), 2
  )
  assert source.tolist() == [[10, 11, 90, 14, 91, 2]]
  assert target.tolist() == [[90, 12, 13, 91, 15, 92, 2]]


def rows_of(task, batches):
  """(source, target) of each row that is there, without padding."""
  for batch in batches:
    for row in range(len(batch["source"])):
      if batch["source_mask"][row].any():
        source = batch["source"][row][batch["source_mask"][row]]
        yield source, batch["targets"][row][batch["weights"][row] > 0]


def sentinels_of(task):
  return {
    i
    for i in range(task.target_vocab_size)
    if task.labels([i])[0].startswith("<extra_id_")
  }


def test_batches_are_shifted_and_rebuild_the_training_text(path):
  task = make(path, "encoder_decoder")
  sentinels = sentinels_of(task)
  train = TEXT[: int(0.9 * len(TEXT))]
  for step in range(10):
    batch = task.train_batch(step)
    assert batch["source"].shape == (4, task.max_source_length)
    assert batch["targets"].shape == (4, task.max_target_length)
    assert (batch["inputs"][:, 0] == task.bos_id).all()
    np.testing.assert_array_equal(
      batch["inputs"][:, 1:], batch["targets"][:, :-1]
    )
    assert batch["source_mask"].all()
    assert (batch["weights"] == 1).all()
    for source, target in rows_of(task, [batch]):
      text = joined(source, target, sentinels, task.eos_id)
      assert task.decode(text) in train


@pytest.mark.parametrize("left", [0, 1, 2, 5])
def test_the_held_out_text_is_used_once(tmp_path, left):
  """But for a last token that would be alone."""
  file = tmp_path / "text.txt"
  piece = fitting_sizes(TextConfig(path="x", context=16)).text
  held_out = (TEXT * 2)[: 6 * piece + left]
  file.write_text((TEXT * 20)[: 9 * len(held_out)] + held_out)
  task = make(file, "encoder_decoder")
  sentinels = sentinels_of(task)
  batches = list(task.eval_batches("validation"))
  text = "".join(
    task.decode(joined(*row, sentinels, task.eos_id))
    for row in rows_of(task, batches)
  )
  assert text == held_out[: len(held_out) - (left == 1)]
  assert all(len(batch["source"]) == 4 for batch in batches)
  again = make(file, "encoder_decoder", seed=3, batch_size=3)
  for row, other in zip(
    rows_of(task, batches),
    rows_of(again, again.eval_batches("validation")),
    strict=True,
  ):
    np.testing.assert_array_equal(row[0], other[0])


def test_what_is_decoded_are_held_out_pieces(path):
  task = make(path, "encoder_decoder", batch_size=6)
  [batch] = task.decode_batches("validation")
  assert batch.inputs["source"].shape == (6, task.max_source_length)
  assert batch.max_length == task.max_target_length
  assert len(batch.references) == 4
  assert all(text.startswith("<extra_id_0>") for text in batch.references)
  sentinels = sentinels_of(task)
  piece = task.piece
  for number, (source, reference) in enumerate(
    zip(batch.inputs["source"], batch.references, strict=False)
  ):
    text = joined(source, task.encode_target(reference), sentinels, 2)
    # A quarter of the pieces further each time.
    start = number * (len(HELD_OUT) // piece // 4) * piece
    assert task.decode(text) == HELD_OUT[start : start + piece]


def test_a_tokenizer_of_t5_is_used_as_it_is(path, tmp_path):
  (tmp_path / "tokenizer.json").write_bytes(words_tokenizer(T5))
  task = make(path, "encoder_decoder", tokenizer=str(tmp_path))
  size = task.target_vocab_size
  assert task.pad_id == task.bos_id == size - 102
  assert task.eos_id == size - 101
  batch = task.train_batch(0)
  first = size - 1  # <extra_id_0>
  assert (batch["targets"][:, 0] == first).all()
  assert (batch["inputs"][:, 0] == task.pad_id).all()
  words = []
  for source, target in rows_of(task, task.eval_batches("validation")):
    words += joined(
      source, target, {first - i for i in range(100)}, task.eos_id
    )
  assert task.labels(words) == HELD_OUT.split()
  ids = task.encode("the <extra_id_0> of")
  assert ids[1] == first
  assert ids[-1] == task.eos_id


def test_what_leaves_no_room_or_has_no_sentinels_is_told(path, tmp_path):
  with pytest.raises(ValueError, match=r"^task\.context: expected at least 3"):
    make(path, "encoder_decoder", context=2)
  make(path, "encoder_decoder", context=3)
  file = tmp_path / "tokenizer.json"
  file.write_bytes(words_tokenizer(T5[:2]))
  with pytest.raises(tasks.DataError) as error:
    make(path, "encoder_decoder", tokenizer=str(file))
  told = f"task.tokenizer: {file} has 0 of the tokens <extra_id_0> to"
  assert str(error.value).startswith(told)
