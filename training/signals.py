"""SIGTERM and SIGINT, on which a run saves and then stops."""

from collections.abc import Callable
import os
import signal
import sys
import threading
from typing import Any


class Interrupted(BaseException):
  """SIGTERM or SIGINT was received when nothing was left to save."""


class Signals:
  """Context manager that records SIGTERM and SIGINT for the loop.

  A second signal of the same kind has its usual effect.

  Args:
    on_signal: called immediately, in another thread, when a signal is received.

  Attributes:
    stop: the signal that was received, or None.
    interrupt: whether a signal raises `Interrupted` immediately.
    exit_message: if not empty, a signal prints this message on standard error and ends
      the process immediately, even during a call into XLA, for which Python's handlers
      wait. Empty if work would be lost.
  """

  def __init__(self, on_signal: Callable[[], None] = lambda: None):
    self._on_signal = on_signal
    self.stop: signal.Signals | None = None
    self.interrupt, self.exit_message = False, ""
    self._previous = {}

  def __enter__(self) -> "Signals":
    # Python handles signals only in the main thread.
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
      self._read, write = os.pipe()
      os.set_blocking(write, False)
      self._others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
      threading.Thread(target=self._watch, daemon=True).start()
    return self

  def __exit__(self, *unused) -> None:
    if self._previous:
      os.close(signal.set_wakeup_fd(self._others))  # Ends the thread.
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: Any) -> None:
    del frame
    self.stop = signal.Signals(number)
    signal.signal(number, self._previous[number])
    if self.interrupt:
      raise Interrupted

  def _watch(self) -> None:
    while number := os.read(self._read, 1):
      if number[0] not in self._previous:
        continue
      if self.exit_message:
        print(self.exit_message, file=sys.stderr, flush=True)
        os._exit(128 + number[0])
      self._on_signal()
    os.close(self._read)
