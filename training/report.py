"""What a finished run looks like: samples.txt and attention.png."""

from collections.abc import Iterable, Mapping, Sequence
import math
import pathlib
from typing import Any

import numpy as np

import models
import tasks
from training.evaluate import Sample

_MAX_SAMPLES = 64
_MAX_TOKENS = 64
_READABLE_TOKENS = 24


def write_samples(
  path: pathlib.Path, samples: Sequence[Sample], num: int = _MAX_SAMPLES
) -> None:
  """Writes the first samples, three lines each; a line break is shown."""
  blocks = []
  for sample in samples[:num]:
    source, reference, output = (s.replace("\n", "\\n") for s in sample)
    blocks.append(
      f"source     {source}\nreference  {reference}\noutput     {output}\n"
    )
  path.write_text("\n".join(blocks))


def draw_attention(
  path: pathlib.Path,
  model: Any,
  variables: Mapping[str, Any],
  task: tasks.Task,
  batches: Iterable[Mapping[str, np.ndarray]],
) -> None:
  """Draws what the last layer attends to in one example, a panel a head.

  Encoder-decoders show cross-attention, the word that is being written
  against the words of the source; other models show self-attention, token
  against token.

  Args:
    path: a .png file.
    model: the module.
    variables: its variables.
    task: for the labels of tokens.
    batches: held-out rows; the most readable of them is drawn.
  """
  example = _readable_example(batches)
  maps = models.attention_maps(model, variables, example)
  name = max(maps, key=_depth)
  if "cross" in name:
    queries, keys = example["targets"][0], example["source"][0]
    axes = ("source", "target, the token being written")
    num_queries = _length(example["weights"][0] > 0)
  else:
    queries = keys = example["inputs" if "inputs" in example else "source"][0]
    axes = ("key token", "query token")
    num_queries = _length(keys != task.pad_id)
  num_queries = min(num_queries, _MAX_TOKENS)
  num_keys = min(_length(keys != task.pad_id), _MAX_TOKENS)
  draw_heads(
    path,
    np.asarray(maps[name])[0, :, :num_queries, :num_keys],
    task.labels(queries[:num_queries]),
    task.labels(keys[:num_keys]),
    axes,
    _title(name),
  )


def draw_heads(
  path: pathlib.Path,
  weights: np.ndarray,
  query_labels: Sequence[str],
  key_labels: Sequence[str],
  axes: tuple[str, str],
  title: str,
) -> None:
  """Draws `[N, T, S]` weights, heads in a grid, every row and column named.

  Args:
    path: a .png file.
    weights: a matrix a head.
    query_labels: T names of rows.
    key_labels: S names of columns.
    axes: what columns and rows are.
    title: above all of them.
  """
  # Takes seconds to import, so only where something is drawn.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  columns = math.ceil(math.sqrt(len(weights)))
  rows = math.ceil(len(weights) / columns)
  width = max(2.5, 0.22 * len(key_labels)) + 1
  height = max(2.0, 0.22 * len(query_labels)) + 1
  figure = Figure(
    figsize=(columns * width, rows * height + 0.5), layout="constrained"
  )
  FigureCanvasAgg(figure)
  panels = figure.subplots(
    rows, columns, sharex=True, sharey=True, squeeze=False
  )
  top = max(weights.max(), 1e-6)  # One scale for all panels.
  # A dollar sign would start a formula.
  escape = [
    [s.replace("$", r"\$") for s in x] for x in (key_labels, query_labels)
  ]
  images = []
  for head, panel in enumerate(panels.flat):
    if head >= len(weights):
      panel.set_axis_off()
      continue
    images.append(panel.imshow(weights[head], vmin=0, vmax=top, aspect="auto"))
    panel.set_title(f"head {head + 1}", fontsize=9)
    panel.set_xticks(range(len(key_labels)), escape[0], rotation=90, fontsize=7)
    panel.set_yticks(range(len(query_labels)), escape[1], fontsize=7)
  figure.supxlabel(axes[0])
  figure.supylabel(axes[1])
  figure.suptitle(title)
  figure.colorbar(images[0], ax=panels, label="attention weight", shrink=0.8)
  figure.savefig(path, dpi=120)


def _title(name: str) -> str:
  """'decoder_1/cross_attention' as 'decoder layer 2, cross-attention'."""
  block, kind = name.split("/")
  side, _, index = block.partition("_")
  layer = f" layer {int(index) + 1}" if index else ""
  return f"{side}{layer}, {kind.replace('_', '-')}"


def _depth(name: str) -> tuple[bool, int]:
  """Orders 'decoder_11/cross_attention': cross-attention last, then layers."""
  return "cross" in name, int("".join(filter(str.isdigit, name)) or 0)


def _length(present: np.ndarray) -> int:
  """One past the last True, at least 1."""
  found = np.flatnonzero(present)
  return int(found[-1]) + 1 if len(found) else 1


def _readable_example(
  batches: Iterable[Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
  """The longest row that still makes a readable picture, as a batch of one."""
  best, example = -math.inf, {}
  for batch in batches:
    for row, weights in enumerate(batch["weights"]):
      length = _length(weights > 0)
      readable = length if length <= _READABLE_TOKENS else -length
      if readable > best:
        best = readable
        example = {name: rows[row : row + 1] for name, rows in batch.items()}
  return example
