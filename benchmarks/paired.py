"""Cost of every mechanism relative to an earlier commit of this repository.

    python -m benchmarks.paired --before=242dee7
    python -m benchmarks.paired --before=242dee7 --lengths=1024 --names=flash,lsh

B 1, N 8, H 64, float32, at the sizes of `benchmarks.scaling`, forward and with
gradients of query, key and value, causal where the mechanism can be both: each of
both versions is compiled and called in turn in one process, and the least time of a
call counts. Ratios are now / before, of seconds and of temporaries in MiB.
"""

from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

from settings.errors import ConfigError
from training.commands import entry
from training.devices import process

_BEFORE = flags.DEFINE_string("before", None, "commit to compare with")
_LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "16384"], "of T = S")
_NAMES = flags.DEFINE_list("names", [], "mechanisms; all without it")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "calls of each", lower_bound=1)

_OLD = "attention_before"
_SLOWEST = 20.0
"""Seconds of a call, beyond which a mechanism is left out of longer lengths."""


def main() -> None:
  """Prints one line per mechanism, form and length."""
  if _BEFORE.value is None:
    raise ConfigError("--before: missing; a commit, such as HEAD~20")
  process.keep_freed_memory()
  with tempfile.TemporaryDirectory() as folder:
    _copy(_BEFORE.value, Path(folder))
    sys.path.insert(0, folder)
    _compare()


def _copy(commit: str, folder: Path) -> None:
  """The library at a commit, as a package with another name."""
  archive = ["git", "archive", commit, "attention"]
  with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
    unpacked = subprocess.run(["tar", "-x", "-C", folder], stdin=packed.stdout)
  if packed.returncode or unpacked.returncode:
    raise ConfigError(f"--before: no commit {commit!r} with attention/ is here")
  (folder / "attention").rename(folder / _OLD)
  for path in (folder / _OLD).rglob("*.py"):
    lines = path.read_text("utf-8").splitlines()
    for i, line in enumerate(lines):
      if line.lstrip().startswith(("from attention", "import attention")):
        lines[i] = line.replace("attention", _OLD, 1)
      else:
        lines[i] = line.replace('"attention.', f'"{_OLD}.')
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _compare() -> None:
  import jax
  import jax.numpy as jnp

  import attention
  from attention import mechanism as mechanisms

  old = __import__(_OLD)
  print(
    f"now / {_BEFORE.value}; jax {jax.__version__}, {jax.default_backend()}\n"
  )
  print(
    "| mechanism | T | forward | with gradients | MiB forward | MiB gradients |"
  )
  print("| --- | --: | --: | --: | --: | --: |")
  for name in _NAMES.value or list(attention.ATTENTIONS):
    for length in map(int, _LENGTHS.value):
      options = mechanisms.example(name).sizes.timed(length)
      keys = jax.random.split(jax.random.key(0), 3)
      qkv: list[Any] = [jax.random.normal(k, (1, length, 8, 64)) for k in keys]
      if "shared_qk" in mechanisms.example(name).supports:
        qkv[1] = None
      calls = []
      for library in (attention, old):
        record = library.gates_from_keys(library.ATTENTIONS[name](**options))
        dims = library.Dims(8, 8, 64, length, 512)
        variables = record.init(jax.random.key(1), dims)

        def forward(qkv, record=record, variables=variables):
          causal = mechanisms.directions(record)[-1]
          return record.apply(variables, *qkv, is_causal=causal)

        def gradients(qkv, forward=forward):
          out, pull = jax.vjp(forward, qkv)
          return out, pull(jnp.ones_like(out))

        calls.append(
          [jax.jit(f).lower(qkv).compile() for f in (forward, gradients)]
        )
      cells, slowest = [], 0.0
      for programs in zip(*calls, strict=True):
        seconds = _least_seconds(programs, qkv)
        slowest = max(slowest, *seconds)
        cells.append(
          f"{seconds[0] / seconds[1]:.2f} ({1e3 * seconds[0]:.0f} ms)"
        )
      for programs in zip(*calls, strict=True):
        mebibytes = [
          p.memory_analysis().temp_size_in_bytes / 2**20 for p in programs
        ]
        cells.append(f"{mebibytes[0]:.1f} / {mebibytes[1]:.1f}")
      causal = ", causal" * mechanisms.directions(mechanisms.example(name))[-1]
      print(
        f"| {name}{causal} | {length:,} | {' | '.join(cells)} |", flush=True
      )
      if slowest > _SLOWEST:
        break


def _least_seconds(programs: Any, qkv: Any) -> list[float]:
  """The shortest time of each function, called in turn after a warm-up call."""
  import jax

  seconds = [float("inf")] * len(programs)
  for _ in range(1 + _ROUNDS.value):
    for i, program in enumerate(programs):
      start = time.perf_counter()
      jax.block_until_ready(program(qkv))
      seconds[i] = min(seconds[i], time.perf_counter() - start)
  return seconds


if __name__ == "__main__":
  entry.run(main)
