"""Calls of recurrences with a kernel in jax-linear-attention.

Its kernels need a GPU. Its own chunked form in JAX takes the same arguments, and

    python -m tests.attention.kernel_cases

where it is installed holds that to the chunks here: outputs, states and gradients.
"""

import functools
import importlib

import jax
import jax.numpy as jnp

from attention.recurrent import kernels
from tests.attention import state_cases

CASES = {
  "decays of heads": ("simple_gla", "gated-head"),
  "decays of channels": ("gla", "gated-channel"),
  "delta": ("deltanet", "delta-none"),
  "gated delta": ("gated_deltanet", "delta-head"),
  "kimi delta": ("kda", "delta-channel"),
  "two gates": ("gdn2", "gates-channel", "erase_key"),
  "one gate": ("gdn2", "gates-channel", "erase_key", "beta", "write_gate"),
  "rwkv7": ("rwkv7", "rwkv7-channel"),
  "product": ("gated_deltanet", "product-head"),
  "product, no decay": ("deltanet", "product-head", "log_decay"),
}
"""Mechanism -> kind of jla, case of a state, and omitted options."""


def call(name, length):
  """Returns the function of a case, and its float32 arguments with all options.

  Some log decays, −60 or −10³⁰, erase the state.
  """
  _, case, *without = CASES[name]
  case = state_cases.CASES[case]
  arrays = {n: x for n, x in case.given(length).items() if n not in without}
  if name == "one gate":  # Of heads, which the kernel takes by channels.
    arrays["log_decay"] = arrays["log_decay"][..., 0].copy()
  if "log_decay" in arrays:
    arrays["log_decay"][0, 3], arrays["log_decay"][1, 5] = -60.0, -1e30
  arrays, rest = jax.tree.map(
    jnp.asarray, (arrays, state_cases.options(length))
  )
  call = {"return_state": True, "scale": 0.3, **rest}
  return functools.partial(case.function, **call), arrays


def outcome(function, arrays, implementation):
  """Returns output, state, and the gradients of a sum of both."""

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
