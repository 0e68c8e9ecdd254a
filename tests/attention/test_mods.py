"""score_mod, mask_mod and block masks: FlexAttention's functions of indices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Visible,
  definitions,
  dense_attention,
  flash_attention,
  make_block_mask,
  sliding_window_attention,
)
from attention.testing import assert_close
from tests.attention.calls import (
  assert_defined,
  assert_equal,
  draw,
  normal,
  pulled,
)
from tests.refusals import assert_refused

HEADS = 4


def prefix(b, n, t, s):
  """A prefix that differs by example is seen whole, the rest causally."""
  del n
  return (s <= t) | (s < 3 + 4 * b)


def far_falls(score, b, n, t, s):
  """Not linear, and different for heads and examples."""
  return score - 0.1 * (1 + n) * abs(t - s) * (1 + b) + 0.05 * score**2


WINDOW = partial(sliding_window_attention, window=9)
FUNCTIONS = {
  "dense": (dense_attention, definitions.dense_attention),
  "flash": (flash_attention, definitions.dense_attention),
  "window": (WINDOW, partial(definitions.sliding_window_attention, window=9)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_the_definition(name):
  fast, definition = FUNCTIONS[name]
  call = {"score_mod": far_falls, "mask_mod": prefix}
  blocks = {} if name == "dense" else {"block_size": 5}
  cap, causal = {"logits_soft_cap": 2.0}, {"is_causal": True}
  for length, more, size in (
    (7, causal, blocks),
    (37, {}, blocks),
    (37, cap, {}),
    (37, causal, blocks),
  ):
    qkv = draw(length)
    out = jax.jit(partial(fast, **call, **more, **size))(*qkv)
    assert_close(out, definition(*qkv, **call, **more), 1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays_of_numpy_beside_a_mod(name):
  """A loop indexes them by traced numbers."""
  fast, definition = FUNCTIONS[name]
  call = {"score_mod": far_falls, "relative_bias": np.eye(HEADS, 9)}
  out = fast(*draw(37), **call, block_size=5)
  assert_close(out, definition(*draw(37), **call), 1e-5)


@pytest.mark.parametrize("name", ["flash", "window"])
def test_gradients_reach_what_a_score_mod_closes_over(name):
  """Floats, and integers that have no gradient."""
  (table,) = normal((HEADS, 80), seed=1)
  documents = np.sort(np.arange(74).reshape(2, 37) % 3, axis=1)

  def run(function):
    def of_tree(tree):
      table, documents, qkv = tree

      def score_mod(score, b, n, t, s):
        del b
        return score * (1.0 + table[n, t - s + 37])

      def mask_mod(b, n, t, s):
        del n
        return documents[b, t] == documents[b, s]

      return function(*qkv, score_mod=score_mod, mask_mod=mask_mod)

    return of_tree

  fast, definition = FUNCTIONS[name]
  tree = table, jnp.asarray(documents, jnp.int32), draw(37)
  for size, where in (({}, "cpu"), ({"block_size": 8}, "gpu")):
    functions = run(partial(fast, **size)), run(definition)
    assert_defined(*functions, tree, where=(where,), tolerance=2e-5)


@pytest.mark.parametrize(("length", "sizes"), [(37, (5, 16)), (40, (8, 5))])
def test_a_block_mask_changes_no_number(sizes, length):
  def strips(b, n, t, s):
    del b, n
    return (t // 8 + s // 8) % 3 == 0

  block_mask = make_block_mask(strips, length=length, block_size=sizes)
  attend = partial(flash_attention, mask_mod=strips)
  got, expected = (
    pulled(partial(attend, **more), *draw(length))
    for more in ({"block_mask": block_mask}, {})
  )
  assert_equal(got, expected, 1e-5)


def test_hidden_blocks_are_not_visited():
  """A block that holds NaN and is hidden changes nothing: nobody reads it."""

  def halves(b, n, t, s):
    del b, n
    return (t < 32) == (s < 32)

  block_mask = make_block_mask(halves, length=64, block_size=16)
  np.testing.assert_array_equal(block_mask.counts, [2, 2, 2, 2])
  np.testing.assert_array_equal(block_mask.visited[2], [2, 3])
  assert block_mask.share == 0.5
  query, key, value = draw(64)
  value = np.array(value)
  value[:, 32:] = np.nan
  call = {"mask_mod": halves, "block_mask": block_mask}
  out = jax.jit(partial(flash_attention, **call))(query, key, value)
  assert np.isfinite(out[:, :32]).all()


def test_a_row_without_keys_gives_zeros():
  def none_for_some(b, n, t, s):
    del b, n, s
    return t % 2 == 0

  for function in (dense_attention, flash_attention):
    attend = jax.jit(partial(function, mask_mod=none_for_some))
    out = np.asarray(attend(*draw(12)))
    assert not out[:, 1::2].any()
    assert out[:, ::2].any()


def test_what_does_not_fit_raises(unchecked):
  of_12, of_13 = (make_block_mask(prefix, batch=2, length=x) for x in (12, 13))
  assert_refused(
    partial(flash_attention, *draw(12)),
    {"mask_mod": lambda b, n, t, s: t - s},
    {"score_mod": 3},
    {"block_mask": of_12},
    {"block_mask": of_13, "mask_mod": prefix},
    {
      "block_mask": of_12,
      "mask_mod": prefix,
      "visible": Visible(query_start=4),
    },
  )
  attend = partial(WINDOW, *draw(12))
  assert_refused(attend, {"mask_mod": prefix, "dilation": 2})
  make = partial(make_block_mask, prefix, length=4)
  assert_refused(make, {"batch": 0})


@jax.custom_vjp
def saturated(x):
  return jnp.clip(x, -1.0, 1.0)


saturated.defvjp(
  lambda x: (saturated(x), x), lambda x, g: (jnp.where(abs(x) < 2, g, g / 4),)
)

CONTROL_FLOW = {
  "custom_vjp": lambda x, w: saturated(x + w),
  "fori_loop": lambda x, w: jax.lax.fori_loop(
    0, 3, lambda i, y: jnp.tanh(y) * 1.5 + i * w, x
  ),
  "scan": lambda x, w: jax.lax.scan(
    lambda y, c: (y + c * jnp.tanh(y + w), None), x, jnp.asarray([0.1, 0.4])
  )[0],
  "cond": lambda x, w: jax.lax.cond(
    x.shape[0] > 0, lambda y: y * w, lambda y: y, x
  ),
  "checkpoint": lambda x, w: jax.checkpoint(jnp.sin)(x * w),
  # Literals, which do not vary over devices as the scores do.
  "where": lambda x, w: jnp.where(
    w < 0.3, x - w * jax.nn.relu(x - 2.0), jnp.clip(x, -2, 2)
  ),
}


@pytest.mark.parametrize("blocks", [{}, {"block_size": 4}])
@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_a_mod_with_control_flow_inside_of_shard_map(name, blocks):
  """As dense attention outside of it, which JAX differentiates.

  The scores vary over one axis, and what the functions close over does not. Each
  device has other positions, and so visits another number of tiles.
  """
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("x", "y"), auto, devices=jax.devices()[:4])
  (table,) = normal((HEADS, 33), seed=1)
  documents = jnp.asarray(np.arange(16) % 3)

  def total(function, table, documents, *qkv, **call):
    def score_mod(score, b, n, t, s):
      del b
      return CONTROL_FLOW[name](score, table[n, t - s + 16])

    def mask_mod(b, n, t, s):
      del b, n
      return (s <= t) & (documents[t] <= documents[s])

    call |= {"score_mod": score_mod, "mask_mod": mask_mod}
    return (function(*qkv, **call) ** 2).sum()

  def on_devices(table, documents, *qkv):
    first = jax.lax.axis_index("x") * qkv[0].shape[1]
    visible = Visible(right=0, query_start=first)
    options = {"visible": visible, **blocks}
    one = total(flash_attention, table, documents, *qkv, **options)
    return jax.lax.psum(one, "x")

  rows = jax.P(None, "x")
  specs = (jax.P(), jax.P(), rows, jax.P(), jax.P())
  sharded = jax.shard_map(
    on_devices, mesh=mesh, in_specs=specs, out_specs=jax.P()
  )
  arguments = table, documents, *draw(16)
  found, expected = (
    jax.jit(jax.value_and_grad(f, (0, 2, 3, 4)))(*arguments)
    for f in (sharded, partial(total, dense_attention))
  )
  assert_equal(found, expected, 1e-5)
