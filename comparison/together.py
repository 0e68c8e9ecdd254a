"""Trains and measures runs of one shape in one process, one after another.

    python -m comparison.together --group=FILE.json

`comparison.launch` writes the file and reads what this prints: a line of JSON as soon
as there is something to know of a run. Runs that differ in seed and learning rate
alone share the compiled step of the first.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import json
import os
from pathlib import Path
import sys
from typing import Any

from absl import flags

from comparison import measurements, plan
from comparison.usage import Meter
from settings.errors import ConfigError, RunError, one_line
from tasks import cache
from training import entry, experiment, host_memory, loop, workdir
from training.experiment import Experiment
from training.signals import Signals

_GROUP = flags.DEFINE_string("group", None, "a .json file", required=True)


def main() -> None:
  """Does what the file says, and prints how it went."""
  group = json.loads(Path(_GROUP.value).read_text())
  answers = sys.stdout

  def tell(run: Mapping[str, Any], event: str, **found: Any) -> None:
    line = {"index": run["index"], "event": event, **found}
    print(json.dumps(line), file=answers, flush=True)

  host_memory.keep_freed()
  cache.keep_programs()
  # A run says a lot that nobody reads here.
  with (
    Path(os.devnull).open("w") as nowhere,
    contextlib.redirect_stdout(nowhere),
    Signals() as signals,
  ):
    train_all(group["runs"], group["stop_at"], signals, tell)


def train_all(
  runs: Sequence[Mapping[str, Any]],
  stop_at: int | None,
  signals: Signals,
  tell: Callable[..., None],
) -> None:
  """Trains and measures one run after another, until `signals.stop`.

  Args:
    runs: as `comparison.launch` writes them.
    stop_at: as in `loop.run`, for all; then nothing is measured.
    signals: entered.
    tell: called with a run, what became of it, and more of that.
  """
  first, shape = None, None
  for run in runs:
    meter = Meter()
    try:
      made = begin(run, first)
      if made is None:
        tell(run, "trained", usage={})
      else:
        first = first or made
        results = loop.run(made, Path(run["folder"]), stop_at, signals)
        event = "stopped" if results is None else "trained"
        tell(run, event, usage=meter.read())
        if results is None:
          if signals.stop:
            return
          continue
    except ConfigError as error:
      tell(run, "failed", reason=one_line(error), is_final=True)
      continue
    except RunError as error:
      reason, usage = one_line(error), meter.read()
      tell(run, "failed", reason=reason, is_final=False, usage=usage)
      continue
    try:
      folder = Path(run["folder"])
      shape = measurements.trained(
        folder, with_map=run["with_map"], shape=shape
      )
      tell(run, "measured", error="", found=shape)
    # It stays to be measured, and the others are not stopped.
    except Exception as error:
      tell(run, "measured", error=one_line(error))


def begin(
  run: Mapping[str, Any], first: Experiment | None
) -> Experiment | None:
  """Everything of a run, its folder claimed; None where it is trained already.

  Args:
    run: as `comparison.launch` writes it.
    first: the run whose program it shares.

  Raises:
    ConfigError: it cannot be.
  """
  config = plan.config_of(run["task"], run["mechanism"], run["leaves"])
  folder = Path(run["folder"])
  workdir.check(folder, config)
  if workdir.final_metrics(folder, config) is not None:
    return None
  made = experiment.begin(config, folder)
  return made if first is None else experiment.sharing(made, first)


if __name__ == "__main__":
  entry.run(main)
