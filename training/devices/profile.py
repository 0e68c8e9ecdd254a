"""What devices and host do in some steps, for TensorBoard and Perfetto."""

from collections.abc import Iterator
import contextlib
import pathlib

import jax

FOLDER = "profile"
"""Of a run: its trace, as `jax.profiler` writes it."""


class Profile:
  """Records the steps of a range with `jax.profiler.trace`.

  Args:
    steps: from 0; none for an empty range.
    workdir: of the run.
    first: step that the run goes on from.
  """

  def __init__(self, steps: range, workdir: pathlib.Path, first: int):
    self._steps, self._folder = steps, workdir / FOLDER
    self._trace = contextlib.ExitStack()
    self._is_open = False
    if steps and steps.stop <= first and not self._folder.exists():
      print(
        f"profile_steps={steps.start}:{steps.stop}: these steps were done before; "
        f"the run goes on from step {first} and records nothing",
        flush=True,
      )

  @contextlib.contextmanager
  def step(self, number: int, state: object) -> Iterator[None]:
    """Around a step; `state` is what it begins with, to be waited for."""
    if number not in self._steps:
      self.close(state)
      yield
      return
    if not self._is_open:
      jax.block_until_ready(state)
      trace = jax.profiler.trace(self._folder, create_perfetto_trace=True)
      self._trace.enter_context(trace)
      self._is_open = True
    with jax.profiler.StepTraceAnnotation("train", step_num=number):
      yield

  def close(self, state: object = None) -> None:
    """Writes what was recorded, once `state` is there."""
    if self._is_open:
      jax.block_until_ready(state)
      self._is_open = False
    self._trace.close()
