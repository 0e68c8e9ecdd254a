"""The metric that decides: which one, which way, and how large it can be."""

import itertools
import math

import pytest

from comparison import criterion
from training.best import is_lower_better

# As docs/comparing.md names them, the first that there is decides.
ORDER = {
  "bleu": (False, 100.0),
  "exact_match": (False, 1.0),
  "last_accuracy": (False, 1.0),
  "accuracy": (False, 1.0),
  "error_rate": (True, math.inf),
  "bits_per_character": (True, math.inf),
  "token_accuracy": (False, 1.0),
  "loss": (True, math.inf),
}


def test_of_two_the_first_decides_and_there_are_no_others():
  assert list(criterion.HEADLINES) == list(ORDER)
  assert criterion.headline(["perplexity", "unigram_loss"]) is None
  for first, second in itertools.combinations(ORDER, 2):
    assert criterion.headline([second, "perplexity", first]) == first


@pytest.mark.parametrize(("metric", "expected"), ORDER.items())
def test_every_metric_has_a_direction_and_a_bound(metric, expected):
  lower, bound = expected
  assert is_lower_better(metric) == lower
  assert criterion.upper_bound(metric) == bound


@pytest.mark.parametrize(("metric", "expected"), ORDER.items())
@pytest.mark.parametrize("value", [0.94, 0.95, 0.96])
def test_a_task_is_solved_from_its_threshold_on(metric, expected, value):
  line = {metric: value, "perplexity": 0.0, "step": 1}
  solved = not expected[0] and value >= 0.95
  assert criterion.is_solved(line, 0.95) == solved
  assert not criterion.is_solved(line, None)
  # Of a metric that decides less, nothing follows.
  assert not criterion.is_solved({"bleu": 0.1} | line, 0.95) or metric == "bleu"
