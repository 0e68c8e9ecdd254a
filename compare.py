r"""Compares mechanisms: trains many runs and writes one report.

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

The same command continues a comparison that was stopped, and skips runs that are
done. `status` shows which runs are done, running, waiting or failed, and estimates
the time left. `report` writes report.html, report.md, report.tex, results.csv,
results.jsonl and plots/ from the records. A comparison also writes them at its end, and
regularly while it runs, which takes at most 2 % of its time. `measure` repeats
measurements that were taken while other programs used the machine, and writes the
report. `pack` writes all records into one small file, from which `report` creates the
folder.
"""

from pathlib import Path
from typing import Any

# Imported first, because it reports missing packages.
import training  # noqa: F401  # isort: skip

from absl import flags

from comparison import archive, config, measure, outline, records, run, status
from comparison import folder as folder_lib
from settings import atomic
from settings.errors import ConfigError
from training.commands import config_flag, entry

_CONFIG = config_flag.define(
  "FILE.py; --config.attention=dense,lsh:chunk_size=8 and --config.seeds=0,1 "
  "choose the runs; any other config field is set in all runs"
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "folder of the comparison; by default one under runs/compare/",
)
_RECORDS = flags.DEFINE_string(
  "records",
  None,
  "file.jsonl.xz of a comparison, which `pack` writes and from which `report` creates "
  "the folder",
)
_SHARD = flags.DEFINE_string(
  "shard",
  "1/1",
  "i/n: runs the i-th of n parts of the rows, for n machines",
)


def main(command: str | None) -> None:
  """Runs a comparison or one of the other commands, and writes the report."""
  if _RECORDS.value is not None and command not in ("report", "pack"):
    raise ConfigError("--records: expected only with `report` or `pack`")
  unread = () if command is None else ("config", "shard")
  for name in (x for x in unread if flags.FLAGS[x].present):
    raise ConfigError(f"--{name}: not supported by `{command}`")
  if command is None:
    folder = _run()
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
  # Importing pandas and SciPy takes two seconds.
  from comparison.report import files

  print(files.write(folder))
  print(folder / files.PAGE)
  if command is None:
    run.check_trained(folder)


def _run() -> Path:
  """Runs the unfinished runs of a comparison, and returns its folder."""
  shard = _shard(_SHARD.value)
  file, mapping = entry.load_config(_CONFIG, "configs/compare/copy.py")
  # Importing pandas and SciPy takes two seconds.
  from comparison.report import files

  typed = config_flag.typed_fields(_CONFIG)
  comparison = config.parse(mapping, typed)
  folder = folder_lib.default_workdir(file, comparison)
  if _WORKDIR.value is not None:
    folder = Path(_WORKDIR.value)
  comparison = folder_lib.with_recorded_eval_every(
    comparison, records.shared_settings(folder), typed
  )
  run.run(comparison, folder, shard, files.report_updater(folder))
  return folder


def _fields(mapping: Any) -> str:
  """Lists the config fields, for `--help` with a config."""
  return outline.fields(mapping, config_flag.typed_fields(_CONFIG))


def _shard(text: str) -> tuple[int, int]:
  """Parses `i/n`."""
  parts = text.split("/")
  if len(parts) == 2 and all(part.isdecimal() for part in parts):
    index, count = int(parts[0]), int(parts[1])
    if 1 <= index <= count:
      return index, count
  raise ConfigError(f"--shard: expected i/n with 1 ≤ i ≤ n, got {text!r}")


if __name__ == "__main__":
  entry.run(
    main, commands=("report", "status", "measure", "pack"), describe=_fields
  )
