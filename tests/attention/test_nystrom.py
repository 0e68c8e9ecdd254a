"""Nyström attention beside the contract suite: its laws, blocks, landmarks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from attention import Dims, definitions, nystrom, nystrom_attention
from attention.definitions.nystrom import iterated_inverse
from attention.nystrom import _pseudo_inverse as pseudo_inverse
from attention.testing import assert_close
from attention.testing.transforms import mesh_of_rows
from tests.attention.calls import (
  assert_equal,
  assert_refused,
  draw,
  pulled,
  random_mask,
)


@functools.partial(
  jax.jit, static_argnames=("num_landmarks", "steps", "shared_start")
)
def attend(
  qkv, mask=None, scale=None, *, num_landmarks, steps=6, shared_start=False
):
  return nystrom_attention(
    *qkv,
    num_landmarks=num_landmarks,
    pinv_iterations=steps,
    shared_start=shared_start,
    mask=mask,
    scale=scale,
  )


def record_of(dims, **options):
  """A record of 4 landmarks, and its variables."""
  attention = nystrom(**{"num_landmarks": 4, **options})
  init = jax.jit(lambda key: attention.init(key, dims))
  return attention, init(jax.random.key(1))


def test_as_many_landmarks_as_tokens_are_dense():
  """Once the iteration has converged, which float32 lets it do for a matrix as
  well conditioned as this one: queries near their own keys.
  """
  query, key, value = map(np.asarray, draw(13, kv_heads=4))
  query = 4 * key / np.linalg.norm(key, axis=-1, keepdims=True) + query / 10
  mask = random_mask(2, 1, 1, 13)
  expected = definitions.dense_attention(query, key, value, mask=mask)
  got = [
    attend((query, key, value), mask, num_landmarks=13, steps=steps)
    for steps in (1, 3, 20)
  ]
  assert_close(got[2], expected, 1e-5)
  errors = [np.abs(x - expected).max() for x in got]
  assert errors[0] > errors[1] > 10 * errors[2]
  # More landmarks than tokens are as many as tokens.
  more = attend((query, key, value), mask, num_landmarks=99, steps=20)
  np.testing.assert_array_equal(more, got[2])


def test_the_error_falls_with_landmarks():
  """Against dense, for a sequence that varies slowly along its length."""
  *qk, value = draw(96, batch=4, kv_heads=4)
  smooth = np.exp(-((np.arange(-12, 13) / 6.0) ** 2))
  query, key = (
    np.apply_along_axis(np.convolve, 1, x, smooth, "same").astype(np.float32)
    for x in qk
  )
  qkv = query / 2, key / 2, np.asarray(value)
  expected = definitions.dense_attention(*qkv)
  errors = [
    np.linalg.norm(attend(qkv, num_landmarks=m) - expected) for m in (2, 8, 32)
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
  errors, inverse = [], jax.jit(pseudo_inverse, static_argnums=1)
  for steps in (2, 4, 12):
    got = np.asarray(inverse(np.float32(matrices), steps))
    errors.append(np.abs(got - expected).max() / np.abs(expected).max())
    for at in np.ndindex(2, 3):
      naive = iterated_inverse(matrices[at], steps)
      assert_close(got[at], naive, 1e-5)
  assert errors[0] > errors[1] > errors[2]
  assert errors[2] < 1e-5


def test_one_example_does_not_scale_another():
  """The paper's code starts every inverse from the largest norm in the batch."""
  qkv = [np.array(x) for x in draw(13)]
  alone = np.asarray(attend(qkv, num_landmarks=4))[:1]
  for x in qkv:
    x[1] *= 50.0
  assert_close(attend(qkv, num_landmarks=4)[:1], alone, 1e-6)


def test_several_blocks_equal_one(tiny_tiles):
  qkv, mask = draw(23, value=5), random_mask(2, 1, 1, 23)
  attention, variables = record_of(
    Dims(4, 2, 8, 23), num_landmarks=6, conv_kernel_size=5
  )

  def run():
    apply = functools.partial(attention.apply, mask=mask)
    return pulled(lambda *arrays: apply(*arrays), variables, *qkv)

  whole = run()
  tiny_tiles(8)
  assert_equal(run(), whole, 1e-5)


def test_masked_tokens_are_as_if_they_were_not_there():
  """Wherever they stand, and also where fewer are left than landmarks."""
  qkv = [np.asarray(x) for x in draw(17)]
  for kept in (np.arange(17) % 3 > 0, np.isin(np.arange(17), (2, 3, 11))):
    mask = np.broadcast_to(kept, (2, 17))[:, None, None]
    got = np.asarray(attend(qkv, mask, num_landmarks=5))[:, kept]
    short = [x[:, kept] for x in qkv]
    assert_close(got, attend(short, num_landmarks=5), 1e-6)


def test_masked_tokens_are_not_read_even_where_they_are_no_numbers():
  """The contract has it for keys and values alone; as a query one stays by itself."""
  qkv, mask = draw(13), random_mask(2, 1, 1, 13)
  attention, variables = record_of(Dims(4, 2, 8, 13), conv_kernel_size=3)
  kept = np.asarray(mask)[:, 0, 0, :, None, None]

  @jax.jit
  def run(qkv):
    out, vjp = jax.vjp(
      lambda *qkv: attention.apply(variables, *qkv, mask=mask), *qkv
    )
    # The output at a masked position is that of the query there.
    g = jnp.broadcast_to(kept, out.shape).astype(jnp.float32)
    return jnp.where(kept, out, 0.0), vjp(g)[1:]

  before = run(qkv)
  for fill in (np.inf, np.nan):
    filled = [np.where(kept, x, np.float32(fill)) for x in qkv]
    np.testing.assert_array_equal(run(filled)[0], before[0])
    after = run([qkv[0], *filled[1:]])
    chex.assert_trees_all_equal(after, before)


def test_nan_among_the_tokens_is_not_hidden():
  for i in range(3):
    qkv = [np.array(x) for x in draw(13)]
    qkv[i][0, 2, 0] = np.nan
    out = np.asarray(attend(qkv, num_landmarks=4))
    # Heads 0 and 1 have the first head of keys.
    heads = [0] if i == 0 else [0, 1]
    assert np.isnan(out[0][:, heads]).all()
    assert np.isfinite(out[1]).all()
    assert np.isfinite(np.delete(out[0], heads, axis=1)).all()


def test_a_traced_scale():
  qkv = draw(13)
  got = attend(qkv, None, jnp.float32(0.2), num_landmarks=4)
  expected = definitions.nystrom_attention(*qkv, num_landmarks=4, scale=0.2)
  assert_close(got, expected, 1e-5)


def test_what_the_factory_refuses():
  assert_refused(
    nystrom,
    [
      (f"{name}: expected .+ got", {name: value})
      for name, value in (
        ("num_landmarks", 0),
        ("pinv_iterations", 0),
        ("conv_kernel_size", 4),
        ("conv_kernel_size", -1),
      )
    ],
  )


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
  qkv = draw(13, heads=2, kv_heads=2, dim=4, value=4, batch=8)
  attention, variables = record_of(
    Dims(2, 2, 4, 13), num_landmarks=5, conv_kernel_size=3
  )
  apply = jax.jit(lambda qkv: attention.apply(variables, *qkv))
  expected = apply(qkv)
  mesh = mesh_of_rows(jax.sharding.AxisType.Explicit)
  rows = jax.sharding.NamedSharding(mesh, jax.P("batch"))
  with jax.set_mesh(mesh):
    out = apply(jax.device_put(qkv, rows))
  assert_close(out, expected, 1e-5)
