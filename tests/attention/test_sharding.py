"""Arrays sharded along batch or heads are computed where they are."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from attention import ATTENTIONS, Dims, gates_from_keys
from attention.softmax.logits import Logits
from attention.softmax.mods import make_block_mask
from attention.softmax.sharding import check_shards
from attention.softmax.visible import Visible, mask_mod, pair_mask
from tests.attention.calls import normal
from tests.attention.forms import FORMS, KINDS, RECURRENT, SIZES, thorough

BATCH, LENGTH, HEADS, HEAD_DIM = 4, 64, 8, 8
SHARDINGS = {
  "batch": (HEADS, PartitionSpec(("x", "y"))),
  "heads": (HEADS, PartitionSpec(None, None, ("x", "y"))),
  "grouped heads": (4, PartitionSpec(None, None, ("x", "y"))),
  "batch and grouped heads": (4, PartitionSpec("x", None, "y")),
}
_ALIKE = {*RECURRENT} - {"gated_linear", "kimi_delta"}
"""Recurrences whose code one of these two has."""


_QKV = jnp.zeros((2, 6, 2, 4))


def below(b, n, t, s):
  del b, n
  return s < t


@pytest.mark.parametrize(
  ("name", "seen", "logits"),
  [
    ("mask", pair_mask(jnp.ones((2, 1, 6, 6), bool)), Logits()),
    ("mask", pair_mask(jnp.ones((2, 2, 1, 6), bool)), Logits()),
    ("mask_mod", mask_mod(below), Logits()),
    ("visible", Visible(query_start=2), Logits()),
    ("visible", Visible(key_start=2), Logits()),
    ("visible", Visible(bands=((_QKV[:, :, 0, 0],) * 2 + (3, True),)), Logits()),
    ("block_mask", Visible(block_mask=make_block_mask(below, length=6)), Logits()),
    ("bias", Visible(), Logits(bias=jnp.zeros((1, 1, 6, 6)))),
    ("score_mod", Visible(), Logits(score_mod=below)),
    ("logits_soft_cap", Visible(), Logits(soft_cap=2.0)),
    ("sinks", Visible(), Logits(sinks=jnp.zeros(2))),
    ("log_forget", Visible(right=0), Logits(log_forget=jnp.zeros((2, 6, 2)))),
  ],
)  # fmt: skip
def test_what_a_sequence_in_shards_does_not_take(name, seen, logits):
  with pytest.raises(ValueError, match=f"^{name}: expected "):
    check_shards(_QKV, _QKV, seen, logits)


def test_shards_of_a_causal_call_have_one_length():
  check_shards(_QKV, _QKV[:, :4], Visible(), Logits())
  for source in (_QKV[:, :4], jnp.zeros((2, 8, 2, 4))):
    with pytest.raises(
      ValueError, match=r"^is_causal: expected shards of equal"
    ):
      check_shards(_QKV, source, Visible(right=0), Logits())


@functools.cache
def program(name, is_causal, kv_heads):
  """Output and gradients to query, key and value, and arguments."""
  mechanism = ATTENTIONS[name](**SIZES.get(name, {}))
  # What all heads share is whole on every device.
  shared = {}
  if "own_keys" not in mechanism.supports:
    mechanism = gates_from_keys(mechanism)
  dims = Dims(HEADS, kv_heads, HEAD_DIM, LENGTH, kv_heads * HEAD_DIM)
  variables = jax.jit(lambda key: mechanism.init(key, dims))(jax.random.key(0))
  query, cotangent, key, value = normal(
    *((BATCH, LENGTH, n, HEAD_DIM) for n in (HEADS, HEADS, kv_heads, kv_heads))
  )
  if mechanism.gates is not None:
    inputs = key.reshape(BATCH, LENGTH, -1)
    shared = jax.jit(mechanism.gates)(variables, inputs)
  if {"shared_qk", "own_keys"} & mechanism.supports:
    key = None
  if {"shared_qk", "own_keys"} <= mechanism.supports:
    value = None

  def run(query, key, value, cotangent):
    def attend(query, key, value):
      call = {"is_causal": is_causal, **shared}
      return mechanism.apply(variables, query, key, value, **call)

    out, pullback = jax.vjp(attend, query, key, value)
    return out, pullback(cotangent)

  return run, (query, key, value, cotangent)


@functools.cache
def on_one_device(*form):
  run, arguments = program(*form)
  return jax.jit(run)(*arguments)


def mesh(kind):
  axes = ((2, 2), ("x", "y"), (kind,) * 2)
  return jax.make_mesh(*axes, devices=jax.devices()[:4])


def assert_same(found, *form):
  named = zip(*map(jax.tree.leaves, (found, on_one_device(*form))), strict=True)
  for got, expected in named:
    bound = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=bound)


@pytest.mark.parametrize(
  "name",
  [
    *("dense", "sliding_window", "performer", "kimi_delta"),
    *thorough(("flash",), ("linear",), ("gated_linear",)),
    *thorough(*((name,) for name in RECURRENT if name in _ALIKE)),
  ],
)
def test_meshes_may_have_explicit_axes(name):
  run, arguments = program(name, True, 4)
  spec, whole = PartitionSpec("x", None, "y"), mesh(AxisType.Explicit)
  placed = jax.device_put(arguments, NamedSharding(whole, spec))
  with jax.set_mesh(whole):
    found = jax.jit(run)(*placed)
  assert_same(found, name, True, 4)
  for got in jax.tree.leaves(found):
    assert jax.typeof(got).sharding.spec[:3] == ("x", None, "y")


@pytest.mark.parametrize(
  "sharding",
  [
    *(
      pytest.param(name, marks=pytest.mark.thorough)
      for name in SHARDINGS
      if name != "batch and grouped heads"
    ),
    "batch and grouped heads",
  ],
)
@pytest.mark.parametrize(
  ("name", "is_causal"),
  [
    # Each mechanism in its last direction, causal if it can.
    pytest.param(
      name,
      is_causal,
      marks=pytest.mark.thorough
      if name in _ALIKE or (not is_causal and (name, True) in FORMS)
      else [],
    )
    for name, is_causal in FORMS
  ],
)
def test_nothing_is_gathered(name, is_causal, sharding):
  kv_heads, spec = SHARDINGS[sharding]
  run, arguments = program(name, is_causal, kv_heads)
  placed = NamedSharding(mesh(AxisType.Auto), spec)
  arguments = jax.device_put(arguments, placed)
  compiled = jax.jit(run).lower(*arguments).compile()
  text = compiled.as_text()
  gathers = [
    line for line in text.splitlines() if " all-gather" in line.split("=")[-1]
  ]
  assert not gathers, gathers
  for got in jax.tree.leaves(compiled.output_shardings):
    assert got.is_equivalent_to(placed, 4)
  # Numbers of one of each kind; XLA partitions all programs by the same rules.
  if name in (*KINDS, "kimi_delta"):
    assert_same(compiled(*arguments), name, is_causal, kv_heads)
