"""TTT-Linear: values, states, gradients, and where its mini-batches start."""

from functools import partial
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, TttState, definitions, ttt_linear_attention
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.calls import assert_refused
from tests.attention.state_cases import BATCH, DIM, HEADS, KV_HEADS

SIZE = 6
BOTH = [
  partial(function, minibatch_size=SIZE, epsilon=1e-3, scale=0.8)
  for function in (ttt_linear_attention, definitions.ttt_linear_attention)
]


def given(length):
  """Arrays with a first state, whose examples are at different places."""
  rng = np.random.default_rng(3)
  model = BATCH, HEADS, DIM + 1, DIM
  arrays = cases.arrays(
    length,
    value=rng.normal(size=(BATCH, length, KV_HEADS, DIM)),
    learning_rate=rng.uniform(0.0, 0.3, size=(BATCH, length, HEADS)),
    initial_weights=rng.normal(size=(HEADS, DIM, DIM)),
    initial_bias=rng.normal(size=(HEADS, DIM)),
    norm_scale=rng.normal(1.0, 0.3, size=(HEADS, DIM)),
    norm_bias=rng.normal(0.0, 0.3, size=(HEADS, DIM)),
    position_offset=rng.normal(0.0, 0.3, size=SIZE),
    initial_state=TttState(
      rng.normal(size=model),
      0.1 * rng.normal(size=model),
      np.array([2, SIZE], np.int32),
    ),
  )
  del arrays["log_decay"]
  return arrays


def naive(given, mask, segment_ids):
  """Position by position, to be differentiated in float64."""
  rates = 1.0 / np.arange(1.0, SIZE + 1.0)
  rates = jnp.maximum(rates + given["position_offset"], 0.0)
  bias = given["initial_bias"][:, None]
  first = jnp.concatenate([given["initial_weights"], bias], axis=1)

  def read(model, x):
    x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
    z = jnp.einsum("bnh,bnhv->bnv", x, first[None] + model)
    z -= z.mean(-1, keepdims=True)
    z /= jnp.sqrt(jnp.mean(z**2, axis=-1, keepdims=True) + 1e-3)
    return given["norm_scale"][None] * z + given["norm_bias"][None]

  def step(state, now):
    q, k, v, rate, seen, begin = now
    q = 0.8 * q

    state = cases.where(begin, jax.tree.map(jnp.zeros_like, state), state)
    change, gradient, count = state
    is_full = count == SIZE
    change = cases.where(is_full, change - rates[-1] * gradient, change)
    gradient = cases.where(is_full, jnp.zeros_like(gradient), gradient)
    count = jnp.where(is_full, 0, count)

    def loss(model):
      return 0.5 * jnp.sum(rate[..., None] * (read(model, k) + k - v) ** 2)

    gradient = gradient + jax.grad(loss)(change)
    now = change - rates[count][:, None, None, None] * gradient
    out = cases.where(seen, q + read(now, q), jnp.zeros_like(q))
    after = TttState(change, gradient, count + 1)
    return cases.where(seen, after, state), out

  gates = [given["learning_rate"]]
  return cases.by_position(step, given, gates, mask, segment_ids)


@pytest.mark.parametrize("length", [1, 5, 6, 7, 65])
def test_values_and_states(length):
  cases.assert_goes_on(*BOTH, given(2 * length))


@pytest.mark.parametrize("length", [1, 5, 6, 77])
def test_without_a_state_mini_batches_are_aligned(length):
  """Neither mask nor segments nor a state: the other form of a step."""
  arrays = given(length)
  del arrays["initial_state"]
  found = cases.compiled(BOTH[0])(arrays)
  expected = BOTH[1](**arrays, return_state=True)
  cases.assert_values(found, expected, 5e-6)


def test_all_gradients():
  cases.assert_gradients(*BOTH, naive, given(150))


def test_segments_are_as_each_on_its_own():
  """They start in the middle of a window, and are shorter and longer than one."""
  arrays = given(29)
  del arrays["initial_state"]
  cuts = 0, 3, 5, 19, 29
  ids = np.searchsorted(cuts[1:], np.arange(29), side="right")
  ids = np.broadcast_to(ids.astype(np.int32), (BATCH, 29))
  whole, state = cases.call(BOTH[0], arrays, segment_ids=ids)
  parts = []
  for begin, end in itertools.pairwise(cuts):
    own = {
      name: x[:, begin:end] if x.shape[:2] == (BATCH, 29) else x
      for name, x in arrays.items()
    }
    out, last = cases.call(BOTH[0], own)
    parts.append(out)
  assert_close(whole, np.concatenate(parts, axis=1), 2e-6)
  cases.assert_values(state, last, 2e-6)


def test_learning_rates_of_zero_leave_the_initial_model():
  arrays = given(9)
  del arrays["initial_state"]
  arrays["learning_rate"] = 0.0 * arrays["learning_rate"]
  out, state = cases.call(BOTH[0], arrays)
  query = 0.8 * arrays["query"]
  z = np.einsum("btnh,nhv->btnv", query, arrays["initial_weights"])
  z += arrays["initial_bias"]
  z -= z.mean(-1, keepdims=True)
  z /= np.sqrt(np.mean(z**2, axis=-1, keepdims=True) + 1e-3)
  expected = query + arrays["norm_scale"] * z + arrays["norm_bias"]
  assert_close(out, expected, 1e-6)
  assert not np.any(state.change)
  assert not np.any(state.gradient)


def test_wrong_arguments_are_refused():
  arrays = given(9)
  qkv = [arrays.pop(name) for name in ("query", "key", "value")]
  state = arrays["initial_state"]

  def call(value=qkv[2], **options):
    return ttt_linear_attention(
      *qkv[:2], value, **arrays | {"minibatch_size": SIZE} | options
    )

  assert_refused(
    call,
    (
      ("value: expected", {"value": qkv[2][..., :5]}),
      (r"position_offset: expected \[C\]", {"minibatch_size": 7}),
      ("minibatch_size: expected", {"minibatch_size": 0}),
      (
        "initial_state: expected a TttState",
        {"initial_state": state._replace(gradient=state.gradient[:, :1])},
      ),
      ("is_causal: expected True, got False;", {"is_causal": False}),
    ),
  )
  wrong = [("base_rate: expected", {"base_rate": 0.0})]
  assert_refused(ATTENTIONS["ttt_linear"], wrong)
