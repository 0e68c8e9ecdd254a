"""Nyström attention beside the contract suite: its laws, blocks, landmarks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  definitions,
  dense_attention,
  nystrom,
  nystrom_attention,
)
from attention.definitions.nystrom import iterated_inverse
from attention.nystrom import _pseudo_inverse as pseudo_inverse
from attention.testing import Case, assert_close
from attention.testing.transforms import mesh_of_rows
from tests.attention.forms import thorough


def draw(case):
  """Query, key, value and the call as arrays of JAX."""
  arrays, call = case.draw()
  return [jnp.asarray(x) for x in arrays], jax.tree.map(jnp.asarray, call)


@functools.partial(
  jax.jit, static_argnames=("num_landmarks", "steps", "shared_start")
)
def attend(
  qkv,
  mask=None,
  scale=None,
  *,
  num_landmarks,
  steps=6,
  shared_start=False,
):
  return nystrom_attention(
    *qkv,
    num_landmarks=num_landmarks,
    pinv_iterations=steps,
    shared_start=shared_start,
    mask=mask,
    scale=scale,
  )


@pytest.mark.parametrize("names", [*thorough(((),)), ("mask",)])
def test_as_many_landmarks_as_tokens_are_dense(names):
  """Once the iteration has converged, which float32 lets it do for a matrix as
  well conditioned as this one: queries near their own keys.
  """
  (query, key, value), call = draw(Case(names, num_kv_heads=4))
  query = 4.0 * key / jnp.linalg.norm(key, axis=-1, keepdims=True) + 0.1 * query
  expected = dense_attention(query, key, value, **call)
  got = [
    attend((query, key, value), **call, num_landmarks=13, steps=steps)
    for steps in (1, 3, 20)
  ]
  assert_close(got[2], expected, 1e-5)
  errors = [np.abs(x - expected).max() for x in got]
  assert errors[0] > errors[1] > 10 * errors[2]
  # More landmarks than tokens are as many as tokens.
  more = attend((query, key, value), **call, num_landmarks=99, steps=20)
  np.testing.assert_array_equal(more, got[2])


def test_the_error_falls_with_landmarks():
  """Against dense, for a sequence that varies slowly along its length."""
  case = Case(length=96, batch=4, num_kv_heads=4)
  qkv, _ = draw(case)
  smooth = np.exp(-((np.arange(-12, 13) / 6.0) ** 2))
  query, key = (
    np.apply_along_axis(np.convolve, 1, x, smooth, "same").astype(np.float32)
    for x in qkv[:2]
  )
  qkv = [jnp.asarray(x) for x in (query / 2, key / 2, qkv[2])]
  expected = dense_attention(*qkv)
  errors = [
    float(jnp.linalg.norm(attend(qkv, num_landmarks=m) - expected))
    for m in (2, 8, 32)
  ]
  assert errors[0] > 1.5 * errors[1] > 3.0 * errors[2]


def test_the_iteration_tends_to_the_pseudo_inverse():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((2, 3, 6, 6)) + 3.0 * np.eye(6)
  matrices = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  # One with two empty landmarks, so singular.
  matrices[1, 2, 4:] = matrices[1, 2, :, 4:] = 0.0
  matrices[1, 2, :4] /= matrices[1, 2, :4].sum(-1, keepdims=True)
  expected = np.linalg.pinv(matrices)
  errors = []
  for steps in (2, 4, 12):
    got = pseudo_inverse(jnp.asarray(matrices, jnp.float32), steps)
    errors.append(np.abs(got - expected).max() / np.abs(expected).max())
    for at in np.ndindex(2, 3):
      naive = iterated_inverse(matrices[at], steps)
      assert_close(got[at], naive, 1e-5)
  assert errors[0] > errors[1] > errors[2]
  assert errors[2] < 1e-5


def test_one_example_does_not_scale_another():
  """The paper's code starts every inverse from the largest norm in the batch."""
  qkv, _ = draw(Case(batch=2))
  alone = attend([x[:1] for x in qkv], num_landmarks=4)
  larger = [x.at[1].multiply(50.0) for x in qkv]
  assert_close(attend(larger, num_landmarks=4)[:1], alone, 1e-6)


def test_several_blocks_equal_one(tiny_tiles):
  length = 23
  case = Case(("mask",), length=length, value_dim=5)
  qkv, call = draw(case)
  cotangent = jax.random.normal(jax.random.key(0), (2, length, 4, 5))
  attention = nystrom(num_landmarks=6, conv_kernel_size=5)
  variables = attention.init(jax.random.key(1), case.dims)

  def run():
    @jax.jit
    def call_and_gradients(variables, qkv, call):
      out, vjp = jax.vjp(
        lambda variables, qkv: attention.apply(variables, *qkv, **call),
        variables,
        qkv,
      )
      return out, vjp(cotangent)

    return jax.tree.leaves(call_and_gradients(variables, qkv, call))

  whole = run()
  tiny_tiles(8)
  for got, expected in zip(run(), whole, strict=True):
    assert_close(got, expected, 1e-5)


def test_masked_tokens_are_as_if_they_were_not_there():
  """Wherever they stand, and also where fewer are left than landmarks."""
  qkv, _ = draw(Case(length=17))
  for kept in (np.arange(17) % 3 > 0, np.isin(np.arange(17), (2, 3, 11))):
    mask = jnp.broadcast_to(kept, (2, 17))[:, None, None]
    got = attend(qkv, mask, num_landmarks=5)[:, kept]
    short = [x[:, kept] for x in qkv]
    assert_close(got, attend(short, num_landmarks=5), 1e-6)


@pytest.mark.parametrize("fill", [np.inf, np.nan])
def test_masked_tokens_are_not_read_even_where_they_are_no_numbers(fill):
  case = Case(("mask",))
  qkv, call = draw(case)
  attention = nystrom(num_landmarks=4, conv_kernel_size=3)
  variables = attention.init(jax.random.key(0), case.dims)
  kept = call["mask"][:, 0, 0, :, None, None]

  @jax.jit
  def run(qkv):
    out, vjp = jax.vjp(
      lambda *qkv: attention.apply(variables, *qkv, **call), *qkv
    )
    # The output at a masked position is that of the query there.
    g = kept.astype(jnp.float32)
    return jnp.where(kept, out, 0.0), vjp(jnp.broadcast_to(g, out.shape))[1:]

  before = run(qkv)
  filled = [jnp.where(kept, x, fill) for x in qkv]
  filled[0] = qkv[0]
  jax.tree.map(np.testing.assert_array_equal, run(filled), before)
  # As a query it stays by itself as well.
  filled[0] = jnp.where(kept, qkv[0], fill)
  np.testing.assert_array_equal(run(filled)[0], before[0])


def test_nan_among_the_tokens_is_not_hidden():
  for i in range(3):
    qkv, _ = draw(Case(num_kv_heads=4))
    qkv[i] = qkv[i].at[0, 2, 1].set(jnp.nan)
    out = np.asarray(attend(qkv, num_landmarks=4))
    assert np.isnan(out[0, :, 1]).all()
    assert np.isfinite(out[1]).all()
    assert np.isfinite(out[0, :, 0]).all()


def test_a_traced_scale():
  qkv, _ = draw(Case())
  got = attend(qkv, None, jnp.float32(0.2), num_landmarks=4)
  constant = functools.partial(nystrom_attention, num_landmarks=4, scale=0.2)
  expected = jax.jit(constant)(*qkv)
  assert_close(got, expected, 1e-6)


def test_what_the_factory_refuses():
  for options, name in (
    ({"num_landmarks": 0}, "num_landmarks"),
    ({"pinv_iterations": 0}, "pinv_iterations"),
    ({"conv_kernel_size": 4}, "conv_kernel_size"),
    ({"conv_kernel_size": -1}, "conv_kernel_size"),
  ):
    with pytest.raises(ValueError, match=f"^{name}: expected .+ got"):
      nystrom(**options)


def test_the_convolution_has_one_filter_a_query_head():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=16)
  variables = nystrom(conv_kernel_size=3).init(jax.random.key(0), dims)
  assert variables["params"]["conv_kernel"].shape == (3, 4)
  assert nystrom().init(jax.random.key(0), dims) == {}


def test_a_shared_start_is_that_of_the_definition():
  """The published models' start; few steps, so that it still shows."""
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(0, 2, (2, 12, 2, 4)).astype(np.float32) for _ in "qkv")
  options = {"num_landmarks": 4, "pinv_iterations": 2}
  own, shared = (
    attend((q, k, v), num_landmarks=4, steps=2, shared_start=is_shared)
    for is_shared in (False, True)
  )
  expected = definitions.nystrom_attention(
    q, k, v, **options, shared_start=True
  )
  np.testing.assert_allclose(shared, expected, rtol=1e-4, atol=1e-5)
  assert np.abs(np.asarray(own - shared)).max() > 1e-2


def test_a_convolution_on_a_mesh_with_explicit_axes():
  rng = np.random.default_rng(0)
  qkv = rng.standard_normal((3, 8, 13, 2, 4), np.float32)
  mechanism = nystrom(num_landmarks=5, conv_kernel_size=3)
  variables = mechanism.init(jax.random.key(0), Dims(2, 2, 4, 13))
  apply = jax.jit(lambda qkv: mechanism.apply(variables, *qkv))
  expected = apply(list(qkv))
  mesh = mesh_of_rows(jax.sharding.AxisType.Explicit)
  rows = jax.sharding.NamedSharding(mesh, jax.P("batch"))
  with jax.set_mesh(mesh):
    out = apply(jax.device_put(list(qkv), rows))
  assert_close(out, expected, 1e-5)
