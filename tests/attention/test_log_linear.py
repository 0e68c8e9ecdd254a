"""Log-linear attention is a binary counter of states."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import definitions, gated_linear_attention, log_linear_attention
from attention.log_linear import LevelState
from tests.attention import state_cases as cases
from tests.attention.calls import assert_refused
from tests.attention.state_cases import BATCH, DIM, HEADS, KV_HEADS, VALUE

LEVELS = 10
BOTH = log_linear_attention, definitions.log_linear_attention
SCALED = [partial(function, scale=0.7) for function in BOTH]


def given(length, *, has_state=True):
  """Arrays, with states of 5 and 70 positions."""
  rng = np.random.default_rng(3)
  scales = rng.uniform(size=(BATCH, length, HEADS, LEVELS))
  arrays = cases.arrays(length, level_scales=scales)
  if has_state:
    sums = rng.normal(size=(BATCH, HEADS, LEVELS - 1, DIM, VALUE))
    sums = np.asarray(sums, np.float32)
    count = np.array([5, 70], np.int32)
    is_there = (count[:, None] >> np.arange(LEVELS - 1)) % 2 == 1
    sums = np.where(is_there[:, None, :, None, None], sums, np.float32(0.0))
    arrays["initial_state"] = LevelState(sums, count)
  return arrays


def digits(x):
  return np.frexp(np.asarray(x, float))[1]


def naive(given, mask, segment_ids, scale):
  """All pairs and levels at once, to be differentiated in float64."""
  decays, first = cases.decays(given["log_decay"], mask, segment_ids)
  sums, begun = given["initial_state"].sums, np.array([5, 70])
  seen = np.asarray(mask[:, 0, 0])
  position = np.zeros(seen.shape, int)
  for b in range(BATCH):
    count = begun[b]
    for t in range(seen.shape[1]):
      count = 0 if t and segment_ids[b, t] != segment_ids[b, t - 1] else count
      position[b, t], count = count, count + seen[b, t]
  end = position[:, -1] + seen[:, -1]
  level = digits(position[:, :, None] ^ position[:, None])
  at_level = level[..., None] == np.arange(LEVELS)
  weights = jnp.einsum("btnl,btsl->bnts", given["level_scales"], at_level)
  older = np.arange(1, LEVELS)
  read = digits(position ^ begun[:, None])[..., None]
  at_level = np.maximum(read, older)[..., None] == np.arange(LEVELS)
  old = jnp.einsum("btnl,btml->btnm", given["level_scales"], at_level)
  key, value = (
    jnp.repeat(given[name], HEADS // KV_HEADS, axis=2)
    for name in ("key", "value")
  )
  scores = jnp.einsum("btnh,bsnh->bnts", given["query"], key)
  out = jnp.einsum("bnts,bsnv->btnv", scores * decays * weights, value)
  old *= jnp.moveaxis(first, 1, 2)[..., None]
  out += jnp.einsum("btnh,btnl,bnlhv->btnv", given["query"], old, sums)
  at_level = digits(end[:, None] ^ position)[..., None] == older
  last = decays[:, :, -1]
  state = jnp.einsum("bns,bsl,bsnh,bsnv->bnlhv", last, at_level, key, value)
  moved = np.maximum(digits(end ^ begun)[:, None], older)[..., None] == older
  old = jnp.einsum("bnmhv,bml->bnlhv", sums, moved)
  state += first[:, :, -1, None, None, None] * old
  return scale * jnp.where(seen[..., None, None], out, 0.0), state


@pytest.mark.parametrize("length", [1, 7, 64, 65])
def test_values_and_states(length):
  cases.assert_goes_on(*BOTH, given(2 * length))


def test_all_gradients():
  cases.assert_gradients(*SCALED, partial(naive, scale=0.7), given(150))


def test_gradients_of_strong_decays():
  cases.assert_strong_decays(*SCALED, partial(naive, scale=0.7), given(150))


def test_one_call_goes_on_from_another():
  """Also where the examples of a batch are at different positions."""
  arrays = given(100)
  mask = np.ones((BATCH, 1, 1, 37), bool)
  mask[1, ..., 20:] = False
  run = cases.compiled(log_linear_attention)
  whole, last = run(arrays)
  # Copies: a program that still runs reads the arrays themselves.
  first, second = (
    {
      name: x if name == "initial_state" else x[:, part].copy()
      for name, x in arrays.items()
    }
    for part in (slice(0, 37), slice(37, None))
  )
  for name in second.keys() - {"initial_state"}:
    second[name][1, :46] = arrays[name][1, 20:66]
  before, state = run(first | {"mask": mask})
  np.testing.assert_array_equal(state.count, [42, 90])
  np.testing.assert_allclose(before[0], whole[0, :37], atol=3e-6)
  assert not np.any(before[1, 20:])
  after, found = run(second | {"initial_state": state})
  np.testing.assert_allclose(after[0], whole[0, 37:], atol=3e-6)
  np.testing.assert_allclose(after[1, :46], whole[1, 20:66], atol=3e-6)
  np.testing.assert_allclose(found.sums[0], last.sums[0], atol=3e-6)
  np.testing.assert_array_equal(found.count, [105, 153])


def test_packed_examples_are_what_they_are_alone():
  arrays = given(100, has_state=False)
  ids = np.repeat([[0, 1]], BATCH, axis=0).repeat([37, 63], axis=1)
  run = cases.compiled(log_linear_attention)
  packed, state = run(arrays | {"segment_ids": ids})
  alone = {name: x[:, 37:] for name, x in arrays.items()}
  expected, last = run(alone)
  np.testing.assert_allclose(packed[:, 37:], expected, atol=3e-6)
  np.testing.assert_allclose(state.sums, last.sums, atol=3e-6)


def test_known_special_cases():
  """Scales of 1 are gated linear attention; too few levels share the last."""
  arrays = given(200, has_state=False)
  arrays["level_scales"][:] = 1.0
  found, state = cases.compiled(log_linear_attention)(arrays)
  arrays.pop("level_scales")
  expected, last = cases.compiled(gated_linear_attention)(arrays)
  np.testing.assert_allclose(found, expected, atol=3e-6)
  np.testing.assert_allclose(np.sum(state.sums, axis=2), last, atol=3e-6)
  arrays = given(16)
  sums, count = arrays["initial_state"]
  arrays["level_scales"] = arrays["level_scales"][..., :5]
  arrays["initial_state"] = LevelState(sums[:, :, :4], count + 40)
  found = cases.compiled(log_linear_attention)(arrays)
  expected = definitions.log_linear_attention(**arrays, return_state=True)
  cases.assert_values(found, expected, 5e-6)


def test_extreme_decays_stay_finite():
  arrays = given(150)
  arrays["log_decay"][:, ::7] = -1e4
  cases.assert_finite(*SCALED, arrays)


def test_bfloat16():
  cases.assert_bfloat16(*BOTH, given(70))


def test_what_does_not_fit_is_told():
  levels = LevelState(np.zeros((2, 4, 8, 8, 5)), np.zeros(2))
  assert_refused(
    lambda **change: jax.eval_shape(
      lambda: cases.call(
        log_linear_attention, cases.as_jax({**given(9), **change})
      )
    ),
    (
      (
        r"level_scales: expected \[B, T, N, L\] with L of at least 5 for 9 pos",
        {"level_scales": np.ones((2, 9, 4, 4), "f")},
      ),
      (
        r"initial_state: expected shapes \[B, N, L-1, H, V\] and \[B\] = ",
        {"initial_state": levels},
      ),
      ("is_causal: expected True, got False;", {"is_causal": False}),
    ),
  )
