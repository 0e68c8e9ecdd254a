"""Nothing leaks: the future, padding, the batch, empty rows, huge logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.cases import Case, assert_close
from tests.attention.mechanisms import MECHANISMS


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


def prepare(mechanism, case, **static):
  """The mechanism's variables and its jitted call `(qkv, **arrays) -> out`."""
  attention = mechanism.build()
  variables = attention.init(jax.random.key(0), case.dims)

  @jax.jit
  def call(qkv, **arrays):
    return attention.apply(variables, *qkv, **arrays, **static)

  return call


@pytest.mark.parametrize("length", [11, 150])
@having("causal")
def test_the_future_changes_no_bit(mechanism, length):
  case = Case(length=length, batch=1)
  call = prepare(mechanism, case, is_causal=True)
  qkv, _ = case.draw()
  before = np.asarray(call(qkv))
  for position in (length - 1, length // 2, 1):
    replaced = [np.array(x) for x in qkv]
    for x, other in zip(replaced, case.draw(seed=1)[0], strict=True):
      x[:, position] = other[:, position]
    raised = [np.array(x) for x in qkv]
    for x in raised:
      x[:, position] += 30.0
    for changed in (replaced, raised):
      after = np.asarray(call(changed))
      np.testing.assert_array_equal(after[:, :position], before[:, :position])
      assert (after[:, position] != before[:, position]).any()


@having("causal", "mask")
def test_the_future_has_no_gradient(mechanism):
  case = Case(length=11, batch=1)
  call = prepare(mechanism, case, is_causal=True)
  qkv, _ = case.draw()
  position = 5
  gradient = jax.grad(lambda qkv: call(qkv)[:, position].sum())(qkv)
  for grad in gradient:
    assert np.abs(grad[:, position]).max() > 0
    assert not np.asarray(grad[:, position + 1 :]).any()


@both_directions
def test_padding_changes_nothing(mechanism, is_causal):
  padded = Case(length=12)
  call = prepare(mechanism, padded, is_causal=is_causal)
  long, _ = padded.draw()
  short = [x[:, :7] for x in long]
  for x in long:
    x[:, 7:] = 1e4
  mask = np.broadcast_to(np.arange(12) < 7, (2, 1, 1, 12))
  expected = call(short)
  assert_close(call(long, mask=mask)[:, :7], expected, 1e-6)
  if "cross" in mechanism.build().supports:
    got = call([short[0], *long[1:]], mask=mask)
    assert_close(got, expected, 1e-6)


@having("mask")
def test_masked_keys_are_not_read(mechanism):
  case = Case(("mask",))
  call = prepare(mechanism, case)
  qkv, options = case.draw()
  before = call(qkv, **options)
  masked = ~options["mask"][:, 0, 0, :]
  assert masked.any()
  for x in qkv[1:]:
    x[masked] = 1e4
  np.testing.assert_array_equal(call(qkv, **options), before)


@having("mask")
def test_an_empty_row_gives_zeros_and_finite_gradients(mechanism):
  case = Case(batch=3)
  call = prepare(mechanism, case)
  qkv, _ = case.draw()
  mask = np.ones((3, 1, 1, 13), bool)
  mask[1] = False

  def loss(qkv):
    out = call(qkv, mask=mask)
    return (out**2).sum() + out.sum(), out

  gradient, out = jax.jit(jax.grad(loss, has_aux=True))(qkv)
  assert not np.asarray(out[1]).any()
  assert np.asarray(out[0]).any()
  for grad in gradient:
    assert np.isfinite(grad).all()
    assert not np.asarray(grad[1]).any()


@having("segments")
def test_a_segment_of_its_own_gives_zeros(mechanism):
  case = Case()
  call = prepare(mechanism, case)
  qkv, _ = case.draw()
  ids = np.zeros((2, 13), np.int32)
  alone = np.array(ids)
  alone[:, 4] = 7
  out = call(qkv, query_segment_ids=alone, key_segment_ids=ids)
  assert not np.asarray(out[:, 4]).any()
  assert np.asarray(out[:, 5]).any()


@both_directions
def test_huge_logits_stay_finite(mechanism, is_causal):
  case = Case(("mask",))
  call = prepare(mechanism, case, is_causal=is_causal)
  (query, key, value), options = case.draw()
  # |key|² / √H = 1e4, and queries along the keys or against them.
  key *= np.sqrt(1e4 * np.sqrt(8)) / np.linalg.norm(key, axis=-1, keepdims=True)
  along = np.repeat(key, 2, axis=2)
  query *= np.linalg.norm(key[0, 0, 0]) / np.sqrt(8)

  @jax.jit
  def run(*qkv):
    out, vjp = jax.vjp(lambda *qkv: call(qkv, **options), *qkv)
    return out, *vjp(jnp.ones_like(out))

  for q in (along, -along, query):
    for array in run(q, key, value):
      assert np.isfinite(array).all()


@having("mask")
def test_examples_do_not_touch_each_other(mechanism):
  case = Case(("mask",), batch=3)
  call = prepare(mechanism, case)
  qkv, options = case.draw()
  before = call(qkv, **options)
  for x in qkv:
    x[1:] = 1e3 * x[1:]
  options["mask"][2] = False
  np.testing.assert_array_equal(call(qkv, **options)[0], before[0])
  alone = call([x[:1] for x in qkv], **{k: x[:1] for k, x in options.items()})
  assert_close(alone[0], before[0], 1e-6)


@having("rowwise")
def test_each_query_stands_alone(mechanism):
  case = Case(("mask",))
  call = prepare(mechanism, case)
  qkv, options = case.draw()
  whole = call(qkv, **options)
  for rows in (slice(3, 8), slice(12, 13)):
    assert_close(
      call([qkv[0][:, rows], *qkv[1:]], **options), whole[:, rows], 1e-6
    )
