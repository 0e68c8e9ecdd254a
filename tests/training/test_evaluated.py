"""Schedule-free optimisers: all that is evaluated is their average."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from settings.errors import ConfigError
from tests.training.fake_task import FakeTask
from tests.training.tiny import Parts, config, make_batch, make_parts
from training import evaluate, experiment, loop
from training import optimizer as optimizer_lib
from training.checkpoint import Checkpoints
from training.config import OptimizerConfig
from training.inference import generation
from training.state import TrainState

SGD = {"name": "schedule_free_sgd", "learning_rate": 0.3}
ADAMW = {"name": "schedule_free_adamw", "learning_rate": 0.05}


def test_the_parameters_of_a_quadratic_are_those_of_the_paper():
  """Equations 3 to 5 of arXiv:2405.15682 in float64, β = 0.9, c = 1/t."""
  target, rate = np.array([1.0, -2.0, 0.5]), 0.3
  z = x = np.array([0.5, 1.0, 3.0])
  optimizer = optimizer_lib.make_optimizer(OptimizerConfig(**SGD), 10)
  state = TrainState.first({"params": {"w": jnp.asarray(x, "f4")}}, optimizer)
  for t in range(1, 8):
    y = 0.1 * z + 0.9 * x
    np.testing.assert_allclose(state.params["w"], y, rtol=1e-5)
    np.testing.assert_allclose(state.variables["params"]["w"], x, rtol=1e-5)
    gradient = {"w": state.params["w"] - jnp.asarray(target, "f4")}
    updates, opt_state = optimizer.update(
      gradient, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    state = state._replace(params=params, opt_state=opt_state)
    z = z - rate * (y - target)
    x = (1 - 1 / t) * x + z / t
  assert np.abs(state.params["w"] - x).max() > 0.01


def after(count, **options):
  """The state after some steps, and optax's own average, called by hand."""
  parts, state = make_parts(**options)
  programs = parts.on()
  for number in range(count):
    state, _ = programs.update(state, make_batch(number))
  return state


def average(state):
  """What the docs of Optax say to evaluate."""
  [free] = [
    part
    for part in jax.tree.leaves(
      state.opt_state,
      is_leaf=lambda x: isinstance(x, optax.contrib.ScheduleFreeState),
    )
    if isinstance(part, optax.contrib.ScheduleFreeState)
  ]
  return optax.contrib.schedule_free_eval_params(free, state.params)


def same(tree, expected):
  chex.assert_trees_all_close(tree, expected, rtol=1e-5, atol=1e-6)


def differ(tree, other):
  return max(
    float(np.abs(x - y).max())
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
  )


@pytest.mark.parametrize("options", [SGD, ADAMW, {**ADAMW, "clip_norm": 0.1}])
def test_variables_are_the_average_of_optax(options):
  state = after(4, **options)
  same(state.variables["params"], average(state))
  assert differ(state.variables["params"], state.params) > 1e-3


def test_a_running_mean_is_of_the_average():
  states = [after(count, **SGD, ema_decay=0.75) for count in (1, 2)]
  mean = jax.tree.map(
    lambda m, x: 0.75 * m + 0.25 * x, states[0].ema, average(states[1])
  )
  same(states[1].variables["params"], mean)


def test_parameters_that_another_optimiser_moves_are_themselves():
  """Of a partition, only one part is schedule-free."""
  optimizer = optax.partition(
    {
      "free": optax.contrib.schedule_free_sgd(0.3),
      "frozen": optax.set_to_zero(),
    },
    {"w": "free", "b": "frozen"},
  )
  params = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([5.0])}
  state = TrainState.first({"params": params}, optimizer)
  alone = optax.contrib.schedule_free_sgd(0.3)
  w, alone_state = params["w"], alone.init(params["w"])
  for _ in range(3):
    gradient = {"w": 2 * state.params["w"], "b": jnp.ones(1)}
    updates, opt_state = optimizer.update(
      gradient, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    state = state._replace(params=params, opt_state=opt_state)
    change, alone_state = alone.update(2 * w, alone_state, w)
    w = optax.apply_updates(w, change)
  expected = optax.contrib.schedule_free_eval_params(alone_state, w)
  np.testing.assert_allclose(
    state.variables["params"]["w"], expected, rtol=1e-6
  )
  np.testing.assert_array_equal(state.variables["params"]["b"], [5.0])


@pytest.mark.parametrize("kind", ["jit", "pmap"])
def test_a_run_evaluates_draws_and_generates_from_the_average(
  run, tmp_path, monkeypatch, kind
):
  seen = []
  monkeypatch.setattr(
    loop.attention_maps, "draw_attention", lambda *x: seen.append(x[2])
  )
  generate = evaluate.generate
  monkeypatch.setattr(
    loop.evaluate,
    "generate",
    lambda run, variables, split: (
      seen.append(variables) or generate(run, variables, split)
    ),
  )
  asked = {"optimizer": OptimizerConfig(**SGD), "parallel": kind}
  results = run(FakeTask(), **asked)
  # The state of its last checkpoint, as optax says to evaluate it.
  config = run.experiment.config.train
  checkpoints = Checkpoints(tmp_path, config, read_only=True)
  state, _ = checkpoints.restore(run.experiment.shapes)
  checkpoints.close()
  expected = {**state.variables, "params": average(state)}
  parts = Parts(run.experiment.model, FakeTask(), config)
  programs = parts.on(len(jax.devices()))

  def evaluated(variables):
    steps = programs.eval_step, programs.mesh
    return evaluate.evaluate(*steps, variables, FakeTask(), "test")["loss"]

  loss = evaluated(expected)
  assert results["test"]["loss"] == pytest.approx(loss, rel=1e-6)
  last = {**expected, "params": state.params}
  assert abs(evaluated(last) - loss) > 1e-3
  # Two splits and a picture, and what generate.py and an export read.
  seen.append(generation.restore_variables(run.experiment, tmp_path))
  assert len(seen) == 4
  for variables in seen:
    same(variables["params"], expected["params"])


def test_an_average_of_bfloat16_parameters_is_refused():
  narrow = config(
    "decoder", {"name": "recall"}, {"param_dtype": "bfloat16"}, optimizer=SGD
  )
  with pytest.raises(ConfigError, match="name: schedule_free_sgd averages"):
    experiment.create(narrow)
