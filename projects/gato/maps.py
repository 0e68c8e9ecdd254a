"""Pictures of the attention between modalities."""

from collections.abc import Iterable, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

import numpy as np

import models
from projects.gato.task import MixedTask
from settings.errors import ConfigError
from training.pictures import attention_maps

_INCHES = 2.6


class Shares(NamedTuple):
  """The attention weights between all pairs of modalities, in one example.

  Attributes:
    modalities: M names, in order of first appearance.
    weights: [L, M, M], for each layer the total weight that queries of one modality
      give to keys of another, as a mean over heads and queries.
    uniform: [M, M], the same for uniform causal attention.
  """

  modalities: Sequence[str]
  weights: np.ndarray
  uniform: np.ndarray


def shares(
  model: Any,
  variables: Mapping[str, Any],
  task: MixedTask,
  example: Mapping[str, np.ndarray],
) -> Shares:
  """Sums the attention weights of every layer by modality.

  Args:
    model: a decoder.
    variables: variables of the model.
    task: the task, which gives the modality of each input.
    example: a batch of one; padding at the end is ignored.
  """
  ids = example["inputs"][0]
  length = int(np.flatnonzero(ids != task.pad_id)[-1]) + 1
  modalities = np.array(task.modalities(ids[:length]))
  names = list(dict.fromkeys(modalities.tolist()))
  # [M, T], 1 for the inputs of each modality.
  membership = np.array([modalities == name for name in names], float)
  mean = membership / membership.sum(1, keepdims=True)
  maps = models.attention_maps(model, variables, example)
  layers = [
    np.asarray(maps[f"decoder_{i}/self_attention"])[0].mean(0)
    for i in range(len(maps))
  ]
  causal = np.tril(np.ones((length, length)))
  uniform = causal / causal.sum(1, keepdims=True)
  weights = [mean @ layer[:length, :length] @ membership.T for layer in layers]
  return Shares(names, np.array(weights), mean @ uniform @ membership.T)


def draw_shares(
  path: pathlib.Path, rows: Sequence[Shares], mechanisms: Sequence[str]
) -> None:
  """Draws shares as coloured tables, one column per layer.

  Args:
    path: a .png file.
    rows: shares of at least one example, all with the same number of layers.
    mechanisms: mechanisms of the layers.
  """
  from matplotlib.figure import Figure

  layers = len(mechanisms)
  figure = Figure(
    figsize=(_INCHES * layers + 1.5, _INCHES * len(rows) + 0.6),
    layout="constrained",
  )
  panels = figure.subplots(len(rows), layers, squeeze=False)
  image: Any = None
  for row, example in enumerate(rows):
    names = range(len(example.modalities))
    for layer, panel in enumerate(panels[row]):
      weights = example.weights[layer]
      image = panel.imshow(weights, cmap="viridis", vmin=0, vmax=1)
      for q in names:
        for k in names:
          panel.text(
            k,
            q,
            f"{weights[q, k]:.2f}\n({example.uniform[q, k]:.2f})",
            ha="center",
            va="center",
            fontsize=8,
            color="black" if weights[q, k] > 0.6 else "white",
          )
      modalities = example.modalities
      panel.set_xticks(names, modalities, rotation=30, fontsize=8)
      labels = modalities if layer == 0 else [""] * len(modalities)
      panel.set_yticks(names, labels, fontsize=8)
      if row == 0:
        panel.set_title(f"layer {layer + 1}: {mechanisms[layer]}", fontsize=9)
  figure.supxlabel("key")
  figure.supylabel("query")
  figure.colorbar(
    image,
    ax=panels,
    shrink=0.7,
    label="share of attention (in brackets: uniform attention)",
  )
  figure.savefig(path, dpi=120)


def _mechanisms(model: Any) -> Sequence[models.AttentionConfig]:
  return model.config.layers("decoder_attention")


class SharePictures:
  """Draws the attention of Gato.

  `training.pictures.attention_maps` and `training.commands.draw_attention` call these
  methods.
  """

  input_file = "image"

  def draw_attention(
    self: Any,
    path: pathlib.Path,
    variables: Mapping[str, Any],
    task: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
  ) -> None:
    """Draws the shares of one example of each kind, one below the other.

    A kind is a set of modalities. Kinds with a single modality, such as text, are
    skipped unless there are no others. Below each share, in brackets, is the share of
    uniform causal attention.

    Args:
      path: a .png file.
      variables: variables of the model.
      task: the task, which gives the modality of each input.
      batches: held-out rows.
    """
    if not hasattr(task, "modalities"):  # A task of text only.
      attention_maps.draw_tokens(path, self, variables, task, batches)
      return
    examples: dict[frozenset[str], dict[str, np.ndarray]] = {}
    for batch in batches:
      for row, ids in enumerate(batch["inputs"]):
        if not batch["weights"][row].any():
          continue
        kind = frozenset(task.modalities(np.unique(ids[ids != task.pad_id])))
        if kind not in examples:
          examples[kind] = {name: x[row : row + 1] for name, x in batch.items()}
    mixed = [x for kind, x in examples.items() if len(kind) > 1]
    rows = [
      shares(self, variables, task, example)
      for example in mixed or examples.values()
    ]
    draw_shares(path, rows, [config.name for config in _mechanisms(self)])

  def draw_input(
    self: Any,
    path: pathlib.Path,
    run: Any,
    variables: Mapping[str, Any],
    file: str,
    query: Any,
  ) -> str:
    """Draws the attention of a generated caption to an image; returns the caption."""
    if query is not None:
      raise ConfigError("--query: only image models support it")
    prompt = run.task.read(file)
    ids, length = prompt["prompt"], run.task.max_target_length
    generated = run.generate(
      variables, prompt, max_length=length - ids.shape[1] + 1
    )
    caption = np.asarray(generated.tokens)[0].tolist()
    if run.task.eos_id in caption:
      caption = caption[: caption.index(run.task.eos_id)]
    example = {
      "inputs": np.array([[*ids[0], *caption]], np.int32)[:, :length],
      "patches": prompt["patches"],
    }
    names = [config.name for config in _mechanisms(self)]
    draw_shares(path, [shares(self, variables, run.task, example)], names)
    return run.task.decode(caption)
