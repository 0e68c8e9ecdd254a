"""Runs what a comparison still lacks: runs of one shape together, or each apart."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
from pathlib import Path
import signal
import sys
from typing import Any

from comparison import child, records
from comparison.config import APART
from comparison.plan import Run
from settings.errors import RunError, one_line
from training import claimed, evaluate, metrics

_ROOT = Path(__file__).parent.parent
_TRAIN = [str(_ROOT / "train.py")]
_MEASURE = ["-m", "comparison.measure"]
_TOGETHER = ["-m", "comparison.together"]
_BUDGETS, _SHAPES = "budgets", "together"

_TRIES = 2


def launch(
  runs: Sequence[Run],
  workdir: Path,
  map_seed: int,
  together: str = APART,
  after: Callable[[], None] = lambda: None,
) -> None:
  """Runs all that has no result yet, and says so as each ends.

  A run has its own folder, as `train.py` makes it, so a comparison that was killed
  continues its unfinished run where that was. What failed is tried twice, and again
  with the next call.

  Args:
    runs: of the plan, or one shard of it.
    workdir: of the comparison.
    map_seed: of the runs whose attention maps are kept, all of one example.
    together: how runs that differ in seed and learning rate alone share a process,
      as in `Comparison`; apart, a run is `train.py` itself, and
      `comparison.measure` then measures it.
    after: called whenever runs of one process have ended.

  Raises:
    RunError: a record cannot be written.
  """
  numbers = {run.identity: number for number, run in enumerate(runs, 1)}
  with _stoppable():
    for group in groups(runs, together):
      left = []
      for run in group:
        status = records.status(workdir, run)
        if status in (records.DONE, records.UNSUPPORTED):
          continue
        name = f"[{numbers[run.identity]}/{len(runs)}] {run.identity}"
        if run.obstacle:
          records.write(workdir, run, status=records.UNSUPPORTED)
          print(f"{name}: not supported: {run.obstacle}", flush=True)
          continue
        print(f"{name}: {run.slots}; {run.parameters:,} parameters", flush=True)
        left.append(run)
      if not left:
        continue
      remaining = _all_tries(left)
      if together != APART:
        remaining = _made_together(left, workdir, map_seed=map_seed)
      for run, tries in remaining:
        _made_apart(run, workdir, tries, with_map=run.seed == map_seed)
      after()


def losses_at(
  runs: Sequence[Run], workdir: Path, share: float, together: str = APART
) -> list[float]:
  """Loss on the first held-out split after a share of each run's steps.

  Trains the runs to there where they have not been, and no further.

  Args:
    runs: that can be.
    workdir: of the comparison.
    share: of their steps, between 0 and 1.
    together: as in `launch`.

  Returns:
    The losses; infinite where a run failed.

  Raises:
    RunError: a record cannot be written.
  """
  steps: dict[str, int] = {}
  with _stoppable():
    for run in runs:
      try:
        whole = run.steps or _budgeted_steps(run, workdir)
        steps[run.identity] = max(1, round(share * whole))
      except RunError as error:
        print(f"  {_failed(run, workdir, f'budget: {error}')}", flush=True)
    for group in groups(runs, together):
      left = [
        run
        for run in group
        if run.identity in steps
        and _evaluated(run, workdir, steps[run.identity]) is None
      ]
      for run in left:
        print(f"to step {steps[run.identity]}: {run.identity}", flush=True)
      remaining = _all_tries(left)
      if left and together != APART:
        stop_at = steps[left[0].identity]  # Runs of one shape have equal steps.
        remaining = _made_together(left, workdir, stop_at=stop_at)
      for run, tries in remaining:
        with records.running(workdir, run):
          stop_at = steps[run.identity]
          print(f"  {_train(run, workdir, tries, stop_at)}", flush=True)
  return [
    math.inf if found is None else found["loss"]
    for run in runs
    for found in [_evaluated(run, workdir, steps.get(run.identity, 0))]
  ]


def groups(runs: Sequence[Run], together: str) -> list[list[Run]]:
  """Runs of one shape, in the order of the first of each; apart, single runs."""
  if together == APART:
    return [[run] for run in runs]
  found: dict[str, list[Run]] = {}
  for run in runs:
    found.setdefault(run.shape, []).append(run)
  return list(found.values())


def _all_tries(runs: Sequence[Run]) -> list[tuple[Run, int]]:
  return [(run, _TRIES) for run in runs]


def _made_apart(run: Run, workdir: Path, tries: int, *, with_map: bool) -> None:
  """Trains a run in a process of its own, and measures it in another."""
  with records.running(workdir, run):
    if records.status(workdir, run) != records.TRAINED:
      print(f"  {_train(run, workdir, tries)}", flush=True)
    if records.status(workdir, run) == records.TRAINED:
      print(f"  {_measure(run, workdir, with_map=with_map)}", flush=True)


def _made_together(
  runs: Sequence[Run],
  workdir: Path,
  *,
  stop_at: int | None = None,
  map_seed: int | None = None,
) -> list[tuple[Run, int]]:
  """Makes runs of one shape in one process, and writes their records.

  Args:
    runs: of one shape.
    workdir: of the comparison.
    stop_at: step at which all of them stop; None measures what is trained.
    map_seed: as in `launch`.

  Returns:
    Runs that have to be tried in a process of their own, and how often: once
    where they failed, and twice where the process ended before they did.
  """
  left: dict[int, Run] = {}
  leaves: dict[int, dict[str, Any]] = {}
  again: list[tuple[Run, int]] = []
  for index, run in enumerate(runs):
    try:
      leaves[index] = _leaves(run, workdir)
      left[index] = run
    except RunError as error:
      print(f"  {_failed(run, workdir, f'budget: {error}')}", flush=True)
  if not left:
    return again
  arguments = {
    index: dataclasses.replace(run, leaves=leaves[index]).arguments
    for index, run in left.items()
  }
  folder = workdir / _SHAPES
  folder.mkdir(exist_ok=True)
  path = folder / f"{runs[0].shape}.runs.json"
  content = {
    "stop_at": stop_at,
    "runs": [
      {
        "index": index,
        "task": run.task,
        "mechanism": run.mechanism,
        "leaves": leaves[index],
        "folder": str(workdir / records.RUNS / run.identity),
        "with_map": run.seed == map_seed,
      }
      for index, run in left.items()
    ],
  }
  claimed.replace(path, content)

  count = len(left)

  def heard(line: Mapping[str, Any]) -> None:
    index = line["index"]
    run = runs[index]
    known = {"arguments": arguments[index], "together": count}
    told = _heard(run, workdir, line, known, stop_at)
    if told:
      print(f"  {run.identity}: {told}", flush=True)
    if line["event"] == "failed" and not line["is_final"]:
      again.append((run, 1))
    if line["event"] != "trained":
      left.pop(index, None)

  with contextlib.ExitStack() as stack:
    for run in left.values():
      stack.enter_context(records.running(workdir, run))
    reason = child.listen([*_TOGETHER, f"--group={path}"], heard)
  if left and reason:
    print(f"  {reason}; those that are left are tried apart", flush=True)
  return [*again, *((run, _TRIES) for run in left.values())]


def _heard(
  run: Run,
  workdir: Path,
  line: Mapping[str, Any],
  known: Mapping[str, Any],
  stop_at: int | None,
) -> str:
  """Writes what a process told of one of its runs; what to say of it."""
  spent = records.usage(workdir, run)
  found = {**known, **spent, **_sum(spent, line.get("usage", {}))}
  match line["event"]:
    case "trained" if records.status(workdir, run) == records.TRAINED:
      return ""
    case "trained":
      outcome = _outcome(workdir / records.RUNS / run.identity)
      records.write(workdir, run, status=records.TRAINED, **found, **outcome)
      return metrics.format_values(_values(outcome["final"]))
    case "stopped":
      reason = _stopped(stop_at)
      records.write(
        workdir, run, status=records.STOPPED, reason=reason, **found
      )
      return reason
    case "failed":
      reason = line["reason"]
      # What does not end alike again is tried once more, apart.
      status = records.FAILED if line["is_final"] else records.STOPPED
      records.write(workdir, run, status=status, reason=reason, **found)
      return f"failed: {reason}"
    case _:
      if error := line["error"]:
        # It stays to be measured: the same command tries again.
        records.update(workdir, run, reason=f"measuring: {error}")
        return f"not measured: {error}"
      return _measured(run, workdir, line["found"])


def _stopped(step: int | None) -> str:
  """Why a run is not at its end, for its record."""
  if step is None:
    return "stopped; the same command continues it"
  return f"at step {step}; it may go on"


def _leaves(run: Run, workdir: Path) -> dict[str, Any]:
  """What a run's config differs in from its file, with a budget as steps.

  Raises:
    RunError: the step cannot be timed.
  """
  if run.budget_seconds is None:
    return run.leaves
  return {**run.leaves, "num_steps": _budgeted_steps(run, workdir)}


def _evaluated(run: Run, workdir: Path, step: int) -> dict[str, Any] | None:
  """The evaluation of a run at a step; None where it has none."""
  lines = records.history(workdir, run)
  return next(
    (x for x in lines if x["step"] == step and x["split"] != "train"), None
  )


def _train(
  run: Run, workdir: Path, tries: int, stop_at: int | None = None
) -> str:
  """Makes one run, writes its record and says how it went."""
  folder = workdir / records.RUNS / run.identity
  try:
    leaves = _leaves(run, workdir)
  except RunError as error:
    return _failed(run, workdir, f"budget: {error}")
  arguments = dataclasses.replace(run, leaves=leaves).arguments
  spent = records.usage(workdir, run)

  def write(status, **found):
    records.write(
      workdir, run, status=status, arguments=arguments, **spent, **found
    )

  def interrupted(usage):
    spent.update(_sum(spent, usage))
    write(records.STOPPED, reason=_stopped(None))

  options = [] if stop_at is None else [f"--stop_at={stop_at}"]
  command = [*_TRAIN, *arguments, *options, f"--workdir={folder}"]
  for left in reversed(range(tries)):
    ended = child.run(command, interrupted)
    # What an interrupted process took, or one that failed, counts as well.
    spent.update(_sum(spent, ended.usage))
    if not ended.error:
      break
    if ended.is_final or not left:
      write(records.FAILED, reason=ended.error)
      return f"failed: {ended.error}"
    print(f"  failed: {ended.error}; tried again", flush=True)
  found = _outcome(folder)
  if stop_at is None:
    write(records.TRAINED, **found)
  else:
    write(records.STOPPED, reason=_stopped(stop_at))
  return metrics.format_values(_values(found["final"]))


def _outcome(folder: Path) -> dict[str, Any]:
  """What a run left in its folder for its record, which is not measured yet.

  'final' is the last evaluation, 'history' all lines. 'sentences' has ten
  numbers for each sentence of the last split, where the task is judged by BLEU.
  """
  history = metrics.read(folder)
  final = [line for line in history if line["split"] != "train"][-1]
  found = {"final": final, "history": history, "measured": {}}
  sentences = claimed.parsed(folder / evaluate.SENTENCES)
  return found | ({"sentences": sentences["statistics"]} if sentences else {})


def _values(line: Mapping[str, Any]) -> dict[str, Any]:
  """The metrics of a line, without where it stands."""
  place = ("step", "split", "seconds")
  return {k: v for k, v in line.items() if k not in place}


def _failed(run: Run, workdir: Path, reason: str) -> str:
  records.write(workdir, run, status=records.FAILED, reason=reason)
  return f"failed: {reason}"


def _sum(spent: child.Usage, usage: child.Usage) -> child.Usage:
  """What several processes of a run took: seconds add up, all else is the most."""
  found: child.Usage = {}
  for name, value in usage.items():
    values = [x for x in (value, spent.get(name)) if x is not None]
    together = sum if name.endswith("seconds") else max
    found[name] = together(values) if values else None
  return found


def _measure(run: Run, workdir: Path, *, with_map: bool) -> str:
  """Measures a trained run and completes its record."""
  folder = workdir / records.RUNS / run.identity
  out = folder / "measured.json"
  options = ["--map"] if with_map else []
  ended = child.run(
    [*_MEASURE, f"--workdir={folder}", f"--out={out}", *options]
  )
  if ended.error:
    # It stays to be measured: the same command tries again.
    records.update(workdir, run, reason=f"measuring: {ended.error}")
    return f"not measured: {ended.error}"
  return _measured(run, workdir, json.loads(out.read_text()))


def _measured(run: Run, workdir: Path, measured: Mapping[str, Any]) -> str:
  """Completes a run's record, and says what a step takes."""
  records.update(
    workdir, run, status=records.DONE, measured=measured, reason=""
  )
  return (
    f"step {1e3 * measured['step_seconds']:.1f} ms, "
    f"compiling {measured['compile_seconds']:.1f} s"
  )


def _budgeted_steps(run: Run, workdir: Path) -> int:
  """A budget of seconds as a number of steps, timed once for all seeds.

  Raises:
    RunError: the step cannot be timed.
  """
  assert run.budget_seconds is not None  # Otherwise `run.steps` is known.
  folder = workdir / _BUDGETS
  folder.mkdir(exist_ok=True)
  path = folder / f"{run.family}.json"
  found = claimed.parsed(path)
  if found is None:
    ended = child.run([*_MEASURE, *run.arguments, f"--out={path}"])
    if ended.error:
      raise RunError(ended.error)
    found = json.loads(path.read_text())
  return max(1, round(run.budget_seconds / found["step_seconds"]))


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
  """SIGTERM ends as Ctrl-C does, so that the child is stopped as well.

  Raises:
    RunError: a file cannot be written, as on a full disk.
  """

  def stop(signum, frame):
    del frame
    sys.exit(128 + signum)

  before = signal.signal(signal.SIGTERM, stop)
  try:
    yield
  except OSError as error:
    raise RunError(
      f"{one_line(error)}; the same command continues the comparison"
    ) from error
  finally:
    signal.signal(signal.SIGTERM, before)
