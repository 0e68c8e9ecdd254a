"""A function with a backward of its own, under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention.derivative import with_backward

X = jnp.array([0.3, -1.2, 2.0])
DOT = jnp.array([1.0, 0.5, -2.0])


def _cube(factor=1.0):
  """x³ of the first of two leaves; its backward is `factor` times the true."""

  def forward(x):
    value, index = x
    return (value**3, index + 1), 3 * value**2

  def backward(x, saved, y_grad):
    return factor * saved * y_grad[0], x[1]

  function = with_backward(forward, backward)
  return lambda value: function((value, jnp.arange(3)))[0]


def test_reverse_mode_is_the_backward_and_forward_mode_is_jax():
  doubled = jax.grad(lambda x: _cube(2.0)(x).sum())(X)
  np.testing.assert_allclose(doubled, 6 * X**2, rtol=1e-6)
  _, tangent = jax.jvp(_cube(2.0), (X,), (DOT,))
  np.testing.assert_allclose(tangent, 3 * X**2 * DOT, rtol=1e-6)


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit])
def test_all_orders_and_directions(compiled):
  f = compiled(_cube())

  def total(x):
    return f(x).sum()

  diagonal = np.diag(6 * X)
  np.testing.assert_allclose(jax.hessian(total)(X), diagonal, rtol=1e-6)
  np.testing.assert_allclose(
    jax.jacrev(jax.grad(total))(X), diagonal, rtol=1e-6
  )
  np.testing.assert_allclose(
    jax.jacfwd(jax.jacfwd(total))(X), diagonal, rtol=1e-6
  )
  np.testing.assert_allclose(
    jax.jacrev(jax.jacfwd(total))(X), diagonal, rtol=1e-6
  )
  _, linear = jax.linearize(f, X)
  np.testing.assert_allclose(linear(DOT), 3 * X**2 * DOT, rtol=1e-6)


def test_mapped_derivatives():
  f = _cube()
  xs = jnp.stack([X, 2 * X])
  np.testing.assert_allclose(
    jax.vmap(jax.grad(lambda x: f(x).sum()))(xs), 3 * xs**2, rtol=1e-6
  )
  tangents = jax.vmap(lambda dot: jax.jvp(f, (X,), (dot,))[1])(xs)
  np.testing.assert_allclose(tangents, (3 * X**2)[None] * xs, rtol=1e-6)
  by_x = jax.vmap(lambda x: jax.jvp(f, (x,), (DOT,))[1])(xs)
  np.testing.assert_allclose(by_x, 3 * xs**2 * DOT[None], rtol=1e-6)


def test_a_loop_keeps_no_tracer_of_it():
  f = _cube()
  xs = jnp.stack([X, 2 * X])
  with jax.checking_leaks():
    jax.eval_shape(jax.grad(lambda xs: jax.lax.map(f, xs).sum()), xs)


def test_integers_have_no_derivative():
  f = with_backward(
    lambda x: (x[0] * x[1], None), lambda x, _, g: (g * x[1], g)
  )
  _, tangent = jax.jvp(lambda x: f((x, jnp.arange(3))), (X,), (DOT,))
  np.testing.assert_allclose(tangent, DOT * jnp.arange(3))


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
  arrays = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 4))
  dots = jax.random.normal(jax.random.key(1), arrays.shape)

  def total(arrays):
    return (function(*arrays) ** 2).sum()

  def along(t):
    return total(arrays + t * dots)

  def slope(t):
    return jax.jvp(along, (t,), (1.0,))[1]

  wanted = jax.jit(lambda t: jax.jvp(slope, (t,), (1.0,))[1])(0.0)
  forward = jax.jit(lambda *x: jax.jvp(jax.grad(total), *x)[1])
  curvature = forward((arrays,), (dots,))
  np.testing.assert_allclose((curvature * dots).sum(), wanted, rtol=1e-4)
