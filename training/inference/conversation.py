"""Conversations with a trained run, line by line."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from settings.errors import ConfigError
from training.experiment import Experiment
from training.inference import generation


class Conversation:
  """Answers one line at a time.

  A language model continues all lines and answers so far, of which it reads at most
  half a context. In all other tasks, each line is a new input.

  Args:
    experiment: created with `restore=True`.
    variables: variables of the model.
    max_length: largest number of tokens in an answer; None means the rest of the
      context.
    seed: seed of sampling.
    **options: options of `models.generate`.

  Raises:
    ConfigError: the model has no decoder, or an option is not valid.
  """

  def __init__(
    self,
    experiment: Experiment,
    variables: Mapping[str, Any],
    *,
    max_length: int | None = None,
    seed: int = 0,
    **options: Any,
  ):
    generation.check_decodes(experiment)
    generation.check_options(
      {"max_length": max_length, "seed": seed, "batch_size": 1} | options
    )
    self._experiment, self._variables = experiment, variables
    self._max_length, self._seed = max_length, seed
    self._options = options
    self._text: list[int] = []
    self._turn = 0

  def answer(self, line: str) -> str:
    """Generates the answer to a line.

    Raises:
      ConfigError: the model cannot read the line, or does not support an option.
    """
    self._turn += 1
    # A user's task does not need to inherit from `Task`.
    if getattr(self._experiment.task, "continues", False):
      return self._continue_text(line)
    [output] = generation.generate_lines(
      self._experiment,
      self._variables,
      [line],
      max_length=self._max_length,
      seed=(self._seed + self._turn - 1) % 2**31,
      batch_size=1,
      **self._options,
    )
    return output

  def _continue_text(self, line: str) -> str:
    """Appends a line to the text so far, and continues it."""
    task = self._experiment.task
    try:
      ids = task.encode(line)
    except ValueError as error:
      raise ConfigError(str(error)) from error
    ends, prefix = generation.eos_ids(task), generation.prompt_prefix(task)
    if self._text:
      ids = ids[len(prefix) :]
    text = [*self._text, *(self._line_end() if self._text else ()), *ids]
    # All prompts have one shape, so that all answers share one compiled program.
    prompt_length = max(1, task.max_target_length // 2)
    room = task.max_target_length - prompt_length + 1
    length = room if self._max_length is None else self._max_length
    key = jax.random.fold_in(jax.random.key(self._seed), self._turn)
    answer: list[int] = []
    while len(answer) < length and not {*ends} & {*answer}:
      prompt = [*text, *answer][-prompt_length:]
      if len(prompt) == prompt_length:
        prompt[: len(prefix)] = prefix
      try:
        output = self._experiment.generate(
          self._variables,
          {
            "prompt": generation.pad(
              [prompt], task.pad_id, prompt_length, prompt_length
            ),
            "prompt_length": np.array([len(prompt)], np.int32),
          },
          max_length=min(room, length - len(answer)),
          rng=jax.random.fold_in(key, len(answer)),
          **self._options,
        )
      except ValueError as error:  # The method does not support an option.
        raise ConfigError(str(error)) from error
      answer += np.asarray(output.tokens)[0].tolist()
    indices = (i for i, token in enumerate(answer) if token in ends)
    answer = answer[: next(indices, length)]
    self._text = [*text, *answer]
    return task.decode(answer)

  def _line_end(self) -> list[int]:
    """Returns the ids of a line end; empty if the vocabulary has none."""
    task = self._experiment.task
    try:
      return task.encode("")[len(generation.prompt_prefix(task)) :]
    except ValueError:
      return []
