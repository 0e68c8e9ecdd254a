"""Nothing leaks: the future, padding, the batch, empty rows, huge logits."""

from functools import partial
from typing import Any

import jax
import numpy as np

from attention.testing.calls import (
  Case,
  assert_close,
  assert_same_bits,
  require,
)
from attention.testing.check import Check, directions
from attention.testing.mechanism import Mechanism, shared

_CASE = Case(("mask",), batch=3)
_EVERY_KEY = np.ones((3, 1, 1, _CASE.length), bool)


@shared
def _forward(mechanism, is_causal):
  """The jitted call `(qkv, **arrays) -> out`."""
  variables = mechanism.variables(_CASE.dims)

  @jax.jit
  def call(qkv, **arrays):
    return mechanism.attention.apply(
      variables, *qkv, is_causal=is_causal, **arrays
    )

  return call


@shared
def _backward(mechanism, is_causal):
  """`(qkv, cotangent, mask) -> gradients of query, key, value`, compiled."""
  call = _forward(mechanism, is_causal)

  @jax.jit
  def gradient(qkv, cotangent, mask):
    return jax.vjp(lambda qkv: call(qkv, **mask), qkv)[1](cotangent)[0]

  return lambda *args: jax.device_get(gradient(*args))


def _drawn(mechanism: Mechanism) -> tuple[list, dict[str, Any]]:
  """Arrays and a key mask; no mask where the mechanism has none."""
  masked = "mask" in mechanism.supports
  return mechanism.draw(_CASE if masked else _CASE._replace(options=()))


def _whole(mechanism: Mechanism) -> dict[str, Any]:
  """A mask that hides nothing, as an option of the programs above."""
  return {"mask": _EVERY_KEY} if "mask" in mechanism.supports else {}


def _past_keeps(mechanism, call, length, position):
  """Requires that changes at `position` leave what is before as it is."""
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
    require(
      moved <= mechanism.past_error,
      f"a change at position {position} of {length} moves earlier results by "
      f"{moved:.2e}, which may be {mechanism.past_error:.0e}",
    )
    require(
      (after[:, position] != before[:, position]).any(),
      f"a change at position {position} of {length} does not change the result "
      "there: a causal query sees its own position",
    )


def _future(mechanism: Mechanism) -> None:
  call = partial(_forward(mechanism, True), **_whole(mechanism))
  for position in (12, 6, 1):
    _past_keeps(mechanism, call, _CASE.length, position)


def _future_over_blocks(mechanism: Mechanism) -> None:
  for position in (149, 75, 1):
    _past_keeps(mechanism, _forward(mechanism, True), 150, position)


def _future_gradient(mechanism: Mechanism) -> None:
  qkv, _ = _drawn(mechanism)
  cotangent = np.zeros_like(qkv[0])
  cotangent[:, 5] = 1.0
  gradient = _backward(mechanism, True)
  for grad in gradient(qkv, cotangent, _whole(mechanism)):
    require(
      np.abs(grad[:, 5]).max() > 0, "result 5 has no gradient at position 5"
    )
    require(
      not grad[:, 6:].any(),
      "result 5 has a gradient at positions after 5",
    )


def _padding(mechanism: Mechanism, is_causal: bool) -> None:
  call = _forward(mechanism, is_causal)
  padded, _ = _drawn(mechanism)
  short = [x[:, :7] for x in padded]
  for x in padded:
    x[:, 7:] = 1e4
  mask = _EVERY_KEY & (np.arange(_CASE.length) < 7)
  out = np.asarray(call(padded, mask=mask))
  assert_close(out[:, :7], call(short), 1e-6, "the padded result")


def _masked_keys(mechanism: Mechanism, is_causal: bool) -> None:
  call = _forward(mechanism, is_causal)
  qkv, options = _drawn(mechanism)
  # The result is awaited: a call that still runs may read the same memory.
  before = np.asarray(call(qkv, **options))
  masked = ~options["mask"][:, 0, 0, :]
  for x in qkv[1:]:
    x[masked] = 1e4
  assert_same_bits(
    call(qkv, **options),
    before,
    "the result changes with keys and values that the mask hides",
  )


def _empty_rows(mechanism: Mechanism, is_causal: bool) -> None:
  qkv, _ = _drawn(mechanism)
  mask = _EVERY_KEY.copy()
  mask[1] = False
  out = np.asarray(_forward(mechanism, is_causal)(qkv, mask=mask))
  require(
    not out[1].any(),
    "the example whose keys are all masked gives "
    f"{'NaN' if np.isnan(out[1]).any() else 'numbers'}, expected zeros",
  )
  require(out[0].any(), "the example whose keys are all visible gives zeros")
  cotangent = np.ones_like(qkv[0])
  gradient = _backward(mechanism, is_causal)
  for grad in gradient(qkv, cotangent, {"mask": mask}):
    require(np.isfinite(grad).all(), "a gradient is not finite")
    require(grad[0].any(), "the visible example has no gradient")
    require(
      not grad[1].any(),
      "the example whose keys are all masked has a gradient, expected zeros",
    )


def _lone_segment(mechanism: Mechanism) -> None:
  qkv, _ = _drawn(mechanism)
  ids = np.zeros((3, _CASE.length), np.int32)
  alone = np.array(ids)
  alone[:, 4] = 7
  out = np.asarray(
    _forward(mechanism, mechanism.record.causal_only)(
      qkv, query_segment_ids=alone, key_segment_ids=ids
    )
  )
  require(not out[:, 4].any(), "the query of another segment gives no zeros")
  require(out[:, 5].any(), "the query of the keys' segment gives zeros")


def _huge_logits(mechanism: Mechanism, is_causal: bool) -> None:
  (query, key, value), _ = _CASE.draw()
  _, options = _drawn(mechanism)
  # |key|² / √H = 1e4; queries along the keys, against them and neither.
  key *= np.sqrt(1e4 * np.sqrt(8)) / np.linalg.norm(key, axis=-1, keepdims=True)
  along = np.repeat(key, 2, axis=2)
  query *= np.linalg.norm(key[0, 0, 0]) / np.sqrt(8)
  for q in (along, -along, query):
    qkv = [q, value] if mechanism.shares_query_and_key else [q, key, value]
    out = np.asarray(_forward(mechanism, is_causal)(qkv, **options))
    require(np.isfinite(out).all(), "the result is not finite")
    largest = np.abs(out).max() / np.abs(value).max()
    near = largest <= 10 or not mechanism.bounded
    require(near, f"the result is {largest:.1e} times the values")
    cotangent = np.ones_like(query)
    for grad in _backward(mechanism, is_causal)(qkv, cotangent, options):
      require(np.isfinite(grad).all(), "a gradient is not finite")


def _examples(mechanism: Mechanism, is_causal: bool) -> None:
  call = _forward(mechanism, is_causal)
  qkv, options = _drawn(mechanism)
  before = np.asarray(call(qkv, **options))
  for x in qkv:
    x[1:] *= 1e3
  if options:
    options["mask"][2] = False
  assert_same_bits(
    np.asarray(call(qkv, **options))[0],
    before[0],
    "example 0 changes when others of its batch do",
  )


def _rowwise(mechanism: Mechanism) -> None:
  call = _forward(mechanism, False)
  (query, *rest), options = _drawn(mechanism)
  whole = np.asarray(call([query, *rest], **options))
  alone = call([query[:, 5:6], *rest], **options)
  assert_close(alone, whole[:, 5:6], 1e-6, "the result of one query alone")


def _both(name, law, advice, *needs, **facts):
  """The law in both directions and causal."""

  def make(is_causal):
    run = partial(law, is_causal=is_causal)
    return Check(name, run, advice, frozenset(needs), **facts)

  return directions(make)


_CAUSAL = frozenset({"causal"})
_FUTURE = (
  "With is_causal=True, query t may see keys s ≤ t only, in values, maxima and "
  "normalisers alike. Where a mechanism adds the same terms in another order "
  "(it sorts), past_error=1e-6 allows for the rounding."
)

CHECKS = (
  Check("future_changes_nothing", _future, _FUTURE, _CAUSAL, bits=True),
  Check(
    "future_changes_nothing_over_blocks",
    _future_over_blocks,
    _FUTURE,
    _CAUSAL,
    bits=True,
  ),
  Check("future_has_no_gradient", _future_gradient, _FUTURE, _CAUSAL),
  *_both(
    "padding_changes_nothing",
    _padding,
    "A sequence with masked padding behind it must give what the sequence gives "
    "alone. pads=False says that the pattern depends on the length, padding "
    "included.",
    "mask",
    where=lambda mechanism: mechanism.pads,
  ),
  *_both(
    "masked_keys_are_not_read",
    _masked_keys,
    "What a masked key and its value hold must not change the result by a bit: "
    "mask logits before the softmax, or set masked keys and values to zero.",
    "mask",
    bits=True,
  ),
  *_both(
    "empty_rows_give_zeros",
    _empty_rows,
    "A query that may attend to nothing gives zeros, with gradients that are "
    "zero and finite. attention.softmax.masked_softmax does that.",
    "mask",
  ),
  Check(
    "lone_segment_gives_zeros",
    _lone_segment,
    "A query whose segment has no key gives zeros. Compare query_segment_ids "
    "with key_segment_ids, and leave out pairs that differ.",
    frozenset({"segments"}),
  ),
  *_both(
    "huge_logits_stay_finite",
    _huge_logits,
    "Logits of ±10,000 must give finite results and gradients, and results not "
    "far above the values: subtract the maximum before the exponential. "
    "bounded=False says that nothing divides the sum of values.",
  ),
  *_both(
    "examples_are_apart",
    _examples,
    "An example must not change by a bit with others of its batch: take no "
    "maximum, sum or norm over axis 0.",
    bits=True,
  ),
  Check(
    "rowwise",
    _rowwise,
    "A query alone must give what it gives among others. If the result depends "
    "on the query's position or on other queries, 'rowwise' must leave "
    "`supports`.",
    frozenset({"rowwise"}),
  ),
)
