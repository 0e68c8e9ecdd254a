"""The metrics of some steps, on the devices until somebody asks."""

from collections.abc import Mapping
import pathlib
import time

import jax

from process.errors import RunError

_AHEAD = 4
"""Steps that the host may be ahead of the devices."""


class LossMeter:
  """What happened since the last line in metrics.jsonl.

  Metrics stay on the devices until `fetch`, so that no step waits for the
  host.

  Attributes:
    sums: sum and count of the loss; goes into checkpoints, so that the first
      line after a restart is that of a run without one.
    seconds: that training took so far, without compiling and evaluations; goes
      into checkpoints too.
  """

  def __init__(
    self,
    sums: tuple[float, float],
    seconds: float,
    workdir: pathlib.Path,
  ):
    self.sums, self.seconds = tuple(sums), seconds
    self._workdir = workdir
    self._pending = []
    self._last = {}
    self._tokens, self._seconds = 0.0, 0.0
    self._mark = time.monotonic()

  def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
    """Takes the metrics of one step, without waiting for it."""
    self._pending.append((step, metrics))
    if len(self._pending) > _AHEAD:
      jax.block_until_ready(self._pending[-1 - _AHEAD][1])

  def fetch(self) -> None:
    """Waits for every step so far.

    Raises:
      RunError: a loss or gradient was not finite; the state is that before.
    """
    for (step, _), metrics in zip(
      self._pending, jax.device_get([m for _, m in self._pending]), strict=True
    ):
      total, count = map(float, metrics["loss"])
      if metrics["updates"] != step + 1:
        raise RunError(
          f"step {step + 1}: loss or gradient is not finite (loss "
          f"{total / max(count, 1)}, gradient norm {metrics['grad_norm']}); "
          f"nothing was updated; config: {self._workdir / 'config.json'}"
        )
      self.sums = (self.sums[0] + total, self.sums[1] + count)
      self._tokens += count
      self._last = metrics
    self._pending = []
    now = time.monotonic()
    self._seconds += now - self._mark
    self.seconds += now - self._mark
    self._mark = now

  def flush(self) -> dict[str, float]:
    """The values of one line; the next one starts from zero."""
    values = {
      "loss": self.sums[0] / max(self.sums[1], 1.0),
      "grad_norm": float(self._last["grad_norm"]),
      "learning_rate": float(self._last["learning_rate"]),
    }
    if self._seconds:
      values["tokens_per_second"] = self._tokens / self._seconds
    self.sums = (0.0, 0.0)
    self._restart_clock()
    return values

  def forget_first(self) -> None:
    """Leaves out the step just fetched: most of it was compiling."""
    self.seconds -= self._seconds
    self._restart_clock()

  def _restart_clock(self) -> None:
    self._tokens, self._seconds = 0.0, 0.0
    self.skip_clock()

  def skip_clock(self) -> None:
    """Leaves out the time since the last `fetch`."""
    self._mark = time.monotonic()
