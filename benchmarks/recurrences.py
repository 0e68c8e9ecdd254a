"""What gated linear attention and the delta rule cost beside `jax.nn`'s attention.

    python -m benchmarks.recurrences
    python -m benchmarks.recurrences --length=16384 --nobaseline

B 1, N 8, H 64, float32, causal, forward and with gradients of query, key and
value, called in turn, with freed memory kept by the process as in training; medians, ratios to `jax.nn.dot_product_attention`, and
temporaries of the compiled programs.
"""

import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attention import delta_rule_attention, gated_linear_attention
from training import entry, host_memory

_LENGTH = flags.DEFINE_integer("length", 4096, "positions", lower_bound=1)
_BASELINE = flags.DEFINE_bool("baseline", True, "also jax.nn's attention")

_HEADS, _DIM, _ROUNDS = 8, 64, 7


def main() -> None:
  """Prints a line for each function and part."""
  host_memory.keep_freed()
  length = _LENGTH.value
  keys = jax.random.split(jax.random.key(0), 6)
  query, key, value = (
    jax.random.normal(k, (1, length, _HEADS, _DIM)) for k in keys[:3]
  )
  key /= jnp.linalg.norm(key, axis=-1, keepdims=True)
  of_head = -jax.random.uniform(keys[3], (1, length, _HEADS))
  of_channel = -jax.random.uniform(keys[4], (1, length, _HEADS, _DIM))
  beta = jax.random.uniform(keys[5], (1, length, _HEADS))
  functions = {
    "jax.nn": lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True),
    "gated, decay of a head": lambda *qkv: gated_linear_attention(
      *qkv, log_decay=of_head
    ),
    "gated, decay of a channel": lambda *qkv: gated_linear_attention(
      *qkv, log_decay=of_channel
    ),
    "delta rule": lambda *qkv: delta_rule_attention(*qkv, beta=beta),
    "delta rule, decay of a head": lambda *qkv: delta_rule_attention(
      *qkv, beta=beta, log_decay=of_head
    ),
    "delta rule, decay of a channel": lambda *qkv: delta_rule_attention(
      *qkv, beta=beta, log_decay=of_channel
    ),
  }
  if not _BASELINE.value:
    functions.pop("jax.nn")
  print(f"T {length:,}, N {_HEADS}, H {_DIM}, float32; jax {jax.__version__}\n")
  print("| function | part | ms | × first | MiB |")
  print("| --- | --- | --: | --: | --: |")
  for part in ("forward", "with gradients"):
    programs = {
      name: _compiled(function, part, query, key, value)
      for name, function in functions.items()
    }
    seconds = _medians(list(programs.values()), query, key, value)
    for (name, program), taken in zip(programs.items(), seconds, strict=True):
      mib = program.memory_analysis().temp_size_in_bytes / 2**20
      print(
        f"| {name} | {part} | {1e3 * taken:.0f} | {taken / seconds[0]:.3f} | "
        f"{mib:.1f} |"
      )


def _compiled(function: Any, part: str, *qkv: jax.Array) -> Any:
  def with_gradients(*qkv):
    out, pull = jax.vjp(function, *qkv)
    return out, pull(out)

  chosen = function if part == "forward" else with_gradients
  return jax.jit(chosen).lower(*qkv).compile()


def _medians(programs: list[Any], *qkv: jax.Array) -> list[float]:
  """Seconds of each, called in turn after a call that warms up."""
  seconds = [[] for _ in programs]
  for program in programs:
    jax.block_until_ready(program(*qkv))
  for _ in range(_ROUNDS):
    for program, taken in zip(programs, seconds, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(program(*qkv))
      taken.append(time.perf_counter() - start)
  return [float(np.median(taken)) for taken in seconds]


if __name__ == "__main__":
  entry.run(main)
