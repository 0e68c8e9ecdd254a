"""Measures the temporaries of a further layer in programs for an H100.

    .venv-devices/bin/python -m tests.benchmarks.layers flash retention

Layers of nothing but a mechanism, each of which keeps its input alone (`jax.checkpoint`).
Prints name, bytes of temporaries that each layer beyond the first adds, and bytes of
its input.
"""

import sys

import jax
import jax.numpy as jnp

from benchmarks import compiled, programs
from training.devices import target

MORE = 4
SIZE = programs.Size(batch=1, heads=4, head_dim=64, dtype="bfloat16")
LENGTH = 8192


def temporaries(name, num_layers, where):
  """Returns the bytes of temporaries of the gradient of `num_layers` layers."""
  parts = programs.programs([name], SIZE, LENGTH)
  forward = [x for x in parts if x.part == programs.FORWARD][-1]
  params, query, key, _, constants = forward.arguments

  @jax.checkpoint
  def layer(params, x):
    shared = None if key is None else x
    return forward.function(params, x, shared, x, constants)

  def loss(params, x):
    for _ in range(num_layers):
      x = layer(params, x)
    return jnp.sum(x.astype(jnp.float32))

  gradient = jax.grad(loss, (0, 1))
  return compiled.report(gradient, (params, query), where)["temporaries"]


if __name__ == "__main__":
  h100 = target.find("h100")
  for mechanism in sys.argv[1:]:
    first, last = (temporaries(mechanism, n, h100) for n in (1, 1 + MORE))
    size = 2 * SIZE.batch * LENGTH * SIZE.heads * SIZE.head_dim
    print(mechanism, (last - first) // MORE, size, flush=True)
