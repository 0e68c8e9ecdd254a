"""Laws that each optimiser of Optax keeps under the name that a config types."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from configs import copy
from settings.errors import ConfigError
from training import experiment, experiment_config, optimizer
from training.config import OptimizerConfig

FACTORIES = {
  name: factory
  for module in (optax.contrib, optax)
  for name, factory in vars(module).items()
  if inspect.isfunction(factory)
  and "learning_rate" in inspect.signature(factory).parameters
  and not name.startswith("_")
}
REFUSED = {
  "dpsgd": "dpsgd refused its options: .* missing 3 required",
  "schedule_free": "schedule_free refused its options: .* missing 1 required",
  "optimistic_adam": "optimistic_adam refused its options: .* schedules",
  "sm3": "sm3 refused its options: bad operand",
  "rprop": "rprop cannot update .* and a schedule alone: full_like",
  "scale_by_rprop": "scale_by_rprop cannot update .*: full_like",
  "lbfgs": "lbfgs cannot update parameters from their gradient .* 'value'",
  "galore": "galore cannot update .* its state has empty arrays",
  "momo": "momo cannot update parameters from their gradient .* 'value'",
  "momo_adam": "momo_adam cannot update .* 'value'",
  "sophia": "sophia cannot update parameters .*: obj_fn must be provided",
}
NAMES = sorted(FACTORIES.keys() - REFUSED.keys())
ARGUMENTS = {
  name: inspect.signature(factory).parameters
  for name, factory in FACTORIES.items()
}
UNMASKED = dict.fromkeys(
  (
    *("dadapt_adamw", "madgrad", "momo", "momo_adam", "novograd", "prodigy"),
    *("schedule_free_adamw", "schedule_free_sgd"),
  ),
  "weight_decay",
) | {"muon": "adam_weight_decay"}
"""Weight decays without a mask, as the signatures of Optax have them."""

MASKED = [
  (name, argument)
  for name in NAMES
  for argument in ARGUMENTS[name]
  if argument in ("weight_decay", "weight_decay_rate")
  and UNMASKED.get(name) != argument
]
RATE, STEPS = 0.03, 5


def config(name, **leaves):
  fields = {k: leaves.pop(k) for k in (*leaves,) if k in ("weight_decay", "b2")}
  return OptimizerConfig(
    name=name, learning_rate=RATE, options=leaves, **fields
  )


def make(name, **leaves):
  return optimizer.make_optimizer(config(name, **leaves), 100)


def draw(seed, *leading, dtype="float32"):
  """Parameters that decay, no number like another."""
  rng = np.random.default_rng(seed)
  shapes = {"kernel": (3, 4), "query": (5, 2), "gate": (6,)}
  arrays = {
    name: jnp.asarray(rng.normal(size=(*leading, *shape)), dtype)
    for name, shape in shapes.items()
  }
  return {"layer": arrays}


def trained(update, params, gradients):
  """The parameters after each gradient, and the last state."""

  @jax.jit
  def train(params, gradients):
    def step(carry, gradient):
      params, state = carry
      updates, state = update.update(gradient, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), params

    carry = params, update.init(params)
    (_, state), steps = jax.lax.scan(step, carry, gradients)
    return steps, state

  return train(params, gradients)


pytestmark = [
  pytest.mark.filterwarnings("ignore:.*optax 0.2.7"),
  pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated"),
]
"""Some optimisers warn of arguments that Optax will rename, one of its end."""

same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_typed_is_the_call_of_optax_with_a_learning_rate(name):
  params, gradients = draw(0), draw(1, STEPS)
  own = trained(FACTORIES[name](learning_rate=RATE), params, gradients)[0]
  # What a run records has these defaults, and is the same optimiser.
  recorded = optimizer.with_defaults(config(name))
  update = optimizer.make_optimizer(recorded, 100)
  jax.tree.map(same, trained(update, params, gradients)[0], own)


@pytest.mark.parametrize(
  ("name", "typed"),
  [
    *((name, {"b2": 0.6}) for name in ("novograd", "adan", "lion")),
    ("muon", {"ns_steps": 3}),
    ("sgd", {"momentum": 0.9}),
  ],
)
def test_what_is_typed_reaches_optax(name, typed):
  params, gradients = draw(0), draw(1, STEPS)
  by_hand = FACTORIES[name](learning_rate=RATE, **typed)
  expected = trained(by_hand, params, gradients)[0]
  found = trained(make(name, **typed), params, gradients)[0]
  jax.tree.map(same, found, expected)
  default = trained(make(name), params, gradients)[0]
  moved = np.abs(default["layer"]["kernel"] - expected["layer"]["kernel"])
  assert moved[-1].max() > 1e-4


def test_a_record_has_the_numbers_of_the_optimiser():
  found = {
    name: optimizer.with_defaults(OptimizerConfig(name=name))
    for name in ("novograd", "sgd", "adamw")
  }
  recorded = {
    name: (x.b1, x.b2, x.eps, x.weight_decay) for name, x in found.items()
  }
  # As docs of Optax have them.
  assert recorded == {
    "novograd": (0.9, 0.25, 1e-6, 0.0),
    "sgd": (None, None, None, None),
    "adamw": (0.9, 0.999, 1e-8, 1e-4),
  }


def test_every_weight_decay_of_optax_is_known():
  """A new one has to be masked, or refused."""
  found = {
    argument
    for arguments in ARGUMENTS.values()
    for argument in arguments
    if "weight_decay" in argument and "mask" not in argument
  }
  assert found == optimizer._WEIGHT_DECAYS.keys()


@pytest.mark.parametrize(("name", "argument"), MASKED)
def test_weight_decay_moves_kernels_and_not_what_is_exempt(name, argument):
  exempt = ("bias", "scale", "norm_scale", "log_rate", "skip")
  params = draw(0)
  params["layer"] |= {
    x: 1 + jnp.arange(3.0) + number for number, x in enumerate(exempt)
  }
  zero = jax.tree.map(lambda x: jnp.zeros((STEPS, *x.shape)), params)
  steps, _ = trained(make(name, **{argument: 0.5}), params, zero)
  for leaf in exempt:
    same(steps["layer"][leaf][-1], params["layer"][leaf], rtol=0, atol=0)
  start, end = params["layer"]["kernel"], steps["layer"]["kernel"][-1]
  # DoG begins with a step of 1e-6.
  assert np.linalg.norm(end) < np.linalg.norm(start)


@pytest.mark.parametrize("name", ["adamw", "adamaxw", "lion"])
def test_nor_does_the_decay_that_optax_has_by_default(name):
  params = {"kernel": jnp.full(3, 2.0), "bias": jnp.full(3, 2.0)}
  zero = jax.tree.map(lambda x: jnp.zeros((1, 3)), params)
  moved, _ = trained(make(name), params, zero)
  default = ARGUMENTS[name]["weight_decay"].default
  np.testing.assert_allclose(
    moved["kernel"][0], 2.0 * (1 - RATE * default), rtol=1e-6
  )
  np.testing.assert_array_equal(moved["bias"][0], params["bias"])


@pytest.mark.parametrize(("name", "argument"), UNMASKED.items())
def test_weight_decay_without_a_mask_is_refused(name, argument):
  message = f"^{argument}: {name} has no mask for it, .* expected 0, got 0.1"
  with pytest.raises(ValueError, match=message):
    make(name, **{argument: 0.1})
  make(name, **{argument: 0.0})


@pytest.mark.parametrize("name", NAMES)
def test_state_is_float32_for_parameters_of_fewer_bits(name):
  def dtypes(dtype):
    run = draw(0, dtype=dtype), draw(1, 3, dtype=dtype)
    steps, state = jax.eval_shape(lambda run: trained(make(name), *run), run)
    assert {x.dtype.name for x in jax.tree.leaves(steps)} == {dtype}
    return [x.dtype for x in jax.tree.leaves(state)]

  assert dtypes("bfloat16") == dtypes("float32")


def test_a_second_moment_in_bfloat16_falls():
  """ν ← b2 ν + (1 − b2) g² by hand, a gradient of 3 and then of 0."""
  params = {"kernel": jnp.ones(2, "bfloat16")}
  gradients = {"kernel": jnp.zeros((300, 2), "bfloat16").at[0].set(3.0)}
  _, state = trained(make("adamw"), params, gradients)
  nu = optax.tree.get(state, "nu")["kernel"]
  assert nu.dtype == "float32"
  np.testing.assert_allclose(nu, 0.001 * 9 * 0.999**299, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_a_gradient_is_refused_before_a_run(
  name, tmp_path
):
  mapping = copy.get_config().to_dict()
  mapping["optimizer"]["name"] = name
  with pytest.raises(ConfigError) as info:
    experiment.begin(experiment_config.parse(mapping), tmp_path / "run")
  assert info.match(f"^config.optimizer.name: {REFUSED[name]}")
  assert "\n" not in str(info.value)
  assert not (tmp_path / "run").exists()


def test_a_gradient_of_each_example_is_refused(tmp_path):
  """DP-SGD takes axis 0 of a gradient for examples."""
  mapping = copy.get_config().to_dict()
  options = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "seed": 0}
  mapping["optimizer"] |= {"name": "dpsgd", **options}
  with pytest.raises(ConfigError, match=r"name: dpsgd cannot update "):
    experiment.begin(experiment_config.parse(mapping), tmp_path / "run")


@pytest.mark.parametrize(
  ("typed", "meant"), [("adamW", "adamw"), ("ADAM", "adam"), ("Lion", "lion")]
)
def test_case_does_not_count_in_what_is_suggested(typed, meant):
  with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
    make(typed)
