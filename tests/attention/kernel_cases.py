"""Calls of recurrences that jax-linear-attention has a kernel for.

Its kernels need a GPU. Its own chunked form in JAX takes the same arguments, and

    python -m tests.attention.kernel_cases

where it is installed holds that to the chunks here: outputs, states and gradients.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np

from attention import (
  delta_product_attention,
  delta_rule_attention,
  gated_linear_attention,
  rwkv7_attention,
)
from attention.recurrent import kernels

BATCH, HEADS, KV_HEADS, DIM, VALUE, WRITES = 2, 4, 2, 8, 5, 2
GATED, DELTA = gated_linear_attention, delta_rule_attention
CASES = {
  "decays of heads": ("simple_gla", GATED, "head"),
  "decays of channels": ("gla", GATED, "channel"),
  "delta": ("deltanet", DELTA, "beta"),
  "gated delta": ("gated_deltanet", DELTA, "head beta"),
  "kimi delta": ("kda", DELTA, "channel beta"),
  "two gates": ("gdn2", DELTA, "channel beta erase_gate write_gate"),
  "one gate": ("gdn2", DELTA, "head erase_gate"),
  "rwkv7": ("rwkv7", rwkv7_attention, "channel removal replacement"),
  "product": ("gated_deltanet", delta_product_attention, "head beta"),
  "product, no decay": ("deltanet", delta_product_attention, "beta"),
}
"""What is called -> kind of jla, function, and options."""


def call(name, length, seed=0):
  """The function of a case and its arguments, with all options, in float32.

  Some decays leave nothing: they are −60 or −10³⁰.
  """
  rng = np.random.default_rng(seed)
  _, function, names = CASES[name]

  def normal(*shape):
    return rng.standard_normal((BATCH, length, *shape), np.float32)

  def uniform(*shape):
    return rng.random((BATCH, length, *shape), np.float32)

  def decays(*shape):
    x = np.float32(-0.3) * uniform(*shape)
    x[uniform(*shape) < 0.04] = -60.0
    x[uniform(*shape) < 0.04] = -1e30
    return x

  def unit(*shape):
    x = normal(*shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)

  writes = (WRITES,) if function is delta_product_attention else ()
  key = unit(*writes, KV_HEADS, DIM)
  removal = -unit(HEADS, DIM)
  options = {
    "head": ("log_decay", lambda: decays(HEADS)),
    "channel": ("log_decay", lambda: decays(HEADS, DIM)),
    "beta": ("beta", lambda: uniform(*writes, HEADS)),
    "erase_gate": ("erase_gate", lambda: uniform(HEADS, DIM)),
    "write_gate": ("write_gate", lambda: uniform(HEADS, VALUE)),
    "removal": ("removal", lambda: removal),
    "replacement": ("replacement", lambda: -removal * uniform(HEADS, DIM)),
  }
  given = dict(options[option] for option in names.split())
  arrays = {
    "query": normal(HEADS, DIM),
    "key": key,
    "value": normal(*writes, KV_HEADS, VALUE),
    "initial_state": rng.standard_normal(
      (BATCH, HEADS, DIM, VALUE), np.float32
    ),
    **{option: make() for option, make in given.items()},
  }
  segments = np.cumsum(rng.random((BATCH, length)) < 0.1, axis=1) % 3
  rest = {
    "mask": rng.random((BATCH, 1, 1, length)) < 0.8,
    "segment_ids": segments,
  }
  arrays, rest = jax.tree.map(jnp.asarray, (arrays, rest))
  return functools.partial(
    function, return_state=True, scale=0.3, **rest
  ), arrays


def outcome(function, arrays, implementation):
  """Output, state, and the gradients of a sum of both."""

  def loss(arrays):
    qkv = [arrays[name] for name in ("query", "key", "value")]
    options = {n: x for n, x in arrays.items() if n not in _QKV}
    found = function(*qkv, implementation=implementation, **options)
    return sum(jnp.sum(jnp.sin(x)) for x in found), found

  (_, found), grads = jax.value_and_grad(loss, has_aux=True)(arrays)
  return *found, grads


_QKV = ("query", "key", "value")


def main():
  """Prints the largest difference of every case, and stops at a large one."""
  ops = importlib.import_module("jla.ops")
  attend, kinds = ops.linear_attention, []

  def chunked(kind, *qkv, impl, lower_bound=None, **options):
    del impl, lower_bound
    kinds.append(kind)
    return attend(kind, *qkv, impl="chunked", **options)

  ops.linear_attention = chunked
  kernels._obstacle = lambda *call: ""
  for name, (kind, *_) in CASES.items():
    function, arrays = call(name, length=70)
    results = [
      jax.jit(outcome, static_argnums=(0, 2))(function, arrays, implementation)
      for implementation in ("jla", "xla")
    ]
    difference = max(
      float(jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(other)))
      for one, other in zip(*map(jax.tree.leaves, results), strict=True)
    )
    print(f"{name}: {difference:.1e}", flush=True)
    if kinds.pop() != kind or not difference < 1e-5:
      raise SystemExit(f"{name}: not what the chunks here give")


if __name__ == "__main__":
  main()
