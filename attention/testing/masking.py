"""Nothing leaks: the future, padding, the batch, empty rows, huge logits."""

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
  pulled_back,
  separate,
)

# All laws are about the arrays of `Mechanism.draw_masked`, so that one program
# `backward` of a direction serves them.


@law("causal", bits=True)
def future_changes_nothing(mechanism: Mechanism) -> None:
  """With is_causal=True, query t may see keys s ≤ t only.

  In values, maxima and normalisers alike. Where a mechanism adds the same terms in
  another order (it sorts), past_error=1e-6 allows for the rounding.
  """
  long = mechanism.draw(LONG_CAUSAL.limited(mechanism.supports))
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
      replaced, raised = ([np.array(x) for x in qkv] for _ in range(2))
      for x, y in zip(replaced, raised, strict=True):
        x[:, position] = x[:, position, :, ::-1].copy()
        y[:, position] += 30.0
      place = f"a change at position {position} of {length}"
      for changed in (replaced, raised):
        after = run(changed)
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
    x[:, 7:] = np.nan
  call["mask"] = np.broadcast_to(np.arange(13) < 7, call["mask"].shape)
  out, _ = backward(mechanism, is_causal, padded, call)
  causal = {"is_causal": True} if is_causal else {}
  alone = mechanism.define(mechanism.variables(Case().dims), short, **causal)
  assert_close(np.asarray(out)[:, :7], alone, 1e-5, "the padded result")


@law("mask", bits=True, each_direction=True)
def hidden_positions_may_hold_anything(
  mechanism: Mechanism, is_causal: bool
) -> None:
  """Keys, values and gates that a key mask hides must not change a bit.

  Of results and gradients, whatever they hold: NaN, infinity, large numbers. Their own
  gradient may be NaN, if they are. NaN gets through a product even with a weight of
  zero, so set them to zero first (`Visible.readable`), ahead of functions that have
  parameters. A query that is NaN must change its own result alone.
  """
  qkv, call = mechanism.draw_masked()
  hidden = ~call["mask"][:, 0, 0, :]
  gates = mechanism.gates(qkv)
  expected = _all_results(mechanism, is_causal, qkv, call | gates)
  for content in (np.nan, np.inf, 1e4):
    padded = [qkv[0], *(_filled(x, hidden, content) for x in qkv[1:])]
    call |= {name: _filled(x, hidden, content) for name, x in gates.items()}
    got = _all_results(mechanism, is_causal, padded, call)
    _same(got, expected, content, hidden, gates)
    padded[0] = _filled(qkv[0], hidden, content)
    out = _all_results(mechanism, is_causal, padded, call)["the result"]
    assert_same_bits(
      out[~hidden],
      expected["the result"][~hidden],
      f"a query of {content} changes the results of other queries",
    )


@law("full_mask", bits=True, each_direction=True)
def hidden_from_every_query(mechanism: Mechanism, is_causal: bool) -> None:
  """A mask of pairs may hide a key from every query, or have one row for all.

  What the key and its value hold must change nothing then, as with a key mask.
  """
  qkv, call = mechanism.draw_masked()
  hidden, gates = np.arange(13) % 4 == 1, mechanism.gates(qkv)
  # Gates of decay count between keys, unless a key mask hides their position.
  keys = gates if "own_keys" in mechanism.supports else {}
  pairs = np.random.default_rng(1).random((8, 4, 13, 13)) < 0.7
  for mask in (
    ~hidden[None, None, None],
    pairs & ~hidden,
    pairs[:, :1] & ~hidden,
  ):
    call |= {"mask": mask, **gates}
    expected = _all_results(mechanism, is_causal, qkv, call)
    padded = [qkv[0], *(_filled(x, np.s_[:, hidden], np.nan) for x in qkv[1:])]
    call |= {k: _filled(x, np.s_[:, hidden], np.nan) for k, x in keys.items()}
    got = _all_results(mechanism, is_causal, padded, call)
    _same(got, expected, np.nan, np.broadcast_to(hidden, (8, 13)), keys)


def _filled(x: Any, where: Any, content: float) -> np.ndarray:
  x = np.array(x)
  x[where] = content
  return x


def _all_results(
  mechanism: Mechanism, is_causal: bool, qkv: Any, call: dict[str, Any]
) -> dict[str, np.ndarray]:
  """The result, and gradients of all that has any, by their names."""
  call = {**call, **({"is_causal": True} if is_causal else {})}
  parts = separate(mechanism, mechanism.variables(Case().dims), qkv, call)
  cotangent = np.random.default_rng(2).standard_normal(qkv[0].shape, np.float32)
  out, gradient = pulled_back(mechanism)(*parts, cotangent)
  leaves, _ = jax.tree_util.tree_flatten_with_path(gradient)
  results = {"the result": np.asarray(out)}
  for path, x in leaves:
    name = f"the gradient of {jax.tree_util.keystr(path)}"
    results[name] = np.asarray(x)
  return results


def _same(
  got: dict[str, Any],
  expected: dict[str, Any],
  content: float,
  hidden: np.ndarray,
  filled: Any,
) -> None:
  """What was `filled` has no gradient where it is hidden, but what 0 · NaN is."""
  own = tuple(f"['{name}']" for name in ("key", "value", *filled))
  for name, x in got.items():
    told, y = f"{content} where the mask hides changes {name}", expected[name]
    if name.endswith(own):
      require(not y[hidden].any(), f"{name} is not zero where the mask hides")
      is_number = ~hidden | np.isfinite(content)
      x, y = x[is_number], y[is_number]
    assert_same_bits(x, y, told)


@law("mask", each_direction=True)
def empty_rows_give_zeros(mechanism: Mechanism, is_causal: bool) -> None:
  """A query that may attend to nothing gives zeros, with gradients of zero.

  `attention.softmax.rows.masked_softmax` does that.
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
  qkv, call = mechanism.draw_masked()
  before, _ = backward(mechanism, is_causal, qkv, call)
  for x in qkv:
    x[1:] *= 1e3
  if "mask" in call:
    call["mask"][2] = False
  after, _ = backward(mechanism, is_causal, qkv, call)
  told = "example 0 changes when others of its batch do"
  assert_same_bits(after[0], before[0], told)


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
