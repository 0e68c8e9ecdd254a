"""Losses, gradients and the guard of one step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.tiny import CLASSES, make_batch, make_functions, numbers
from training.step import cross_entropy, eval_step, mean_gradient, train_step


def test_loss_is_the_cross_entropy_and_smoothing_stays_out_of_it():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 3, CLASSES)).astype(np.float32)
  targets = rng.integers(0, CLASSES, (2, 3))
  weights = np.array([[1, 1, 0], [1, 0, 0]], np.float32)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  nats = -sum(
    weights[b, t] * log_probs[b, t, targets[b, t]]
    for b in range(2)
    for t in range(3)
  )
  uniform = -np.sum(weights * log_probs.mean(-1))
  objective, got, count = cross_entropy(
    logits, {"targets": targets, "weights": weights}, 0.1
  )
  assert got == pytest.approx(nats, rel=1e-5)
  assert objective == pytest.approx(0.9 * nats + 0.1 * uniform, rel=1e-5)
  assert count == 3


gradient_of = jax.jit(mean_gradient, static_argnums=0)
update = jax.jit(train_step, static_argnums=0)
evaluate = jax.jit(eval_step, static_argnums=0)


def step(functions, state, batch, index, **options):
  """`train_step` with the numbers of an optimiser of these options."""
  return update(functions, numbers(**options), state, batch, index)


@pytest.mark.parametrize("splits", [2, 16])
def test_micro_batches_give_the_gradient_of_the_batch(splits):
  batch = make_batch()
  whole, state = make_functions(label_smoothing=0.1)
  expected, sums, _ = gradient_of(whole, state.params, state.collections, batch)
  split = whole._replace(accumulate_steps=splits)
  got, split_sums, _ = gradient_of(
    split, state.params, state.collections, batch
  )
  np.testing.assert_allclose(split_sums, sums, rtol=1e-6)
  chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("splits", [1, 16])
def test_gradients_of_bfloat16_parameters_are_summed_in_float32(splits):
  """256 + 1 is 256 in bfloat16: over micro-batches, and over devices."""
  functions, _ = make_functions()
  functions = functions._replace(
    forward=lambda variables, batch, _: (
      variables["params"]["w"] * batch["inputs"].astype("bfloat16")
    ),
    loss=lambda logits, batch, _: (
      jnp.sum(logits),
      jnp.sum(logits),
      jnp.sum(batch["weights"]),
    ),
    accumulate_steps=splits,
  )
  batch = {
    "inputs": np.array([[256.0]] + [[1.0]] * 15),
    "weights": np.ones((16, 1)),
  }
  if splits == 1:
    batch = {name: rows[:1] for name, rows in batch.items()}
  params = {"w": jnp.ones((), "bfloat16")}

  def reduce(tree):  # A second device, whose gradient is 1.
    return jax.tree.map(lambda x: x + jnp.ones_like(x), tree)

  gradient, (_, count), _ = mean_gradient(
    functions, params, {}, batch, reduce=reduce
  )
  assert gradient["w"].dtype == "float32"
  total = 257 if splits == 1 else 256 + 15 + 1
  assert gradient["w"] == pytest.approx(total / float(count))
  assert count == (2 if splits == 1 else 17)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_losses_of_a_model_are_added_to_the_mean_of_the_task(
  splits, label_smoothing
):
  """d/dw of w³/3 + 5w is w² + 5, whatever the number of targets and splits is."""
  plain, state = make_functions(
    label_smoothing=label_smoothing, accumulate_steps=splits
  )

  def forward_and_state(variables, batch, rng):
    kernel = variables["params"]["kernel"]
    losses = {"a": jnp.sum(kernel**3) / 3, "b": (5 * jnp.sum(kernel),)}
    return plain.forward(variables, batch, rng), {"losses": losses}

  functions = plain._replace(forward_and_state=forward_and_state)
  batch = make_batch()
  arguments = state.params, state.collections, batch
  expected, sums, _ = gradient_of(plain, *arguments)
  got, same_sums, collections = gradient_of(functions, *arguments)
  kernel = np.asarray(state.params["kernel"])
  np.testing.assert_allclose(
    got["kernel"], expected["kernel"] + kernel**2 + 5, rtol=1e-5
  )
  np.testing.assert_allclose(
    got["embedding"], expected["embedding"], rtol=1e-4, atol=1e-7
  )
  # What is reported is the task's loss alone.
  np.testing.assert_allclose(same_sums, sums, rtol=1e-6)
  assert collections.keys() == state.collections.keys()


def test_a_batch_without_targets_changes_nothing_but_the_step():
  functions, state = make_functions(weight_decay=0.0)
  batch = make_batch()
  batch["weights"] = np.zeros_like(batch["weights"])
  new, metrics = step(functions, state, batch, np.int32(0))
  assert new.step == 1
  assert metrics["grad_norm"] == 0
  chex.assert_trees_all_equal(new.params, state.params)


def test_a_bad_step_freezes_the_state_and_keeps_its_number():
  functions, state = make_functions()
  good, bad = make_batch(), make_batch()
  bad["weights"] = bad["weights"] * np.float32(np.nan)
  state, metrics = step(functions, state, good, np.int32(0))
  assert metrics["updates"] == 1
  before = jax.device_get(state)
  for index, batch in ((1, bad), (2, good), (3, good)):
    state, metrics = step(functions, state, batch, np.int32(index))
    assert metrics["updates"] == 1
  chex.assert_trees_all_equal(state, before)


@pytest.mark.parametrize("name", ["adamw", "sign_sgd"])
def test_a_gradient_that_is_not_finite_changes_nothing(name):
  """Not with an optimiser that makes a finite update of it, either."""
  functions, state = make_functions(name=name)

  def forward(variables, batch, rng):
    # Zero, and its derivative is infinite.
    kernel = variables["params"]["kernel"][0, 0]
    zero = jnp.sqrt(kernel - jax.lax.stop_gradient(kernel))
    logits = functions.forward(variables, batch, rng)
    return logits.at[..., 0].add(zero)

  bad = functions._replace(forward=forward)
  new, metrics = step(bad, state, make_batch(), np.int32(0), name=name)
  assert np.isfinite(metrics["loss"]).all()
  assert not np.isfinite(metrics["grad_norm"])
  assert metrics["updates"] == 0
  chex.assert_trees_all_equal(new, state)


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize(
  ("options", "has_targets"),
  [
    # 3e38 times a gradient above 1.2 is beyond float32.
    ({"name": "sgd", "learning_rate": 3e38}, True),
    ({"name": "schedule_free_sgd", "learning_rate": 3e38}, True),
    # Prodigy divides by a norm of the gradient.
    ({"name": "prodigy", "learning_rate": 1.0}, False),
  ],
)
def test_an_update_that_is_not_finite_changes_nothing(
  options, has_targets, ema_decay
):
  options = {**options, "ema_decay": ema_decay}
  functions, state = make_functions(**options)
  batch = make_batch()
  batch["weights"] *= has_targets

  def loss(logits, batch, smoothing):
    objective, nats, count = cross_entropy(logits, batch, smoothing)
    return 100 * objective, nats, count

  functions = functions._replace(loss=loss)
  new, metrics = step(functions, state, batch, np.int32(0), **options)
  assert np.isfinite(metrics["loss"]).all()
  assert np.isfinite(metrics["grad_norm"])
  assert metrics["updates"] == 0
  chex.assert_trees_all_equal(new, state)


def test_dropout_follows_from_the_step_alone():
  functions, state = make_functions(dropout=True)

  def loss(index):
    at = state._replace(step=jnp.int32(index))
    _, metrics = step(functions, at, make_batch(), np.int32(index))
    return float(metrics["loss"][0])

  assert loss(0) == loss(0)
  assert loss(0) != loss(1)


def test_evaluation_adds_the_loss_to_the_metrics():
  functions, state = make_functions()
  batch = make_batch()
  sums = evaluate(functions, state.variables, batch)
  assert sums.keys() == {"loss", "accuracy"}
  assert sums["loss"][1] == batch["weights"].sum() == sums["accuracy"][1]


def test_loss_falls():
  functions, state = make_functions(learning_rate=0.05, num_steps=100)
  losses = []
  for index in range(60):
    state, metrics = step(
      functions, state, make_batch(), np.int32(index), learning_rate=0.05
    )
    losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  assert losses[-1] < 0.7 * losses[0]


def test_constants_are_redrawn_on_time_and_by_the_step_alone():
  functions, state = make_functions()
  functions = functions._replace(
    redraw_every=2,
    draw_constants=lambda key: {"mix": jax.random.normal(key, (4, 4))},
  )
  batch = make_batch()
  seen = []
  states = [state]
  for index in range(4):
    states.append(step(functions, states[-1], batch, np.int32(index))[0])
    seen.append(np.asarray(states[-1].collections["constants"]["mix"]))
  assert (seen[0] != state.collections["constants"]["mix"]).any()
  np.testing.assert_array_equal(seen[0], seen[1])
  assert (seen[2] != seen[1]).any()
  np.testing.assert_array_equal(seen[2], seen[3])
  # A restart at step 2 draws what the run drew.
  again, _ = step(functions, states[2], batch, np.int32(2))
  np.testing.assert_array_equal(again.collections["constants"]["mix"], seen[2])


def test_the_loss_is_that_of_the_new_constants():
  functions, state = make_functions()
  batch = make_batch()
  new = {"mix": np.random.default_rng(7).normal(size=(4, 4)).astype("f4")}
  redrawn = functions._replace(redraw_every=1, draw_constants=lambda _: new)
  at = state._replace(collections={"constants": new})
  _, got = step(redrawn, state, batch, np.int32(0))
  _, expected = step(functions, at, batch, np.int32(0))
  np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-6)
