"""Kernels of recurrences: which calls go to them, and with which arguments.

There is none here. `emulate` puts a scan over positions in their place, which has the
names and letters of jax-linear-attention 0.1.0 and refuses what that does. With JLA_PYTHON,
a Python that has it, its own form in JAX is tried as well.
"""

import importlib.metadata
import inspect
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, delta_rule_attention, gated_linear_attention
from attention.mechanism import Dims
from attention.platform import backend
from attention.recurrent import kernels
from attention.recurrent.gates import gates_from_keys
from attention.testing import assert_close
from tests.attention import kernel_cases
from tests.attention.forms import RECURRENT

VERSIONS = {"jax-linear-attention": "0.1.0", "jax": "0.11.2"}
FACTORIES = [
  name
  for name in RECURRENT
  if "implementation" in inspect.signature(ATTENTIONS[name]).parameters
]


def recurrence(kind, q, k, v, *, scale, initial_state, segment_ids, **gates):
  """What jla documents of a kind, position by position."""
  zeros = jnp.zeros((*q.shape[:2], q.shape[2], q.shape[3]), jnp.float32)
  g = gates.get("w" if kind == "rwkv7" else "g", zeros)
  g = g if g.ndim == 4 else g[..., None] + zeros
  a, b, write = zeros, zeros, v
  if kind == "rwkv7":
    a, b = gates["a"], gates["b"]
  elif kind == "gdn2":
    a, b, write = -jnp.exp(g) * gates["b"] * k, k, gates["w"] * v
  elif "beta" in gates:
    beta = gates["beta"][..., None]
    a, b, write = -jnp.exp(g) * k, beta * k, beta * v
  begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
  state, out = initial_state, []
  if state is None:
    state = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1]))
  for t in range(q.shape[1]):
    state = jnp.where(begins[:, t, None, None, None], 0.0, state)
    read = jnp.einsum("bnh,bnhv->bnv", a[:, t], state)
    state = jnp.exp(g[:, t])[..., None] * state
    state += b[:, t, :, :, None] * read[:, :, None]
    state += k[:, t, :, :, None] * write[:, t, :, None]
    out.append(scale * jnp.einsum("bnh,bnhv->bnv", q[:, t], state))
  return jnp.stack(out, axis=1), state


def emulate(monkeypatch, versions=VERSIONS, generation="9.0", computes=False):
  """Puts a stand-in where jla would be, as on an H100; returns recorded calls."""
  calls = []

  def attend(kind, q, k, v, *, impl, output_final_state, **options):
    assert impl == "mosaic_gpu"
    assert output_final_state
    options.setdefault("segment_ids", None)
    bound = options.pop("lower_bound", None)
    dtypes = {x.dtype for x in (q, k, v)}
    calls.append({"kind": kind, "bound": bound, "dtypes": dtypes})
    if computes:
      return recurrence(kind, q, k, v, **options)
    state = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1]))
    return jnp.zeros_like(v), state

  def supports(q, k, v, *gates, initial_state=None, **options):
    return computes or (
      generation == "9.0"
      and q.dtype == k.dtype == v.dtype == jnp.bfloat16
      and {q.shape[-1], v.shape[-1]} <= {64, 128}
      and (gates[0].ndim == 3 or not q.shape[2] * q.shape[3] % 128)
      and q.shape[1] < 9000
    )

  monkeypatch.setattr(backend, "name", lambda: "gpu")
  modules = {"jla.ops": types.SimpleNamespace(linear_attention=attend)}
  for path in kernels._SUPPORTS.values():
    module, name = path.split(".")
    module = f"jla.ops.mosaic_gpu.{module}"
    found = modules.setdefault(module, types.SimpleNamespace())
    setattr(found, name, supports)
  for name, module in modules.items():
    monkeypatch.setitem(sys.modules, name, module)
  device = types.SimpleNamespace(platform="gpu", compute_capability=generation)
  monkeypatch.setattr(jax, "devices", lambda: [device])

  def version(package):
    if package in versions:
      return versions[package]
    raise importlib.metadata.PackageNotFoundError(package)

  monkeypatch.setattr(importlib.metadata, "version", version)
  return calls


@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_arguments_are_those_of_the_kernel(name, monkeypatch):
  calls = emulate(monkeypatch, computes=True)
  function, arrays = kernel_cases.call(name, length=7)
  qkv = [arrays.pop(x) for x in ("query", "key", "value")]
  found, expected = (
    jax.jit(lambda *qkv, x=x: function(*qkv, **arrays, implementation=x))(*qkv)
    for x in ("jla", "xla")
  )
  for one, other in zip(found, expected, strict=True):
    assert one.dtype == other.dtype == jnp.float32
    assert_close(one, other, 2e-6)
  (call,) = calls
  assert call["kind"] == kernel_cases.CASES[name][0]


@pytest.mark.parametrize("name", FACTORIES)
def test_mechanisms_hand_on_the_dtype_of_their_model(name, monkeypatch):
  calls = emulate(monkeypatch)
  dims = Dims(4, 2, 64, 3, 128)
  record = gates_from_keys(ATTENTIONS[name](implementation="jla"))
  init = jax.jit(lambda key: record.init(key, dims))
  variables = init(jax.random.key(0))
  cache = record.init_cache(variables, 1, 3, dims, jnp.bfloat16)
  query = jnp.ones((1, 3, 4, 64), jnp.bfloat16)
  key = value = query[:, :, :2]
  shape = jax.eval_shape(
    lambda *qkv: record.apply(variables, *qkv, is_causal=True),
    query,
    key,
    value,
  )
  assert (shape.shape, shape.dtype) == (query.shape, query.dtype)
  lengths = np.array([2])
  jax.eval_shape(
    lambda *qkv: record.prefill(variables, cache, *qkv, lengths),
    *(query, key, value),
  )
  bound = -0.61 if name == "rwkv7" else None
  for call in calls:
    assert call["dtypes"] == {jnp.dtype("bfloat16")}
    assert call["bound"] == pytest.approx(bound, abs=1e-3)
  assert len(calls) == 2
  one = (x[:, :1] for x in (query, key, value))
  jax.eval_shape(lambda *qkv: record.decode(variables, cache, *qkv), *one)
  assert len(calls) == 2


def test_mamba3_writes_what_the_kernel_reads(monkeypatch):
  emulate(monkeypatch, computes=True)
  qkv = jax.random.normal(jax.random.key(0), (3, 2, 9, 2, 8))
  segments = jnp.arange(9)[None].repeat(2, axis=0) // 6
  call = {
    "is_causal": True,
    "mask": jnp.ones((2, 1, 1, 9), bool).at[..., 3:5].set(False),
    "query_segment_ids": segments,
    "key_segment_ids": segments,
  }
  found = []
  for x in ("jla", "xla"):
    record = gates_from_keys(ATTENTIONS["mamba3"](implementation=x))
    variables = record.init(jax.random.key(1), Dims(2, 2, 8, 9, 16))
    found.append(record.apply(variables, *qkv, **call))
  assert_close(*found, 2e-6)


def gated(decay_width=None, shape=(1, 3, 2, 64), dtype="bfloat16", **options):
  """Traces a call with decays of heads, or of channels."""
  x = jnp.ones(shape, dtype)
  decay = jnp.ones(shape if decay_width else shape[:3])
  options = {"log_decay": decay, "implementation": "jla", **options}
  return jax.eval_shape(lambda x: gated_linear_attention(x, x, x, **options), x)


@pytest.mark.parametrize(
  ("call", "reason"),
  [
    ({"dtype": "float32"}, "takes bfloat16, got float32"),
    ({"shape": (1, 3, 2, 48)}, "takes heads of 64 or 128, got 48 and 48"),
    (
      {"shape": (1, 3, 1, 64), "decay_width": 64},
      "takes decays per channel for N·H a multiple of 128, got 64",
    ),
    ({"shape": (1, 9999, 2, 64)}, "has no simple_gla kernel for queries of"),
  ],
)
def test_what_no_kernel_serves_is_told(monkeypatch, call, reason):
  emulate(monkeypatch)
  gated()
  with pytest.raises(
    ValueError, match=f"^implementation: 'jla' {reason}.*'xla'"
  ):
    gated(**call)


def test_where_there_are_no_kernels(monkeypatch):
  message = "^implementation: 'jla' needs an H100 or H200, got cpu; use 'xla'"
  with pytest.raises(ValueError, match=message):
    gated()
  with pytest.raises(
    ValueError, match=r"^implementation: expected None or one"
  ):
    gated(implementation="triton")
  emulate(monkeypatch, generation="8.0")
  with pytest.raises(ValueError, match=r"'jla' needs .*9\.0 .*got gpu of 8\.0"):
    gated()
  emulate(monkeypatch, {})
  with pytest.raises(
    ValueError, match=r"package jax-linear-attention 0\.1\.0,"
  ):
    gated()
  emulate(monkeypatch, {**VERSIONS, "jax": "0.12.0"})
  with pytest.raises(ValueError, match=r"needs jax 0\.11\.2, got 0\.12\.0"):
    gated()


def test_an_array_as_scale_and_a_sequence_in_parts_are_refused(monkeypatch):
  emulate(monkeypatch)
  gated(scale=0.5)
  with pytest.raises(
    ValueError, match=r"'jla' takes a number for scale, got an"
  ):
    gated(scale=jnp.float32(0.5))
  record = ATTENTIONS["retention"](implementation="jla")
  kinds = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("x",), axis_types=kinds)
  spec = jax.P(None, "x")

  def part(x):
    return record.apply({}, x, x, x, is_causal=True, axis_name="x")

  attend = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)
  with pytest.raises(ValueError, match=r"'jla' cannot take a sharded sequence"):
    jax.eval_shape(attend, jnp.ones((1, 4, 2, 64), jnp.bfloat16))


def test_erased_keys_are_refused(monkeypatch):
  emulate(monkeypatch)
  x = jnp.ones((1, 3, 2, 64), jnp.bfloat16)
  beta = jnp.ones((1, 3, 2))
  options = {"beta": beta, "erase_key": x, "implementation": "jla"}
  with pytest.raises(ValueError, match=r"'jla' cannot take erase_key"):
    delta_rule_attention(x, x, x, **options)


@pytest.mark.thorough
def test_the_chunked_form_of_the_package():
  python = os.environ.get("JLA_PYTHON", sys.executable)
  root = pathlib.Path(__file__).parents[2]
  if subprocess.run(
    [python, "-c", "import jla"], capture_output=True
  ).returncode:
    pytest.skip(
      "needs jax==0.11.2, jaxtyping and jax-linear-attention==0.1.0 in the Python "
      "that JLA_PYTHON names"
    )
  subprocess.run(
    [python, "-m", "tests.attention.kernel_cases"],
    cwd=root,
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    check=True,
  )
