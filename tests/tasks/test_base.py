"""What all tasks share: metrics, and what is never imported."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from settings import cache
from tasks import base

_IMPORTS = """
import sys
import tasks

packages = {x.partition(".")[0] for x in sys.modules}
heavy = {"grain", "gymnasium", "matplotlib", "num2words", "PIL", "sacrebleu"}
heavy |= {"sentencepiece", "sklearn", "tensorflow", "tensorflow_datasets"}
print(sorted(packages & heavy))
from tasks.translation import TranslationConfig

config = TranslationConfig(num_train=900, num_validation=70, max_number=9999)
task = tasks.TASKS["translation"].make(
  config, kind="encoder_decoder", batch_size=4, seed=0, workdir=None
)
task.train_batch(0)
task.score(["a"], ["a"])
print([x for x in ("tensorflow", "matplotlib", "torch") if x in sys.modules])
"""


def test_importing_tasks_is_cheap_and_tensorflow_is_never_imported(tmp_path):
  """Nor does TFDS print anything of its own."""
  found = subprocess.run(
    [sys.executable, "-c", _IMPORTS],
    capture_output=True,
    text=True,
    check=True,
    env={**os.environ, cache.VARIABLE: str(tmp_path)},
  )
  assert found.stdout == "[]\n[]\n"


def test_accuracies_are_sums_and_counts():
  targets = jnp.array([[1, 2, 0], [3, 4, 2], [0, 0, 0]])
  weights = jnp.array([[1.0, 1, 0], [1, 1, 1], [0, 0, 0]])
  right = np.array([[1, 2, 4], [3, 1, 2], [0, 0, 0]])
  logits = jnp.asarray(np.eye(5, dtype=np.float32)[right])
  token = base.token_accuracy(logits, targets, weights)
  sequence = base.sequence_accuracy(logits, targets, weights)
  # The wrong third token of row 0 has no weight; row 2 is padding.
  np.testing.assert_array_equal(token, [4, 5])
  np.testing.assert_array_equal(sequence, [1, 2])
  # Row 0 is right at its last weighted place, row 1 too, though not before it.
  last = base.last_accuracy(logits, targets, weights)
  np.testing.assert_array_equal(last, [2, 2])
  wrong = base.last_accuracy(logits, targets.at[1, 2].set(3), weights)
  np.testing.assert_array_equal(wrong, [1, 2])


def test_divide_leaves_out_what_was_not_counted():
  assert base.divide({"a": (3.0, 4.0), "b": (0.0, 0.0)}) == {"a": 0.75}


def test_until_eos():
  assert base.until_eos([1, 7, 8, 2, 9, 0]) == [7, 8]
  assert base.until_eos(np.array([7, 0, 8])) == [7, 8]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 1)])
def test_rows_of_any_rank_are_padded_with_zeros(shape):
  array = np.ones((3, *shape), np.float32)
  padded = base.pad_rows({"image": array}, 5)["image"]
  np.testing.assert_array_equal(padded[:3], array)
  assert padded.shape == (5, *shape)
  assert padded.dtype == np.float32
  assert not padded[3:].any()
