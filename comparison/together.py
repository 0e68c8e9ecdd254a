"""Trains and measures runs of one shape in one process.

    python -m comparison.together --group=FILE.json

`comparison.launch` writes the file and reads what this prints: a line of JSON as soon
as there is something to know of a run. How the runs share a program is chosen by
measuring one step of each way (`training.together`).
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
from pathlib import Path
import sys
from typing import Any

from absl import flags
import jax

from comparison import measurements, plan
from comparison.usage import Meter
from settings.errors import ConfigError, RunError, one_line
from tasks import cache
from training import (
  claimed,
  entry,
  experiment,
  host_memory,
  loop,
  together,
  workdir,
)
from training.together import Member, Outcome

_GROUP = flags.DEFINE_string("group", None, "a .json file", required=True)

_SHARED = ("seconds", "cpu_seconds")
_WAYS = {"side_by_side": together.side_by_side, "in_turn": together.in_turn}


def main() -> None:
  """Does what the file says, and prints how it went."""
  group = json.loads(Path(_GROUP.value).read_text())
  runs, stop_at = group["runs"], group["stop_at"]
  answers = sys.stdout

  def tell(index: int, event: str, **found: Any) -> None:
    line = {"index": runs[index]["index"], "event": event, **found}
    print(json.dumps(line), file=answers, flush=True)

  host_memory.keep_freed()
  cache.keep_programs()
  # A run says a lot that nobody reads here.
  with (
    Path(os.devnull).open("w") as nowhere,
    contextlib.redirect_stdout(nowhere),
  ):
    _make(group, runs, stop_at, tell)


def _make(
  group: Mapping[str, Any],
  runs: Sequence[Mapping[str, Any]],
  stop_at: int | None,
  tell: Any,
) -> None:
  meter, shape = Meter(), None
  members, places, trained = [], [], []
  for index, run in enumerate(runs):
    try:
      member = _member(run)
    except ConfigError as error:
      tell(index, "failed", reason=one_line(error), is_final=True)
      continue
    if member is None:
      tell(index, "trained", usage={})
      trained.append(index)
    else:
      members.append(member)
      places.append(index)
  way = _way(group, members)
  at_once = len(members) if way == "side_by_side" else 1
  # All of them needed the start, whichever comes first.
  start, meter = _shared(meter.read(), max(len(members), 1)), Meter()
  for outcome in _outcomes(way, members, stop_at):
    index, took = places[outcome.index], _shared(meter.read(), at_once)
    for name in _SHARED:
      took[name] += start[name]
    if outcome.error is not None:
      reason = one_line(outcome.error)
      tell(index, "failed", reason=reason, is_final=False, usage=took)
    elif outcome.results is None:
      tell(index, "stopped", usage=took)
    else:
      tell(index, "trained", usage=took)
      trained.append(index)
    if at_once == 1:
      shape = _measure(runs, trained, shape, tell)
      meter = Meter()
  _measure(runs, trained, shape, tell)


def _shared(usage: dict[str, Any], runs: int) -> dict[str, Any]:
  """What one of some runs took that took it together."""
  return usage | {name: usage[name] / runs for name in _SHARED}


def _member(run: Mapping[str, Any]) -> Member | None:
  """Everything of a run, its folder claimed; None where it is trained already.

  Raises:
    ConfigError: it cannot be.
  """
  config = plan.config_of(run["task"], run["mechanism"], run["leaves"])
  folder = Path(run["folder"])
  workdir.check(folder, config)
  if workdir.final_metrics(folder, config) is not None:
    return None
  return Member(experiment.begin(config, folder), folder)


def _way(group: Mapping[str, Any], members: Sequence[Member]) -> str:
  """'side_by_side', 'in_turn', or 'apart' where devices are several."""
  kinds = {member.experiment.config.train.parallel for member in members}
  if jax.device_count() > 1 or kinds == {"pmap"}:
    return "apart"
  if len(members) < 2:
    return "in_turn"
  if group["way"] != "auto":
    return group["way"]
  path = Path(group["measured"])
  seconds = claimed.parsed(path)
  if seconds is None:
    # Only where nothing is known: this makes the first batches of every run.
    if not together.are_alike(members):
      return "in_turn"
    seconds = together.step_seconds(members)
    claimed.replace(path, seconds)
  return min(seconds, key=seconds.__getitem__)


def _outcomes(
  way: str, members: Sequence[Member], stop_at: int | None
) -> Iterator[Outcome]:
  """How each of the runs ended, as soon as it has."""
  if way in _WAYS:
    if members:
      yield from _WAYS[way](members, stop_at)
    return
  for index, member in enumerate(members):
    try:
      results = loop.run(member.experiment, member.workdir, stop_at)
      yield Outcome(index, results)
    except (ConfigError, RunError) as error:
      yield Outcome(index, None, error)


def _measure(
  runs: Sequence[Mapping[str, Any]],
  trained: list[int],
  shape: Mapping[str, Any] | None,
  tell: Any,
) -> Mapping[str, Any] | None:
  """Measures and removes those that are `trained`; what all of them share."""
  while trained:
    index = trained.pop(0)
    run = runs[index]
    try:
      found = measurements.trained(
        Path(run["folder"]), with_map=run["with_map"], shape=shape
      )
    # It stays to be measured, and the others are not stopped.
    except Exception as error:
      tell(index, "measured", error=one_line(error))
      continue
    tell(index, "measured", error="", found=found)
    shape = found
  return shape


if __name__ == "__main__":
  entry.run(main)
