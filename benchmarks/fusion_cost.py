"""Time of every mechanism without XLA:CPU's faulty fusion, against with it.

    python -m benchmarks.fusion_cost
    python -m benchmarks.fusion_cost --length=1024 --attention=flash,performer

Each program is compiled twice in one process, and the two are called in turn, so
that a noisy machine slows both. Prints Markdown: the shortest
call without the fusion / the shortest with it. Below 1, the laboratory's setting
(without it) is the faster. `benchmarks/xla_cpu_fusion.py` tells what the fault is.
"""

import os
import time

from absl import flags

from training import compiler, entry

_LENGTH = flags.DEFINE_integer("length", 4096, "T = S", lower_bound=2)
_ATTENTION = flags.DEFINE_list("attention", "all", "mechanisms, or all")
_CALLS = flags.DEFINE_integer("calls", 5, "of each program", lower_bound=1)


def main() -> None:
  """Times one mechanism after another and prints a row for each."""
  # The fusion is on unless a program is compiled without it.
  os.environ["XLA_FLAGS"] = ""
  import jax

  from attention import ATTENTIONS
  from benchmarks import programs

  names = _ATTENTION.value
  if names == ["all"]:
    names = [programs.BASELINE, *ATTENTIONS]
  off: dict[str, bool | str] = {compiler.FLAG.removeprefix("--"): ""}
  on: dict[str, bool | str] = {}
  print(
    f"T = S = {_LENGTH.value:,}, B, N, H = 1, 8, 64, float32, jax "
    f"{jax.__version__}, {os.cpu_count()} cores\n\n"
    "| mechanism | causal | forward | with gradients |\n"
    "| --- | --- | --: | --: |"
  )
  for name in names:
    ratios: dict[bool, list[str]] = {}
    for program in programs.programs([name], programs.Size(), _LENGTH.value):
      if program.part == programs.DECODE:
        continue
      lowered = jax.jit(program.function).lower(*program.arguments)
      times = []
      for options in (off, on):
        compiled = lowered.compile(compiler_options=options)
        times.append((compiled, [_seconds(compiled, program.arguments)]))
      for _ in range(_CALLS.value):
        for compiled, seconds in times:
          seconds.append(_seconds(compiled, program.arguments))
      (_, without), (_, with_it) = times
      ratio = min(without[1:]) / min(with_it[1:])
      ratios.setdefault(program.causal, []).append(f"{ratio:.2f}")
    for causal, cells in ratios.items():
      cells = [name, "yes" if causal else "no", *cells]
      print(f"| {' | '.join(cells)} |", flush=True)


def _seconds(compiled, arguments) -> float:
  """Of one call."""
  import jax

  start = time.perf_counter()
  jax.block_until_ready(compiled(*arguments))
  return time.perf_counter() - start


if __name__ == "__main__":
  entry.run(main)
