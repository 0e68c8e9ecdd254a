"""Ragged arrays, shapes and epochs."""

import numpy as np
import pytest

from tasks.bucketing import BucketedBatches, Ragged, choose_shapes, fit


@pytest.fixture(scope="module")
def lengths():
  rng = np.random.default_rng(0)
  source = np.clip(rng.gamma(6, 2.5, 3000), 2, 60).astype(int)
  target = np.clip(source * rng.normal(1.0, 0.15, 3000), 2, 60).astype(int)
  return np.stack([source, target], axis=1)


def padding(lengths, shapes):
  return 1 - lengths.sum() / shapes[fit(shapes, lengths)].sum()


def test_ragged_pads_and_cuts():
  ragged = Ragged.join([Ragged.stack([[1, 2, 3], []]), Ragged.stack([[4]])])
  rows = ragged.pad(np.array([2, 0, 1]), 2)
  np.testing.assert_array_equal(rows, [[4, 0], [1, 2], [0, 0]])
  assert rows.dtype == np.int32
  np.testing.assert_array_equal(ragged.lengths, [3, 0, 1])


@pytest.mark.parametrize("max_shapes", [1, 2, 6])
def test_shapes_hold_everything(lengths, max_shapes):
  shapes = choose_shapes(lengths, max_shapes)
  assert len(shapes) <= max_shapes
  np.testing.assert_array_equal(shapes[-1], lengths.max(axis=0))
  assert (fit(shapes, lengths) < len(shapes)).all()


def test_more_shapes_pad_less(lengths):
  padded = [padding(lengths, choose_shapes(lengths, k)) for k in (1, 2, 3, 6)]
  assert padded == sorted(padded, reverse=True)
  assert padded[0] > 0.6
  assert padded[-1] < 0.2


def test_no_other_side_of_a_shape_pads_less():
  """Of two shapes, of which the larger one has to fit everything; all are tried."""
  for seed in range(5):
    lengths = np.random.default_rng(seed).integers(1, 10, (30, 2))
    shapes = choose_shapes(lengths, 2)
    assert len(shapes) == 2

    def padded(small, shapes=shapes, lengths=lengths):
      fits = (lengths <= small).all(axis=1)
      return np.where(fits, sum(small), shapes[1].sum()).sum()

    source, target = shapes[0]
    tried = [(i, target) for i in range(1, 10)]
    tried += [(source, i) for i in range(1, 10)]
    assert padded(shapes[0]) == min(map(padded, tried))


def test_there_are_no_more_shapes_than_pairs_of_lengths():
  assert choose_shapes(np.full((10, 2), 7), 6).tolist() == [[7, 7]]
  assert choose_shapes(np.array([[3, 9]]), 6).tolist() == [[3, 9]]
  lengths = np.array([[1, 2], [3, 4], [1, 2]])
  assert choose_shapes(lengths, 10**18).tolist() == [[1, 2], [3, 4]]


def test_fit_takes_the_smallest():
  shapes = np.array([[4, 4], [8, 5], [9, 9]])
  pairs = np.array([[4, 4], [5, 5], [5, 6], [10, 1]])
  np.testing.assert_array_equal(fit(shapes, pairs), [0, 1, 2, 3])


def test_an_epoch_uses_each_row_at_most_once(lengths):
  shapes = choose_shapes(lengths, 6)
  batches = BucketedBatches(lengths, shapes, batch_size=64, seed=0)
  assert batches.batches_per_epoch == 3000 // 64
  orders = []
  for epoch in range(3):
    used, areas = [], []
    for position in range(batches.batches_per_epoch):
      step = epoch * batches.batches_per_epoch + position
      rows, shape = batches.batch(step)
      assert rows.shape == (64,)
      assert (lengths[rows] <= shape).all()
      used.append(rows)
      areas.append(sum(shape))
    # Shapes come in random order.
    assert abs(np.corrcoef(areas, np.arange(len(areas)))[0, 1]) < 0.5
    used = np.concatenate(used)
    assert len(np.unique(used)) == len(used) == 3000 // 64 * 64
    orders.append(used)
  assert not np.array_equal(orders[0], orders[1])
  # What one epoch leaves out, others train.
  assert len(np.unique(np.concatenate(orders))) > 2995


def test_fewer_rows_than_a_batch_are_repeated():
  lengths = np.array([[2, 3], [4, 4], [5, 2]])
  shapes = choose_shapes(lengths, 2)
  batches = BucketedBatches(lengths, shapes, batch_size=8, seed=0)
  assert batches.batches_per_epoch == 1
  for step in range(3):
    rows, shape = batches.batch(step)
    assert len(rows) == 8
    assert set(rows.tolist()) == {0, 1, 2}
    assert shape == (5, 4)
