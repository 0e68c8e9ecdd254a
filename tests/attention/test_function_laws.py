"""Each law of attention functions finds the fault that breaks it, and no other."""

import dataclasses
import inspect
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

from flax import linen, nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.testing import FUNCTION_LAWS, Function, check_function, run_laws
from attention.testing.modules import from_equinox, from_linen, from_nnx

ROOT = pathlib.Path(__file__).parents[2]

T = 9


# Plainly written, so that each fault is a change of one line.
def softmax_attention(
  query,
  key,
  value,
  *,
  mask=None,
  bias=None,
  is_causal=False,
  scale=None,
  window=None,
  segment_ids=None,
  cu_seqlens=None,
):
  """Attention by its formula; what is masked is never read."""
  dtype, steps = query.dtype, jnp.arange(query.shape[1])
  query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
  if mask is not None:
    rows = jnp.swapaxes(mask, 1, -1)
    key, value = jnp.where(rows, key, 0.0), jnp.where(rows, value, 0.0)
  groups = query.shape[2] // key.shape[2]
  key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
  scale = query.shape[-1] ** -0.5 if scale is None else scale
  logits = scale * jnp.einsum("btnh,bsnh->bnts", query, key)
  if bias is not None:
    logits += bias
  far = steps[:, None] - steps[None]
  visible = jnp.ones((1, 1, *far.shape), bool)
  if is_causal:
    visible &= (far >= 0)[None, None]
  if mask is not None:
    visible &= mask
  if cu_seqlens is not None:
    segment_ids = jnp.searchsorted(cu_seqlens[1:], steps, side="right")[None]
  if segment_ids is not None:
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    visible &= same[:, None]
  if window is not None:
    visible &= (abs(far) <= window)[None, None]
  logits = jnp.where(visible, logits, -1e30)
  logits -= jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.exp(logits) * visible
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights /= jnp.where(total == 0.0, 1.0, total)
  pairs = weights[..., None] * jnp.swapaxes(value, 1, 2)[:, :, None]
  pairs = jnp.where(visible[..., None], pairs, 0.0)
  return jnp.swapaxes(jnp.sum(pairs, axis=-2), 1, 2).astype(dtype)


def recurrence(
  query, key, value, *, mask=None, initial_state=None, return_state=False
):
  """S_t = a_t S_{t−1} + k_t v_tᵀ, out_t = S_tᵀ q_t, with a decay from the key."""
  dtype = query.dtype
  query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
  decay = jax.nn.sigmoid(key[..., :1])
  if mask is not None:
    rows = jnp.swapaxes(mask, 1, -1)
    key, value = jnp.where(rows, key, 0.0), jnp.where(rows, value, 0.0)
    decay = jnp.where(rows, decay, 1.0)
  state = jnp.zeros((*query[:, 0].shape, value.shape[-1]))
  if initial_state is not None:
    state = initial_state
  out = []
  for t in range(query.shape[1]):
    write = key[:, t, :, :, None] * value[:, t, :, None]
    state = decay[:, t, :, None] * state + write
    out.append(jnp.einsum("bnh,bnhv->bnv", query[:, t], state))
  out = jnp.stack(out, axis=1).astype(dtype)
  return (out, state) if return_state else out


_KEYS = 'jnp.einsum("btnh,bsnh->bnts", query, key)'
_MASKED = {
  "padding_on_the_right",
  "padding_on_the_left",
  "padding_of_one_example",
  "lengths_by_mask",
}
_EMPTY = {"empty_rows", "gradients_at_empty_rows"}
_NAN = {
  "nan_in_masked_positions",
  "infinity_in_masked_positions",
  "gradients_beside_nan",
}
_PACKED = {"packing", "packing_of_nan", "packing_by_lengths"}
_BATCH = {"examples_apart", "order_of_examples", "shard_map"}


def given(name, value):
  """A change of an array before anything is computed."""
  first = "dtype, steps = query.dtype,"
  return first, f"dtype, {name}, steps = query.dtype, {value},"


# What was a line, what it becomes, the laws that find it, and those that it may break
# as well.
FAULTS = [
  ("far >= 0)", "far >= -1)",
   {"future", "lengths", "prefixes"}, _MASKED),
  (_KEYS, f"jnp.log(len(steps) + 1.0) * {_KEYS}",
   {"lengths", "lengths_by_mask", "prefixes"}, _MASKED | _PACKED),
  (_KEYS, f"(1.0 + 0.1 * steps)[None, None, :, None] * {_KEYS}",
   {"packing", "packing_by_lengths", "padding_on_the_left"},
   {"padding_of_one_example"}),
  ("jnp.where(rows, value, 0.0)",
   "jnp.where(rows, value, 0.0) + 0.1 * value[:, -1:]",
   {"lengths_by_mask", "padding_on_the_right"}, _MASKED | _NAN | _EMPTY),
  ('side="right"', 'side="left"',
   {"packing_by_lengths"}, set()),
  ("visible &= same[:, None]",
   "visible &= (same | jnp.roll(same, 1, axis=1))[:, None]",
   _PACKED, set()),
  ("jnp.where(visible[..., None], pairs, 0.0)", "pairs",
   {"packing_of_nan"}, set()),
  (*given("query", "query - 0.5 * query.mean(0)[None]"),
   {"examples_apart", "shard_map"}, _MASKED | _PACKED | _BATCH | _EMPTY),
  (*given("query", "query.at[0].multiply(2.0)"),
   {"order_of_examples", "shard_map"}, {"packing_by_lengths"}),
  (*given("query", "query.at[:, :, 0].multiply(2.0)"),
   {"order_of_heads"}, set()),
  ("jnp.repeat(x, groups, axis=2)", "jnp.tile(x, (1, 1, groups, 1))",
   {"grouped_heads"}, set()),
  ("jnp.sum(pairs, axis=-2)",
   "jnp.sum(pairs, axis=-2) + (total == 0.0) * jnp.swapaxes(query, 1, 2)",
   _EMPTY, set()),
  (*given("value", "value + 0.0 * value.sum(1)[:, None]"),
   _NAN | {"packing_of_nan"}, set()),
  ("abs(far) <= window", "abs(far) <= window + 2",
   {"window"}, set()),
  ("* jnp.swapaxes(value, 1, 2)", "* scale * jnp.swapaxes(value, 1, 2)",
   {"scale"}, set()),
  ("(x.astype(jnp.float32) for",
   "(x.astype(jnp.float8_e4m3fn if x.dtype == jnp.bfloat16 else x.dtype)"
   ".astype(jnp.float32) for",
   {"bfloat16"}, set()),
  ("jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))", "0.0",
   {"huge_logits"}, set()),
  (_KEYS, _KEYS.replace("key)", "jax.lax.stop_gradient(key))"),
   {"grad"}, set()),
  (*given("query", "query * (1 + isinstance(query, jax.core.Tracer))"),
   {"grad", "jit", "scan", "shard_map", "vmap"}, _NAN),
  (*given("query", "only_reverse(query)"),
   {"jvp"}, set()),
  (*given("query", "query * next(COUNTS)"),
   {"checkpoint", "grad", "jit"}, {*FUNCTION_LAWS}),
  ("  visible &= mask", "  pass",
   _MASKED, set()),
  ("jnp.where(rows, key, 0.0),", "key,",
   {"gradients_beside_nan"}, set()),
  (*given("mask", "mask if len(query) > 1 else None"),
   {"padding_of_one_example"}, set()),
  ("jnp.where(rows, value, 0.0)",
   "jnp.where(rows, value, 0.0) + 0.1 * value[:, len(steps) // 2][:, None]",
   {"content_of_masked_positions"}, _MASKED | _NAN | _EMPTY),
  (*given("mask", "None"),
   _MASKED | _NAN | _EMPTY | {"mask_is_honoured"},
   {"content_of_masked_positions"}),
  ("logits += bias", "pass",
   {"bias_is_honoured"}, set()),
  ("visible &= same[:, None]", "pass",
   _PACKED | {"segments_are_honoured"}, set()),
  ("if window is not None", "if window is None and False",
   {"window", "window_is_honoured"}, set()),
  ("if scale is None else scale", "",
   {"scale", "scale_is_honoured"}, set()),
  ("if is_causal", "if is_causal is None",
   {"causality_is_honoured", "future"}, {"lengths", "prefixes"}),
]  # fmt: skip
_CONTENT = {
  "content_of_masked_positions",
  "content_of_masked_positions_after_a_state",
}
STATES = [
  (
    "    state = initial_state",
    "    pass",
    {"state_is_honoured", "tokens", "states"},
  ),
  ("(out, state) if", "(out, 0.5 * state) if", {"tokens", "states"}),
  # The content of a masked position decays the state.
  (
    "decay = jnp.where(rows, decay, 1.0)",
    "pass",
    _CONTENT | _NAN - {"infinity_in_masked_positions"},
  ),
]


COUNTS = itertools.count(1)


@jax.custom_vjp
def only_reverse(x):
  """The identity, without a forward derivative."""
  return x


only_reverse.defvjp(lambda x: (x, None), lambda _, grad: (grad,))


def faulty(function, old, new):
  """The function with one change of its source."""
  source = inspect.getsource(function)
  assert source.count(old) == 1, old
  scope = {**globals()}
  exec(source.replace(old, new), scope)
  return scope[function.__name__]


def broken(function, lengths=(T,), laws=None):
  """The names of the broken laws."""
  outcomes = run_laws(Function(function, f"{__name__}:f"), laws, lengths)
  return {x.law for x in outcomes if x.status == "broken"}


def test_right_functions_keep_every_law():
  assert broken(softmax_attention) == set()
  assert broken(softmax_attention, (67,), laws=["lengths_by_mask"]) == set()
  assert broken(recurrence) == set()


@pytest.mark.parametrize(
  ("old", "new", "found", "may"),
  FAULTS,
  ids=[f"{x[0]} → {x[1]}" for x in FAULTS],
)
def test_each_fault_is_named(old, new, found, may):
  lengths = (67,) if "lengths" in found else (T,)
  # The other laws take turns, as each takes a second.
  first = [x[:2] for x in FAULTS].index((old, new)) % 4
  laws = {*found, *may, *list(FUNCTION_LAWS)[first::4]}
  got = broken(faulty(softmax_attention, old, new), lengths, laws)
  assert found <= got, f"not found: {found - got}"
  assert got <= found | may, f"also broken: {got - found - may}"


@pytest.mark.parametrize(
  ("old", "new", "found"), STATES, ids=[f"{x[0]} → {x[1]}" for x in STATES]
)
def test_each_fault_of_a_state_is_named(old, new, found):
  assert broken(faulty(recurrence, old, new)) == found


def test_every_law_is_broken_once():
  found = [*FAULTS, *STATES]
  assert set().union(*(x[2] for x in found)) == {*FUNCTION_LAWS}


_MODULE = """
import jax.numpy as jnp
from jax.nn import dot_product_attention

# The query sees one key of the future; heads are before positions.
def leaks(query, key, value, *, causal=False):
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
  mask = jnp.tri(q.shape[1], k=1, dtype=bool)[None, None] if causal else None
  return jnp.swapaxes(dot_product_attention(q, k, v, mask=mask), 1, 2)

def gated(query, key, value, gate):
  return query

number = 3
"""


def judge(folder, *arguments):
  """Runs the command in a folder that has `mine.py`."""
  (folder / "mine.py").write_text(_MODULE)
  command = [sys.executable, "-m", "attention.testing", *arguments]
  path = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  return subprocess.run(
    command, cwd=folder, env=path, capture_output=True, text=True
  )


def test_the_reproduction_shows_the_difference(tmp_path):
  laws = "--laws=future,prefixes,examples_apart,packing,causality_is_honoured"
  ran = judge(tmp_path, "mine:leaks", "--layout=BNTH", laws, "--lengths=9")
  assert ran.returncode == 1, ran.stderr
  assert "axes BNTH, causal: by option, options: is_causal" in ran.stdout
  assert "2 laws kept, 2 broken, 1 do not apply" in ran.stdout
  assert "does not apply: no option segment_ids" in ran.stdout
  told, lines = re.search(
    r"future: .*?off by (\S+) of .*?, at T = 2\n(.*?)\n\n", ran.stdout, re.S
  ).groups()
  lines = textwrap.dedent(lines)
  assert len(lines.splitlines()) <= 9
  (tmp_path / "shown.py").write_text(lines)
  shown = subprocess.run(
    [sys.executable, "shown.py"], cwd=tmp_path, capture_output=True, text=True
  )
  scope = {"print": lambda *x: None}
  exec(
    lines.replace(
      "from mine",
      f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom mine",
    ),
    scope,
  )
  largest = np.abs(scope["expected"]).max()
  assert float(shown.stdout) == pytest.approx(float(told) * largest, rel=0.05)


@pytest.mark.parametrize(
  ("function", "told"),
  [
    ("mine:gated", "mine:gated: function: also needs gate; pass a function of"),
    ("mine:number", "mine:number: expected a function, got int"),
    ("mine", "mine: expected PACKAGE.MODULE:FUNCTION"),
    ("mine:absent", "mine:absent: module 'mine' has no attribute 'absent'"),
    ("theirs:f", "theirs:f: No module named 'theirs'"),
    ("raises:f", "raises:f: importing raises raised SyntaxError: "),
  ],
)
def test_what_cannot_be_judged_is_one_line(tmp_path, function, told):
  (tmp_path / "raises.py").write_text("def (")
  ran = judge(tmp_path, function)
  assert (ran.returncode, ran.stdout) == (2, "")
  assert told in ran.stderr.splitlines()[-1]


def test_a_record_has_every_law(tmp_path):
  laws = "--laws=jit,future", "--record=r.json", "--lengths=5"
  ran = judge(tmp_path, "mine:leaks", "--layout=BNTH", *laws)
  rows = json.loads((tmp_path / "r.json").read_text())
  found = [(x["law"], x["status"]) for x in rows]
  assert found == [("jit", "kept"), ("future", "broken")], ran.stderr


def test_check_function_raises_with_statement_and_reproduction():
  check_function(softmax_attention, laws=["future", "vmap"], lengths=(5,))
  wrong = faulty(softmax_attention, "far >= 0)", "far >= -1)")
  with pytest.raises(AssertionError) as error:
    check_function(wrong, laws=["future", "vmap"], lengths=(5,))
  assert str(error.value).startswith(
    "future: Keys and values after a query do not affect its result.\n"
  )
  with pytest.raises(ValueError, match=r"laws: expected future, .*got 'fast'"):
    check_function(softmax_attention, laws=["fast"])


class Layer:
  """As an Equinox layer: no batch axis, and a mask [T, S]."""

  def __call__(self, query, key, value, mask=None):
    mask = None if mask is None else mask[None, None]
    arrays = (x[None, :, None] for x in (query, key, value))
    return jax.nn.dot_product_attention(*arrays, mask=mask)[0, :, 0]


_MASKS = [*sorted(_MASKED), "examples_apart", "mask_is_honoured"]
_MODULES = {
  "linen": lambda: from_linen(linen.MultiHeadDotProductAttention(2), 6),
  "nnx": lambda: from_nnx(
    nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0)), 6
  ),
  "equinox": lambda: from_equinox(Layer(), 6),
}


@pytest.mark.parametrize("kind", _MODULES)
def test_modules_are_judged(kind):
  function = _MODULES[kind]()
  outcomes = run_laws(function, [*_MASKS, "order_of_heads"], (T,))
  assert [x.status for x in outcomes] == [*["kept"] * 6, "none"], outcomes

  def leaky(query, key, value, mask=None):
    return function.call(query, key, value, mask) + key.mean(0)[None]

  outcomes = run_laws(dataclasses.replace(function, call=leaky), _MASKS, (T,))
  assert "examples_apart" in {x.law for x in outcomes if x.status == "broken"}
