"""Windows of a grid beyond the contract suite: grids, shifts, tables, padding."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  definitions,
  dense_attention,
  platform,
  window_2d,
  window_2d_attention,
)
from attention.testing import assert_close
from attention.testing.mechanism import in_float64
from attention.window_2d import windows_of
from tests.attention.forms import thorough

HERE = pathlib.Path(__file__).parent
NUM_HEADS, KV_HEADS = 4, 2


def draw(grid, window, *, seed=0, batch=2, table_deviation=1.0):
  """Query, key, value and table; value heads are narrower than the others."""
  rng = np.random.default_rng(seed)
  length = grid[0] * grid[1]
  shapes = (
    (batch, length, NUM_HEADS, 8),
    (batch, length, KV_HEADS, 8),
    (batch, length, KV_HEADS, 5),
  )
  arrays = [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes]
  table = rng.standard_normal(((2 * window - 1) ** 2, NUM_HEADS))
  return arrays, jnp.asarray(table_deviation * table, jnp.float32)


@functools.partial(jax.jit, static_argnames=("grid", "window", "shift", "rest"))
def pulled(arrays, table, mask, cotangent, grid, window, shift, rest=()):
  """The result, and gradients of query, key, value and table."""
  out, pullback = jax.vjp(
    lambda arrays, table: window_2d_attention(
      *arrays,
      relative_bias=table,
      mask=mask,
      grid=grid,
      window=window,
      shift=shift,
      **dict(rest),
    ),
    arrays,
    table,
  )
  return out, pullback(cotangent)


def slope(function, tree, direction, step=1e-5):
  """The central difference of a function of float64 arrays."""

  def moved(sign):
    return function(
      *jax.tree.map(lambda x, d: x + sign * step * d, tree, direction)
    )

  return (moved(1) - moved(-1)) / (2 * step)


@pytest.mark.parametrize(
  ("grid", "window", "shift", "hidden_logit"),
  [
    ((7, 1), 3, 2, None),
    ((7, 13), 4, 2, None),
    ((7, 13), 4, 2, -3.0),
    ((4, 6), 5, 3, -3.0),
    *thorough(
      ((1, 1), 7, 0, None),
      ((1, 7), 7, 3, -3.0),
      ((5, 3), 2, 1, -3.0),
      ((8, 8), 3, 1, None),
      ((6, 9), 3, 2, -3.0),
    ),
  ],
)
def test_values_and_gradients_are_those_of_the_definition(
  grid, window, shift, hidden_logit
):
  """Whole windows, padded ones, one row, and a grid smaller than a window."""
  arrays, table = draw(grid, window)
  rng = np.random.default_rng(1)
  length = grid[0] * grid[1]
  mask = rng.random((2, 1, 1, length)) < 0.7
  cotangent = rng.standard_normal((2, length, NUM_HEADS, 5), np.float32)
  options = {"grid": grid, "window": window, "shift": shift}
  got, gradients = pulled(
    arrays,
    table,
    mask,
    cotangent,
    **options,
    rest=(("hidden_logit", hidden_logit),),
  )

  def define(query, key, value, table):
    return definitions.window_2d_attention(
      query,
      key,
      value,
      relative_bias=table,
      mask=mask,
      hidden_logit=hidden_logit,
      **options,
    )

  tree = in_float64((*arrays, table))
  assert_close(got, define(*tree), 2e-6)
  gradients = (*gradients[0], gradients[1])
  # Each alone, so that a large gradient does not cover for a small one.
  for i, gradient in enumerate(gradients):
    direction = [np.zeros_like(x) for x in tree]
    direction[i] = rng.standard_normal(tree[i].shape)
    expected = slope(
      lambda *xs: np.sum(define(*xs) * cotangent), tree, tuple(direction)
    )
    found = np.sum(np.asarray(gradient, np.float64) * direction[i])
    assert abs(found - expected) < 2e-4 * max(1.0, abs(expected)), i


@pytest.mark.parametrize(
  "case", ["shifted", "sharp", *thorough(("plain",), ("one_window",))]
)
def test_numbers_are_those_of_transformers(case):
  """`window_2d/make_fixtures.py` made them from transformers' SwinLayer."""
  stored = np.load(HERE / "window_2d" / f"{case}.npz")
  options = {
    "grid": tuple(map(int, stored["grid"])),
    "window": int(stored["window"]),
    "shift": int(stored["shift"]),
  }
  qkv = [stored[name] for name in ("query", "key", "value")]
  table = stored["relative_bias"]
  define = functools.partial(
    definitions.window_2d_attention, *qkv, relative_bias=table, **options
  )
  exact = define(hidden_logit=-100.0)
  np.testing.assert_allclose(exact, stored["out"], rtol=0, atol=1e-13)
  # Where logits are as large as that, hiding is not the same.
  difference = np.abs(define() - stored["out"]).max()
  assert difference > 1.0 if case == "sharp" else difference < 1e-13
  rest = (("hidden_logit", -100.0),)
  got, (_, gradient) = pulled(
    list(map(jnp.asarray, qkv)),
    jnp.asarray(table),
    None,
    stored["cotangent"],
    **options,
    rest=rest,
  )
  assert_close(got, stored["out"], 1e-5)
  assert_close(gradient, stored["table_gradient"], 1e-5)


def test_one_window_of_everything_is_dense_attention():
  (query, key, value), table = draw((4, 4), 4)
  attend = functools.partial(
    window_2d_attention, grid=(4, 4), window=4, relative_bias=table
  )
  got = jax.jit(attend)(query, key, value)
  y, x = np.divmod(np.arange(16), 4)
  index = 7 * (y[:, None] - y + 3) + (x[:, None] - x + 3)
  bias = jnp.moveaxis(table[index], 2, 0)[None]
  expected = jax.jit(dense_attention)(query, key, value, bias=bias)
  assert_close(got, expected, 1e-6)


def test_a_grid_is_cut_into_windows_and_put_back():
  for grid, window, shift in (((5, 3), 2, 1), ((6, 6), 3, 0), ((7, 8), 3, 2)):
    length = grid[0] * grid[1]
    places = windows_of(length, grid, window, shift)
    x = jnp.arange(1, 2 * length + 1).reshape(2, length)
    cut = places.to_windows(x)
    assert cut.shape[2] == places.window**2
    assert cut.shape[1] == np.prod(places.windows)
    assert np.sum(cut == 0) == cut.size - x.size
    np.testing.assert_array_equal(places.from_windows(cut), x)


def test_the_first_window_after_a_shift():
  """The corner of the grid moves to the end, where it is alone."""
  places = windows_of(16, (4, 4), 2, 1)
  number = places.to_windows(jnp.arange(16)[None])[0].reshape(4, 4)
  np.testing.assert_array_equal(number[0], [5, 6, 9, 10])
  np.testing.assert_array_equal(number[3], [15, 12, 3, 0])
  regions = places.to_windows(places.regions())
  assert len(set(np.asarray(regions[0, 3]).tolist())) == 4


@pytest.mark.parametrize("length", [1, 2, 7, 12, 13, 16, 17, 31])
def test_the_grid_of_a_length_is_nearly_a_square(length):
  places = windows_of(length, None, 2, 0)
  assert 0 <= places.columns - places.rows <= 1
  assert places.rows * places.columns >= length
  assert (places.rows - 1) * places.columns < length


def test_padding_is_not_seen():
  """Also not what stands in a grid's last, incomplete row."""
  for grid, length in (((5, 7), 35), (None, 31)):
    (query, key, value), table = draw((1, length), 3)
    attend = functools.partial(
      window_2d_attention, grid=grid, window=3, shift=1, relative_bias=table
    )
    out = jax.jit(attend)(query, key, jnp.ones_like(value))
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)


def test_a_mask_that_empties_a_window():
  grid, window = (6, 6), 3
  arrays, table = draw(grid, window)
  y, x = np.divmod(np.arange(36), 6)
  emptied = (y < 3) & (x < 3)
  mask = jnp.asarray(~emptied)[None, None, None]
  cotangent = np.ones((2, 36, NUM_HEADS, 5), np.float32)
  out, (gradients, of_table) = pulled(
    arrays, table, mask, cotangent, grid, window, 0
  )
  assert not np.asarray(out)[:, emptied].any()
  assert np.asarray(out)[:, ~emptied].all(axis=(0, 2, 3)).all()
  for gradient in (*gradients, of_table):
    assert np.isfinite(gradient).all()
  for gradient in gradients:
    assert not np.asarray(gradient)[:, emptied].any()


@pytest.mark.parametrize("hidden_logit", [None, -100.0])
def test_huge_logits(hidden_logit):
  grid, window, shift = (5, 6), 3, 1
  (query, key, value), table = draw(grid, window)
  query, table = 1e4 * query, 1e3 * table
  options = {"grid": grid, "window": window, "shift": shift}
  rest = {"hidden_logit": hidden_logit, "relative_bias": table}
  got, (gradients, of_table) = pulled(
    [query, key, value],
    table,
    None,
    np.ones((2, 30, NUM_HEADS, 5), np.float32),
    **options,
    rest=(("hidden_logit", hidden_logit),),
  )
  expected = definitions.window_2d_attention(
    query, key, value, **options, **rest
  )
  # Logits are off by their rounding, which is 1e-3 where they are 1e4.
  assert_close(got, expected, 2e-2)
  for gradient in (*gradients, of_table):
    assert np.isfinite(gradient).all()


def test_what_a_masked_key_holds_is_not_read():
  arrays, table = draw((5, 5), 2)
  mask = jnp.asarray(np.random.default_rng(2).random((2, 1, 1, 25)) < 0.6)
  cotangent = np.ones((2, 25, NUM_HEADS, 5), np.float32)
  run = functools.partial(pulled, grid=(5, 5), window=2, shift=1)
  before = run(arrays, table, mask, cotangent)
  hidden = ~mask[:, 0, 0, :, None, None]
  filled = [arrays[0], *(jnp.where(hidden, jnp.nan, x) for x in arrays[1:])]
  after = run(filled, table, mask, cotangent)
  jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize(
  ("name", "rest"),
  [
    ("cpu", {"dropout_rate": 0.3}),
    ("gpu", {"hidden_logit": -2.0, "dropout_rate": 0.3}),
    *thorough(("cpu", {"hidden_logit": -2.0}), ("gpu", {})),
  ],
)
def test_several_windows_at_once_are_as_one_after_another(name, rest):
  """With a last step that moves back: nine windows, four at a time."""
  grid, window = (9, 9), 3
  arrays, table = draw(grid, window)
  mask = jnp.asarray(np.random.default_rng(3).random((2, 1, 1, 81)) < 0.8)
  cotangent = np.random.default_rng(4).standard_normal(
    (2, 81, NUM_HEADS, 5), np.float32
  )
  run = functools.partial(
    pulled.__wrapped__, arrays, table, mask, cotangent, grid, window, 1
  )
  if "dropout_rate" in rest:
    rest = {**rest, "dropout_rng": jax.random.key(0)}
  with platform.tracing_for(name):
    expected, *results = [
      jax.jit(lambda s=size: run(rest=(*rest.items(), ("block_size", s))))()
      for size in (1, 36, None)
    ]
  for result in results:
    jax.tree.map(
      functools.partial(assert_close, tolerance=1e-5), result, expected
    )


def test_tables_may_be_mapped():
  """Values and gradients; the contract is about mapped examples."""
  (query, key, value), table = draw((4, 6), 2)
  tables = jnp.stack([table, 2.0 * table])

  def loss(table):
    out = window_2d_attention(
      query, key, value, grid=(4, 6), window=2, shift=1, relative_bias=table
    )
    return jnp.sum(out**2), out

  run = jax.value_and_grad(loss, has_aux=True)
  mapped, one_by_one = jax.jit(jax.vmap(run)), jax.jit(run)
  (_, out), gradient = mapped(tables)
  for i, table in enumerate(tables):
    (_, expected), slope = one_by_one(table)
    assert_close(out[i], expected, 1e-6)
    assert_close(gradient[i], slope, 1e-6)


def test_windows_drop_different_weights():
  """All inputs are alike, so results differ by what dropout leaves alone."""
  ones = jnp.ones((1, 16, 1, 1))
  out = window_2d_attention(
    ones,
    ones,
    ones,
    grid=(4, 4),
    window=2,
    dropout_rate=0.5,
    dropout_rng=jax.random.key(0),
  )
  out = windows_of(16, (4, 4), 2, 0).to_windows(out).reshape(4, 4)
  assert len({tuple(window) for window in np.asarray(out).tolist()}) > 1


def test_a_traced_scale():
  (query, key, value), _ = draw((4, 4), 3)
  options = {"grid": (4, 4), "window": 3, "shift": 1}
  got = jax.jit(
    lambda scale: window_2d_attention(query, key, value, scale=scale, **options)
  )(jnp.float32(0.2))
  expected = definitions.window_2d_attention(
    query, key, value, scale=0.2, **options
  )
  assert_close(got, expected, 1e-6)


@functools.cache
def temporary(side, **options):
  """Bytes that a call and its gradients hold, arrays in float32."""
  length = side * side
  x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
  table = jax.ShapeDtypeStruct((27 * 27, 2), jnp.float32)

  def run(table, *qkv):
    out, pullback = jax.vjp(
      lambda table, *qkv: window_2d_attention(
        *qkv, grid=(side, side), window=14, relative_bias=table, **options
      ),
      table,
      *qkv,
    )
    return pullback(out)

  compiled = jax.jit(run).lower(table, x, x, x).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.optimised
@pytest.mark.parametrize(
  "options",
  [
    pytest.param({}, id="plain", marks=pytest.mark.thorough),
    pytest.param({"shift": 3}, id="shifted", marks=pytest.mark.thorough),
    pytest.param({"shift": 3, "hidden_logit": -100.0}, id="with a logit"),
  ],
)
def test_memory_is_linear(options):
  assert temporary(140, **options) < 4.2 * temporary(70, **options)
  # Of the logits of every query and the keys of its window.
  assert temporary(140, **options) < 140**2 * 2 * 14**2 * 4 / 2


def test_the_table_is_drawn_and_given():
  dims = Dims(NUM_HEADS, KV_HEADS, 8, 16)
  record = window_2d(window=3, grid=(4, 4))
  variables = record.init(jax.random.key(0), dims)
  (table,) = variables["params"].values()
  assert table.shape == (25, NUM_HEADS)
  assert 0.01 < jnp.std(table) < 0.02
  assert jnp.abs(table).max() <= 0.04
  qkv, _ = draw((4, 4), 3)
  got = record.apply(variables, *qkv)
  expected = window_2d_attention(
    *qkv, grid=(4, 4), window=3, relative_bias=table
  )
  np.testing.assert_array_equal(got, expected)
  assert window_2d(relative=False).init(jax.random.key(0), dims) == {}


def test_what_is_refused(unchecked):
  (query, key, value), table = draw((4, 6), 3)
  options = {"grid": (4, 6), "window": 3, "relative_bias": table}
  for change, message in (
    ({"grid": (4, 5)}, "grid: expected .* = 24, .* got 4 · 5 = 20"),
    ({"grid": 24}, "grid: expected .*, got 24"),
    ({"grid": (4, 6, 1)}, "grid: expected"),
    ({"grid": (24, 0)}, "grid: expected"),
    ({"grid": (2.0, 12)}, "grid: expected"),
    ({"window": 0}, "window: expected .* got 0"),
    ({"shift": -1}, "shift: expected .* got -1"),
    ({"shift": 3}, "shift: expected less than window, 3, got 3"),
    (
      {"relative_bias": table[1:]},
      r"relative_bias: expected .* \[25, 4\], got",
    ),
    ({"relative_bias": table.T}, r"relative_bias: expected \[D, 4\] .* got"),
    ({"hidden_logit": -np.inf}, "hidden_logit: expected a finite .* got -inf"),
    ({"hidden_logit": True}, "hidden_logit: expected a finite .* got True"),
    ({"is_causal": True}, "is_causal: expected False, got True"),
    ({"block_size": 0}, "block_size: expected .* got 0"),
    ({"mask": jnp.ones((1, 1, 24, 24), bool)}, "mask: expected a key mask"),
  ):
    with pytest.raises(ValueError, match=f"^{message}"):
      window_2d_attention(query, key, value, **options | change)
  with pytest.raises(ValueError, match=r"^key: expected .* 24, K, .*; dense"):
    window_2d_attention(query, key[:, :20], value[:, :20], **options)
  with pytest.raises(ValueError, match=r"^grid: window_2d_attention needs it"):
    window_2d_attention(query, key, value, window=3)
  for option in (
    {"grid": (0, 4)},
    {"grid": "44"},
    {"window": 4, "shift": 4},
    {"hidden_logit": np.nan},
  ):
    with pytest.raises(ValueError, match=f"^{list(option)[-1]}: expected"):
      window_2d(**option)
  record = window_2d(window=3, grid=(5, 5))
  variables = record.init(jax.random.key(0), Dims(NUM_HEADS, KV_HEADS, 8, 25))
  with pytest.raises(ValueError, match=r"^grid: expected .* = 24"):
    record.apply(variables, query, key, value)
  with pytest.raises(ValueError, match=r"^relative_bias: the record"):
    record.apply(variables, query, key, value, relative_bias=table)
