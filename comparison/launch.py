"""Makes what a comparison still lacks: runs of one shape together, or each apart."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
from pathlib import Path

from comparison import records, worker
from comparison.config import APART, Comparison
from comparison.plan import Run, grouped
from settings.errors import RunError, one_line
from training import ownership

_TRIES = 2


def launch(
  runs: Sequence[Run],
  workdir: Path,
  comparison: Comparison,
  share: float | None = None,
  after: Callable[[], None] = lambda: None,
) -> None:
  """Makes all that has no result yet, and says so as each ends.

  A run has its own folder, as `train.py` makes it, so a comparison that was killed
  continues its unfinished run where that was. What failed is tried twice, and again
  with the next call.

  Args:
    runs: of the plan.
    workdir: of the comparison.
    comparison: says which runs share a process, and the map of which is kept.
    share: of their steps, where they are evaluated and stop; None trains to the
      end, and measures those that are reported.
    after: called whenever runs of one process have ended.

  Raises:
    RunError: a record cannot be written, or another process makes one of them.
  """
  end = "" if share is None else f"; to {share:.3g} of the steps"
  numbers = {run.identity: number for number, run in enumerate(runs, 1)}
  try:
    key = "identity" if comparison.together == APART else "shape"
    for shape in grouped(runs, key):
      queue = [run for run in shape if not _is_refused(run, workdir)]
      for run in queue:
        records.forget_failure(workdir, run)
      queue = [run for run in queue if not _has_ended(run, workdir, share)]
      for run in queue:
        name = f"[{numbers[run.identity]}/{len(runs)}] {run.identity}"
        print(
          f"{name}: {'; '.join(filter(None, (run.slots, run.options)))}; "
          f"{run.parameters:,} parameters{end}",
          flush=True,
        )
      if queue:
        _make(queue, workdir, share, comparison.seed_numbers[0], _TRIES)
        after()
  except OSError as error:
    raise RunError(
      f"{one_line(error)}; the same command continues the comparison"
    ) from error


def _is_refused(run: Run, workdir: Path) -> bool:
  """Whether a run cannot be; its record says so."""
  if not run.obstacle:
    return False
  record = records.of(workdir, run.identity)
  is_done = record.get("status") == records.DONE
  if not is_done and record.get("reason") != run.obstacle:
    records.write(workdir, run, status=records.UNSUPPORTED)
  return True


def _has_ended(run: Run, workdir: Path, share: float | None) -> bool:
  """Whether there is nothing to do for a run before it is tried again."""
  record = records.of(workdir, run.identity)
  match record.get("status"):
    case records.DONE | records.FAILED:
      return True
    case records.TRAINED:
      return bool(record["reason"])  # Why it could not be measured.
  return share is not None and records.loss_at(workdir, run, share) is not None


def _make(
  runs: Sequence[Run],
  workdir: Path,
  share: float | None,
  map_seed: int,
  tries: int,
) -> None:
  """Makes runs of one shape in one process; what fails is tried again, apart.

  Raises:
    RunError: another process makes one of them.
  """
  for run in runs:
    if (home := records.home(workdir, run)).is_dir():
      with ownership.lock(home):
        pass
  with contextlib.ExitStack() as stack:
    for run in runs:
      stack.enter_context(records.running(workdir, run))
    fault = worker.run(
      {
        "workdir": str(workdir),
        "runs": [dataclasses.asdict(run) for run in runs],
        "share": share,
        "map_seed": map_seed,
      }
    )
  # Where a process of several ends, nobody knows by whose fault.
  remaining_tries = tries if fault and len(runs) > 1 else tries - 1
  for run in runs:
    if _has_ended(run, workdir, share):
      continue
    record = records.of(workdir, run.identity)
    reason = fault or record.get("reason") or "it was stopped"
    if remaining_tries:
      print(f"  {run.identity}: failed: {reason}; tried again", flush=True)
      _make([run], workdir, share, map_seed, remaining_tries)
    elif record.get("status") == records.TRAINED:
      reason = f"measuring: {reason}"
      records.update(workdir, run.identity, reason=reason)
      print(f"  {run.identity}: {reason}", flush=True)
    else:
      spent = records.usage(workdir, run)
      records.write(workdir, run, status=records.FAILED, reason=reason, **spent)
      print(f"  {run.identity}: failed: {reason}", flush=True)
