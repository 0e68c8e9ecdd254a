"""Times eager calls after the first one, relative to `jax.nn`.

    python -m benchmarks.eager
    python -m benchmarks.eager --attention=flash,performer --length=256

It times a call, its gradients and one decoding step of every mechanism in each
direction, without `jax.jit`, at B 2, N 8, H 16 in float32. A ratio is the shortest of
ten times, over that of `jax.nn.dot_product_attention` on the same arrays in the same
run. "compiled" counts the programs that these calls compile; it should be 0.
"""

from collections.abc import Callable
import time
from typing import Any

from absl import flags

from training.commands import entry

_ATTENTION = flags.DEFINE_list("attention", ["all"], "mechanisms, or all")
_LENGTH = flags.DEFINE_integer("length", 64, "T = S", lower_bound=1)
_CALLS = flags.DEFINE_integer("calls", 10, "per program", lower_bound=1)


def main() -> None:
  """Prints one line per mechanism, direction and part."""
  # The import of JAX takes a second, which --help and wrong flags do not need.
  import jax

  from attention.testing.transforms import compilations
  from benchmarks import programs

  names = programs.select(_ATTENTION.value)
  size = programs.Size(batch=2, heads=8, head_dim=16)
  shape = (size.batch, _LENGTH.value, size.heads, size.head_dim)
  x = jax.random.normal(jax.random.key(0), shape)
  baseline = _seconds(lambda: jax.nn.dot_product_attention(x, x, x))
  print(f"`jax.nn.dot_product_attention`: {baseline * 1e3:.2f} ms\n")
  print("| mechanism | causal | part | ms | ratio | compiled |")
  print("| --- | :-: | --- | --: | --: | --: |")
  for program in programs.programs(names, size, _LENGTH.value):
    # The first call compiles.
    jax.block_until_ready(program.function(*program.arguments))
    with compilations() as compiled:
      seconds = _seconds(lambda: program.function(*program.arguments))  # noqa: B023
    print(
      f"| `{program.mechanism}` | {'✓' * program.causal} | {program.part} | "
      f"{seconds * 1e3:.2f} | {seconds / baseline:.2f} | {len(compiled)} |",
      flush=True,
    )


def _seconds(call: Callable[[], Any]) -> float:
  """Returns the shortest time of a call."""
  import jax

  times = []
  for _ in range(_CALLS.value):
    start = time.perf_counter()
    jax.block_until_ready(call())
    times.append(time.perf_counter() - start)
  return min(times)


if __name__ == "__main__":
  entry.run(main)
