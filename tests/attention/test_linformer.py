"""Linformer beside the contract suite: projections, ranks, shorter inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, definitions, linformer, linformer_attention
from attention.platform import backend
from tests.attention.calls import assert_defined, draw, normal, random_mask
from tests.refusals import assert_refused

_DIMS = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=12)


def drawn(dims=_DIMS, **options):
  init = jax.jit(lambda key: linformer(**options).init(key, dims))
  return init(jax.random.key(0))["params"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_factory_makes_the_projections_it_names(shared, per_head):
  params = drawn(rank=5, shared=shared, per_head=per_head)
  expected = {"key_projection"} | (set() if shared else {"value_projection"})
  assert set(params) == expected
  shape = (2, 12, 5) if per_head else (12, 5)
  assert all(p.shape == shape for p in params.values())


def test_a_projected_unit_vector_has_a_variance_of_1():
  wide = drawn(_DIMS._replace(max_length=256), rank=64)["key_projection"]
  assert np.mean(np.sum(wide**2, axis=1)) == pytest.approx(1, abs=0.05)


def test_what_does_not_fit_is_refused():
  (e, f) = normal((9, 3), (9, 2))
  assert_refused(
    functools.partial(linformer_attention, *draw(9)),
    {"key_projection": e[:8]},
    ("value_projection", {"key_projection": e, "value_projection": f}),
  )
  init = functools.partial(linformer(rank=13).init, jax.random.key(0))
  assert_refused(lambda: init(_DIMS), ("rank", {}))


@pytest.mark.parametrize("per_head", [False, True])
def test_blocks_leave_no_seam(monkeypatch, per_head):
  """Lengths that no block divides, projections longer than the input."""
  monkeypatch.setattr(backend, "LEAST_ROWS", 128)
  monkeypatch.setattr(backend, "DIAGONAL_ROWS", 128)
  shape = (2, 160, 6) if per_head else (160, 6)
  projections = [x / 12 for x in map(np.asarray, normal(shape, shape, seed=1))]
  keep = random_mask(2, 150, share=0.8)

  def run(function):
    def of_tree(tree):
      query, key, value, e, f = tree
      call = {"key_projection": e, "value_projection": f}
      return function(query, key, value, mask=keep[:, None, None], **call)

    return of_tree

  functions = linformer_attention, definitions.linformer_attention
  arrays = *draw(300, 150, value=5), *projections
  assert_defined(*map(run, functions), arrays)


def test_memory_is_that_of_the_gradients_alone():
  """Nothing of T×R or of the keys' size beside what is returned."""
  x = jax.ShapeDtypeStruct((1, 8192, 2, 16), jnp.float32)
  e = jax.ShapeDtypeStruct((8192, 64), jnp.float32)

  def loss(query, key, value, e):
    out = linformer_attention(query, key, value, key_projection=e)
    return jnp.sum(out * out)

  for function, arrays in ((loss, 1), (jax.grad(loss, (0, 1, 2)), 4)):
    compiled = jax.jit(function).lower(x, x, x, e).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp <= arrays * 4 * 8192 * 2 * 16 + 2**20 + 2**10
