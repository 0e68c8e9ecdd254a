"""Repeats the measurements that other programs disturbed."""

from pathlib import Path
import time

from comparison import records, worker
from comparison.measurement.usage import BUSY_CORES, Meter
from settings.errors import RunError

_WATCH_SECONDS = 1.0
_VARYING_ARGUMENTS = ("--config.seed=", "--config.optimizer.learning_rate=")


def measure(workdir: Path) -> None:
  """Repeats the measurements during which other programs used the machine.

  Runs that differ only in seed and learning rate share the measurements of their
  shape. Shapes are measured one after another.

  Raises:
    RunError: other programs use the machine now.
  """
  shapes: dict[tuple[str, ...], dict[str, bool]] = {}
  missing: list[str] = []
  for identity, record in records.by_identity(workdir).items():
    measured = record.get("measured", {})
    if (measured.get("measured_others_cores") or 0.0) <= BUSY_CORES:
      continue
    if not (workdir / records.RUNS / identity).is_dir():
      missing.append(identity)
    else:
      arguments = [
        x for x in record["arguments"] if not x.startswith(_VARYING_ARGUMENTS)
      ]
      shape = shapes.setdefault((record["attention"], *arguments), {})
      shape[identity] = bool(measured.get("map"))
  if missing:
    print(
      f"not measured again, because their folders are missing in "
      f"{workdir / records.RUNS}: "
      f"{', '.join(missing)}",
      flush=True,
    )
  elif not shapes:
    print("nothing was measured while others used the machine", flush=True)
  if not shapes:
    return
  meter = Meter()
  time.sleep(_WATCH_SECONDS)
  busy = meter.others_cores()
  if busy > BUSY_CORES:
    raise RunError(
      f"other programs use {busy:.2f} cores now; measure when the machine is idle"
    )
  for shape in shapes.values():
    error = worker.measure(workdir, shape)
    if error:
      print(f"  {', '.join(shape)}: not measured: {error}", flush=True)
