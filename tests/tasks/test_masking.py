"""Masked language modelling: what is chosen, what hides it, what is held out."""

import math

import numpy as np
import pytest

import tasks
from tasks.text.masking import mask_tokens
from tests.tasks.text_cases import BERT, HELD_OUT, TEXT, make, words_tokenizer

CLS, SEP, MASK = 3, 4, 5


@pytest.mark.parametrize("length", [1, 2, 7, 13, 100])
@pytest.mark.parametrize("rate", [0.01, 0.15, 0.9])
def test_as_many_are_chosen_as_bert_chooses(length, rate):
  rng = np.random.default_rng(0)
  tokens = rng.integers(6, 90, (50, length))
  hidden, chosen = mask_tokens(rng, tokens, rate, MASK, np.arange(6, 90))
  assert (chosen.sum(axis=1) == max(1, round(rate * length))).all()
  np.testing.assert_array_equal(hidden[~chosen], tokens[~chosen])


def test_every_place_is_chosen_as_often_and_hidden_as_told():
  """80 % masks, 10 % random tokens, 10 % themselves."""
  rng = np.random.default_rng(1)
  rows, length, ordinary = 20_000, 20, np.arange(6, 26)
  tokens = rng.choice(ordinary, (rows, length))
  hidden, chosen = mask_tokens(rng, tokens, 0.15, MASK, ordinary)
  # Five standard deviations of a share p of n draws.
  share = chosen.mean(axis=0)
  assert np.abs(share - 0.15).max() < 5 * math.sqrt(0.15 * 0.85 / rows)
  count = chosen.sum()
  masked = (hidden == MASK) & chosen
  # A random token is the same one in 20 times.
  other = chosen & ~masked & (hidden != tokens)
  for found, expected in ((masked, 0.8), (other, 0.1 * 19 / 20)):
    error = abs(found.sum() / count - expected)
    assert error < 5 * math.sqrt(expected * (1 - expected) / count)
  drawn = np.bincount(hidden[other], minlength=26)[6:] / other.sum()
  assert np.abs(drawn - 1 / 20).max() < 0.01
  assert np.isin(hidden[other], ordinary).all()


def test_a_batch_is_a_framed_piece_of_the_training_text(path):
  task = make(path, "encoder")
  train = TEXT[: int(0.9 * len(TEXT))]
  for step in range(10):
    batch = task.train_batch(step)
    for name in ("source", "targets"):
      assert batch[name].shape == (4, 16)
      assert batch[name].dtype == np.int32
      assert (batch[name][:, 0] == CLS).all()
      assert (batch[name][:, -1] == SEP).all()
    assert batch["source_mask"].dtype == bool
    assert batch["source_mask"].all()
    assert batch["weights"].dtype == np.float32
    assert (batch["weights"].sum(axis=1) == round(0.15 * 14)).all()
    assert not batch["weights"][:, [0, -1]].any()
    same = batch["source"] == batch["targets"]
    assert same[batch["weights"] == 0].all()
    for row in batch["targets"]:
      assert task.decode(row[1:-1]) in train


def targets(batches):
  """Those of each row that is there."""
  for batch in batches:
    for row, mask in zip(batch["targets"], batch["source_mask"], strict=True):
      if mask.any():
        yield row[mask]


def test_the_held_out_text_is_read_once_with_the_same_masks_always(path):
  task = make(path, "encoder")
  batches = list(task.eval_batches("validation"))
  assert "".join(task.decode(row[1:-1]) for row in targets(batches)) == HELD_OUT
  assert all(batch["source"].shape == (4, 16) for batch in batches)
  for batch in batches:
    assert (batch["source"][~batch["source_mask"]] == 0).all()
    assert (batch["source"][batch["source_mask"]] != 0).all()
    assert not batch["weights"][~batch["source_mask"]].any()
  other = make(path, "encoder", batch_size=3, seed=5)
  again = list(other.eval_batches("validation"))
  for name in ("source", "targets", "weights"):
    rows, others = (
      np.concatenate([batch[name] for batch in found])
      for found in (batches, again)
    )
    count = min(len(rows), len(others))
    np.testing.assert_array_equal(rows[:count], others[:count])


@pytest.mark.parametrize("first", [0, 5])
def test_a_tokenizer_of_bert_is_used_as_it_is(path, tmp_path, first):
  """Its own ids, whether or not one of them is 0."""
  (tmp_path / "tokenizer.json").write_bytes(words_tokenizer(BERT, first))
  task = make(path, "encoder", tokenizer=str(tmp_path))
  size = task.target_vocab_size
  special = [task.pad_id, task.bos_id, task.eos_id]
  assert special == [size - 4, size - 3, size - 2]
  batches = list(task.eval_batches("validation"))
  for batch in [task.train_batch(0), *batches]:
    mask = batch["source_mask"]
    rows = mask.any(axis=1)
    assert (batch["source"][rows, 0] == size - 3).all()
    assert (batch["source"][rows][~mask[rows]] == task.pad_id).all()
    assert batch["source"].max() < size
  words = [x for row in targets(batches) for x in task.labels(row[1:-1])]
  assert words == HELD_OUT.split()
  labels = task.labels(task.encode("the [MASK] of"))
  assert labels == ["[CLS]", "the", "[MASK]", "of", "[SEP]"]


def test_without_cls_and_sep_nothing_is_put_around(path, tmp_path):
  file = tmp_path / "tokenizer.json"
  file.write_bytes(words_tokenizer(["<pad>", "<mask>"]))
  task = make(path, "encoder", tokenizer=str(file))
  assert task.train_batch(0)["weights"].sum(axis=1).tolist() == [2] * 4
  assert task.labels(task.encode("the <mask>")) == ["the", "<mask>"]


@pytest.mark.parametrize(
  ("special", "message"),
  [
    (["[PAD]", "[CLS]", "[SEP]"], "has no token <mask> or [MASK],"),
    (["[CLS]", "[MASK]"], "has no token <pad> or [PAD] or "),
  ],
)
def test_a_tokenizer_that_lacks_a_token_is_told(
  path, tmp_path, special, message
):
  file = tmp_path / "tokenizer.json"
  file.write_bytes(words_tokenizer(special))
  with pytest.raises(tasks.DataError) as error:
    make(path, "encoder", tokenizer=str(file))
  assert str(error.value).startswith(f"task.tokenizer: {file} has no")
  assert message in str(error.value)


def test_what_is_typed_has_to_fit_and_a_context_has_room(path):
  make(path, "encoder", context=4)
  with pytest.raises(ValueError, match=r"^task\.context: expected at least 4"):
    make(path, "encoder", context=3)
  task = make(path, "encoder")
  assert len(task.encode("t" * 14)) == 16
  with pytest.raises(ValueError, match=r"^expected at most 16 characters"):
    task.encode("t" * 15)
