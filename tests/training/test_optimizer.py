"""Schedules and the pieces of an update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, Dims
from configs import copy
from settings.errors import ConfigError
from training import experiment_config
from training.config import OptimizerConfig
from training.optimizer import make_optimizer, make_schedule


def rates(num_steps=100, **options):
  schedule = make_schedule(OptimizerConfig(**options), num_steps)
  return np.array([schedule(step) for step in range(num_steps + 1)])


def update(optimizer, gradient, params):
  """The first update, as one program."""

  @jax.jit
  def first(gradient, params):
    return optimizer.update(gradient, optimizer.init(params), params)[0]

  return first(gradient, params)


def test_warmup_reaches_the_peak_and_starts_above_zero():
  got = rates(learning_rate=2.0, warmup_steps=9)
  np.testing.assert_allclose(got[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
  np.testing.assert_allclose(got[9:], 2.0)


def test_cosine_ends_at_the_final_fraction():
  got = rates(
    learning_rate=1.0, schedule="cosine", warmup_steps=10, final_fraction=0.1
  )
  assert got[10] == pytest.approx(1.0)
  assert got[55] == pytest.approx(0.55)
  assert got[100] == pytest.approx(0.1)
  assert np.all(np.diff(got[10:]) <= 0)


def test_a_warm_up_may_last_to_the_end():
  got = rates(10, learning_rate=1.1, schedule="cosine", warmup_steps=10)
  np.testing.assert_allclose(got, np.arange(1, 12) / 10, rtol=1e-6)


def test_inverse_sqrt_is_that_of_the_paper():
  got = rates(learning_rate=3.0, schedule="inverse_sqrt")
  np.testing.assert_allclose(got, 3 / np.sqrt(np.arange(1, 102)), rtol=1e-6)
  got = rates(learning_rate=1.0, schedule="inverse_sqrt", warmup_steps=16)
  steps = np.arange(16, 101)
  np.testing.assert_allclose(got[16:], 4 / np.sqrt(steps), rtol=1e-6)


# What Mamba's and fla's code marks as `_no_weight_decay` (A_log, dt_bias, D, L and
# lambda_params), and what is a bias or a scale of a norm by its name.
@pytest.mark.parametrize(
  ("name", "exempt"),
  [
    ("mamba2", {"log_rate", "step_bias", "skip"}),
    ("gated_delta", {"log_rate", "step_bias"}),
    ("kimi_delta", {"log_rate", "step_bias"}),
    ("comba", {"log_rate", "step_bias", "correction"}),
    ("mesa", {"rate_bias", "decay_bias", "regularizer"}),
    ("log_linear", {"log_rate", "step_bias", "skip", "level_gain"}),
    ("gated_linear", {"gate_bias"}),
    ("latent", {"norm_scale"}),
  ],
)
def test_rates_biases_and_scales_of_mechanisms_do_not_decay(name, exempt):
  dims = Dims(2, 2, 8, 16, 8)
  params = ATTENTIONS[name]().init(jax.random.key(0), dims)["params"]
  params = {"layer": jax.tree.map(jnp.ones_like, params)}
  optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), 10)
  updates = update(optimizer, jax.tree.map(np.zeros_like, params), params)
  kept = {k for k, x in updates["layer"].items() if not np.any(x)}
  assert kept == exempt


def test_clipping_scales_the_gradient_that_adam_sees():
  params = {"kernel": jnp.zeros(2)}
  gradient = {"kernel": jnp.array([30.0, 40.0])}
  optimizer = make_optimizer(OptimizerConfig(clip_norm=1.0), 10)
  _, opt_state = optimizer.update(gradient, optimizer.init(params), params)
  moments = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.shape == (2,)]
  np.testing.assert_allclose(moments[0], [0.06, 0.08], rtol=1e-5)


def test_an_optimiser_may_be_one_of_an_import_path():
  config = OptimizerConfig(name="optax:sgd", learning_rate=0.5)
  params = {"kernel": np.ones(2)}
  updates = update(make_optimizer(config, 10), params, params)
  np.testing.assert_allclose(updates["kernel"], -0.5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"name": "adamww"}, "name: unknown 'adamww'; did you mean 'adamw'"),
    ({"name": "optax:chain"}, "name: expected a function of a learning_rate"),
    ({"options": {"warmup_step": 1}}, "warmup_step: .*mean 'warmup_steps'"),
    ({"name": "sgd", "weight_decay": 0.1}, "weight_decay: sgd has none"),
    ({"name": "adam", "weight_decay": 0.1}, "weight_decay: adam has none"),
    ({"name": "dpsgd"}, "name: dpsgd refused its options: .*l2_norm_clip"),
  ],
)
def test_what_is_no_optimiser_is_refused(options, message):
  """By name of the leaf, while a config is read."""
  mapping = copy.get_config().to_dict()
  mapping["optimizer"] |= options | options.pop("options", {})
  with pytest.raises(ConfigError, match=f"^config.optimizer.{message}"):
    experiment_config.parse(mapping)
