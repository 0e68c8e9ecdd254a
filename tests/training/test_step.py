"""Losses, gradients and the guard of one step."""

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import tiny
from tests.training.tiny import CLASSES, Model, make_batch, make_parts
from training import experiment
from training.step import cross_entropy, make_objective, mean_gradient


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


@pytest.mark.parametrize("splits", [2, 16])
def test_micro_batches_give_the_gradient_of_the_batch(splits):
  batch = make_batch()
  whole, state = make_parts(label_smoothing=0.1)
  arguments = state.params, state.collections, batch
  expected, sums, _ = whole.gradient(*arguments)
  split = whole.with_optimizer(accumulate_steps=splits)
  got, split_sums, _ = split.gradient(*arguments)
  np.testing.assert_allclose(split_sums, sums, rtol=1e-6)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7),
    got,
    expected,
  )


def test_a_mean_does_not_depend_on_the_scale_of_the_weights():
  """The weights of a task may sum to less than 1."""
  parts, state = make_parts()
  batch = make_batch()
  light = batch | {"weights": batch["weights"] / 1024}
  assert light["weights"].sum() < 1
  arguments = state.params, state.collections
  expected, got = (parts.gradient(*arguments, x)[0] for x in (batch, light))
  chex.assert_trees_all_close(got, expected, rtol=1e-5)


def test_each_micro_batch_and_each_device_draws_its_own_dropout():
  """Of equal rows, which the same masks would give equal losses."""
  parts, state = make_parts(dropout=True)
  rows = make_batch(rows=8)
  key = jax.random.key(5)

  def loss(batch, key, splits=1):
    objective = make_objective(*parts, parts.on().mesh)
    arguments = objective, state.params, state.collections, batch, key
    return float(mean_gradient(*arguments, splits=splits)[1][0])

  twice = {name: np.repeat(x, 2, axis=0) for name, x in rows.items()}
  each = [loss(rows, jax.random.fold_in(key, i)) for i in range(2)]
  assert each[0] != pytest.approx(each[1], rel=1e-3)
  assert loss(twice, key, splits=2) == pytest.approx(sum(each), rel=1e-5)
  many, state = make_parts(dropout=True, kind="pmap")
  after = {name: np.concatenate([x, x]) for name, x in rows.items()}
  one, two = (
    float(many.on(count).update(state, batch)[1]["loss"][0])
    for count, batch in ((1, rows), (2, after))
  )
  assert two != pytest.approx(2 * one, rel=1e-3)


@pytest.mark.parametrize("splits", [1, 16])
def test_gradients_of_bfloat16_parameters_are_summed_in_float32(splits):
  """256 + 1 is 256 in bfloat16: over micro-batches, and over devices."""
  parts, _ = make_parts()
  parts = parts._replace(
    model=Model(
      lambda variables, batch, _: (
        variables["params"]["w"] * batch["inputs"].astype("bfloat16")
      )
    ),
    task=types.SimpleNamespace(
      loss=lambda logits, batch, _: (
        jnp.sum(logits),
        jnp.sum(logits),
        jnp.sum(batch["weights"]),
      )
    ),
  )
  objective = make_objective(*parts, parts.on().mesh)
  batch = {
    "inputs": np.array([[256.0]] + [[1.0]] * 15),
    "weights": np.ones((16, 1)),
  }
  if splits == 1:
    batch = {name: rows[:1] for name, rows in batch.items()}
  params = {"w": jnp.ones((), "bfloat16")}

  # A second device, whose gradient is 1.
  other = {name: np.zeros_like(rows) for name, rows in batch.items()}
  other["inputs"][0] = other["weights"][0] = 1
  key = jax.random.key(0)
  gradient, (_, count), _ = jax.pmap(
    lambda batch: mean_gradient(
      objective, params, {}, batch, key, splits=splits, axis_name="data"
    ),
    axis_name="data",
    out_axes=None,
  )(jax.tree.map(lambda *rows: np.stack(rows), batch, other))
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
  plain, state = make_parts(
    label_smoothing=label_smoothing, accumulate_steps=splits
  )

  def new(variables):
    kernel = variables["params"]["kernel"]
    return {
      "losses": {"a": jnp.sum(kernel**3) / 3, "b": (5 * jnp.sum(kernel),)}
    }

  parts = plain._replace(model=Model(new=new))
  batch = make_batch()
  arguments = state.params, state.collections, batch
  expected, sums, _ = plain.gradient(*arguments)
  got, same_sums, collections = parts.gradient(*arguments)
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
  parts, state = make_parts(weight_decay=0.0)
  batch = make_batch()
  batch["weights"] = np.zeros_like(batch["weights"])
  new, metrics = parts.on().update(state, batch)
  assert new.step == 1
  assert metrics["grad_norm"] == 0
  jax.tree.map(np.testing.assert_array_equal, new.params, state.params)


def test_a_bad_step_leaves_the_state_as_it_was_and_keeps_its_number():
  parts, state = make_parts()
  programs = parts.on()
  good, bad = make_batch(), make_batch()
  bad["weights"] = bad["weights"] * np.float32(np.nan)
  state, metrics = programs.update(state, good)
  assert metrics["updates"] == 1
  before = jax.device_get(state)
  for _ in range(2):
    state, metrics = programs.update(state, bad)
    assert metrics["updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, state, before)


@pytest.mark.parametrize("name", ["adamw", "sign_sgd"])
def test_a_gradient_that_is_not_finite_changes_nothing(name):
  """Not with an optimiser that makes a finite update of it, either."""
  parts, state = make_parts(name=name)

  def forward(variables, batch, rng):
    # Zero, and its derivative is infinite.
    kernel = variables["params"]["kernel"][0, 0]
    zero = jnp.sqrt(kernel - jax.lax.stop_gradient(kernel))
    logits = tiny.forward(variables, batch, rng)
    return logits.at[..., 0].add(zero)

  bad = parts._replace(model=Model(forward))
  new, metrics = bad.on().update(state, make_batch())
  assert np.isfinite(metrics["loss"]).all()
  assert not np.isfinite(metrics["grad_norm"])
  assert metrics["updates"] == 0
  jax.tree.map(np.testing.assert_array_equal, new, state)


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
  parts, state = make_parts(**options)
  batch = make_batch()
  batch["weights"] *= has_targets

  def loss(logits, batch, smoothing):
    objective, nats, count = cross_entropy(logits, batch, smoothing)
    return 100 * objective, nats, count

  task = types.SimpleNamespace(loss=loss, metric_sums=tiny.metric_sums)
  new, metrics = parts._replace(task=task).on().update(state, batch)
  assert np.isfinite(metrics["loss"]).all()
  assert np.isfinite(metrics["grad_norm"])
  assert metrics["updates"] == 0
  jax.tree.map(np.testing.assert_array_equal, new, state)


def test_dropout_follows_from_seed_and_step_alone():
  parts, state = make_parts(dropout=True)
  programs = parts.on()

  def loss(index, seed=1):
    at = state._replace(step=jnp.int32(index), seed=jnp.int32(seed))
    _, metrics = programs.update(at, make_batch())
    return float(metrics["loss"][0])

  assert loss(0) == loss(0)
  assert loss(0) != loss(1)
  assert loss(0) != loss(0, seed=2)


def test_evaluation_adds_the_loss_to_the_metrics():
  parts, state = make_parts()
  batch = make_batch()
  sums = parts.on().evaluate(state.variables, batch)
  assert sums.keys() == {"loss", "accuracy"}
  assert sums["loss"][1] == batch["weights"].sum() == sums["accuracy"][1]


def test_runs_of_another_seed_and_rate_lower_to_the_same_programs():
  """Their first states differ, and their steps, as both numbers are in the state."""

  def run(seed, rate, warmup_steps=2):
    task = {"name": "recall", "vocab_size": 16, "length": 8, "num_pairs": 2}
    return experiment.create(
      tiny.config(
        "decoder",
        task | {"eval_size": 8},
        {"dropout_rate": 0.2},
        seed=seed,
        num_steps=6,
        optimizer={"learning_rate": rate, "warmup_steps": warmup_steps},
      )
    )

  def lowered(run):
    step = tiny.Parts.of(run).on().step
    draw = jax.jit(lambda *x: run.draw(*x)).lower(np.int32(0), np.float32(0))
    batch = run.task.train_batch(0)
    return draw.as_text(), step.lower(run.shapes, batch).as_text()

  first, second = run(0, 1e-2), run(1, 3e-3)
  assert lowered(first) == lowered(second)
  assert lowered(first) != lowered(run(0, 1e-2, warmup_steps=3))
  programs = tiny.Parts.of(first).on()
  states = [
    programs.update(x.init(), first.task.train_batch(0))
    for x in (first, second)
  ]
  assert states[0][1]["loss"][0] != states[1][1]["loss"][0]
  assert states[0][1]["learning_rate"] == pytest.approx(1e-2 / 3)
  assert states[1][1]["learning_rate"] == pytest.approx(1e-3)


def test_constants_are_redrawn_on_time_and_by_the_step_alone():
  parts, state = make_parts()
  programs = parts._replace(
    model=Model(draw=lambda key: {"mix": jax.random.normal(key, (4, 4))}),
    config=dataclasses.replace(parts.config, redraw_every=2),
  ).on()
  batch = make_batch()
  seen = []
  states = [state]
  for _ in range(4):
    states.append(programs.update(states[-1], batch)[0])
    seen.append(np.asarray(states[-1].collections["constants"]["mix"]))
  assert (seen[0] != state.collections["constants"]["mix"]).any()
  np.testing.assert_array_equal(seen[0], seen[1])
  assert (seen[2] != seen[1]).any()
  np.testing.assert_array_equal(seen[2], seen[3])
  # A restart at step 2 draws what the run drew.
  again, _ = programs.update(states[2], batch)
  np.testing.assert_array_equal(again.collections["constants"]["mix"], seen[2])


def test_the_loss_is_that_of_the_new_constants():
  parts, state = make_parts()
  batch = make_batch()
  new = {"mix": np.random.default_rng(7).normal(size=(4, 4)).astype("f4")}
  redrawn = parts._replace(
    model=Model(draw=lambda _: new),
    config=dataclasses.replace(parts.config, redraw_every=1),
  )
  at = state._replace(collections={"constants": new})
  _, got = redrawn.on().update(state, batch)
  _, expected = parts.on().update(at, batch)
  np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-6)
