"""Sliding-window attention: transformations, memory, decoding and faults."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  platform,
  sliding_window,
  sliding_window_attention,
)
from tests.attention.forms import thorough
from tests.attention.window_cases import (
  ALL,
  draw_inputs,
  draw_options,
)

pytestmark = pytest.mark.usefixtures("short_blocks")


def _compiled(length, with_gradient, names="", kv_heads=2, dilation=1):
  """The compiled program at this length; nothing is run."""
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    tuple(draw_inputs(length, batch=1, kv_heads=kv_heads)),
  )
  batch_one = {
    name: x[:1] if isinstance(x, np.ndarray) else x
    for name, x in draw_options(names, length, length).items()
  }
  static = {k: v for k, v in batch_one.items() if not isinstance(v, np.ndarray)}
  arrays = {k: v for k, v in batch_one.items() if isinstance(v, np.ndarray)}

  def attend(query, key, value, arrays):
    return sliding_window_attention(
      query, key, value, window=16, dilation=dilation, **arrays, **static
    )

  def forward(query, key, value, cotangent, arrays):
    del cotangent
    return attend(query, key, value, arrays)

  def backward(query, key, value, cotangent, arrays):
    pull = jax.vjp(lambda *qkv: attend(*qkv, arrays), query, key, value)[1]
    return pull(cotangent)

  program = jax.jit(backward if with_gradient else forward)
  return program.lower(*shapes, arrays).compile()


@pytest.mark.optimised
@pytest.mark.parametrize(
  ("with_gradient", "names", "dilation"),
  [
    # test_memory.py has these two, at blocks of the real length.
    *thorough((False, "", 1), (True, "", 1)),
    (True, "causal " + ALL, 3),
  ],
)
def test_memory_is_linear_in_length(
  monkeypatch, with_gradient, names, dilation
):
  monkeypatch.setattr(platform, "window_rows", lambda width: 64)
  temp = {}
  instructions = {}
  for length in (2048, 8192):
    compiled = _compiled(length, with_gradient, names, dilation=dilation)
    temp[length] = compiled.memory_analysis().temp_size_in_bytes
    instructions[length] = compiled.as_text().count(" = ")
  assert temp[8192] <= 4.2 * temp[2048]
  # Not even one boolean for every pair of positions.
  assert temp[8192] < 8192 * 8192 / 8
  # And the program is the same one, whatever the length.
  assert instructions[8192] <= instructions[2048] * 1.05


@pytest.mark.optimised
def test_grouped_heads_need_no_repeated_keys(monkeypatch):
  monkeypatch.setattr(platform, "window_rows", lambda width: 64)
  few = _compiled(2048, with_gradient=True, kv_heads=1)
  many = _compiled(2048, with_gradient=True, kv_heads=4)
  assert (
    few.memory_analysis().temp_size_in_bytes
    < many.memory_analysis().temp_size_in_bytes
  )


@pytest.mark.parametrize(
  ("window", "dilation", "ring"),
  [((2, 5), 3, 7), (2, (1, 1, 2, 4), 9), (0, 1, 1), (100, 1, 40)],
)
def test_decode_is_the_causal_call(window, dilation, ring):
  attention = sliding_window(window=window, dilation=dilation)
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.normal(size=(2, 40, n, 4)), jnp.float32) for n in (4, 2, 2)
  )
  cache = attention.init_cache({}, 2, 40, Dims(4, 2, 4, 40), jnp.float32)
  assert cache.key.shape == (2, ring, 2, 4)

  def step(cache, qkv):
    out, cache = attention.decode({}, cache, *(x[:, None] for x in qkv))
    return cache, out[:, 0]

  # The second example starts five positions later: indices differ.
  scan = jax.jit(lambda *args: jax.lax.scan(step, *args))
  first, _ = scan(
    cache, [jnp.moveaxis(x[:, :5], 1, 0) for x in (query, key, value)]
  )
  cache = jax.tree.map(lambda a, b: jnp.stack([a[0], b[1]]), first, cache)
  shifted = [
    jnp.stack([x[0, 5:], x[1, :-5]], axis=1) for x in (query, key, value)
  ]
  cache, out = scan(cache, shifted)
  apply = jax.jit(functools.partial(attention.apply, is_causal=True))
  want = apply({}, query, key, value)
  np.testing.assert_allclose(out[:, 0], want[0, 5:], atol=1e-5)
  np.testing.assert_allclose(out[:, 1], want[1, :-5], atol=1e-5)
  np.testing.assert_array_equal(cache.index, [40, 35])


@pytest.mark.usefixtures("unchecked")
def test_a_traced_scale_has_a_gradient():
  *qkv, cotangent = draw_inputs(9)
  indices = jnp.array([[2], [-1]])

  def loss(scale, query):
    out = sliding_window_attention(
      query, *qkv[1:], window=2, global_indices=indices, scale=scale
    )
    return jnp.sum(out * cotangent)

  value, got = jax.jit(jax.value_and_grad(loss))(jnp.float32(0.3), qkv[0])
  fixed = functools.partial(loss, 0.3)
  want, by_query = jax.jit(jax.value_and_grad(fixed))(qkv[0])
  np.testing.assert_allclose(value, want, rtol=1e-5)
  # Only the product of scale and query matters.
  np.testing.assert_allclose(got * 0.3, jnp.sum(by_query * qkv[0]), rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("window", {"window": -1}),
    ("window", {"window": (1, 2, 3)}),
    ("window", {"window": (1, -2)}),
    ("window", {"window": 1.5}),
    ("window", {"window": True}),
    ("dilation", {"dilation": 0}),
    ("dilation", {"dilation": (1, 2)}),
    ("dilation", {"dilation": (1, 2, 3, 0)}),
    ("mask", {"mask": np.ones((2, 1, 9, 9), bool)}),
    ("mask", {"mask": np.ones((2, 1, 1, 8), bool)}),
    ("key_segment_ids", {"query_segment_ids": np.zeros((2, 9), int)}),
    ("global_indices", {"global_indices": np.zeros((9,), int)}),
    ("global_indices", {"global_indices": np.zeros((1, 9), int)}),
    ("global_indices", {"global_indices": np.zeros((2, 9), np.float32)}),
    ("global_qkv", {"global_qkv": (0, 0, 0)}),
    ("dropout_rate", {"dropout_rate": 1.0}),
    ("dropout_rng", {"dropout_rate": 0.1}),
  ],
)
def test_errors_name_the_argument(name, options):
  qkv = draw_inputs(9)[:3]
  with pytest.raises(ValueError, match=rf"^{name}: expected"):
    sliding_window_attention(*qkv, **{"window": 2, **options})


@pytest.mark.usefixtures("unchecked")
def test_errors_of_global_tokens():
  indices = jnp.zeros((2, 1), jnp.int32)
  query, key, value, _ = draw_inputs(9, 8)
  with pytest.raises(ValueError, match=r"global_indices: expected .* 9 and 8"):
    sliding_window_attention(
      query, key, value, window=2, global_indices=indices
    )
  qkv = draw_inputs(9)[:3]
  with pytest.raises(ValueError, match=r"global_qkv: expected the shapes"):
    sliding_window_attention(
      *qkv, window=2, global_indices=indices, global_qkv=(query, key, value)
    )


@pytest.mark.usefixtures("unchecked")
def test_the_factory_checks_and_refuses():
  with pytest.raises(ValueError, match=r"^window: expected"):
    sliding_window(window=-2)
  with pytest.raises(ValueError, match=r"^dilation: expected"):
    sliding_window(window=2, dilation=(1, 0))
  attention = sliding_window(window=2)
  qkv = draw_inputs(9)[:3]
  with pytest.raises(ValueError, match=r"^bias: "):
    attention.apply({}, *qkv, bias=jnp.zeros((2, 4, 9, 9)))
