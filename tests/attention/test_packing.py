"""Each segment of a packed row has a first and a last state of its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from tests.attention import calls
from tests.attention import state_cases as cases
from tests.attention.state_cases import BATCH, CASES, HEADS, RULES, VALUE
from tests.refusals import assert_refused

LENGTH, SEGMENTS = 150, 6
OTHERS = "mesa", "gka", "gsa", "momentum_delta", "log_linear"


def chosen(name):
  """A case, and its arrays with a first state for each segment."""
  case = CASES[name]
  given, rng = case.given(LENGTH), np.random.default_rng(5)
  first = given["initial_state"]
  if name == "log_linear":
    count = rng.integers(0, 90, (BATCH, SEGMENTS)).astype(np.int32)
    state = cases.level_state(count, (SEGMENTS,))
  else:
    state = np.stack([first * (i + 1) for i in range(SEGMENTS)], axis=1)
  return case, given | {"initial_state": state}


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


def alone(definition, given, ids, keep):
  """Results and last states of each segment on its own, by the definition."""
  first = given["initial_state"]
  out = np.zeros((BATCH, LENGTH, HEADS, VALUE))
  last = jax.tree.map(np.array, first)
  for b, g in np.ndindex(BATCH, SEGMENTS):
    own = np.flatnonzero(keep[b] & (ids[b] == g))
    if not len(own):
      continue
    part = {
      n: x[b : b + 1, own] if cases.has_positions(x, LENGTH) else x
      for n, x in given.items()
    }
    part["initial_state"] = jax.tree.map(
      lambda x, at=(b, g): x[at][None], first
    )
    result, state = definition(**part, return_state=True)
    out[b, own] = result[0]
    for x, y in zip(*map(jax.tree.leaves, (last, state)), strict=True):
      x[b, g] = y[0]
  return out, last


@pytest.mark.parametrize("name", [*(x.name for x in RULES), *OTHERS])
def test_segments_are_those_of_each_alone(name):
  """Values and last states, of the definition as well, and all gradients."""
  case, given = chosen(name)
  ids, keep = ids_and_mask()
  more = {"segment_ids": ids, "mask": keep[:, None, None]}
  exact = jax.tree.map(calls.wide, given)
  found = case.definition(
    **exact, **more, num_segments=SEGMENTS, return_state=True
  )
  cases.assert_values(found, alone(case.definition, exact, ids, keep), 1e-12)
  more["num_segments"] = SEGMENTS
  cases.assert_gradients(case, given, more, tolerance=1e-5)


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
  "change",
  [
    {"num_segments": SEGMENTS, "segment_ids": None},
    {"initial_state": np.zeros((2, 4, 8, 5))},
    {"num_segments": 0},
    {"implementation": "jla"},
  ],
  ids=str,
)
def test_what_does_not_fit_is_told(change):
  case, given = chosen("delta-head")
  given |= {"segment_ids": ids_and_mask()[0], "num_segments": SEGMENTS}
  assert_refused(lambda **x: case.function(**given | x), change)


def test_ids_of_few_bits_count_more_segments_than_they_can():
  case, given = chosen("gated-head")
  ids, _ = ids_and_mask()
  del given["initial_state"]
  call = jax.jit(functools.partial(case.function, num_segments=200))
  expected = call(**given, segment_ids=ids)
  got = call(**given, segment_ids=ids.astype(np.int8))
  chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize("rule", ["gated-head", "log_linear"])
def test_positions_of_no_segment_are_hidden(rule):
  """Their id is −1, as padding often has, or beyond the last."""
  case, given = chosen(rule)
  ids = np.repeat(np.arange(SEGMENTS), LENGTH // SEGMENTS)[None]
  ids = np.broadcast_to(ids, (BATCH, LENGTH)).copy()
  keep = np.ones((BATCH, 1, 1, LENGTH), bool)
  keep[..., 20:30], keep[..., -7:] = False, False
  outside = ids.copy()
  outside[:, 20:30], outside[:, -7:] = -1, SEGMENTS
  run = cases.jit_with_state(case.function, num_segments=SEGMENTS)
  hidden = run(given | {"segment_ids": outside})
  masked = run(given | {"segment_ids": ids, "mask": keep})
  cases.assert_values(hidden, masked, 1e-6)
