"""Sliding-window attention against its definition, in values and gradients.

Blocks are 8 queries long here instead of 64, so that short sequences already
run over several blocks, a shifted last one and clipped key slices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  attention_weights,
  dense_attention,
  sliding_window,
  sliding_window_attention,
  sliding_window_blocks,
)


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
  monkeypatch.setattr(sliding_window_blocks, "BLOCK", 8)


# The reference: who sees whom by loops over the definition, then dense softmax
# and its derivative in float64.


def _visible(
  shape,
  window,
  dilation=1,
  mask=None,
  is_causal=False,
  query_segment_ids=None,
  key_segment_ids=None,
  global_indices=None,
):
  """`[B, N, T, S]` by the definition."""
  left, right = (window, window) if isinstance(window, int) else window
  visible = np.zeros(shape, bool)
  for b, n, t, s in np.ndindex(*shape):
    d = dilation if isinstance(dilation, int) else dilation[n]
    tokens = () if global_indices is None else global_indices[b]
    steps, rest = divmod(s - t, d)
    near = rest == 0 and -left <= steps <= right
    allowed = near or s in tokens or t in tokens
    allowed &= mask is None or mask[b, 0, 0, s]
    allowed &= not is_causal or s <= t
    if query_segment_ids is not None:
      allowed &= query_segment_ids[b, t] == key_segment_ids[b, s]
    visible[b, n, t, s] = allowed
  return visible


def _attend(qkv, visible, cotangent, scale=None):
  """Output and gradients of masked softmax attention, `[B, N, T, S]` whole."""
  query, key, value = (np.asarray(x, np.float64) for x in qkv)
  group = query.shape[2] // key.shape[2]
  keys, values = (np.repeat(x, group, axis=2) for x in (key, value))
  scale = query.shape[-1] ** -0.5 if scale is None else scale
  logits = np.einsum("btnh,bsnh->bnts", query, keys) * scale
  logits = np.where(visible, logits, -np.inf)
  top = np.max(logits, axis=-1, keepdims=True, initial=-1e300)
  weights = np.exp(logits - top)
  weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
  out = np.einsum("bnts,bsnv->btnv", weights, values)
  d_weights = np.einsum("btnv,bsnv->bnts", cotangent, values)
  mean = (weights * d_weights).sum(-1, keepdims=True)
  d_logits = weights * (d_weights - mean) * scale

  def per_key_head(x):
    return x.reshape(*key.shape[:3], group, -1).sum(3)

  return out, (
    np.einsum("bnts,bsnh->btnh", d_logits, keys),
    per_key_head(np.einsum("bnts,btnh->bsnh", d_logits, query)),
    per_key_head(np.einsum("bnts,btnv->bsnv", weights, cotangent)),
  )


def _reference(qkv, cotangent, *, global_qkv=None, scale=None, **options):
  """Output and gradients with respect to qkv and global_qkv."""
  shape = (*np.shape(qkv[0])[:3:2], *np.shape(qkv[0])[1:2], qkv[1].shape[1])
  visible = _visible(shape, **options)
  cotangent = np.asarray(cotangent, np.float64)
  if global_qkv is None:
    return _attend(qkv, visible, cotangent, scale)
  is_token = np.zeros(shape[::2], bool)
  for b, tokens in enumerate(options["global_indices"]):
    is_token[b, tokens[tokens >= 0]] = True
  rows = is_token[:, :, None, None]
  out, grads = _attend(qkv, visible, np.where(rows, 0, cotangent), scale)
  out_g, grads_g = _attend(
    global_qkv, visible, np.where(rows, cotangent, 0), scale
  )
  return np.where(rows, out_g, out), grads + grads_g


def _inputs(
  length, source=None, heads=4, kv_heads=2, batch=2, dtype=np.float32, seed=0
):
  """Query, key, value and a cotangent; values are wider than keys."""
  rng = np.random.default_rng(seed)
  source = length if source is None else source
  shapes = (
    (batch, length, heads, 4),
    (batch, source, kv_heads, 4),
    (batch, source, kv_heads, 5),
    (batch, length, heads, 5),
  )
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def _options(names, length, source, seed=1):
  """The options that are named, as NumPy arrays for the reference."""
  rng = np.random.default_rng(seed)
  options = {}
  for name in names.split():
    if name == "causal":
      options["is_causal"] = True
    elif name == "mask":
      options["mask"] = rng.random((2, 1, 1, source)) < 0.6
    elif name == "segments":
      longest = np.sort(rng.integers(3, size=(2, max(length, source))), axis=1)
      options["query_segment_ids"] = longest[:, :length]
      options["key_segment_ids"] = longest[:, :source]
    elif name == "global":
      indices = rng.integers(-1, length, size=(2, 5))
      indices[:, 1] = indices[:, 0]  # twice the same
      indices[:, 2] = -1
      options["global_indices"] = indices
    elif name == "scale":
      options["scale"] = 0.3
  return options


def _to_jax(options):
  return {
    name: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    for name, x in options.items()
  }


def _run(qkv, cotangent, global_qkv=None, **options):
  """Output and gradients, as `_reference`, compiled once."""
  options = _to_jax(options)

  def function(qkv, global_qkv):
    return sliding_window_attention(*qkv, global_qkv=global_qkv, **options)

  @jax.jit
  def both(qkv, global_qkv, cotangent):
    out, pull = jax.vjp(function, qkv, global_qkv)
    return out, pull(cotangent)

  out, (grads, grads_g) = both(tuple(qkv), global_qkv, cotangent)
  return out, tuple(grads) + tuple(grads_g or ())


def _assert_close(got, want, tolerance):
  """Relative to the largest number of the array."""
  assert got.shape == want.shape
  scale = max(np.max(np.abs(want), initial=0.0), 1e-3)
  error = np.max(np.abs(np.asarray(got, np.float64) - want), initial=0.0)
  assert error <= tolerance * scale


def _check(qkv, cotangent, tolerance=1e-5, **options):
  got, got_grads = _run(qkv, cotangent, **options)
  want, want_grads = _reference(qkv, cotangent, **options)
  _assert_close(got, want, tolerance)
  assert len(got_grads) == len(want_grads)
  for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
    _assert_close(got_grad, want_grad, tolerance)


ALL = "mask segments global scale"


@pytest.mark.parametrize(
  ("length", "source", "window", "dilation", "names"),
  [
    (1, 1, 3, 1, ""),
    (1, 1, 0, 2, "causal global"),
    (7, 7, 0, 1, "mask"),
    (7, 7, 6, 1, "scale"),
    (7, 7, 8, 3, "segments global"),
    (8, 8, 3, 1, "global"),
    (13, 13, (2, 0), 1, "causal"),
    (31, 31, 3, 1, ""),
    (31, 31, (5, 1), 1, "mask segments"),
    (31, 31, (0, 4), 2, "mask global"),
    (31, 31, 3, 1, "causal " + ALL),
    (31, 31, (3, 2), 3, ALL),
    (31, 31, 2, (5, 1, 1, 5), "causal " + ALL),
    (31, 31, 2, (1, 1, 3, 3), "segments"),
    (16, 16, 9, 40, "global"),
    (23, 11, 4, 1, "mask segments"),
    (11, 23, (1, 3), 2, "causal mask"),
    (5, 37, 3, 1, ""),
    (37, 5, 2, (2, 2, 1, 3), "mask segments causal"),
  ],
)
def test_equals_the_definition(length, source, window, dilation, names):
  *qkv, cotangent = _inputs(length, source)
  options = _options(names, length, source)
  _check(qkv, cotangent, window=window, dilation=dilation, **options)


@pytest.mark.parametrize(
  ("names", "dilation"),
  [("global", 1), ("causal " + ALL, 2)],
)
def test_separate_global_projections(names, dilation):
  *qkv, cotangent = _inputs(19)
  global_qkv = tuple(_inputs(19, seed=5)[:3])
  options = _options(names, 19, 19)
  _check(
    qkv,
    cotangent,
    window=2,
    dilation=dilation,
    global_qkv=global_qkv,
    **options,
  )


@pytest.mark.parametrize(("kv_heads", "dilation"), [(1, (1, 2, 2, 2)), (4, 1)])
def test_grouped_heads(kv_heads, dilation):
  *qkv, cotangent = _inputs(21, kv_heads=kv_heads)
  options = _options("mask global", 21, 21)
  _check(qkv, cotangent, window=3, dilation=dilation, **options)


@pytest.mark.parametrize("names", ["", "causal " + ALL])
def test_bfloat16(names):
  *qkv, cotangent = _inputs(31, dtype=jnp.bfloat16)
  options = _options(names, 31, 31)
  _check(qkv, cotangent, tolerance=2e-2, window=4, dilation=2, **options)
  assert sliding_window_attention(*qkv, window=4).dtype == jnp.bfloat16


def test_blocks_of_the_real_length(monkeypatch):
  monkeypatch.setattr(sliding_window_blocks, "BLOCK", 64)
  *qkv, cotangent = _inputs(263, heads=2, kv_heads=1, batch=1)
  _check(qkv, cotangent, window=(9, 30))


@pytest.mark.parametrize("names", ["", "mask global causal"])
def test_large_logits(names):
  *qkv, cotangent = _inputs(31)
  query, key, value = qkv
  options = _options(names, 31, 31)
  out, grads = _run(
    (query * 1e2, key * 1e2, value), cotangent, window=3, **options
  )
  for array in (out, *grads):
    assert np.all(np.isfinite(array))


def test_a_query_that_sees_nothing_gets_zeros():
  *qkv, cotangent = _inputs(19)
  options = _options("global", 19, 19)
  mask = np.ones((2, 1, 1, 19), bool)
  mask[0] = False
  out, grads = _run(qkv, cotangent, window=2, mask=mask, **options)
  for array in (out, *grads):
    assert np.all(np.isfinite(array))
    assert not np.any(array[0])
    assert np.any(array[1])
  # Queries beyond the keys' last window, without any mask.
  query, key, value, _ = _inputs(30, 4)
  out = sliding_window_attention(query, key, value, window=3)
  assert not np.any(out[:, 7:])
  assert np.all(np.any(out[:, :7], axis=-1))


@pytest.mark.parametrize("dilation", [1, (1, 2, 3, 3)])
def test_the_future_changes_nothing_at_all(dilation):
  options = _options("causal mask segments global", 29, 29)
  options["global_indices"][:, 3] = 28
  attend = jax.jit(
    functools.partial(
      sliding_window_attention, window=4, dilation=dilation, **_to_jax(options)
    )
  )
  qkv = _inputs(29)[:3]
  changed = [x.at[:, -1].add(30.0) for x in qkv]
  np.testing.assert_array_equal(attend(*qkv)[:, :-1], attend(*changed)[:, :-1])


@pytest.mark.parametrize("names", ["mask", "mask segments causal"])
@pytest.mark.parametrize("fill", [1e30, np.nan])
def test_masked_keys_are_not_read(names, fill):
  *qkv, cotangent = _inputs(29)
  options = _options(names, 29, 29)
  hidden = ~options["mask"][:, 0, 0, :, None, None]
  filled = [qkv[0], *(jnp.where(hidden, fill, x) for x in qkv[1:])]
  plain = _run(qkv, cotangent, window=4, **options)
  other = _run(filled, cotangent, window=4, **options)
  jax.tree.map(np.testing.assert_array_equal, plain, other)


def test_masked_global_keys_change_nothing():
  *qkv, cotangent = _inputs(29)
  options = _options("mask global", 29, 29)
  options["mask"][:, :, :, options["global_indices"][0, 0]] = False
  hidden = ~options["mask"][:, 0, 0, :, None, None]
  filled = [qkv[0], *(jnp.where(hidden, 1e30, x) for x in qkv[1:])]
  plain = _run(qkv, cotangent, window=4, **options)
  other = _run(filled, cotangent, window=4, **options)
  jax.tree.map(np.testing.assert_array_equal, plain, other)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_over_everything_is_dense(is_causal):
  qkv = _inputs(29)[:3]
  np.testing.assert_allclose(
    sliding_window_attention(*qkv, window=10**12, is_causal=is_causal),
    dense_attention(*qkv, is_causal=is_causal),
    atol=2e-6,
  )


def test_examples_do_not_touch_each_other():
  options = _options("mask segments global", 21, 21)
  qkv = _inputs(21)[:3]
  attend = functools.partial(sliding_window_attention, window=3)
  options = _to_jax(options)
  together = attend(*qkv, **options)
  alone = attend(
    *(x[:1] for x in qkv), **{name: x[:1] for name, x in options.items()}
  )
  np.testing.assert_allclose(together[:1], alone, atol=1e-6)


def test_weights_are_the_union():
  query, key, _, _ = _inputs(17, heads=2, kv_heads=1)
  indices = np.array([[3, 3, -1], [0, 16, 9]])
  weights = attention_weights(
    sliding_window_attention,
    query,
    key,
    window=1,
    global_indices=jnp.asarray(indices),
  )
  visible = _visible((2, 2, 17, 17), window=1, global_indices=indices)
  np.testing.assert_array_equal(np.asarray(weights) > 0, visible)
  np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)


def test_transformations_and_traces():
  *qkv, cotangent = _inputs(19)
  traces = []

  def loss(query, key, value):
    traces.append(None)
    out = sliding_window_attention(query, key, value, window=3)
    return jnp.sum(out * cotangent)

  grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  want = grad(*qkv)
  grad(*(x + 1 for x in qkv))
  assert len(traces) == 1
  got = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)))(*qkv)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-6), got, want
  )
  out = sliding_window_attention(*qkv, window=3)
  mapped = jax.vmap(functools.partial(sliding_window_attention, window=3))(
    *(x[:, None] for x in qkv)
  )
  np.testing.assert_allclose(mapped[:, 0], out, atol=1e-6)


def _compiled(length, with_gradient, names="", kv_heads=2, dilation=1):
  """The compiled program at this length; nothing is run."""
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    tuple(_inputs(length, batch=1, kv_heads=kv_heads)),
  )
  batch_one = {
    name: x[:1] if isinstance(x, np.ndarray) else x
    for name, x in _options(names, length, length).items()
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


@pytest.mark.parametrize(
  ("with_gradient", "names", "dilation"),
  [
    (False, "", 1),
    (True, "", 1),
    (True, "causal " + ALL, 3),
  ],
)
def test_memory_is_linear_in_length(
  monkeypatch, with_gradient, names, dilation
):
  monkeypatch.setattr(sliding_window_blocks, "BLOCK", 64)
  temp = {}
  lines = {}
  for length in (2048, 4096, 8192):
    compiled = _compiled(length, with_gradient, names, dilation=dilation)
    temp[length] = compiled.memory_analysis().temp_size_in_bytes
    lines[length] = compiled.as_text().count("\n")
  assert temp[4096] <= 2.1 * temp[2048]
  assert temp[8192] <= 2.1 * temp[4096]
  # Not even one boolean for every pair of positions.
  assert temp[8192] < 8192 * 8192 / 8
  # And the program is the same one, whatever the length.
  assert lines[8192] <= lines[2048] * 1.05


def test_grouped_heads_need_no_repeated_keys(monkeypatch):
  monkeypatch.setattr(sliding_window_blocks, "BLOCK", 64)
  few = _compiled(2048, with_gradient=True, kv_heads=1)
  many = _compiled(2048, with_gradient=True, kv_heads=4)
  assert (
    few.memory_analysis().temp_size_in_bytes
    < many.memory_analysis().temp_size_in_bytes
  )


@pytest.mark.parametrize(
  ("window", "dilation", "ring"),
  [(3, 1, 4), ((2, 5), 3, 7), (2, (1, 1, 2, 4), 9), (0, 1, 1), (100, 1, 40)],
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
  first, _ = jax.lax.scan(
    step, cache, [jnp.moveaxis(x[:, :5], 1, 0) for x in (query, key, value)]
  )
  cache = jax.tree.map(lambda a, b: jnp.stack([a[0], b[1]]), first, cache)
  shifted = [
    jnp.stack([x[0, 5:], x[1, :-5]], axis=1) for x in (query, key, value)
  ]
  cache, out = jax.jit(lambda *args: jax.lax.scan(step, *args))(cache, shifted)
  want = attention.apply({}, query, key, value, is_causal=True)
  np.testing.assert_allclose(out[:, 0], want[0, 5:], atol=1e-5)
  np.testing.assert_allclose(out[:, 1], want[1, :-5], atol=1e-5)
  np.testing.assert_array_equal(cache.index, [40, 35])


@pytest.mark.usefixtures("unchecked")
def test_a_traced_scale_has_a_gradient():
  *qkv, cotangent = _inputs(9)
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
  ],
)
def test_errors_name_the_argument(name, options):
  qkv = _inputs(9)[:3]
  with pytest.raises(ValueError, match=rf"^{name}: expected"):
    sliding_window_attention(*qkv, **{"window": 2, **options})


@pytest.mark.usefixtures("unchecked")
def test_errors_of_global_tokens():
  indices = jnp.zeros((2, 1), jnp.int32)
  query, key, value, _ = _inputs(9, 8)
  with pytest.raises(ValueError, match=r"global_indices: expected .* 9 and 8"):
    sliding_window_attention(
      query, key, value, window=2, global_indices=indices
    )
  qkv = _inputs(9)[:3]
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
  qkv = _inputs(9)[:3]
  with pytest.raises(ValueError, match=r"^bias: "):
    attention.apply({}, *qkv, bias=jnp.zeros((2, 4, 9, 9)))
