"""Nothing leaks: the future, padding, the batch, empty rows, huge logits."""

import numpy as np

from attention.testing.calls import (
  Case,
  assert_close,
  assert_same_bits,
  require,
)
from attention.testing.mechanism import (
  Mechanism,
  backward,
  forward,
  law,
)

# All laws are about the arrays of `Mechanism.draw_masked`, so that the two
# programs `forward` and `backward` of a direction serve them.


@law("causal", bits=True)
def future_changes_nothing(mechanism: Mechanism) -> None:
  """With is_causal=True, query t may see keys s ≤ t only.

  In values, maxima and normalisers alike. Where a mechanism adds the same terms in
  another order (it sorts), past_error=1e-6 allows for the rounding.
  """
  run = forward(mechanism, True)
  # The second length is more than one block.
  for length, positions in ((13, (12, 6, 1)), (150, (149, 75, 1))):
    qkv, call = mechanism.draw_masked(length, hides=False)
    others, _ = mechanism.draw_masked(length, seed=1)
    before = np.asarray(run(qkv, **call))
    for position in positions:
      replaced, raised = ([np.array(x) for x in qkv] for _ in range(2))
      for x, y, other in zip(replaced, raised, others, strict=True):
        x[:, position] = other[:, position]
        y[:, position] += 30.0
      place = f"a change at position {position} of {length}"
      for changed in (replaced, raised):
        after = np.asarray(run(changed, **call))
        moved = np.abs(after[:, :position] - before[:, :position]).max()
        require(
          moved <= mechanism.past_error,
          f"{place} moves earlier results by {moved:.2e}, which may be "
          f"{mechanism.past_error:.0e}",
        )
        require(
          (after[:, position] != before[:, position]).any(),
          f"{place} does not change the result there: a causal query sees its "
          "own position",
        )


@law("causal")
def future_has_no_gradient(mechanism: Mechanism) -> None:
  """With is_causal=True, a result has no gradient at later positions."""
  qkv, call = mechanism.draw_masked(hides=False)
  cotangent = np.zeros_like(qkv[0])
  cotangent[:, 5] = 1.0
  _, gradient = backward(mechanism, True, qkv, call, cotangent)
  for grad in map(np.asarray, gradient):
    # A sparse one may not see its own position.
    require(
      mechanism.sparse or np.abs(grad[:, 5]).max() > 0,
      "result 5 has no gradient at position 5",
    )
    require(
      not grad[:, 6:].any(), "result 5 has a gradient at positions after 5"
    )


@law("mask", where=lambda mechanism: mechanism.pads, each_direction=True)
def padding_changes_nothing(mechanism: Mechanism, is_causal: bool) -> None:
  """A sequence with masked padding behind it must give what it gives alone.

  pads=False says that the pattern depends on the length, padding included.
  """
  padded, call = mechanism.draw_masked()
  short = [x[:, :7].copy() for x in padded]
  for x in padded:
    x[:, 7:] = 1e4
  call["mask"] = np.broadcast_to(np.arange(13) < 7, call["mask"].shape)
  out, _ = backward(mechanism, is_causal, padded, call)
  causal = {"is_causal": True} if is_causal else {}
  alone = mechanism.define(mechanism.variables(Case().dims), short, **causal)
  assert_close(np.asarray(out)[:, :7], alone, 1e-5, "the padded result")


@law("mask", bits=True, each_direction=True)
def masked_keys_are_not_read(mechanism: Mechanism, is_causal: bool) -> None:
  """What a masked key and its value hold must not change the result by a bit.

  Mask logits before the softmax, or set masked keys and values to zero.
  """
  run = forward(mechanism, is_causal)
  qkv, call = mechanism.draw_masked()
  # The result is awaited: a call that still runs may read the same memory.
  before = np.asarray(run(qkv, **call))
  masked = ~call["mask"][:, 0, 0, :]
  for x in qkv[1:]:
    x[masked] = 1e4
  assert_same_bits(
    run(qkv, **call),
    before,
    "the result changes with keys and values that the mask hides",
  )


@law("mask", each_direction=True)
def empty_rows_give_zeros(mechanism: Mechanism, is_causal: bool) -> None:
  """A query that may attend to nothing gives zeros, with gradients of zero.

  `attention.softmax.masked_softmax` does that.
  """
  qkv, call = mechanism.draw_masked(hides=False)
  call["mask"][1] = False
  out, gradient = backward(mechanism, is_causal, qkv, call)
  out = np.asarray(out)
  require(
    not out[1].any(),
    "the example whose keys are all masked gives "
    f"{'NaN' if np.isnan(out[1]).any() else 'numbers'}, expected zeros",
  )
  require(out[0].any(), "the example whose keys are all visible gives zeros")
  for grad in map(np.asarray, gradient):
    require(np.isfinite(grad).all(), "a gradient is not finite")
    require(grad[0].any(), "the visible example has no gradient")
    require(
      not grad[1].any(),
      "the example whose keys are all masked has a gradient, expected zeros",
    )


@law("segments", each_direction=True)
def lone_segment_gives_zeros(mechanism: Mechanism, is_causal: bool) -> None:
  """A query whose segment has no key gives zeros.

  Compare query_segment_ids with key_segment_ids, leave out pairs that differ.
  """
  qkv, call = mechanism.draw_masked(hides=False)
  call["query_segment_ids"][:, 4] = 7
  out, gradient = backward(mechanism, is_causal, qkv, call)
  out = np.asarray(out)
  require(not out[:, 4].any(), "the query of another segment gives no zeros")
  require(out[:, 5].any(), "the query of the keys' segment gives zeros")
  for grad in gradient:
    require(np.isfinite(grad).all(), "a gradient is not finite")


@law(each_direction=True)
def huge_logits_stay_finite(mechanism: Mechanism, is_causal: bool) -> None:
  """Logits of ±10,000 must give finite results and gradients, near the values.

  Subtract the maximum before the exponential. bounded=False says that nothing
  divides the sum of values.
  """
  drawn, call = mechanism.draw_masked()
  query, key, value = drawn[0], drawn[1], drawn[-1]
  # |key|² / √H = 1e4; queries along the keys, against them and neither.
  key = key * np.sqrt(1e4 * np.sqrt(8))
  key /= np.linalg.norm(drawn[1], axis=-1, keepdims=True)
  along = np.repeat(key, 2, axis=2)
  query = query * np.linalg.norm(key[0, 0, 0]) / np.sqrt(8)
  for q in (along, -along, query):
    qkv = [q, value] if mechanism.shares_query_and_key else [q, key, value]
    out, gradient = backward(mechanism, is_causal, qkv, call)
    for x, name in (
      (out, "the result"),
      *((x, "a gradient") for x in gradient),
    ):
      require(np.isfinite(x).all(), f"{name} is not finite")
    largest = np.abs(out).max() / np.abs(value).max()
    near = largest <= 10 or not mechanism.bounded
    require(near, f"the result is {largest:.1e} times the values")


@law(each_direction=True)
def gradients_of_any_size(mechanism: Mechanism, is_causal: bool) -> None:
  """Gradients must be 1e18 times larger or smaller where the cotangent is.

  Squares of small and large numbers leave float32: an iteration in the backward
  pass should divide by the largest number first.
  """
  qkv, call = mechanism.draw_masked()
  _, expected = backward(mechanism, is_causal, qkv, call)
  for size in (1e-18, 1e18):
    cotangent = np.full(qkv[0].shape, size, np.float32)
    _, gradient = backward(mechanism, is_causal, qkv, call, cotangent)
    for i, (x, y) in enumerate(zip(gradient, expected, strict=True)):
      name = f"the gradient of array {i} for a cotangent of {size}"
      assert_close(x / size, y, 1e-5, name)


@law(bits=True, each_direction=True)
def examples_are_apart(mechanism: Mechanism, is_causal: bool) -> None:
  """An example must not change by a bit with others of its batch.

  Take no maximum, sum or norm over axis 0.
  """
  run = forward(mechanism, is_causal)
  qkv, call = mechanism.draw_masked()
  before = np.asarray(run(qkv, **call))
  for x in qkv:
    x[1:] *= 1e3
  if "mask" in call:
    call["mask"][2] = False
  assert_same_bits(
    np.asarray(run(qkv, **call))[0],
    before[0],
    "example 0 changes when others of its batch do",
  )


@law("rowwise")
def rowwise(mechanism: Mechanism) -> None:
  """A query alone must give what it gives among others.

  If the result depends on the query's position or on other queries, 'rowwise' must
  leave `supports`.
  """
  (query, *rest), call = mechanism.draw_masked()
  whole, _ = backward(mechanism, False, [query, *rest], call)
  if "query_segment_ids" in call:
    call["query_segment_ids"] = call["query_segment_ids"][:, 5:6]
  alone = forward(mechanism, False)([query[:, 5:6], *rest], **call)
  expected = np.asarray(whole)[:, 5:6]
  assert_close(alone, expected, 1e-6, "the result of one query alone")
