"""Mechanisms are fitted to what they replace, and nothing else changes."""

import chex
import jax
import numpy as np
import pytest

import models
from models.attention_config import AttentionConfig
from projects.swap import scores, source, substitution, transfer, variant
from projects.swap.tests import swap_cases as cases
from tests.attention.forms import thorough

HYBRID = AttentionConfig("window_linear", {"window": 4})


def drawn(model, config):
  """What a mechanism draws at every place of a model."""
  description = variant.describe(model, config, model.modules)
  _, variables = variant.make(model, description, 0)
  return substitution.extract(
    variables, [module.path for module in model.modules]
  )


def fitted(model, config, before, steps):
  return transfer.fit(
    model.model,
    model.variables,
    config.build(),
    before,
    model.task.train_batch,
    steps=steps,
    rate=1e-2,
    pad_id=model.task.pad_id,
  )


@pytest.mark.parametrize(
  ("case", "config"),
  [
    ("gpt2", HYBRID),
    *thorough(("bert_masked", AttentionConfig("linformer", {"rank": 8}))),
  ],
)
def test_every_layer_comes_nearer(case, config, tmp_path):
  _, model = cases.read(case, tmp_path)
  before = drawn(model, config)
  after = fitted(model, config, before, 40)
  chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
  errors = scores.make(model, config.build()).errors
  (old, old_whole), (new, new_whole) = map(errors, (before, after))
  assert all(b < 0.95 * a for a, b in zip(old, new, strict=True))
  assert new_whole < 0.9 * old_whole
  assert np.sqrt(np.mean(np.square(old))) == pytest.approx(old_whole, rel=0.5)


def test_what_is_drawn_and_not_trained_stays(tmp_path):
  _, model = cases.read("gpt2", tmp_path)
  config = AttentionConfig("performer", {"num_features": 8})
  before = drawn(model, config)
  after = fitted(model, config, before, 2)
  chex.assert_trees_all_equal(before, after)
  assert jax.tree.leaves(after)


def test_errors_are_shares_of_all_outputs(tmp_path):
  """Of all batches; the whole error is not the mean of those of layers."""
  _, model = cases.read("gpt2", tmp_path)
  model = model._replace(batches=[*model.batches, model.task.train_batch(0)])
  before = drawn(model, HYBRID)
  norms = 0
  for batch in model.batches:
    valid = {"decoder": batch["weights"] > 0}
    found = substitution.squares(
      model.model, model.variables, batch, valid, HYBRID.build(), before
    )
    norms += np.array([found[module.path] for module in model.modules])
  errors, whole = scores.make(model, HYBRID.build()).errors(before)
  np.testing.assert_allclose(np.square(errors), norms[:, 0] / norms[:, 1], 1e-4)
  difference, size = norms.sum(axis=0)
  np.testing.assert_allclose(whole**2, difference / size, 1e-4)


def test_the_rate_decays_to_zero(tmp_path):
  """A first step of Adam is the rate; the second of two has half of it."""
  _, model = cases.read("gpt2", tmp_path)
  before = drawn(model, HYBRID)
  for steps, low, high in ((1, 0.0099, 0.0101), (2, 0.0145, 0.0155)):
    after = fitted(model, HYBRID, before, steps)
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), after, before)
    assert low < max(jax.tree.leaves(changes)) < high


def test_a_layer_does_not_wait_for_another(tmp_path):
  """Fitting a layer depends on the model's own inputs to it alone."""
  _, model = cases.read("gpt2", tmp_path)
  before, last = drawn(model, HYBRID), model.modules[-1].path
  alone = fitted(model, HYBRID, {last: before[last]}, 3)[last]
  among = fitted(model, HYBRID, before, 3)[last]
  chex.assert_trees_all_close(alone, among, rtol=1e-3, atol=1e-5)


def test_a_layer_that_is_kept_keeps_its_own_variables(tmp_path):
  """Both mechanisms have variables of the same names in every layer."""
  asked = cases.settings("gpt2", tmp_path)
  folder = tmp_path / "gpt2"
  forgetting = {"name": "dense", "forget": True}
  models.save_pretrained(folder, models.load_pretrained(folder, forgetting))
  model = source.read(asked)
  config = AttentionConfig("flash", {"forget": True})
  mechanisms, paths = drawn(model, config), [x.path for x in model.modules]
  mechanisms = jax.tree.map(lambda x: 2 * x + 1, mechanisms)
  target = tmp_path / "kept"
  variant.write(model, config, model.modules[1:], mechanisms, target)
  p = models.load_pretrained(target)
  found = substitution.extract(p.variables, paths)
  own = substitution.extract(model.variables, paths)
  for path, wanted in zip(paths, (own, mechanisms), strict=True):
    chex.assert_trees_all_equal(found[path], dict(wanted[path]))
