"""Finds the projects in this checkout; tests of the core skip missing ones."""

from collections.abc import Iterable
import pathlib

ROOT = pathlib.Path(__file__).parents[1]

CORE = (
  *("attention", "models", "tasks", "training", "comparison", "settings"),
  *("benchmarks", "compare.py", "train.py", "generate.py", "lab.py"),
)
"""Folders and files that work without projects."""

PROJECTS = {
  "image": ("vision",),
  "vit": ("vision",),
  "swin": ("vision",),
  "cvt": ("vision",),
  # The image task is in vision.
  "perceiver": ("perceiver", "vision"),
  "perceiver_bytes": ("perceiver",),
  "perceiver_widths": ("perceiver",),
  "speech": ("speech",),
  "conformer": ("speech",),
  "wav2vec2_conformer_relative": ("speech",),
  "wav2vec2_conformer_rotary": ("speech",),
  "mixed": ("gato",),
  "gato": ("gato",),
  "seq2seq": ("seq2seq",),
  "bahdanau": ("seq2seq",),
  "pathfinder": ("pathfinder",),
}
"""Config, task, kind of model or small published model -> the projects it needs."""


def is_here(name: str) -> bool:
  """Returns whether the projects that a name needs are in this checkout."""
  return all((ROOT / "projects" / x).is_dir() for x in PROJECTS.get(name, ()))


def here(names: Iterable[str]) -> list[str]:
  """Returns the names whose projects are in this checkout."""
  return [name for name in names if is_here(name)]
