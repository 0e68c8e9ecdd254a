"""Gated slot attention: values, states, gradients, and its special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, definitions, gsa_attention
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.calls import assert_refused
from tests.attention.state_cases import BATCH, DIM, HEADS, KV_HEADS, VALUE

SLOTS = 7
BOTH = gsa_attention, definitions.gsa_attention


def given(length):
  """Arrays with a first state; some slots forget all at two positions."""
  rng = np.random.default_rng(3)
  decay = -rng.exponential(0.1, size=(BATCH, length, HEADS, SLOTS))
  if length > 40:
    decay[:, 10:13] = 0.0
    decay[:, 30, :, ::2], decay[:, 33] = -60.0, -30.0
  arrays = cases.arrays(
    length,
    log_decay=decay,
    slot_weights=rng.uniform(size=decay.shape),
    initial_state=rng.normal(size=(BATCH, HEADS, SLOTS, DIM + VALUE)),
  )
  return arrays | {"query": 6.0 * arrays["query"]}


def naive(given, mask, segment_ids):
  """Position by position, to be differentiated in float64."""

  def step(state, now):
    query, key, value, decay, slots, seen, first = now
    kv = jnp.concatenate([key, value], axis=-1)
    state = jnp.where(first[:, None, None, None], 0.0, state)
    after = jnp.exp(decay)[..., None] * state
    after += slots[..., None] * kv[:, :, None]
    state = jnp.where(seen[:, None, None, None], after, state)
    logits = jnp.einsum("bnmh,bnh->bnm", state[..., :DIM], query) / DIM**0.5
    weights = jax.nn.softmax(logits)
    return state, jnp.einsum("bnm,bnmv->bnv", weights, state[..., DIM:])

  gates = given["log_decay"], given["slot_weights"]
  return cases.by_position(step, given, gates, mask, segment_ids)


@pytest.mark.parametrize("length", [1, 7, 64, 65])
def test_values_and_states(length):
  cases.assert_goes_on(*BOTH, given(2 * length))


def test_all_gradients():
  cases.assert_gradients(*BOTH, naive, given(150))


def test_gradients_of_strong_decays():
  cases.assert_strong_decays(*BOTH, naive, given(150))


def test_extreme_decays_stay_finite():
  arrays = given(150)
  for low in (-1e4, -90.0, 0.0):
    arrays["log_decay"][:] = low
    cases.assert_finite(*BOTH, arrays)


def test_a_slot_for_each_position_is_softmax_attention():
  """Position t writes slot t alone, so the slots are the keys and the values."""
  arrays, length = given(12), 12
  qkv = [arrays[name] for name in ("query", "key", "value")]
  shape = BATCH, length, HEADS, length
  slots = np.broadcast_to(np.eye(length)[None, :, None], shape)
  found = gsa_attention(
    *qkv, log_decay=np.zeros(shape, "f"), slot_weights=np.float32(slots)
  )
  # Slots that are not written yet have the logit 0 and the value 0.
  key, value = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in qkv[1:])
  logits = np.einsum("bthd,bshd->bhts", qkv[0], key) / DIM**0.5
  weights = np.exp(np.where(np.tri(length), logits, 0.0))
  weights /= weights.sum(axis=-1, keepdims=True)
  expected = np.einsum("bhts,bshv->bthv", np.tril(weights), value)
  assert_close(found, expected, 1e-5)


def test_wrong_arguments_are_refused():
  arrays = given(9)
  qkv = [arrays.pop(name) for name in ("query", "key", "value")]
  state = np.zeros((BATCH, HEADS, SLOTS, DIM), "f")

  def call(**options):
    return gsa_attention(*qkv, **arrays | options)

  assert_refused(
    call,
    (
      (r"initial_state: expected \[B, N, M, H\+V\]", {"initial_state": state}),
      ("is_causal: expected True, got False;", {"is_causal": False}),
    ),
  )
  wrong = [("temperature: expected", {"temperature": 0.0})]
  assert_refused(ATTENTIONS["gsa"], wrong)
