"""Measures time and memory of every mechanism as functions of the length.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --lengths=4096 --attention=dense,performer
    python -m benchmarks.scaling --dtype=bfloat16 --out=rows.jsonl

It measures forward, forward with gradients, and one decoding step at the last
position of a cache, full and causal, and `jax.nn.dot_product_attention`. One
process calls the programs in turn and reports medians ± half the interquartile
range, and ratios to the baseline of the same run, since machines are noisy. Memory
is what XLA reserves for temporaries, in addition to arguments and results. It
prints Markdown: tables by length, the exponent over the upper half of the lengths,
and the length from which on a mechanism is faster than `dense`. Programs that need
more memory or time than allowed are not run, and their rows say so.
"""

from collections.abc import Sequence
import json
from pathlib import Path
import sys
import time

from absl import flags

from settings.errors import ConfigError
from training.commands import entry

_LENGTHS = flags.DEFINE_list(
  "lengths", "256,512,1024,2048,4096,8192,16384", "T = S"
)
_ATTENTION = flags.DEFINE_list(
  "attention",
  "all",
  "mechanisms, or all; flash/cudnn is flash with that implementation",
)
_BATCH = flags.DEFINE_integer("batch", 1, "B", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 8, "N = K", lower_bound=1)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "H", lower_bound=1)
_DTYPE = flags.DEFINE_enum(
  "dtype", "float32", ["float32", "bfloat16"], "dtype of all arrays"
)
_MINUTES = flags.DEFINE_float(
  "minutes", 10.0, "approximate time of the whole run"
)
_MAX_GIB = flags.DEFINE_float(
  "max_gib", 6.0, "programs that need more memory are not run"
)
_KEEP_FREED = flags.DEFINE_bool(
  "keep_freed",
  False,
  "the process keeps freed memory, as in training: no page faults",
)
_OUT = flags.DEFINE_string(
  "out", None, "file for the rows, one JSON object per line"
)


def main() -> None:
  """Times each length, writes its rows, and prints the tables."""
  lengths = _numbers(_LENGTHS.value)
  out = None if _OUT.value is None else Path(_OUT.value)
  if out is not None and not out.parent.is_dir():
    raise ConfigError(f"--out: no such folder: {str(out.parent)!r}")
  # The import of JAX takes a second, which --help and wrong flags do not need.
  import jax

  from benchmarks import bounds, programs, scaling_tables, timing
  from training.devices import process

  if _KEEP_FREED.value:
    process.keep_freed_memory()
  # Tables compare all mechanisms with dense.
  names = dict.fromkeys([programs.DENSE, *programs.select(_ATTENTION.value)])
  size = programs.Size(
    _BATCH.value, _HEADS.value, _HEAD_DIM.value, _DTYPE.value
  )
  if out is not None:
    out.write_text("", "utf-8")
  budget = timing.Budget(_MINUTES.value * 60, lengths)
  rows: list[timing.Row] = []
  for length in lengths:
    start = time.perf_counter()
    candidates = programs.programs([programs.BASELINE, *names], size, length)
    new_rows = timing.time_length(
      candidates, budget, _MAX_GIB.value * 2**30, rows
    )
    rows += new_rows
    if out is not None:
      with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in new_rows)
    seconds = time.perf_counter() - start
    print(f"length {length:,}: {seconds:.0f} s", file=sys.stderr, flush=True)
  device = jax.devices()[0]
  print(
    f"B, N, H = {size.batch}, {size.heads}, {size.head_dim}, {size.dtype}, "
    f"{device.device_kind}, jax {jax.__version__}\n"
  )
  print(scaling_tables.markdown(rows))
  if bounds.LENGTH in lengths:
    print(f"\n### Bounds at {bounds.LENGTH:,}\n\n{bounds.markdown(rows)}")
  if {bounds.LENGTH, bounds.LONGER} <= set(lengths):
    print(f"\n### From {bounds.LENGTH:,} to {bounds.LONGER:,}\n")
    print(bounds.growth_markdown(rows))


def _numbers(texts: Sequence[str]) -> list[int]:
  """Parses and sorts the lengths."""
  for text in texts:
    if not text.isdecimal() or int(text) < 2:
      raise ConfigError(f"--lengths: expected whole numbers > 1, got {text!r}")
  if not texts or len(set(map(int, texts))) < len(texts):
    raise ConfigError(
      f"--lengths: expected at least one, each once, got {','.join(texts)!r}"
    )
  return sorted(map(int, texts))


if __name__ == "__main__":
  entry.run(main)
