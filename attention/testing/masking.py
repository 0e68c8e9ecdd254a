"""Laws of masks: the future, padding, other examples, empty rows and huge logits."""

from typing import Any

import jax
import numpy as np

from attention.testing.calls import (
  LONG_CAUSAL,
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
  separate,
  vjp_program,
)

# All laws use the arrays of `Mechanism.draw_masked`, so that they share one program
# `backward` per direction.


@law("causal", bits=True)
def future_changes_nothing(mechanism: Mechanism) -> None:
  """With is_causal=True, query t must see only keys s ≤ t.

  This holds for values, maxima and normalisers. If a mechanism may add the same terms
  in another order, for example because it sorts, past_error=1e-6 allows for rounding.
  """
  long = mechanism.draw(mechanism.limited(LONG_CAUSAL))
  if "mask" in long[1]:
    long[1]["mask"] = np.ones_like(long[1]["mask"])
  for (qkv, call), dims, positions in (
    (mechanism.draw_masked(hides=False), Case().dims, (12, 6, 1)),
    (long, LONG_CAUSAL.dims, (306, 150, 1)),
  ):

    def run(qkv, call=call, dims=dims):
      return np.asarray(backward(mechanism, True, qkv, call, dims=dims)[0])

    before, length = run(qkv), qkv[0].shape[1]
    for position in positions:
      reversed_features, shifted = (
        [np.array(x) for x in qkv] for _ in range(2)
      )
      for x, y in zip(reversed_features, shifted, strict=True):
        x[:, position] = x[:, position, :, ::-1].copy()
        y[:, position] += 30.0
      change = f"a change at position {position} of {length}"
      for changed in (reversed_features, shifted):
        after = run(changed)
        error = np.abs(after[:, :position] - before[:, :position]).max()
        require(
          error <= mechanism.past_error,
          f"{change} moves earlier results by {error:.2e}, which may be "
          f"{mechanism.past_error:.0e}",
        )
        require(
          (after[:, position] != before[:, position]).any(),
          f"{change} does not change the result there: a causal query sees its "
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
    # In a sparse mechanism, a query may not see its own position.
    require(
      mechanism.sparse or np.abs(grad[:, 5]).max() > 0,
      "result 5 has no gradient at position 5",
    )
    require(
      not grad[:, 6:].any(), "result 5 has a gradient at positions after 5"
    )


@law("mask", where=lambda mechanism: mechanism.pads, each_direction=True)
def padding_changes_nothing(mechanism: Mechanism, is_causal: bool) -> None:
  """Masked padding at the end must not change the results of a sequence.

  pads=False declares that the pattern depends on the length, including padding.
  """
  qkv, call = mechanism.draw_masked()
  short = [x[:, :7] for x in qkv]
  padded = [_fill(x, np.s_[:, 7:], np.nan) for x in qkv]
  call["mask"] = np.broadcast_to(np.arange(13) < 7, call["mask"].shape)
  out, _ = backward(mechanism, is_causal, padded, call)
  causal = {"is_causal": True} if is_causal else {}
  alone = mechanism.define(mechanism.variables(Case().dims), short, **causal)
  assert_close(np.asarray(out)[:, :7], alone, 1e-5, "the padded result")


@law("mask", bits=True, each_direction=True)
def hidden_positions_may_hold_anything(
  mechanism: Mechanism, is_causal: bool
) -> None:
  """Masked keys, values and gates must not change a bit of results and gradients.

  This holds for any content: NaN, infinity, large numbers. The gradient of a masked
  position may be NaN if its content is. NaN times a weight of zero is NaN, so set
  masked positions to zero first (`Visible.readable`), before functions that have
  parameters. A query that is NaN must affect only its own result.
  """
  qkv, call = mechanism.draw_masked()
  masked = ~call["mask"][:, 0, 0, :]
  gates = mechanism.gates(qkv)
  expected = _all_results(mechanism, is_causal, qkv, call | gates)
  for content in (np.nan, np.inf, 1e4):
    padded = [qkv[0], *(_fill(x, masked, content) for x in qkv[1:])]
    call |= {name: _fill(x, masked, content) for name, x in gates.items()}
    got = _all_results(mechanism, is_causal, padded, call)
    _compare(got, expected, content, masked, gates)
    padded[0] = _fill(qkv[0], masked, content)
    out = _all_results(mechanism, is_causal, padded, call)["the result"]
    assert_same_bits(
      out[~masked],
      expected["the result"][~masked],
      f"a query of {content} changes the results of other queries",
    )


@law("full_mask", bits=True, each_direction=True)
def hidden_from_every_query(mechanism: Mechanism, is_causal: bool) -> None:
  """A key that a full mask hides from every query must not affect any result.

  This holds also for a full mask with one row for all queries, as for a key mask. A mask
  of all heads must give the results of the same mask for each head.
  """
  qkv, call = mechanism.draw_masked()
  masked, gates = np.arange(13) % 4 == 1, mechanism.gates(qkv)
  # Decays between keys count unless a key mask excludes their position.
  keys = gates if "own_keys" in mechanism.supports else {}
  pairs = np.random.default_rng(1).random((8, 4, 13, 13)) < 0.7
  for mask in (
    ~masked[None, None, None],
    pairs & ~masked,
    pairs[:, :1] & ~masked,
  ):
    call |= {"mask": mask, **gates}
    expected = _all_results(mechanism, is_causal, qkv, call)
    padded = [qkv[0], *(_fill(x, np.s_[:, masked], np.nan) for x in qkv[1:])]
    call |= {k: _fill(x, np.s_[:, masked], np.nan) for k, x in keys.items()}
    got = _all_results(mechanism, is_causal, padded, call)
    _compare(got, expected, np.nan, np.broadcast_to(masked, (8, 13)), keys)
  # `expected` has the last mask, which is one for all heads.
  call |= {"mask": np.repeat(mask, 4, axis=1), **gates}
  by_head = _all_results(mechanism, is_causal, qkv, call)
  for name, x in by_head.items():
    assert_close(expected[name], x, 1e-5, f"with a mask of all heads, {name}")


def _fill(x: Any, where: Any, content: float) -> np.ndarray:
  x = np.array(x)
  x[where] = content
  return x


def _all_results(
  mechanism: Mechanism, is_causal: bool, qkv: Any, call: dict[str, Any]
) -> dict[str, np.ndarray]:
  """The result, and the gradients of all differentiable arrays, by name."""
  call = {**call, **({"is_causal": True} if is_causal else {})}
  inputs = separate(mechanism, mechanism.variables(Case().dims), qkv, call)
  cotangent = np.random.default_rng(2).standard_normal(qkv[0].shape, np.float32)
  out, gradient = vjp_program(mechanism)(*inputs, cotangent)
  leaves, _ = jax.tree_util.tree_flatten_with_path(gradient)
  results = {"the result": np.asarray(out)}
  for path, x in leaves:
    name = f"the gradient of {jax.tree_util.keystr(path)}"
    results[name] = np.asarray(x)
  return results


def _compare(
  got: dict[str, Any],
  expected: dict[str, Any],
  content: float,
  masked: np.ndarray,
  filled: Any,
) -> None:
  """Compares results; gradients of `filled` arrays must be 0 or NaN where masked."""
  own = tuple(f"['{name}']" for name in ("key", "value", *filled))
  for name, x in got.items():
    y, message = expected[name], f"{content} at masked positions changes {name}"
    if name.endswith(own):
      require(not y[masked].any(), f"{name} is not zero at masked positions")
      is_finite = ~masked | np.isfinite(content)
      x, y = x[is_finite], y[is_finite]
    assert_same_bits(x, y, message)


@law("mask", each_direction=True)
def empty_rows_give_zeros(mechanism: Mechanism, is_causal: bool) -> None:
  """A query that may attend to nothing must give zeros, with gradients of zero.

  `attention.softmax.rows.masked_softmax` does this.
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
  """A query whose segment has no key must give zeros.

  Mask pairs in which query_segment_ids and key_segment_ids differ.
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
  """Logits of ±10,000 must give finite gradients, and results of the size of the
  values.

  Subtract the maximum before the exponential. bounded=False declares that the sum of
  values is not normalised.
  """
  drawn, call = mechanism.draw_masked()
  query, key, value = drawn[0], drawn[1], drawn[-1]
  # |key|² / √H = 1e4; queries parallel to the keys, opposite to them, and random.
  key = key * np.sqrt(1e4 * np.sqrt(8))
  key /= np.linalg.norm(drawn[1], axis=-1, keepdims=True)
  parallel = np.repeat(key, 2, axis=2)
  query = query * np.linalg.norm(key[0, 0, 0]) / np.sqrt(8)
  for q in (parallel, -parallel, query):
    qkv = [q, value] if mechanism.shares_query_and_key else [q, key, value]
    out, gradient = backward(mechanism, is_causal, qkv, call)
    for x, name in (
      (out, "the result"),
      *((x, "a gradient") for x in gradient),
    ):
      require(np.isfinite(x).all(), f"{name} is not finite")
    largest = np.abs(out).max() / np.abs(value).max()
    is_bounded = largest <= 10 or not mechanism.bounded
    require(is_bounded, f"the result is {largest:.1e} times the values")


@law(each_direction=True)
def gradients_of_any_size(mechanism: Mechanism, is_causal: bool) -> None:
  """Gradients must scale with cotangents that are 1e18 times larger or smaller.

  Squares of such numbers leave the range of float32, so an iteration in the backward
  pass should first divide by the largest number.
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
  """Other examples of a batch must not change a bit of an example's result.

  Do not take a maximum, sum or norm over axis 0.
  """
  qkv, call = mechanism.draw_masked()
  before, _ = backward(mechanism, is_causal, qkv, call)
  changed = [np.concatenate([x[:1], 1e3 * x[1:]]) for x in qkv]
  if "mask" in call:
    call["mask"] = _fill(call["mask"], 2, False)
  after, _ = backward(mechanism, is_causal, changed, call)
  message = "example 0 changes when others of its batch do"
  assert_same_bits(after[0], before[0], message)


@law("rowwise")
def rowwise(mechanism: Mechanism) -> None:
  """The result of a query must not depend on the other queries.

  If it depends on the query's position or on other queries, remove 'rowwise' from
  `supports`.
  """
  (query, *rest), call = mechanism.draw_masked()
  whole, _ = backward(mechanism, False, [query, *rest], call)
  if "query_segment_ids" in call:
    call["query_segment_ids"] = call["query_segment_ids"][:, 5:6]
  alone = forward(mechanism, False)([query[:, 5:6], *rest], **call)
  expected = np.asarray(whole)[:, 5:6]
  assert_close(alone, expected, 1e-6, "the result of one query alone")
