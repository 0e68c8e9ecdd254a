"""Calls of functions with a state, and how they are held to their definitions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from attention import platform

BATCH, HEADS, KV_HEADS, DIM, VALUE = 2, 4, 2, 8, 5


def arrays(length, **more):
  """Arrays of a call by name; decays of 1, e⁻³⁰ and e⁻⁶⁰ among them."""
  rng = np.random.default_rng(0)

  def unit(heads):
    x = rng.normal(size=(BATCH, length, heads, DIM))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)

  decay = -rng.exponential(0.1, size=(BATCH, length, HEADS))
  if length > 40:
    decay[:, 10:13] = 0.0
    decay[:, 30], decay[:, 33] = -60.0, -30.0
  found = {
    "query": unit(HEADS),
    "key": unit(KV_HEADS),
    "value": rng.normal(size=(BATCH, length, KV_HEADS, VALUE)),
    "log_decay": decay,
    **more,
  }
  return jax.tree.map(as_float32, found)


def as_jax(tree):
  """NumPy's arrays as JAX's, all else as it is."""
  return jax.tree.map(
    lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree
  )


def as_float32(x):
  is_float = np.issubdtype(np.asarray(x).dtype, np.floating)
  return np.asarray(x, np.float32 if is_float else None)


def options(length):
  """A key mask, and segments of random lengths."""
  rng = np.random.default_rng(1)
  return {
    "mask": rng.random((BATCH, 1, 1, length)) < 0.8,
    "segment_ids": np.cumsum(rng.random((BATCH, length)) < 0.05, axis=1) % 3,
  }


def call(function, given, **more):
  """The result and the state, of a compiled call."""
  given = {**given, **more}
  qkv = [given.pop(name) for name in ("query", "key", "value")]
  compiled = jax.jit(partial(function, return_state=True))
  return compiled(*qkv, **given)


def assert_defined(function, definition, given, tolerance=5e-6, **more):
  """A call and its state are those of the definition."""
  found = jax.tree.leaves(call(function, given, **more))
  expected = jax.tree.leaves(definition(**given, **more, return_state=True))
  for one, other in zip(found, expected, strict=True):
    scale = max(1.0, np.abs(other).max())
    np.testing.assert_allclose(one, other, atol=tolerance * scale)


def decays(log_decay, mask, segment_ids):
  """e^(Σ g_u over s < u ≤ t) `[B, N, T, T]`, and that from the start, in jnp.

  0 where s is hidden, after t, or of another segment. Hidden positions and those of
  later segments do not go on from a first state.
  """
  seen = mask[:, 0, 0]
  steps = jnp.where(seen[..., None], log_decay, 0.0)
  total = jnp.moveaxis(jnp.cumsum(steps, axis=1), 1, 2)
  begins = np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
  part = np.cumsum(begins, axis=1)
  allowed = seen[:, None] & (part[:, :, None] == part[:, None])
  allowed &= np.tri(part.shape[1], dtype=bool)
  apart = total[..., :, None] - total[..., None, :]
  apart = jnp.where(allowed[:, None], apart, -jnp.inf)
  first = jnp.where(part[:, None] == 0, total, -jnp.inf)
  return jnp.exp(apart), jnp.exp(first)


def assert_gradients(function, naive, given, **more):
  """Of all arrays of a call, from the result and the state, in float64."""
  rng = np.random.default_rng(2)
  length = given["query"].shape[1]
  weights = rng.normal(size=(BATCH, length, HEADS, VALUE))

  def loss(run, given):
    out, state = run(given)
    total = jnp.sum(out * weights)
    for x in jax.tree.leaves(state):
      total += (
        jnp.sum(jnp.sin(x)) if jnp.issubdtype(x.dtype, jnp.floating) else 0
      )
    return total

  def run(given):
    return call(function, given, **more)

  found = jax.jit(jax.grad(partial(loss, run)))(given)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), given)
    expected = jax.jit(jax.grad(partial(loss, partial(naive, **more))))(wide)
    expected = jax.device_get(expected)
  for name, other in expected.items():
    scale = max(1.0, np.abs(other).max())
    np.testing.assert_allclose(
      found[name], other, atol=2e-5 * scale, err_msg=name
    )


def assert_bfloat16(function, definition, given):
  """A call in bfloat16 is computed in float32, and rounded."""
  half = {
    name: x if name == "initial_state" else jnp.asarray(x, jnp.bfloat16)
    for name, x in given.items()
  }
  found, state = call(function, half)
  assert found.dtype == jnp.bfloat16
  assert jax.tree.leaves(state)[0].dtype == jnp.float32
  exact = {
    name: x if name == "initial_state" else np.asarray(x, np.float32)
    for name, x in half.items()
  }
  expected = definition(**exact)
  found, scale = found.astype(jnp.float32), np.abs(expected).max()
  np.testing.assert_allclose(found, expected, atol=5e-3 * scale)


def assert_many_chunks_are_the_loop(function, given, **options):
  """Values, states and gradients as an accelerator computes them."""

  def found(where):
    def run(given):
      out, state = call(function, given, **options)
      floats = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
      total = sum(jnp.sum(jnp.sin(x)) for x in (out, *floats))
      return total, (out, state)

    with platform.tracing_for(where):
      return jax.jit(jax.value_and_grad(run, has_aux=True))(given)

  many, loop = jax.tree.leaves(found("gpu")), jax.tree.leaves(found("cpu"))
  for one, other in zip(many, loop, strict=True):
    np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)
