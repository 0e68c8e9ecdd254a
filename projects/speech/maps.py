"""Attention of a speech model, drawn below the spectrogram of its input."""

from collections.abc import Iterable, Mapping
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from projects.speech import ctc, mel
from projects.speech.task import SpeechTask
from training.pictures import attention_maps

_INCHES = 10.0
_INCHES_PER_ROW = 0.2


def labels(num_positions: int, num_frames: int) -> list[str]:
  """The time of every position, in seconds."""
  step = num_frames // num_positions * mel.HOP_SECONDS
  return [f"{i * step:.2f}" for i in range(num_positions)]


def draw_below_spectrogram(
  path: pathlib.Path,
  model: Any,
  variables: Mapping[str, Any],
  task: SpeechTask,
  example: Mapping[str, np.ndarray],
) -> str:
  """Draws the attention of each recognised symbol, one panel per layer.

  The x axis is time, in the spectrogram and below it. Each row has the weights, as a
  mean over heads, of a position at which a symbol is recognised. If no symbol is
  recognised, the rows are all positions.

  Args:
    path: a .png file.
    model: a Conformer over frames.
    variables: variables of the model.
    task: the task, which has the symbols.
    example: a batch of one recording.

  Returns:
    The recognised text.
  """
  maps = models.attention_maps(model, variables, example)
  layers = [
    np.asarray(maps[f"encoder_{i}/self_attention"])[0] for i in range(len(maps))
  ]
  frames, mask = example["frames"][0], example["source_mask"]
  logits = jax.jit(models.forward, static_argnums=0)(model, variables, example)
  valid = ctc.subsample_mask(jnp.asarray(mask), logits.shape[1])
  ids = np.asarray(ctc.greedy(logits, valid))[0]
  num_frames, num_positions = int(mask.sum()), int(valid.sum())
  ratio = mask.shape[1] // logits.shape[1]
  rows = np.flatnonzero(ids[:num_positions])
  names = task.labels(ids[rows])
  if not len(rows):
    rows, names = np.arange(num_positions), []
  from matplotlib.figure import Figure

  height = 0.6 + _INCHES_PER_ROW * max(4, len(names))
  figure = Figure(
    figsize=(_INCHES, 2.5 + (height + 0.3) * len(layers)),
    layout="constrained",
  )
  axes = figure.subplots(
    1 + len(layers),
    1,
    sharex=True,
    squeeze=False,
    height_ratios=[2.5] + [height] * len(layers),
  )[:, 0]
  hop, end = mel.HOP_SECONDS, num_frames * mel.HOP_SECONDS
  axes[0].imshow(
    frames[:num_frames].T,
    cmap="magma",
    origin="lower",
    aspect="auto",
    extent=(0, end, 0, frames.shape[1]),
  )
  axes[0].set_ylabel("mel band")
  hypothesis = task.decode(ids)
  titles = [f"recognised: {hypothesis or 'nothing'}"]
  if "targets" in example:
    titles.append(f"said: {task.decode(example['targets'][0])}")
  axes[0].set_title(", ".join(titles).replace("$", r"\$"), fontsize=9)
  mechanisms = model.config.layers("encoder_attention")
  for i, (panel, weights) in enumerate(zip(axes[1:], layers, strict=True)):
    row_weights = weights.mean(0)[rows, :num_positions]
    top = max(float(np.abs(row_weights).max()), 1e-6)
    has_signs = row_weights.min() < -0.01 * top
    image = panel.imshow(
      row_weights,
      cmap="RdBu" if has_signs else "viridis",
      vmin=-top if has_signs else 0,
      vmax=top,
      aspect="auto",
      interpolation="nearest",
      extent=(0, num_positions * ratio * hop, len(rows), 0),
    )
    if names:
      ticks = [name.replace("$", r"\$") for name in names]
      panel.set_yticks(np.arange(len(names)) + 0.5, ticks, fontsize=7)
    panel.set_ylabel("recognised" if names else "query position", fontsize=8)
    panel.set_title(f"layer {i + 1}, {mechanisms[i].name}", fontsize=9)
    figure.colorbar(image, ax=panel, shrink=0.9)
  axes[0].set_xlim(0, end)
  axes[-1].set_xlabel("seconds")
  attention_maps.save(figure, path, dpi=120)
  return hypothesis


class SpectrogramPictures:
  """Draws the attention of a Conformer.

  `training.pictures.attention_maps` and `training.commands.draw_attention` call these
  methods.
  """

  input_file = "audio"

  def draw_attention(
    self: Any,
    path: pathlib.Path,
    variables: Mapping[str, Any],
    task: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
  ) -> None:
    """Draws the attention of each recognised symbol in one held-out recording."""
    example = attention_maps.readable_example(batches)
    draw_below_spectrogram(path, self, variables, task, example)

  def name_map(
    self: Any,
    name: str,
    weights: np.ndarray,
    task: Any,
    example: Mapping[str, np.ndarray],
  ) -> attention_maps.NamedMap:
    """Labels both axes with the time of each position, without padding."""
    del name, task
    frames, length = example["frames"].shape[1], weights.shape[-1]
    ratio = frames // length
    count = max(1, -(-int(example["source_mask"][0].sum()) // ratio))
    times = labels(length, frames)[:count]
    names = ("key, in seconds", "query, in seconds")
    return weights[:, :count, :count], times, times, names

  def draw_input(
    self: Any,
    path: pathlib.Path,
    run: Any,
    variables: Mapping[str, Any],
    file: str,
    query: Any,
  ) -> str:
    """Draws the attention to the recording in a file; returns its text."""
    del query  # Recordings have no query patch.
    example = run.task.read(file)
    return draw_below_spectrogram(path, self, variables, run.task, example)
