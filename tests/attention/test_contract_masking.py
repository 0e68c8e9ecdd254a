"""Nothing leaks: the future, padding, the batch, empty rows, huge logits."""

import functools

import jax
import numpy as np
import pytest

from tests.attention.cases import Case, assert_close
from tests.attention.mechanisms import MECHANISMS

pytestmark = pytest.mark.optimised


def having(*features):
  """Parametrises a test over the mechanisms that claim all `features`."""
  return pytest.mark.parametrize(
    "mechanism",
    [m for m in MECHANISMS if m.build().supports.issuperset(features)],
    ids=str,
  )


both_directions = pytest.mark.parametrize(
  ("mechanism", "is_causal"),
  [
    pytest.param(m, is_causal, id=f"{m}-{'causal' * is_causal or 'both'}")
    for m in MECHANISMS
    for is_causal in (False, True)
    if m.build().supports >= {"mask", *["causal"] * is_causal}
  ],
)


CASE = Case(("mask",), batch=3)
EVERY_KEY = np.ones((3, 1, 1, CASE.length), bool)


# Tests share what they compile: one call a mechanism and direction.
@functools.cache
def forward(mechanism, is_causal=False):
  """The jitted call `(qkv, **arrays) -> out`."""
  attention = mechanism.build()
  variables = attention.init(jax.random.key(0), CASE.dims)

  @jax.jit
  def call(qkv, **arrays):
    return attention.apply(variables, *qkv, is_causal=is_causal, **arrays)

  return call


@functools.cache
def backward(mechanism, is_causal=False):
  """The jitted `(qkv, mask, cotangent) -> gradients of query, key, value`."""

  call = forward(mechanism, is_causal)

  @jax.jit
  def gradient(qkv, mask, cotangent):
    return jax.vjp(lambda qkv: call(qkv, mask=mask), qkv)[1](cotangent)[0]

  return gradient


def assert_unread(mechanism, call, length, position):
  """Asserts that changes at `position` leave what is before bit by bit."""
  case = Case(length=length, batch=3)
  qkv, others = mechanism.draw(case)[0], mechanism.draw(case, seed=1)[0]
  before = np.asarray(call(qkv))
  replaced, raised = ([np.array(x) for x in qkv] for _ in range(2))
  for x, y, other in zip(replaced, raised, others, strict=True):
    x[:, position] = other[:, position]
    y[:, position] += 30.0
  for changed in (replaced, raised):
    after = np.asarray(call(changed))
    moved = np.abs(after[:, :position] - before[:, :position]).max()
    assert moved <= mechanism.past_error
    assert (after[:, position] != before[:, position]).any()


@having("causal")
def test_the_future_changes_no_bit(mechanism):
  call = functools.partial(forward(mechanism, is_causal=True), mask=EVERY_KEY)
  for position in (12, 6, 1):
    assert_unread(mechanism, call, CASE.length, position)


@having("causal")
def test_the_future_changes_no_bit_over_several_blocks(mechanism):
  call = forward(mechanism, is_causal=True)
  for position in (149, 75, 1):
    assert_unread(mechanism, call, 150, position)


@having("causal")
def test_the_future_has_no_gradient(mechanism):
  qkv, _ = mechanism.draw(CASE)
  cotangent = np.zeros_like(qkv[0])
  cotangent[:, 5] = 1.0
  for grad in backward(mechanism, is_causal=True)(qkv, EVERY_KEY, cotangent):
    assert np.abs(grad[:, 5]).max() > 0
    assert not np.asarray(grad[:, 6:]).any()


@both_directions
def test_padding_changes_nothing(mechanism, is_causal):
  if not mechanism.pads:
    pytest.skip("its pattern depends on the length, padding included")
  call = forward(mechanism, is_causal)
  padded, _ = mechanism.draw(CASE)
  short = [x[:, :7] for x in padded]
  for x in padded:
    x[:, 7:] = 1e4
  mask = EVERY_KEY & (np.arange(13) < 7)
  assert_close(call(padded, mask=mask)[:, :7], call(short), 1e-6)


@both_directions
def test_masked_keys_are_not_read(mechanism, is_causal):
  call = forward(mechanism, is_causal)
  qkv, options = mechanism.draw(CASE)
  before = call(qkv, **options)
  masked = ~options["mask"][:, 0, 0, :]
  assert masked.any()
  for x in qkv[1:]:
    x[masked] = 1e4
  np.testing.assert_array_equal(call(qkv, **options), before)


@both_directions
def test_an_empty_row_gives_zeros_and_finite_gradients(mechanism, is_causal):
  qkv, _ = mechanism.draw(CASE)
  mask = EVERY_KEY.copy()
  mask[1] = False
  out = np.asarray(forward(mechanism, is_causal)(qkv, mask=mask))
  assert not out[1].any()
  assert out[0].any()
  cotangent = np.ones_like(qkv[0])
  for grad in backward(mechanism, is_causal)(qkv, mask, cotangent):
    assert np.isfinite(grad).all()
    assert np.asarray(grad[0]).any()
    assert not np.asarray(grad[1]).any()


@having("segments")
def test_a_segment_of_its_own_gives_zeros(mechanism):
  qkv, _ = mechanism.draw(CASE)
  ids = np.zeros((3, 13), np.int32)
  alone = np.array(ids)
  alone[:, 4] = 7
  call = forward(mechanism)
  out = np.asarray(call(qkv, query_segment_ids=alone, key_segment_ids=ids))
  assert not out[:, 4].any()
  assert out[:, 5].any()


@both_directions
def test_huge_logits_stay_finite(mechanism, is_causal):
  (query, key, value), options = CASE.draw()
  # |key|² / √H = 1e4; queries along the keys, against them and neither.
  key *= np.sqrt(1e4 * np.sqrt(8)) / np.linalg.norm(key, axis=-1, keepdims=True)
  along = np.repeat(key, 2, axis=2)
  query *= np.linalg.norm(key[0, 0, 0]) / np.sqrt(8)
  for q in (along, -along, query):
    qkv = [q, value] if mechanism.shares_query_and_key else [q, key, value]
    out = forward(mechanism, is_causal)(qkv, **options)
    assert np.isfinite(out).all()
    assert np.abs(out).max() <= 10 * np.abs(value).max()
    cotangent = np.ones_like(query)
    grads = backward(mechanism, is_causal)(qkv, options["mask"], cotangent)
    for grad in grads:
      assert np.isfinite(grad).all()


@both_directions
def test_examples_do_not_touch_each_other(mechanism, is_causal):
  call = forward(mechanism, is_causal)
  qkv, options = mechanism.draw(CASE)
  before = call(qkv, **options)
  for x in qkv:
    x[1:] *= 1e3
  options["mask"][2] = False
  np.testing.assert_array_equal(call(qkv, **options)[0], before[0])


@having("rowwise")
def test_each_query_stands_alone(mechanism):
  call = forward(mechanism)
  (query, key, value), options = mechanism.draw(CASE)
  whole = call([query, key, value], **options)
  alone = call([query[:, 5:6], key, value], **options)
  assert_close(alone, whole[:, 5:6], 1e-6)
