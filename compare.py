r"""Compares mechanisms: many runs, one report.

    python compare.py --config=configs/compare/copy.py --workdir=/tmp/compare
    python compare.py --config=configs/compare/copy.py --config.attention=dense,lsh
    python compare.py --config=configs/compare/copy.py \
        --config.attention=sliding_window:window=8,delta,hybrid \
        --config.variants.hybrid='{"layers": "sliding_window:window=8,delta"}'
    python compare.py status --workdir=/tmp/compare
    python compare.py report --workdir=/tmp/compare
    python compare.py measure --workdir=/tmp/compare
    python compare.py pack --workdir=/tmp/compare --records=copy.jsonl.xz
    python compare.py report --workdir=/tmp/new --records=copy.jsonl.xz

The same command continues a comparison that was stopped; runs that are done with
the same config are not run again. `status` says what is done, runs, waits and
failed, and when it will be done. `report` writes report.html, report.md,
report.tex, results.csv, results.jsonl and plots/ from what there is; a comparison
ends with it too, and writes them while it runs as often as 2 % of the time allow.
`measure` measures again what was measured while other programs used the machine,
and writes the report. `pack` puts all records into one small file, and `report`
with such a file makes the folder from it.
"""

from pathlib import Path

# First, as it says what to do where packages are missing.
import training  # noqa: F401  # isort: skip

from absl import flags

from comparison import archive, config, measure, records, run, status
from comparison import folder as folder_lib
from settings.errors import ConfigError
from training import atomic
from training.commands import config_flag, entry

_CONFIG = config_flag.define(
  "FILE.py; --config.attention=dense,lsh:chunk_size=8 and --config.seeds=0,1 "
  "choose, any other leaf is set for all runs"
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "folder of the comparison; by default one under runs/compare/",
)
_RECORDS = flags.DEFINE_string(
  "records",
  None,
  "file.jsonl.xz of a comparison: `pack` writes it, `report` makes the folder from it",
)
_SHARD = flags.DEFINE_string(
  "shard",
  "1/1",
  "i/n makes the i-th of n parts of the comparison, for n machines",
)


def main(command: str | None) -> None:
  """Plans, runs what is missing, and writes the tables."""
  if command is None:
    if _RECORDS.value is not None:
      raise ConfigError("--records: expected it behind `report` or `pack`")
    folder = _run()
  elif flags.FLAGS["shard"].present:
    raise ConfigError(f"--shard: expected it without `{command}`")
  elif _WORKDIR.value is None:
    raise ConfigError("--workdir: missing; the folder of the comparison")
  else:
    folder = Path(_WORKDIR.value)
  if command == "report" and _RECORDS.value is not None:
    archive.unpack(Path(_RECORDS.value), folder)
  if atomic.read_json(folder / records.COMPARISON) is None:
    raise ConfigError(f"--workdir: no comparison in {folder}, or a damaged one")
  if command == "status":
    print(status.text(folder))
    return
  for name in records.read(folder)[1]:
    print(
      f"{folder / records.RECORDS / name}: damaged; run again to replace it"
    )
  if command == "pack":
    if _RECORDS.value is None:
      raise ConfigError("--records: missing; the file.jsonl.xz to write")
    count = archive.pack(folder, Path(_RECORDS.value))
    print(f"{_RECORDS.value}: {count} records")
    return
  if command == "measure":
    measure.measure(folder)
  # With pandas and SciPy it takes two seconds to import.
  from comparison.report import files

  print(files.write(folder))
  print(folder / files.PAGE)
  if command is None:
    run.check_trained(folder)


def _run() -> Path:
  """Runs what is missing of the comparison that was typed; its folder."""
  shard = _shard(_SHARD.value)
  file, mapping = entry.load_config(_CONFIG, "configs/compare/copy.py")
  # With pandas and SciPy it takes two seconds to import.
  from comparison.report import files

  typed = config_flag.typed(_CONFIG)
  comparison = config.parse(mapping, typed)
  folder = folder_lib.default_workdir(file, comparison)
  if _WORKDIR.value is not None:
    folder = Path(_WORKDIR.value)
  comparison = folder_lib.paced(comparison, records.shared(folder), typed)
  run.run(comparison, folder, shard, files.meanwhile(folder))
  return folder


def _shard(text: str) -> tuple[int, int]:
  """`i/n` as numbers."""
  parts = text.split("/")
  if len(parts) == 2 and all(part.isdecimal() for part in parts):
    index, count = int(parts[0]), int(parts[1])
    if 1 <= index <= count:
      return index, count
  raise ConfigError(f"--shard: expected i/n with 1 ≤ i ≤ n, got {text!r}")


if __name__ == "__main__":
  entry.run(main, commands=("report", "status", "measure", "pack"))
