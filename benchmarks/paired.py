"""Compares the cost of every mechanism with that at an earlier commit.

    python -m benchmarks.paired --before=242dee7
    python -m benchmarks.paired --before=242dee7 --lengths=1024 --names=flash,lsh

It measures forward calls and gradients of query, key and value at B 1, N 8, H 64 in
float32, with the hyperparameters of `benchmarks.scaling`, in the causal form if there
is one. One process compiles both versions and calls them in turn; the shortest time
counts. Ratios are now / before. Temporaries are in MiB.
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
_LENGTHS = flags.DEFINE_list(
  "lengths", ["1024", "4096", "16384"], "values of T = S"
)
_NAMES = flags.DEFINE_list("names", [], "mechanisms; all by default")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "calls per program", lower_bound=1)

_OLD = "attention_before"
_SLOWEST = 20.0
"""Seconds of a call; slower mechanisms skip longer lengths."""


def main() -> None:
  """Prints one line per mechanism, form and length."""
  if _BEFORE.value is None:
    raise ConfigError("--before: expected a commit, such as HEAD~20")
  process.keep_freed_memory()
  with tempfile.TemporaryDirectory() as folder:
    _copy(_BEFORE.value, Path(folder))
    sys.path.insert(0, folder)
    _compare()


def _copy(commit: str, folder: Path) -> None:
  """Copies the library at a commit to a package with another name."""
  archive = ["git", "archive", commit, "attention"]
  with subprocess.Popen(archive, stdout=subprocess.PIPE) as git:
    tar = subprocess.run(["tar", "-x", "-C", folder], stdin=git.stdout)
  if git.returncode or tar.returncode:
    raise ConfigError(
      f"--before: no commit {commit!r} with a folder attention/"
    )
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
        mechanism = library.gates_from_keys(library.ATTENTIONS[name](**options))
        dims = library.Dims(8, 8, 64, length, 512)
        variables = mechanism.init(jax.random.key(1), dims)

        def forward(qkv, mechanism=mechanism, variables=variables):
          causal = mechanisms.directions(mechanism)[-1]
          return mechanism.apply(variables, *qkv, is_causal=causal)

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
  """Returns the shortest time per program, over calls in turn after a warm-up."""
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
