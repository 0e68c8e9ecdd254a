"""SIGTERM and SIGINT: a run is asked to stop, and saves before it does."""

import signal
import threading
from typing import Any


class Interrupted(BaseException):
  """SIGTERM or SIGINT, where there is nothing left to save."""


class Signals:
  """Notes SIGTERM and SIGINT for the loop, while it is entered.

  The second SIGINT interrupts at once, as usual.

  Attributes:
    stop: one of them came.
    interrupt: raise `Interrupted` at once.
  """

  _NUMBERS = (signal.SIGTERM, signal.SIGINT)

  def __init__(self):
    self.stop, self.interrupt = False, False
    self._previous = {}

  def __enter__(self) -> "Signals":
    # Python lets only the main thread handle signals.
    if threading.current_thread() is threading.main_thread():
      for number in self._NUMBERS:
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *unused) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: Any) -> None:
    del frame
    self.stop = True
    signal.signal(number, self._previous[number])
    if self.interrupt:
      raise Interrupted
