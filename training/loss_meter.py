"""Accumulates the metrics of training steps, without waiting for the devices."""

from collections.abc import Mapping
import math
import pathlib
import time

import jax

from settings.errors import RunError

_MAX_STEPS_AHEAD = 4
"""The largest number of steps by which the host may be ahead of the devices."""

_MAX_RATIO = 10
"""A model that learned never has more than this multiple of the loss of guessing.

This holds if there are many classes.
"""

_MAX_NATS = 50.0
"""A model with few classes never exceeds this loss in nats, even if it overfits."""


class LossMeter:
  """Accumulates loss, tokens and time since the last line in metrics.jsonl.

  Metrics stay on the devices until `fetch`, so that no step waits for the host.

  Attributes:
    sums: sum and count of the loss. Checkpoints store it, so that the first line
      after a restart is the same as in an uninterrupted run.
    seconds: training time so far, without compilation and evaluations. Checkpoints
      also store it.
  """

  def __init__(
    self, sums: tuple[float, float], seconds: float, workdir: pathlib.Path
  ):
    self.sums, self.seconds = tuple(sums), seconds
    self._workdir = workdir
    self._pending, self._last = [], {}
    self._last_loss = math.nan
    self._restart_clock()

  def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
    """Adds the metrics of one step, without waiting for it."""
    self._pending.append((step, metrics))
    if len(self._pending) > _MAX_STEPS_AHEAD:
      jax.block_until_ready(self._pending[-1 - _MAX_STEPS_AHEAD][1])

  def fetch(self) -> None:
    """Waits for all steps so far and fetches their metrics.

    Raises:
      RunError: a loss, a gradient or a new parameter was not finite; that step did
        not change the state.
    """
    for step, metrics in jax.device_get(self._pending):
      total, count = map(float, metrics["loss"])
      if metrics["updates"] != step + 1:
        loss, norm = total / (count or 1.0), metrics["grad_norm"]
        numbers = f"(loss {loss}, gradient norm {norm}"
        if math.isfinite(loss) and math.isfinite(norm):
          what = "the update makes a parameter infinite or NaN"
          numbers += f", learning rate {metrics['learning_rate']}"
        else:
          what = "loss or gradient is not finite"
        raise self._error(step + 1, f"{what} {numbers}); nothing was updated")
      self.sums = (self.sums[0] + total, self.sums[1] + count)
      self._tokens += count
      self._last = metrics
    self._pending = []
    elapsed = time.monotonic() - self._start
    self._seconds += elapsed
    self.seconds += elapsed
    self._start += elapsed

  def check_held_out(self, step: int, loss: float, guess: float) -> None:
    """Checks that a held-out loss is plausible, given the training loss.

    Args:
      step: number of updates.
      loss: the held-out loss.
      guess: the loss of a uniform guess; infinite if there is none.

    Raises:
      RunError: the loss is not finite; or the training loss is below that of guessing,
        but the held-out loss is above 50 nats and more than ten times that of guessing.
    """
    train_loss = self._last_loss
    if self.sums[1]:
      train_loss = self.sums[0] / self.sums[1]
    has_learned = train_loss < guess
    limit = max(_MAX_RATIO * guess, _MAX_NATS)
    if math.isfinite(loss) and not (has_learned and loss > limit):
      return
    raise self._error(
      step,
      f"held-out loss is {loss:.4g}, but the training loss is {train_loss:.4g}; "
      "the model diverged, or the compiled evaluation is wrong",
    )

  def _error(self, step: int, what: str) -> RunError:
    return RunError(
      f"step {step}: {what}; config: {self._workdir / 'config.json'}"
    )

  def flush(self) -> dict[str, float]:
    """Returns the values of one line, and resets the sums.

    `tokens_per_second` counts the same targets as the loss: those with a weight.
    """
    # Weights of a task may sum to less than 1.
    self._last_loss = self.sums[0] / (self.sums[1] or 1.0)
    values = {
      "loss": self._last_loss,
      "grad_norm": float(self._last["grad_norm"]),
      "learning_rate": float(self._last["learning_rate"]),
    }
    if self._seconds:
      values["tokens_per_second"] = self._tokens / self._seconds
    self.sums = (0.0, 0.0)
    self._restart_clock()
    return values

  def discard_first_step(self) -> None:
    """Discards the time of the first step, which is mostly compilation."""
    self.seconds -= self._seconds
    self._restart_clock()

  def _restart_clock(self) -> None:
    self._tokens, self._seconds = 0.0, 0.0
    self.skip_clock()

  def skip_clock(self) -> None:
    """Discards the time since the last `fetch`."""
    self._start = time.monotonic()
