"""Measures again what was measured while others used the machine."""

from pathlib import Path
import time

from comparison import records, worker
from comparison.measurement.usage import BUSY_CORES, Meter
from settings.errors import RunError

_WATCHED_SECONDS = 1.0
_VARYING_ARGUMENTS = ("--config.seed=", "--config.optimizer.learning_rate=")


def measure(workdir: Path) -> None:
  """Measures the runs of a comparison again whose times others may have spoilt.

  Runs that differ in seed and learning rate alone share what is measured of their
  shape; one shape is measured after another.

  Raises:
    RunError: other programs use the machine now, too.
  """
  shapes: dict[tuple[str, ...], dict[str, bool]] = {}
  gone: list[str] = []
  for identity, record in records.by_identity(workdir).items():
    measured = record.get("measured", {})
    if (measured.get("measured_others_cores") or 0.0) <= BUSY_CORES:
      continue
    if not (workdir / records.RUNS / identity).is_dir():
      gone.append(identity)
    else:
      arguments = [
        x for x in record["arguments"] if not x.startswith(_VARYING_ARGUMENTS)
      ]
      shape = shapes.setdefault((record["attention"], *arguments), {})
      shape[identity] = bool(measured.get("map"))
  if gone:
    print(
      f"not measured again, as they have no folder in {workdir / records.RUNS}: "
      f"{', '.join(gone)}",
      flush=True,
    )
  elif not shapes:
    print("nothing was measured while others used the machine", flush=True)
  if not shapes:
    return
  meter = Meter()
  time.sleep(_WATCHED_SECONDS)
  busy = meter.others_cores()
  if busy > BUSY_CORES:
    raise RunError(
      f"other programs use {busy:.2f} cores now; measure when the machine is idle"
    )
  for shape in shapes.values():
    fault = worker.measure(workdir, shape)
    if fault:
      print(f"  {', '.join(shape)}: not measured: {fault}", flush=True)
