"""Writes the metrics of a run to metrics.jsonl, loggers and a progress bar."""

from collections.abc import Mapping
import datetime
import json
import pathlib
import sys
from typing import Any

import tensorboardX
import tqdm

from settings import atomic, json_text
from training.config import LogConfig

FILE = "metrics.jsonl"

_BAR_METRICS = ("loss", "tokens_per_second")


def read(workdir: pathlib.Path, file: str = FILE) -> list[dict[str, Any]]:
  """Reads all intact lines of a file such as metrics.jsonl; none if it is missing.

  Reports each damaged line on standard error, except the last one, which a killed
  process may have truncated.
  """
  path = workdir / file
  if not path.exists():
    return []
  records: list[dict[str, Any]] = []
  lines = path.read_text("utf-8", "replace").splitlines()
  for number, line in enumerate(lines, 1):
    try:
      record = json_text.loads(line)
    except ValueError:
      record = None
    if isinstance(record, dict) and (
      file != FILE
      or (isinstance(record.get("step"), int) and "split" in record)
    ):
      records.append(record)
    elif number < len(lines):
      print(f"{path}: line {number} is damaged", file=sys.stderr)
  return records


class MetricsWriter:
  """Writes records to metrics.jsonl, and their numbers to the loggers of `log`.

  First, it removes records after `step`, so that a run that continues from there writes
  the same file as an uninterrupted run. With several processes, only the first writes.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    step: int,
    writes: bool = True,
    log: LogConfig = LogConfig(),  # noqa: B008  # It is frozen.
  ):
    self._writes, self._workdir = writes, workdir
    if not writes:
      return
    records = [record for record in read(workdir) if record["step"] <= step]
    text = "".join(json.dumps(record) + "\n" for record in records)
    atomic.write_text(workdir / FILE, text)
    self._board, self._wandb = None, None
    if log.tensorboard:
      self._board = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=step + 1 if step else None
      )
    if log.wandb:
      self._wandb = _start_wandb(workdir, log.project)
    self._file = (workdir / FILE).open("a", encoding="utf-8")

  def write(
    self,
    step: int,
    splits: Mapping[str, Mapping[str, float | str]],
    seconds: float,
  ) -> None:
    """Writes one line for each split; `splits` maps splits to metrics to values."""
    if not self._writes:
      return
    lines = ""
    for split, values in splits.items():
      header = {"step": step, "split": split, "seconds": round(seconds, 3)}
      lines += json.dumps({**header, **values}) + "\n"
      numbers = {
        f"{split}/{name}": value
        for name, value in values.items()
        if not isinstance(value, str)
      }
      if self._board is not None:
        for name, value in numbers.items():
          self._board.add_scalar(name, value, step)
      if self._wandb is not None:
        self._wandb.log(numbers, step=step)
    if len(splits) > 1:  # Of a finished run: all of them, or none.
      text = (self._workdir / FILE).read_text("utf-8")
      self._file.close()
      atomic.write_text(self._workdir / FILE, text + lines)
      self._file = (self._workdir / FILE).open("a", encoding="utf-8")
    else:
      self._file.write(lines)
      self._file.flush()

  def close(self) -> None:
    """Closes the file and the loggers."""
    if self._writes:
      self._file.close()
      if self._board is not None:
        self._board.close()
      if self._wandb is not None:
        self._wandb.finish()


def _start_wandb(workdir: pathlib.Path, project: str) -> Any:
  """Starts a run of Weights & Biases with the name, config and folder of this run.

  If this run continues, so does the run of Weights & Biases, whose id is in `workdir`.
  """
  # An optional package.
  import wandb  # pyrefly: ignore[missing-import]

  config, run_id = workdir / "config.json", workdir / "wandb" / "run_id"
  run = wandb.init(
    project=project,
    name=workdir.name,
    dir=str(workdir),
    config=json.loads(config.read_text("utf-8")) if config.exists() else None,
    id=run_id.read_text("utf-8") if run_id.exists() else None,
    resume="allow",
    settings=wandb.Settings(silent=True),
  )
  run_id.parent.mkdir(exist_ok=True)
  atomic.write_text(run_id, run.id)
  return run


class Progress:
  """Shows the progress of a run: a bar on a terminal, lines elsewhere.

  Args:
    first: number of updates before this process.
    total: number of updates in the whole run.
    shown: whether to show a bar; with several processes, only the first shows one.
  """

  def __init__(self, first: int, total: int, shown: bool = True):
    self._total, self._bar = total, None
    if shown and sys.stderr.isatty():
      self._bar = tqdm.tqdm(
        initial=first, total=total, unit="step", dynamic_ncols=True
      )
    self.restart_clock(first, 0.0)

  def restart_clock(self, step: int, seconds: float) -> None:
    """Excludes time so far, such as compilation, from the estimate of the time left."""
    self._first, self._started = step, seconds

  def update(
    self, step: int, values: Mapping[str, float], seconds: float
  ) -> None:
    """Shows the step, its values and the estimated time left.

    `seconds` is the training time, without compilation and evaluations.
    """
    if self._bar is not None:
      self._bar.update(step - self._bar.n)
      # A bar has room only for these; metrics.jsonl has all.
      short = {k: v for k, v in values.items() if k in _BAR_METRICS}
      self._bar.set_postfix_str(format_values(short))
      return
    per_step = (seconds - self._started) / max(step - self._first, 1)
    left = datetime.timedelta(seconds=round(per_step * (self._total - step)))
    self.say(f"step {step}/{self._total}  {format_values(values)}  {left} left")

  def say(self, text: str) -> None:
    """Prints a line above the bar."""
    if self._bar is not None:
      self._bar.write(text, file=sys.stdout)
    else:
      print(text, flush=True)

  def close(self) -> None:
    """Closes the bar."""
    if self._bar is not None:
      self._bar.close()


def format_values(values: Mapping[str, Any]) -> str:
  """Formats values as in `loss 1.2345  exact_match 0.9990`."""
  return "  ".join(f"{name} {format_number(v)}" for name, v in values.items())


def format_number(value: float | str) -> str:
  """Formats a number with four decimals, if it is neither very small nor large."""
  if isinstance(value, str):
    return value
  if value == 0 or 1e-3 <= abs(value) < 1e4:
    return f"{value:.4f}"
  return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.2e}"
