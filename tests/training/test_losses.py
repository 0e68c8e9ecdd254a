"""What a mechanism adds to the loss of the model that is trained with it."""

import functools

import jax
import numpy as np
import pytest

import models
from tests.models import tiny
from tests.training.tiny import Model, Parts
from training import experiment, experiment_config

ROWS = 8
OPTIONS = {"top_k": 3, "num_index_heads": 2, "index_dim": 4}


@functools.cache
def make(attention="dsa", **leaves):
  """A tiny decoder on the task of induction."""
  from configs import induction

  config = induction.get_config(attention)
  config.unlock()
  config.update_from_flattened_dict(
    {
      "task.length": 16,
      "task.eval_lengths": (8,),
      "task.eval_size": 8,
      "model.num_layers": 1,
      "model.features": 32,
      "model.mlp_features": 0,
      "batch_size": ROWS,
      **leaves,
    }
  )
  return experiment.create(experiment_config.parse(config))


def indexers(tree):
  """Leaves of the indexer, and all others."""
  own, others = [], []
  for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
    is_own = "index_" in jax.tree_util.keystr(path)
    (own if is_own else others).append(np.asarray(x))
  return own, others


def test_the_loss_is_sown_in_training_alone():
  model = tiny.create(
    "decoder", decoder_attention=models.AttentionConfig("dsa", OPTIONS)
  )
  batch = tiny.batch()
  variables = tiny.initialize(model, jax.random.key(0), batch)
  assert set(variables) == {"params", "constants"}
  logits, new = jax.jit(models.forward_and_state, static_argnums=0)(
    model, variables, batch, dropout_rng=None
  )
  (loss,) = jax.tree.leaves(new["losses"])
  assert loss.shape == ()
  assert loss > 0.0
  expected = tiny.forward(model, variables, batch)
  np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2])
def test_the_indexer_learns_from_its_loss_and_nothing_else_does(splits):
  run = make()
  parts = Parts.of(run).with_optimizer(accumulate_steps=splits)
  state, batch = run.init(), run.task.train_batch(0)
  own, others = indexers(
    parts.gradient(state.params, state.collections, batch)[0]
  )
  plain = parts._replace(
    model=Model(
      lambda variables, batch, rng: models.forward(
        run.model, variables, batch, dropout_rng=rng
      )
    )
  )
  zeros, expected = indexers(
    plain.gradient(state.params, state.collections, batch)[0]
  )
  assert all(np.any(x) for x in own)
  assert not any(np.any(x) for x in zeros)
  for x, y in zip(others, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-6)


def test_training_lowers_the_loss():
  run = make()
  programs = Parts.of(run).on()
  state, batch = run.init(), run.task.train_batch(0)
  first = state

  @jax.jit
  def loss(variables):
    _, new = models.forward_and_state(
      run.model, variables, batch, dropout_rng=None
    )
    return sum(jax.tree.leaves(new["losses"]))

  for _ in range(30):
    state, _ = programs.update(state, batch)

  def untrained(path, before, after):
    return before if "index_" in jax.tree_util.keystr(path) else after

  params = jax.tree_util.tree_map_with_path(
    untrained, first.params, state.params
  )
  indexer_as_drawn = state._replace(params=params)
  assert loss(state.variables) < 0.9 * loss(indexer_as_drawn.variables)
