"""Each segment of a packed row has a first and a last state of its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import definitions
from attention.log_linear import LevelState
from attention.platform import backend
from tests.attention import state_cases as cases
from tests.attention import (
  test_gka,
  test_gsa,
  test_log_linear,
  test_mesa,
  test_momentum_delta,
  test_recurrences,
)
from tests.attention.state_cases import BATCH, DIM, HEADS, VALUE

LENGTH, SEGMENTS = 150, 6
RULES = [
  *map("-".join, test_recurrences.RULES),
  *("mesa", "gka", "gsa", "momentum_delta", "log_linear"),
]


def chosen(rule):
  """The function, its definition, and arrays with a first state a segment."""
  rng = np.random.default_rng(5)
  if rule == "log_linear":
    name, given = "log_linear_attention", test_log_linear.given(LENGTH)
    count = rng.integers(0, 90, (BATCH, SEGMENTS)).astype(np.int32)
    sums = rng.normal(size=(BATCH, SEGMENTS, HEADS, 9, DIM, VALUE))
    is_there = (count[..., None] >> np.arange(9)) % 2 == 1
    sums = np.where(is_there[:, :, None, :, None, None], sums, 0.0)
    state = LevelState(np.float32(sums), count)
  elif rule in ("mesa", "gka", "gsa", "momentum_delta"):
    module = {
      "mesa": test_mesa,
      "gka": test_gka,
      "gsa": test_gsa,
      "momentum_delta": test_momentum_delta,
    }[rule]
    name, given = f"{rule}_attention", module.given(LENGTH)
    parts = [given["initial_state"] * (i + 1) for i in range(SEGMENTS)]
    state = np.stack(parts, axis=1)
  else:
    function, _, given = test_recurrences.chosen(
      rule.split("-")[0], LENGTH, rule.split("-")[1]
    )
    name = function.__name__
    shape = BATCH, SEGMENTS, HEADS, DIM, VALUE
    state = np.float32(rng.normal(size=shape))
  given |= {"initial_state": state}
  function = getattr(attention, name)
  if rule == "gka":  # The definition solves exactly.
    function = functools.partial(function, num_iterations=80)
  return function, getattr(definitions, name), given


def ids_and_mask():
  """Segments, of which 3 and 5 are empty in one row; padding with any id."""
  ids = np.zeros((BATCH, LENGTH), np.int32)
  for row, lengths in enumerate(([64, 1, 30, 0, 20, 17], [9, 3, 70, 33, 7, 0])):
    ends = np.cumsum(lengths)
    ids[row, : ends[-1]] = np.repeat(np.arange(SEGMENTS), lengths)
  keep = np.random.default_rng(6).random((BATCH, LENGTH)) < 0.9
  keep[0, 132:] = keep[1, 122:] = False
  keep[0, 66], keep[1, 9:12] = False, True
  ids[0, 66] = 0  # A hidden position within segment 2.
  return ids, keep


def is_along(x):
  """Whether an argument is an array of positions."""
  return isinstance(x, np.ndarray) and x.shape[:2] == (BATCH, LENGTH)


def alone(definition, given, ids, keep):
  """Results and last states of each segment on its own, by the definition."""
  first = given["initial_state"]
  out = np.zeros((BATCH, LENGTH, HEADS, VALUE))
  last = jax.tree.map(
    lambda x: np.array(x, np.int64 if x.dtype == np.int32 else np.float64),
    first,
  )
  for b, g in np.ndindex(BATCH, SEGMENTS):
    own = np.flatnonzero(keep[b] & (ids[b] == g))
    if not len(own):
      continue
    part = {
      name: x[b : b + 1, own] if is_along(x) else x for name, x in given.items()
    }
    part["initial_state"] = jax.tree.map(
      lambda x, b=b, g=g: x[b : b + 1, g], first
    )
    result, state = definition(**part, return_state=True)
    out[b, own] = result[0]
    for x, y in zip(*map(jax.tree.leaves, (last, state)), strict=True):
      x[b, g] = y[0]
  return out, last


@pytest.mark.parametrize("rule", RULES)
def test_segments_are_those_of_each_alone(rule):
  """Values and last states, of the definition as well, and all gradients.

  Gradients are compared with central differences of the definition.
  """
  function, definition, given = chosen(rule)
  ids, keep = ids_and_mask()
  options = {"segment_ids": ids, "mask": keep[:, None, None]}
  defined = functools.partial(
    definition, **options, num_segments=SEGMENTS, return_state=True
  )
  expected = alone(definition, given, ids, keep)
  cases.assert_values(defined(**given), expected, 1e-12)
  rng = np.random.default_rng(8)
  cotangents = [np.float32(rng.normal(size=x.shape)) for x in floats(expected)]

  def run(given, options):
    def call(given):
      return function(
        **given, **options, num_segments=SEGMENTS, return_state=True
      )

    found, pullback = jax.vjp(call, given)
    zeros = iter(cotangents)
    return found, pullback(
      jax.tree.map(
        lambda x: (
          jnp.asarray(next(zeros))
          if x.dtype == jnp.float32
          else np.zeros(x.shape, jax.dtypes.float0)
        ),
        found,
      )
    )[0]

  spoiled = dict(given)
  for name, x in given.items():
    if is_along(x):
      spoiled[name] = np.where(
        keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), x, np.nan
      )
  for where in ("cpu", "gpu"):
    with backend.tracing_for(where):
      found, gradients = jax.jit(lambda *x: run(*x))(spoiled, options)
    cases.assert_values(found, expected, 1e-5)
    largest = np.sqrt(sum(np.sum(np.square(x)) for x in floats(gradients)))
    for name, gradient in gradients.items():
      directions = [rng.normal(size=x.shape) for x in floats(gradient)]
      moved = [
        floats(defined(**(given | {name: shifted(given[name], directions, h)})))
        for h in (1e-6, -1e-6)
      ]
      slope = sum(
        np.sum((x - y) * c) / 2e-6
        for x, y, c in zip(*moved, cotangents, strict=True)
      )
      parts = zip(floats(gradient), directions, strict=True)
      got = sum(np.sum(x * np.float64(d)) for x, d in parts)
      assert abs(got - slope) < 1e-5 * largest, name


def floats(tree):
  """The leaves with derivatives."""
  return [
    np.asarray(x, np.float64)
    for x in jax.tree.leaves(tree)
    if np.issubdtype(x.dtype, np.floating)
  ]


def shifted(tree, directions, distance):
  """The leaves with derivatives moved along directions, in float64."""
  steps = iter(directions)
  return jax.tree.map(
    lambda x: (
      np.float64(x) + distance * next(steps)
      if np.issubdtype(x.dtype, np.floating)
      else x
    ),
    tree,
  )


def test_memory_is_linear_and_no_state_is_kept_a_position():
  """With gradients, of many segments: less than half of a state of 64² a position."""
  length, segments = 4096, 16
  shape = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
  gate = jax.ShapeDtypeStruct((1, length, 2), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

  @jax.jit
  def run(query, key, value, beta, ids):
    def total(*arrays):
      *qkv, beta = arrays
      out, state = attention.delta_rule_attention(
        *qkv,
        beta=beta,
        segment_ids=ids,
        num_segments=segments,
        return_state=True,
      )
      return jnp.sum(out**2) + jnp.sum(state**2)

    return jax.grad(total, (0, 1, 2, 3))(query, key, value, beta)

  program = run.lower(shape, shape, shape, gate, ids).compile()
  held = program.memory_analysis().temp_size_in_bytes
  assert held < 4 * length * 2 * 64 * 64 / 2, held


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"segment_ids": None}, r"num_segments: expected segment_ids \[B, T\] from 0"),
    ({"initial_state": np.zeros((2, 4, 8, 5))}, r"initial_state: expected \[B, G, N"),
    ({"num_segments": 0}, "num_segments: expected an int of at least 1"),
    ({"implementation": "jla"}, "implementation: 'jla' cannot take num_segments"),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_told(change, message):
  function, _, given = chosen("delta-head")
  ids, _ = ids_and_mask()
  given |= {"segment_ids": ids, "num_segments": SEGMENTS, **change}
  static = {
    name: given.pop(name)
    for name in ("num_segments", "implementation", "segment_ids")
    if not isinstance(given.get(name), np.ndarray) and name in given
  }
  with pytest.raises(ValueError, match=f"^{message}"):
    jax.eval_shape(functools.partial(function, **static), **given)


def test_ids_of_few_bits_count_more_segments_than_they_can():
  function, _, given = chosen("gated-head")
  ids, _ = ids_and_mask()
  del given["initial_state"]
  call = jax.jit(functools.partial(function, num_segments=200))
  expected = call(**given, segment_ids=ids)
  got = call(**given, segment_ids=ids.astype(np.int8))
  chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize("rule", ["gated-head", "log_linear"])
def test_positions_of_no_segment_are_hidden(rule):
  """Their id is −1, as padding often has, or beyond the last."""
  function, _, given = chosen(rule)
  ids = np.repeat(np.arange(SEGMENTS), LENGTH // SEGMENTS)[None]
  ids = np.broadcast_to(ids, (BATCH, LENGTH)).copy()
  keep = np.ones((BATCH, 1, 1, LENGTH), bool)
  keep[..., 20:30], keep[..., -7:] = False, False
  outside = ids.copy()
  outside[:, 20:30], outside[:, -7:] = -1, SEGMENTS
  run = cases.compiled(function, num_segments=SEGMENTS)
  hidden = run(given | {"segment_ids": outside})
  masked = run(given | {"segment_ids": ids, "mask": keep})
  cases.assert_values(hidden, masked, 1e-6)
