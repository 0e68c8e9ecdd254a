"""Nyström attention beside the contract suite: its laws, blocks, landmarks."""

import functools

import jax
import numpy as np

from attention import Dims, definitions, nystrom, nystrom_attention
from attention.definitions.nystrom import iterated_inverse
from attention.nystrom import _pseudo_inverse as pseudo_inverse
from attention.testing import assert_close
from attention.testing.transforms import mesh_of_rows
from tests.attention.calls import draw, random_mask
from tests.refusals import assert_refused


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


def test_what_the_factory_refuses():
  assert_refused(
    nystrom,
    {"num_landmarks": 0},
    {"pinv_iterations": 0},
    {"conv_kernel_size": 4},
    {"conv_kernel_size": -1},
  )


def test_the_convolution_has_one_filter_a_query_head():
  dims = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=16)
  variables = nystrom(conv_kernel_size=3).init(jax.random.key(0), dims)
  assert variables["params"]["conv_kernel"].shape == (3, 4)
  assert nystrom().init(jax.random.key(0), dims) == {}


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
