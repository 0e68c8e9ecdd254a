"""A teacher's labels as targets of a second head (DeiT)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import models
from settings.errors import ConfigError
import tasks
from tasks.base import Batch


class DistillationTask:
  """A task of images whose batches also have a teacher's labels.

  'targets' and 'weights' are [B, 2]: the true label for the head of [CLS], and for the
  head of the distillation token the label that the teacher predicts for the same
  augmented image (hard distillation). Held-out batches have the true label twice. The
  rest is that of the original task.

  Paper: DeiT, section 4, arXiv:2012.12877.
  """

  max_target_length = 2

  def __init__(self, task: tasks.Task, teacher: models.Pretrained):
    self._task = task

    @jax.jit
    def predict(variables, images):
      return teacher.logits(variables, pixel_values=images).argmax(-1)

    self._teacher_labels = lambda images: np.asarray(
      predict(teacher.variables, images)
    )

  def __getattr__(self, name: str) -> Any:
    return getattr(self._task, name)

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """Returns the batch of a step, with the teacher's label as second target."""
    batch = self._task.train_batch(step, rows)
    return _with_two_targets(
      batch, self._teacher_labels(batch["image"])[:, None]
    )

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields held-out batches, with the true label for both heads."""
    for batch in self._task.eval_batches(split):
      yield _with_two_targets(batch, batch["targets"])

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Computes the sums of the task's metrics for the mean of both heads."""
    first = {name: batch[name][:, :1] for name in ("targets", "weights")}
    return self._task.metric_sums(
      logits.mean(axis=1, keepdims=True), {**batch, **first}
    )


def with_teacher(task: tasks.Task, folder: str) -> Any:
  """Adds the labels of a teacher model to a task.

  Args:
    task: a task whose batches have 'image'.
    folder: folder of published weights or of a run.

  Raises:
    ConfigError: the folder cannot be read, or its model is not a classifier of such
      images with the same number of classes.
  """
  try:
    teacher = models.load_pretrained(Path(folder))
  except (OSError, ValueError) as error:
    raise ConfigError(f"config.model.teacher: {error}") from error
  shape = tasks.input_shapes(task).get("image")
  channels = getattr(teacher.model, "image_shape", (0, 0, 0))[2]
  classes = teacher.model.target_vocab_size
  if not channels or teacher.model.config.head != "class":
    raise ConfigError(
      f"config.model.teacher: expected a classifier of images, got "
      f"{teacher.architecture} in {folder}"
    )
  if shape is None or shape[2] != channels:
    raise ConfigError(
      f"config.model.teacher: expected images of shape {shape}, as in the task; "
      f"{folder} reads {channels} channels"
    )
  if classes != task.target_vocab_size:
    raise ConfigError(
      f"config.model.teacher: expected the {task.target_vocab_size} classes of the "
      f"task, got {classes} in {folder}"
    )
  return DistillationTask(task, teacher)


def _with_two_targets(batch: Batch, second: np.ndarray) -> Batch:
  weights = batch["weights"]
  return {
    **batch,
    "targets": np.hstack([batch["targets"], second.astype(np.int32)]),
    "weights": np.hstack([weights, weights]),
  }
