"""Mechanisms are fitted to what they replace, and nothing else changes."""

import jax
import numpy as np
import pytest

from models.attention_config import AttentionConfig
from projects.swap import scores, substitution, transfer, variant
from projects.swap.tests import swap_cases as cases


def fitted(model, config, steps, **options):
  described = variant.describe(model, config, model.places)
  _, variables = variant.make(model, described, 0)
  paths = [place.path for place in model.places]
  before = substitution.drawn(variables, paths)
  after = transfer.fit(
    model.model,
    model.variables,
    config.build(),
    before,
    model.task.train_batch,
    steps=steps,
    rate=1e-2,
    pad_id=model.task.pad_id,
    **options,
  )
  return before, after, scores.make(model, config.build())


@pytest.mark.parametrize(
  ("case", "config"),
  [
    ("gpt2", AttentionConfig("window_linear", {"window": 4})),
    pytest.param(
      "gpt2",
      AttentionConfig("linear", {"feature_map": "hedgehog"}),
      marks=pytest.mark.thorough,
    ),
    pytest.param(
      "bert_masked",
      AttentionConfig("linformer", {"rank": 8}),
      marks=pytest.mark.thorough,
    ),
  ],
)
def test_every_layer_comes_nearer(case, config, tmp_path):
  _, model = cases.read(case, tmp_path)
  before, after, found = fitted(model, config, 40)
  assert jax.tree.map(np.shape, before) == jax.tree.map(np.shape, after)
  (old, old_whole), (new, new_whole) = map(found.errors, (before, after))
  assert all(b < 0.95 * a for a, b in zip(old, new, strict=True))
  assert new_whole < 0.9 * old_whole
  assert np.sqrt(np.mean(np.square(old))) == pytest.approx(old_whole, rel=0.5)


def test_what_is_drawn_and_not_trained_stays(tmp_path):
  _, model = cases.read("gpt2", tmp_path)
  config = AttentionConfig("performer", {"num_features": 8})
  before, after, _ = fitted(model, config, 2)
  jax.tree.map(np.testing.assert_array_equal, before, after)
  assert jax.tree.leaves(after)


def test_a_layer_does_not_wait_for_another(tmp_path):
  """Fitting a layer depends on the model's own inputs to it alone."""
  _, model = cases.read("gpt2", tmp_path)
  config = AttentionConfig("window_linear", {"window": 4})
  before, after, _ = fitted(model, config, 3)
  last = model.places[-1].path
  alone = transfer.fit(
    model.model,
    model.variables,
    config.build(),
    {last: before[last]},
    model.task.train_batch,
    steps=3,
    rate=1e-2,
    pad_id=model.task.pad_id,
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
    alone[last],
    after[last],
  )
