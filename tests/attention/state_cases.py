"""Calls of functions with a state, and how they are held to their definitions."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from attention.platform import backend
from tests.attention.calls import in_float64

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


def by_position(step, given, gates, mask, segment_ids):
  """Scans `step` over positions of a call, to be differentiated in float64.

  Its inputs are query, key and value of each query head, the gates, whether the position
  is visible and whether a segment starts. Returns the results and the last state.
  """
  key, value = (
    jnp.repeat(given[name], HEADS // KV_HEADS, axis=2)
    for name in ("key", "value")
  )
  begins = np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
  along = given["query"], key, value, *gates
  along = *along, jnp.asarray(mask[:, 0, 0]), jnp.asarray(begins)
  along = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), along)
  state, out = jax.lax.scan(step, given["initial_state"], along)
  return jnp.moveaxis(out, 0, 1), state


def where(condition, x, y):
  """`jnp.where` of two trees, by a condition `[B]`."""

  def one(x, y):
    return jnp.where(condition.reshape(-1, *[1] * (jnp.ndim(y) - 1)), x, y)

  return jax.tree.map(one, x, y)


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
  """The result and the state."""
  given = {**given, **more}
  qkv = [given.pop(name) for name in ("query", "key", "value")]
  return function(*qkv, **given, return_state=True)


def compiled(function, **options):
  """`call` as a program of the arrays that it is given."""
  return jax.jit(partial(call, function, **options))


def assert_goes_on(function, definition, given, tolerance=5e-6):
  """A call of half the positions, and one that goes on from it, are the whole."""
  run, length = compiled(function), given["query"].shape[1] // 2
  halves = [{}, {}]
  for name, x in given.items():
    is_long = isinstance(x, np.ndarray) and x.shape[:2] == (BATCH, 2 * length)
    for half, part in zip(
      halves, (slice(length), slice(length, None)), strict=True
    ):
      half[name] = x[:, part] if is_long else x
  first, state = run(halves[0])
  second, last = run(halves[1] | {"initial_state": state})
  joined = np.concatenate([first, second], axis=1)
  expected = definition(**given, return_state=True)
  assert first.dtype == jax.tree.leaves(state)[0].dtype == jnp.float32
  assert_values((joined, last), expected, tolerance)


def assert_values(found, expected, tolerance, by_largest=True):
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    scale = max(1.0, np.abs(other).max()) if by_largest else 1.0
    np.testing.assert_allclose(
      one, other, atol=tolerance * scale, rtol=tolerance
    )


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
  # The gradients of a difference that is always 0 would take the digits of others.
  apart = jnp.where(np.eye(part.shape[1], dtype=bool), 0.0, apart)
  apart = jnp.where(allowed[:, None], apart, -jnp.inf)
  first = jnp.where(part[:, None] == 0, total, -jnp.inf)
  return jnp.exp(apart), jnp.exp(first)


def _loss(run, given, options):
  """Of the result and the state, which are given as well."""
  out, state = run(given, options)
  weights = np.random.default_rng(2).normal(size=out.shape)
  total = jnp.sum(out * weights)
  for x in jax.tree.leaves(state):
    if jnp.issubdtype(x.dtype, jnp.floating):
      total += jnp.sum(jnp.sin(x))
  return total, (out, state)


def _gradients(run):
  loss = partial(_loss, run)
  return jax.jit(jax.grad(loss, has_aux=True, allow_int=True))


@functools.cache
def pulled(function, where):
  """`(given, options) -> gradients, (result, state)` as a platform computes it."""
  # A function of its own, because JAX keeps traces by function.
  program = _gradients(lambda given, options: call(function, given, **options))

  def traced(given, options):
    with backend.tracing_for(where):
      return jax.device_get(program(given, options))

  return traced


def trivial(length):
  """Options that hide nothing, for the program that takes some."""
  chosen = options(length)
  ids = np.zeros_like(chosen["segment_ids"])
  return {"mask": np.ones_like(chosen["mask"]), "segment_ids": ids}


def assert_gradients(
  function, definition, naive, given, tolerance=2e-5, by_largest=True, more=None
):
  """Values, states and all gradients, as a CPU and as an accelerator does it.

  What hidden positions hold is read by neither.
  """
  length = given["query"].shape[1]
  more = options(length) if more is None else more
  expected = definition(**given, **more, return_state=True)
  exact = _gradients(lambda given, options: naive(given, **more))
  gradients, _ = in_float64(exact, given, {})
  spoiled = jax.tree.map(np.array, given)
  for name, x in spoiled.items():
    is_long = isinstance(x, np.ndarray) and x.shape[:2] == (BATCH, length)
    if is_long and name != "query":
      x[~more["mask"][:, 0, 0]] = np.nan
  for where in ("cpu", "gpu"):
    by_name, found = pulled(function, where)(spoiled, more)
    assert_values(found, expected, 5e-6, by_largest)
    for name in gradients:
      parts = zip(
        *map(jax.tree.leaves, (by_name[name], gradients[name])), strict=True
      )
      for one, other in parts:
        if one.dtype != jax.dtypes.float0:  # A count.
          bound = tolerance * np.abs(other).max()
          np.testing.assert_allclose(one, other, atol=bound, err_msg=name)


def assert_strong_decays(function, definition, naive, given):
  """Gradients where every decay is strong, so that its own is far below the others."""
  more = trivial(given["query"].shape[1])
  for low in (-10.0, -30.0):
    given["log_decay"][:] = low
    assert_gradients(function, definition, naive, given, more=more)


def assert_finite(function, definition, given, tolerance=2e-5):
  """Values and states are the definition's, and gradients are finite."""
  more = trivial(given["query"].shape[1])
  by_name, found = pulled(function, "cpu")(given, more)
  assert_values(found, definition(**given, return_state=True), tolerance)
  for name, gradient in by_name.items():
    for x in jax.tree.leaves(gradient):
      assert x.dtype == jax.dtypes.float0 or np.isfinite(x).all(), name


def assert_bfloat16(function, definition, given):
  """A call in bfloat16 is computed in float32, and rounded."""
  half = {
    name: x if name == "initial_state" else x.astype(jnp.bfloat16)
    for name, x in given.items()
  }
  found, state = compiled(function)(half)
  assert found.dtype == jnp.bfloat16
  assert jax.tree.leaves(state)[0].dtype == jnp.float32
  exact = {
    name: x if name == "initial_state" else np.asarray(x, np.float32)
    for name, x in half.items()
  }
  expected = definition(**exact)
  found, scale = np.asarray(found, np.float32), np.abs(expected).max()
  np.testing.assert_allclose(found, expected, atol=5e-3 * scale)
