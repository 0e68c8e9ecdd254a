"""A function with a backward of its own, under JAX's transformations."""

import jax
import numpy as np
import pytest

import attention
from attention.platform.derivative import with_backward
from tests.attention.calls import normal

X = np.array([0.3, -1.2, 2.0], np.float32)
DOT = np.array([1.0, 0.5, -2.0], np.float32)


def _cube(factor=1.0):
  """x³ of the first of two leaves; its backward is `factor` times the true."""

  def forward(x):
    value, index = x
    return (value**3, index + 1), 3 * value**2

  def backward(x, saved, y_grad):
    return factor * saved * y_grad[0], x[1]

  function = with_backward(forward, backward)
  return lambda value: function((value, np.arange(3)))[0]


def test_all_orders_and_directions():
  """Reverse mode is the backward, forward mode is JAX's; mapped or not."""
  f, doubled = _cube(), _cube(2.0)

  def total(x):
    return f(x).sum()

  xs = np.stack([X, 2 * X])
  diagonal = np.diag(6 * X)
  found = {
    "doubled": (lambda: jax.grad(lambda x: doubled(x).sum())(X), 6 * X**2),
    "forward": (lambda: jax.jvp(doubled, (X,), (DOT,))[1], 3 * X**2 * DOT),
    "of a tangent": (
      lambda: jax.grad(lambda dot: jax.jvp(doubled, (X,), (dot,))[1].sum())(
        DOT
      ),
      6 * X**2,
    ),
    "hessian": (lambda: jax.hessian(total)(X), diagonal),
    "reverse twice": (lambda: jax.jacrev(jax.grad(total))(X), diagonal),
    "forward twice": (lambda: jax.jacfwd(jax.jacfwd(total))(X), diagonal),
    "both": (lambda: jax.jacrev(jax.jacfwd(total))(X), diagonal),
    "linear": (lambda: jax.linearize(f, X)[1](DOT), 3 * X**2 * DOT),
    "mapped": (lambda: jax.vmap(jax.grad(total))(xs), 3 * xs**2),
    "mapped tangents": (
      lambda: jax.vmap(lambda dot: jax.jvp(f, (X,), (dot,))[1])(xs),
      (3 * X**2)[None] * xs,
    ),
    "mapped points": (
      lambda: jax.vmap(lambda x: jax.jvp(f, (x,), (DOT,))[1])(xs),
      3 * xs**2 * DOT[None],
    ),
  }
  got = jax.jit(lambda: {name: run() for name, (run, _) in found.items()})()
  for name, (_, expected) in found.items():
    np.testing.assert_allclose(got[name], expected, rtol=1e-6, err_msg=name)
  # Outside of `jax.jit`, too.
  np.testing.assert_allclose(jax.hessian(total)(X), diagonal, rtol=1e-6)


def test_a_loop_keeps_no_tracer_of_it():
  f = _cube()
  xs = np.stack([X, 2 * X])
  with jax.checking_leaks():
    jax.eval_shape(jax.grad(lambda xs: jax.lax.map(f, xs).sum()), xs)


def test_integers_have_no_derivative():
  f = with_backward(
    lambda x: (x[0] * x[1], None), lambda x, _, g: (g * x[1], g)
  )
  _, tangent = jax.jvp(lambda x: f((x, np.arange(3))), (X,), (DOT,))
  np.testing.assert_allclose(tangent, DOT * np.arange(3))


@pytest.mark.parametrize(
  "function",
  [
    lambda q, k, v: attention.flash_attention(q, k, v, block_size=16),
    lambda q, k, v: attention.sliding_window_attention(
      q, k, v, window=(5, 0), is_causal=True, block_size=16
    ),
    lambda q, k, v: attention.linear_attention(
      q, k, v, is_causal=True, block_size=16
    ),
  ],
  ids=["flash", "sliding_window", "linear"],
)
def test_curvature_of_loops_and_scans(function):
  """Forward over reverse equals forward over forward, along one direction."""
  arrays, dots = normal((3, 1, 40, 2, 4), (3, 1, 40, 2, 4))

  def total(arrays):
    return (function(*arrays) ** 2).sum()

  def along(t):
    return total(arrays + t * dots)

  def slope(t):
    return jax.jvp(along, (t,), (1.0,))[1]

  wanted = jax.jit(lambda t: jax.jvp(slope, (t,), (1.0,))[1])(0.0)
  forward = jax.jit(lambda *x: jax.jvp(jax.grad(total), *x)[1])
  curvature = forward((arrays,), (dots,))
  np.testing.assert_allclose(np.sum(curvature * dots), wanted, rtol=1e-4)
