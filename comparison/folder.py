"""The folder of a comparison: what its runs share, and how it goes on."""

from collections.abc import Iterable, Mapping
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from comparison.config import BUDGETS, Comparison
from settings.build import to_mapping
from settings.leaves import Leaves, flatten


def paced(
  comparison: Comparison, recorded: Leaves, typed: Iterable[str] = ()
) -> Comparison:
  """A comparison whose runs are evaluated as often as those of its folder.

  No parameter depends on it but by `patience` and `checkpoint_keep=best`, so a folder
  goes on when a config evaluates oftener than the one that it was made with.

  Args:
    comparison: to continue.
    recorded: what all runs of the folder share; empty of a new one.
    typed: leaves that the command line has set; where `eval_every` is one of them,
      nothing changes.
  """
  name = "eval_every"
  if not recorded or any(leaf.rpartition(".")[2] == name for leaf in typed):
    return comparison

  def recorded_leaves(leaves: Mapping[str, Any], prefix: str = "") -> Leaves:
    others = {k: x for k, x in flatten(leaves).items() if k != name}
    every = recorded.get(prefix + name)
    return others if every is None else others | {name: every}

  return dataclasses.replace(
    comparison,
    overrides=recorded_leaves(comparison.overrides),
    per_task={
      task: recorded_leaves(leaves, f"per_task.{task}.")
      for task, leaves in comparison.per_task.items()
    },
  )


def shared(comparison: Comparison) -> dict[str, Any]:
  """What all runs of a comparison share, JSON-ready."""
  mapping = to_mapping(comparison)
  # More mechanisms, variants and seeds may come later; how runs are
  # measured and what a report names beside them changes no number.
  for field in ("attention", "seeds", "variants", "together", "references"):
    mapping.pop(field, None)
  # What is set for a task that does not run changes no number either.
  mapping["per_task"] = {
    task: leaves
    for task, leaves in mapping["per_task"].items()
    if task in comparison.task_names
  }
  if not comparison.choosing_seeds:  # Nothing is chosen.
    mapping.pop("halving")
  # A leaf of the runs may be None and differ from their file's; a budget is not there.
  return {
    name: value
    for name, value in flatten(mapping).items()
    if value is not None or name not in BUDGETS
  }


def default_workdir(config_file: str, comparison: Comparison) -> Path:
  """`runs/compare/<config file>-<digest of what all runs share>`."""
  text = json.dumps(shared(comparison), sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()[:8]
  return Path("runs/compare") / f"{Path(config_file).stem}-{digest}"
