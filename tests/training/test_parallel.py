"""One, four and eight devices give the same numbers, under jit and pmap."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.tiny import make_batch, make_parts
from training.devices import parallel


@functools.cache
def on_one(splits):
  """The gradient's norm and the sums of a whole batch; the state after a step."""
  parts, state = make_parts(accumulate_steps=splits, clip_norm=1.0)
  batch = make_batch()
  whole = parts.with_optimizer(accumulate_steps=1)
  gradient, sums, _ = whole.gradient(state.params, state.collections, batch)
  norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
  after, _ = parts.on().update(state, batch)
  return norm, sums, after


# Each pair of values of two of the three.
@pytest.mark.parametrize(
  ("kind", "count", "splits"),
  [("jit", 8, 2), ("jit", 4, 1), ("pmap", 8, 1), ("pmap", 4, 2)],
)
def test_gradient_and_loss_of_an_uneven_batch_agree(kind, count, splits):
  parts, state = make_parts(kind=kind, accumulate_steps=splits, clip_norm=1.0)
  batch = make_batch()
  norm, sums, expected = on_one(splits)
  new, metrics = parts.on(count).update(state, batch)
  np.testing.assert_allclose(metrics["loss"], sums, rtol=1e-6)
  # Before clipping and Adam, which would hide a wrong factor.
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
  assert int(new.step) == 1
  # The moments hold the gradient itself, leaf by leaf.
  chex.assert_trees_all_close(new, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["jit", "pmap"])
def test_evaluation_agrees(kind):
  parts, state = make_parts(kind=kind)
  batch = make_batch()
  totals = []
  for count in (1, 8):
    run = parts.on(count)
    totals.append(run.evaluate(run.place(state).variables, batch))
  chex.assert_trees_all_close(*totals, rtol=1e-6)


@pytest.mark.parametrize("kind", ["jit", "pmap"])
def test_a_second_step_neither_compiles_nor_loses_the_original(kind):
  parts, state = make_parts(kind=kind)
  run = parts.on(8)
  placed, batch = run.place(state), make_batch()
  placed, _ = run.train(placed, batch)
  with jax.log_compiles(False), _no_compilation():
    placed, _ = run.train(placed, batch)
  assert int(placed.step) == 2
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


class _no_compilation:  # noqa: N801
  """Fails if anything compiles inside."""

  def __enter__(self):
    self._events = []
    jax.monitoring.register_event_duration_secs_listener(self._note)

  def _note(self, event, duration, **unused):
    if "backend_compile" in event:
      self._events.append(event)

  def __exit__(self, *unused):
    jax.monitoring.unregister_event_duration_listener(self._note)
    assert not self._events


def test_the_gradient_of_a_gathered_parameter_is_kept_in_parts():
  automatic = (jax.sharding.AxisType.Auto,)
  laid = jax.make_mesh((4,), ("fsdp",), automatic, devices=jax.devices()[:4])
  whole, part = (jax.NamedSharding(laid, x) for x in (jax.P(), jax.P("fsdp")))
  variable = jax.device_put(jnp.arange(8.0), part)

  @jax.jit
  def gradient(variable):
    def squares(variable):
      return jnp.sum(parallel._gather(variable, whole, part) ** 2)

    return jax.grad(squares)(variable)

  found = gradient(variable)
  np.testing.assert_array_equal(found, 2 * np.arange(8))
  assert found.sharding.is_equivalent_to(part, 1)
