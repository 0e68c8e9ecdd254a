"""Windows of a grid beyond the contract suite: grids, shifts, tables, padding."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, definitions, window_2d, window_2d_attention
from attention.platform import backend
from attention.testing import assert_close
from attention.window_2d import make_grid
from tests.attention.calls import (
  assert_defined,
  assert_equal,
  normal,
  pulled,
  random_mask,
)
from tests.attention.calls import draw as drawn
from tests.refusals import assert_refused

HERE = pathlib.Path(__file__).parent
NUM_HEADS, KV_HEADS = 4, 2


def draw(grid, window):
  """Query, key, value and table; values are narrower than the others."""
  (table,) = normal(((2 * window - 1) ** 2, NUM_HEADS), seed=9)
  return drawn(grid[0] * grid[1], value=5), table


def run(arrays, table, cotangent=None, **options):
  """The result, and gradients of query, key, value and table."""

  def attend(arrays, table):
    return window_2d_attention(*arrays, relative_bias=table, **options)

  out, gradients = pulled(attend, arrays, table, cotangent=cotangent)
  return out, [*gradients[0], gradients[1]]


def define(*arrays, **options):
  *qkv, table = (np.asarray(x, np.float64) for x in arrays)
  return definitions.window_2d_attention(*qkv, relative_bias=table, **options)


@pytest.mark.parametrize(
  ("grid", "window", "shift", "hidden_logit"),
  [
    ((7, 1), 3, 2, None),
    ((7, 13), 4, 2, None),
    ((7, 13), 4, 2, -3.0),
    ((4, 6), 5, 3, -3.0),
  ],
)
def test_values_and_gradients_are_those_of_the_definition(
  grid, window, shift, hidden_logit
):
  """Whole windows, padded ones, one row, and a grid smaller than a window."""
  arrays, table = draw(grid, window)
  length = grid[0] * grid[1]
  options = {"grid": grid, "window": window, "shift": shift}
  options |= {"hidden_logit": hidden_logit}
  options["mask"] = random_mask(2, 1, 1, length)

  def run(function):
    def of_tree(tree):
      *qkv, table = tree
      return function(*qkv, relative_bias=table, **options)

    return of_tree

  functions = window_2d_attention, definitions.window_2d_attention
  assert_defined(*map(run, functions), [*arrays, table])


@pytest.mark.parametrize("case", ["shifted", "sharp", "plain", "one_window"])
def test_numbers_are_those_of_transformers(case):
  """`window_2d/make_fixtures.py` made them from transformers' SwinLayer."""
  stored = np.load(HERE / "window_2d" / f"{case}.npz")
  options = {
    "grid": tuple(map(int, stored["grid"])),
    "window": int(stored["window"]),
    "shift": int(stored["shift"]),
  }
  *qkv, table = (
    stored[name] for name in ("query", "key", "value", "relative_bias")
  )
  exact = define(*qkv, table, hidden_logit=-100.0, **options)
  np.testing.assert_allclose(exact, stored["out"], rtol=0, atol=1e-13)
  # Where logits are as large as that, hiding is not the same.
  difference = np.abs(define(*qkv, table, **options) - stored["out"]).max()
  assert difference > 1.0 if case == "sharp" else difference < 1e-13
  qkv, table, cotangent = jax.tree.map(
    jnp.float32, (qkv, table, stored["cotangent"])
  )
  got, gradients = run(qkv, table, cotangent, hidden_logit=-100.0, **options)
  assert_close(got, stored["out"], 1e-5)
  assert_close(gradients[-1], stored["table_gradient"], 1e-5)


def test_a_grid_is_cut_into_windows_and_put_back():
  for grid, window, shift in (((5, 3), 2, 1), ((6, 6), 3, 0), ((7, 8), 3, 2)):
    length = grid[0] * grid[1]
    places = make_grid(length, grid, window, shift)
    x = np.arange(1, 2 * length + 1).reshape(2, length)
    cut, back = jax.jit(
      lambda x, p=places: (p.to_windows(x), p.from_windows(p.to_windows(x)))
    )(x)
    assert cut.shape[2] == places.window**2
    assert cut.shape[1] == np.prod(places.windows)
    assert np.sum(np.asarray(cut) == 0) == cut.size - x.size
    np.testing.assert_array_equal(back, x)


def test_the_first_window_after_a_shift():
  """The corner of the grid moves to the end, where it is alone."""
  places = make_grid(16, (4, 4), 2, 1)
  cut = jax.jit(places.to_windows)
  number = cut(np.arange(16)[None])[0].reshape(4, 4)
  np.testing.assert_array_equal(number[0], [5, 6, 9, 10])
  np.testing.assert_array_equal(number[3], [15, 12, 3, 0])
  regions = np.asarray(jax.jit(lambda: places.to_windows(places.regions()))())
  assert len(set(regions[0, 3].tolist())) == 4


@pytest.mark.parametrize("length", [1, 2, 7, 12, 13, 16, 17, 31])
def test_the_grid_of_a_length_is_nearly_a_square(length):
  places = make_grid(length, None, 2, 0)
  assert 0 <= places.columns - places.rows <= 1
  assert places.rows * places.columns >= length
  assert (places.rows - 1) * places.columns < length


@pytest.mark.parametrize("hidden_logit", [None, -100.0])
def test_huge_logits(hidden_logit):
  (query, key, value), table = draw((5, 6), 3)
  arrays = (1e4 * np.asarray(query), key, value), 1e3 * np.asarray(table)
  options = {"grid": (5, 6), "window": 3, "shift": 1}
  options["hidden_logit"] = hidden_logit
  got, gradients = run(*arrays, **options)
  # Logits are off by their rounding, which is 1e-3 where they are 1e4.
  assert_close(got, define(*arrays[0], arrays[1], **options), 2e-2)
  for gradient in gradients:
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
  ("name", "rest"),
  [
    ("cpu", {"dropout_rate": 0.3}),
    ("gpu", {"hidden_logit": -2.0, "dropout_rate": 0.3}),
  ],
)
def test_several_windows_at_once_are_as_one_after_another(name, rest):
  """With a last step that moves back: nine windows, four at a time.

  What a masked key holds is not read.
  """
  arrays, table = draw((9, 9), 3)
  rest |= {"dropout_rng": jax.random.key(0), "mask": random_mask(2, 1, 1, 81)}
  hidden = ~np.asarray(rest["mask"])[:, 0, 0]
  spoiled = [np.array(x) for x in arrays]
  for x in spoiled[1:]:
    x[hidden] = np.nan
  options = {"grid": (9, 9), "window": 3, "shift": 1, **rest}
  with backend.tracing_for(name):
    expected = run(arrays, table, block_size=1, **options)
    for size in (36, None):
      got = run(spoiled, table, block_size=size, **options)
      assert_equal(got, expected, 1e-5)


def test_tables_may_be_mapped():
  """Values and gradients; the contract is about mapped examples."""
  qkv, table = draw((4, 6), 2)
  tables = np.stack([table, 2.0 * np.asarray(table)])

  def loss(table):
    options = {"grid": (4, 6), "window": 2, "shift": 1}
    out = window_2d_attention(*qkv, relative_bias=table, **options)
    return jnp.sum(out**2), out

  gradient = jax.value_and_grad(loss, has_aux=True)
  (_, out), slopes = jax.jit(jax.vmap(gradient))(tables)
  one_by_one = jax.jit(gradient)
  for i, table in enumerate(tables):
    (_, expected), slope = one_by_one(table)
    assert_close(out[i], expected, 1e-6)
    assert_close(slopes[i], slope, 1e-6)


def test_windows_drop_different_weights():
  """All inputs are alike, so results differ by what dropout leaves alone."""
  x = np.ones((1, 16, 1, 1), np.float32)
  dropout = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}

  @jax.jit
  def windows(x):
    out = window_2d_attention(x, x, x, grid=(4, 4), window=2, **dropout)
    return make_grid(16, (4, 4), 2, 0).to_windows(out).reshape(4, 4)

  assert len({tuple(window) for window in np.asarray(windows(x)).tolist()}) > 1


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


def test_memory_is_linear():
  options = {"shift": 3, "hidden_logit": -100.0}
  assert temporary(140, **options) < 4.2 * temporary(70, **options)
  # Of the logits of every query and the keys of its window.
  assert temporary(140, **options) < 140**2 * 2 * 14**2 * 4 / 2


def test_the_table_is_drawn_and_given():
  dims = Dims(NUM_HEADS, KV_HEADS, 8, 16)
  record = window_2d(window=3, grid=(4, 4))
  variables = jax.jit(record.init, static_argnums=1)(jax.random.key(0), dims)
  (table,) = variables["params"].values()
  assert table.shape == (25, NUM_HEADS)
  assert 0.01 < np.std(table) < 0.02
  assert np.abs(table).max() <= 0.04
  qkv, _ = draw((4, 4), 3)
  got = jax.jit(record.apply)(variables, *qkv)
  assert_close(got, define(*qkv, table, grid=(4, 4), window=3), 1e-6)
  assert window_2d(relative=False).init(jax.random.key(0), dims) == {}


def test_what_is_refused(unchecked):
  (query, key, value), table = draw((4, 6), 3)
  given = {"grid": (4, 6), "window": 3, "relative_bias": table}
  assert_refused(
    lambda **x: window_2d_attention(query, **{"key": key, "value": value} | x),
    ("grid", given | {"grid": (4, 5)}),
    ("grid", given | {"grid": 24}),
    ("grid", given | {"grid": (4, 6, 1)}),
    ("grid", given | {"grid": (24, 0)}),
    ("grid", given | {"grid": (2.0, 12)}),
    ("grid", {"window": 3}),
    ("window", given | {"window": 0}),
    ("shift", given | {"shift": -1}),
    ("shift", given | {"shift": 3}),
    ("relative_bias", given | {"relative_bias": table[1:]}),
    ("relative_bias", given | {"relative_bias": table.T}),
    ("hidden_logit", given | {"hidden_logit": -np.inf}),
    ("hidden_logit", given | {"hidden_logit": True}),
    ("is_causal", given | {"is_causal": True}),
    ("block_size", given | {"block_size": 0}),
    ("key", given | {"key": key[:, :20], "value": value[:, :20]}),
  )
  assert_refused(
    window_2d,
    {"grid": (0, 4)},
    {"grid": "44"},
    ("shift", {"window": 4, "shift": 4}),
    {"hidden_logit": np.nan},
  )
  variables = {"params": {"relative_bias": table}}
  apply = window_2d(window=3, grid=(5, 5)).apply
  assert_refused(
    lambda **more: apply(variables, query, key, value, **more),
    ("grid", {}),
    {"relative_bias": table},
  )
