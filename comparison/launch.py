"""Trains the runs of a comparison that have no result yet, and measures them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from comparison import records, train_run, worker
from comparison.config import APART, Comparison
from comparison.planned_run import Run, group_by
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
  """Trains and measures all runs without a result, and prints each result.

  Each run has its own workdir, as with `train.py`, so a comparison that was killed
  continues its unfinished run from the last checkpoint. A run that fails is tried
  twice, and again in the next call.

  Args:
    runs: runs of the plan.
    workdir: the folder of the comparison.
    comparison: determines which runs are measured together, and whose attention map is
      stored.
    share: share of the steps after which runs are evaluated and stopped; None trains
      them to the end and measures the reported ones.
    after: called whenever all runs of one shape have ended.

  Raises:
    RunError: a record cannot be written, or another process trains one of the runs.
  """
  suffix = "" if share is None else f"; to {share:.3g} of the steps"
  numbers = {run.identity: number for number, run in enumerate(runs, 1)}
  try:
    key = "identity" if comparison.together == APART else "shape"
    for shape in group_by(runs, key):
      queue = [run for run in shape if not _cannot_run(run, workdir)]
      for run in queue:
        records.forget_failure(workdir, run)
      queue = [run for run in queue if not _has_ended(run, workdir, share)]
      for run in queue:
        name = f"[{numbers[run.identity]}/{len(runs)}] {run.identity}"
        print(
          f"{name}: {'; '.join(filter(None, (run.slots, run.options)))}; "
          f"{run.parameters:,} parameters{suffix}",
          flush=True,
        )
      if queue:
        for run in queue:
          if (run_workdir := records.run_workdir(workdir, run)).is_dir():
            # Raises if another process is training the run.
            with ownership.lock(run_workdir):
              pass
        for run in queue:
          _train(run, workdir, share)
        _measure(queue, workdir, comparison.seed_numbers[0])
        after()
  except OSError as error:
    raise RunError(
      f"{one_line(error)}; the same command continues the comparison"
    ) from error


def _cannot_run(run: Run, workdir: Path) -> bool:
  """Returns whether a run cannot run, and records the reason."""
  if not run.obstacle:
    return False
  record = records.read_one(workdir, run.identity)
  is_done = record.get("status") == records.DONE
  if not is_done and record.get("reason") != run.obstacle:
    records.write(workdir, run, status=records.UNSUPPORTED)
  return True


def _has_ended(run: Run, workdir: Path, share: float | None) -> bool:
  """Returns whether a run has finished or failed, so that nothing is left to do."""
  record = records.read_one(workdir, run.identity)
  match record.get("status"):
    case records.DONE | records.FAILED:
      return True
    case records.TRAINED:
      # A reason means that the run could not be measured.
      return bool(record["reason"])
  return share is not None and records.loss_at(workdir, run, share) is not None


def _train(run: Run, workdir: Path, share: float | None) -> None:
  """Trains a run, and tries once more if that fails."""
  if records.status(workdir, run) == records.TRAINED:
    return
  reason = ""
  for tries_left in reversed(range(_TRIES)):
    with records.running(workdir, run):
      train_run.train(run, workdir, share)
    is_trained = records.status(workdir, run) == records.TRAINED
    if is_trained or _has_ended(run, workdir, share):
      return
    record = records.read_one(workdir, run.identity)
    reason = record.get("reason") or "it was stopped"
    if tries_left:
      print(f"  {run.identity}: failed: {reason}; trying again", flush=True)
  earlier_usage = records.usage(workdir, run)
  records.write(
    workdir, run, status=records.FAILED, reason=reason, **earlier_usage
  )
  print(f"  {run.identity}: failed: {reason}", flush=True)


def _measure(runs: Sequence[Run], workdir: Path, map_seed: int) -> None:
  """Measures the reported runs of one shape together; after a failure, one by one."""
  trained = {
    run.identity: run.seed == map_seed
    for run in runs
    if not run.choosing and records.status(workdir, run) == records.TRAINED
  }
  if not trained or not worker.measure(workdir, trained):
    return
  for identity, with_map in trained.items():
    record = records.read_one(workdir, identity)
    if record["status"] != records.TRAINED or record["reason"]:
      continue
    if error := worker.measure(workdir, {identity: with_map}):
      reason = f"measuring: {error}"
      records.update(workdir, identity, reason=reason)
      print(f"  {identity}: {reason}", flush=True)
