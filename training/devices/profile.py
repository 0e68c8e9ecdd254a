"""Traces of devices and host during some steps, for TensorBoard and Perfetto."""

from collections.abc import Iterator
import contextlib
import pathlib

import jax

FOLDER = "profile"
"""Folder of a run's trace, as `jax.profiler` writes it."""


class Profile:
  """Records a range of steps with `jax.profiler.trace`.

  Args:
    steps: the steps, counted from 0; an empty range records nothing.
    workdir: the folder of the run.
    first: the step at which the run starts or continues.
  """

  def __init__(self, steps: range, workdir: pathlib.Path, first: int):
    self._steps, self._folder = steps, workdir / FOLDER
    self._trace = contextlib.ExitStack()
    self._is_open = False
    if steps and steps.stop <= first and not self._folder.exists():
      print(
        f"profile_steps={steps.start}:{steps.stop}: these steps are already done; "
        f"the run continues from step {first} and records nothing",
        flush=True,
      )

  @contextlib.contextmanager
  def step(self, number: int, state: object) -> Iterator[None]:
    """Returns a context for one step, which waits for `state`, the step's input."""
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
    """Waits for `state`, and writes the trace."""
    if self._is_open:
      jax.block_until_ready(state)
      self._is_open = False
    self._trace.close()
