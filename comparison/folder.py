"""The folder of a comparison: its path, and the settings that its runs share."""

from collections.abc import Iterable, Mapping
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from comparison.config import BUDGETS, Comparison
from settings.build import to_mapping
from settings.field_values import FieldValues, flatten


def with_recorded_eval_every(
  comparison: Comparison, recorded: FieldValues, typed: Iterable[str] = ()
) -> Comparison:
  """Returns a comparison with the `eval_every` that its folder has recorded.

  Parameters depend on `eval_every` only if a run may end early or with
  `checkpoint_keep=best`, so a folder can be continued with a config that evaluates more
  often than the original.

  Args:
    comparison: the comparison to continue.
    recorded: the settings that all runs of the folder share; empty for a new folder.
    typed: config fields that the command line has set; if `eval_every` is one of
      them, the comparison is returned unchanged.
  """
  name = "eval_every"
  if not recorded or any(field.rpartition(".")[2] == name for field in typed):
    return comparison

  def recorded_fields(
    fields: Mapping[str, Any], prefix: str = ""
  ) -> FieldValues:
    others = {k: x for k, x in flatten(fields).items() if k != name}
    every = recorded.get(prefix + name)
    return others if every is None else others | {name: every}

  return dataclasses.replace(
    comparison,
    overrides=recorded_fields(comparison.overrides),
    per_task={
      task: recorded_fields(fields, f"per_task.{task}.")
      for task, fields in comparison.per_task.items()
    },
  )


def shared(comparison: Comparison) -> dict[str, Any]:
  """Returns the settings that all runs of a comparison share, JSON-ready."""
  mapping = to_mapping(comparison)
  # Mechanisms, variants and seeds may be added later. How runs are measured and the
  # references in the report do not affect results.
  for field in ("attention", "seeds", "variants", "together", "references"):
    mapping.pop(field, None)
  # Neither do fields of tasks that are not compared.
  mapping["per_task"] = {
    task: fields
    for task, fields in mapping["per_task"].items()
    if task in comparison.task_names
  }
  if not comparison.choosing_seeds:  # No grid point is chosen.
    mapping.pop("halving")
  # None may replace a value of a config file, and is kept. A budget or a reference of
  # None is not set.
  return {
    name: value
    for name, value in flatten(mapping).items()
    if value is not None or name not in (*BUDGETS, "reference")
  }


def default_workdir(config_file: str, comparison: Comparison) -> Path:
  """Returns `runs/compare/<config file>-<digest of the shared settings>`."""
  text = json.dumps(shared(comparison), sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()[:8]
  return Path("runs/compare") / f"{Path(config_file).stem}-{digest}"
