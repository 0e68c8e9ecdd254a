"""The definitions: of every mechanism, and of NumPy alone."""

import ast
import functools
import inspect
import pathlib

import numpy as np
import pytest

import attention
from attention import definitions
from attention.definitions import recurrent
from attention.definitions.shared import visible_pairs
from attention.testing import Case
from tests.attention.forms import FUNCTIONS
from tests.attention.mechanisms import ONE_EACH
from tests.refusals import assert_refused

# Arguments of the fast functions that do not say what is computed, but how, and
# dropout, whose draws are an implementation's own.
_HOW = {
  "dropout_rate",
  "dropout_rng",
  "block_size",
  "absorbed",
  "block_mask",
  "implementation",
  "num_iterations",
  # Of shards.
  "axis_name",
  "in_parts",
  # Other ways to say the same, and the log-sum-exp beside the result.
  "visible",
  "logits",
  "return_lse",
}
# Their blocks are what they attend to.
_HOW_OF = dict.fromkeys(("bigbird", "moba", "nsa"), _HOW - {"block_size"})
# NumPy's own, where the fast function has one of JAX.
_OTHER_DEFAULT = {"feature_map"}

by_name = pytest.mark.parametrize(
  "name",
  [
    *FUNCTIONS,
    "gated_linear",
    "delta_rule",
    "delta_product",
    "mamba",
    "mlstm",
    "momentum_delta",
    "rg_lru",
    "gka",
    "gsa",
    "precond_delta",
    "titans",
    "ttt_linear",
    "rwkv6",
    "rwkv7",
    "mesa",
    "log_linear",
  ],
)


@by_name
def test_the_arguments_are_those_of_the_fast_function(name):
  """By name, or among the `**options` that a definition hands on."""
  function = f"{name}_attention"
  assert function in definitions.__all__
  fast = inspect.signature(getattr(attention, function)).parameters
  definition = inspect.signature(getattr(definitions, function)).parameters
  how = _HOW_OF.get(name, _HOW)
  expected = {x: p for x, p in fast.items() if x not in how}
  named = {x: p for x, p in definition.items() if x != "options"}
  assert set(named) <= set(expected)
  if "options" in definition:
    takes = inspect.signature(_hands_on_to(name)).parameters
    assert set(expected) - set(named) <= set(takes)
  else:
    assert set(named) == set(expected)
  for argument, parameter in named.items():
    assert parameter.kind == expected[argument].kind, argument
    if argument not in _OTHER_DEFAULT:
      assert parameter.default == expected[argument].default, argument


def _hands_on_to(name):
  """The function that the options of a definition go to."""
  if name in ("linear", "performer", "window_linear", "additive"):
    return visible_pairs
  if name == "gated_linear":
    return definitions.delta_rule_attention
  if name in ("mesa", "gka", "momentum_delta", "log_linear"):
    return recurrent.segment_starts
  if name in ("delta_product", "mamba", "rwkv7"):
    return recurrent.recurrence
  return definitions.dense_attention


def test_they_are_of_numpy_alone():
  """No JAX, and nothing of what they define the results of."""
  allowed = {
    "collections.abc",
    "jaxtyping",
    "numpy",
    "functools",
    "numpy.typing",
    "typing",
  }
  files = list(pathlib.Path(definitions.__file__).parent.glob("*.py"))
  assert len(files) > len(FUNCTIONS)
  for file in files:
    for node in ast.walk(ast.parse(file.read_text())):
      match node:
        case ast.Import(names=names):
          modules = [alias.name for alias in names]
        case ast.ImportFrom(module=module):
          modules = [module]
        case _:
          continue
      for module in modules:
        own = f"{module}.".startswith("attention.definitions.")
        assert own or module in allowed, f"{file.name}: {module}"


def call_of(mechanism, case):
  """The definition with its variables, arrays, and options of the call."""
  variables = mechanism.variables(case.dims)
  arrays, call = mechanism.draw(case)
  define = functools.partial(mechanism.definition, variables)
  if mechanism.record.causal_only:
    define = functools.partial(define, is_causal=True)
  return define, arrays, call


@pytest.mark.parametrize("mechanism", ONE_EACH, ids=str)
def test_what_a_definition_keeps_to(mechanism):
  """All of them in turn, because they share variables, which a program makes."""
  masks = "mask" in mechanism.supports
  for law in (is_float64, hides, masks_broadcast) if masks else ():
    law(mechanism)
  define, arrays, call = call_of(mechanism, Case(("full_mask",)))
  if mechanism.name in ("linformer", "nystrom", "lsh"):
    # A mask along queries.
    with pytest.raises(ValueError, match="broadcast"):
      define(*arrays, **call)
  record = mechanism.record
  if record.causal_only or "causal" not in mechanism.supports:
    expected = record.causal_only
    with pytest.raises(ValueError, match=f"^is_causal: expected {expected}"):
      define(*arrays, is_causal=not expected)


def is_float64(mechanism):
  """And zero where nothing is seen."""
  case = mechanism.limited(Case(("mask",), value_dim=5))
  define, arrays, call = call_of(mechanism, case)
  out = define(*arrays, **call)
  assert isinstance(out, np.ndarray)
  assert out.dtype == np.float64
  assert out.shape == (case.batch, case.length, case.num_heads, case.value_dim)
  # Nested lists do as well.
  np.testing.assert_array_equal(
    define(arrays[0], *(x.tolist() for x in arrays[1:]), **call), out
  )
  mask = call["mask"].copy()
  mask[0] = False
  empty = define(*arrays, mask=mask)
  assert not empty[0].any()
  np.testing.assert_array_equal(empty[1], out[1])


def hides(mechanism):
  """What a masked key holds changes nothing."""
  define, arrays, call = call_of(mechanism, Case(("mask",)))
  expected = define(*arrays, **call)
  kept = call["mask"][:, 0, 0, :, None, None]
  for fill in (1e30, np.inf, np.nan):
    filled = [np.where(kept, x, fill) for x in arrays]
    if not mechanism.shares_query_and_key:
      filled[0] = arrays[0]
    np.testing.assert_array_equal(define(*filled, **call), expected)


def masks_broadcast(mechanism):
  """Each axis of a mask is whole or 1; whole along T and N where it may."""
  full = "full_mask" in mechanism.supports
  case = Case(("full_mask" if full else "mask",))
  define, arrays, call = call_of(mechanism, case)
  whole = (case.batch, 1, 1, case.keys)
  if full:
    whole = (case.batch, case.num_heads, case.length, case.keys)
  for axes in (0,), (3,), (0, 1, 2), (1, 2, 3):
    mask = call["mask"]
    for axis in axes:
      mask = mask.take([0], axis=axis)
    np.testing.assert_array_equal(
      define(*arrays, mask=mask),
      define(*arrays, mask=np.broadcast_to(mask, whole)),
    )


def test_options_need_what_they_go_with():
  arrays, call = Case(("segments",)).draw()
  del call["key_segment_ids"]
  with pytest.raises(ValueError, match=r"^query_segment_ids, key_segment_ids"):
    definitions.dense_attention(*arrays, **call)
  arrays, call = Case(("global", "relative")).draw()
  window = functools.partial(
    definitions.sliding_window_attention, *arrays, window=1
  )
  assert_refused(
    window, ("global_indices", call), {"global_qkv": tuple(arrays)}
  )
