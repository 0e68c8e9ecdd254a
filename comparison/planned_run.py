"""One planned run of a comparison, and the name of its row."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import hashlib
import json
from typing import Any

from settings.field_values import FieldValues

MATCHED, DENSE = "matched", "dense"
"""Feed-forward width of a row: matches parameter counts, or is the dense model's."""

COUNTERPART = "feed-forward as in dense"
"""Label of a counterpart, a row with the feed-forward width of the dense model."""

_MAX_NAME = 230
"""Largest length of the name of a run's folder; that of most file systems is 255, and
temporary files need 21."""


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a comparison.

  Attributes:
    task: file in configs/.
    attention: the mechanism, or the variant.
    mechanism: its key of `ATTENTIONS`, or its import path.
    seed: the seed of the run.
    fields: values of the config fields that differ from the file's config.
    grid: the entries of `fields` that come from the grid.
    across: the entries of `fields` that come from `across`, which separate rows.
    width: `MATCHED`, or `DENSE` for the counterpart of a row whose feed-forward layers
      are much narrower than the dense model's, or whose parameters do not match.
    choosing: whether the run serves to choose a grid point, and is not reported.
    at_edge: fields of the grid whose chosen value is the lowest or highest of those
      that were tried.
    budget_seconds: training time, converted to steps when the run starts.
    parameters: number of parameters of the model, after matching; 0 if it cannot run.
    unmatched_parameters: number of parameters with the config of the file.
    feed_forward: width of the feed-forward layers, if parameters are matched.
    dense_feed_forward: that width in the model with dense attention.
    dense_parameters: number of parameters of the model with dense attention.
    obstacle: the reason why the run is impossible; empty if it is possible.
    slots: mechanisms of the attention modules; empty if the run is impossible.
    options: the options of the mechanism, as in the config.
    learning_rate: the peak of the schedule; None if the run is impossible.
    steps: number of training steps, if known before the run starts; else 0.
    length: length of the longest training examples if the task is also evaluated at
      other lengths; else None.
    solved_at: the smallest value of the main metric that solves the task; None
      for a task without a threshold.
  """

  task: str
  attention: str
  mechanism: str
  seed: int
  fields: FieldValues
  grid: FieldValues
  across: FieldValues = dataclasses.field(default_factory=dict)
  width: str = MATCHED
  choosing: bool = False
  at_edge: Sequence[str] = ()
  budget_seconds: float | None = None
  parameters: int = 0
  unmatched_parameters: int = 0
  feed_forward: int | None = None
  dense_feed_forward: int | None = None
  dense_parameters: int | None = None
  obstacle: str = ""
  slots: str = ""
  options: str = ""
  learning_rate: float | None = None
  steps: int = 0
  length: int | None = None
  solved_at: float | None = None

  @property
  def identity(self) -> str:
    """The name of the run's folder, which is equal for equal configs."""
    content = [self.task, self.mechanism, self.fields, self.budget_seconds]
    if self.width != MATCHED:
      content.append(self.width)
    text = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    end = f"-{self.seed}-{digest}"
    name = f"{self.task}-{self.attention}"[: _MAX_NAME - len(end)] + end
    # A task may be in a subfolder of configs/, and a mechanism in a module.
    return name.replace("/", "-").replace(":", ".")

  @property
  def family(self) -> str:
    """An identity that two runs share if and only if they differ only in the seed."""
    return self._identity_without("seed")

  @property
  def shape(self) -> str:
    """An identity that two runs share if they differ only in seed and learning rate."""
    return self._identity_without("seed", "optimizer.learning_rate")

  def _identity_without(self, *fields: str) -> str:
    """An identity that does not depend on some config fields."""
    other_fields = {k: v for k, v in self.fields.items() if k not in fields}
    return dataclasses.replace(self, seed=0, fields=other_fields).identity

  @property
  def row(self) -> str:
    """The name of the run's row in a table, which all seeds and grid points share."""
    return f"{self.task}, {label(vars(self))}"

  @property
  def arguments(self) -> list[str]:
    """The arguments of `train.py`, without the workdir."""
    return [
      f"--config=configs/{self.task}.py:{self.mechanism}",
      *(f"--config.{field}={value}" for field, value in self.fields.items()),
    ]

  def with_num_steps(self, steps: int) -> "Run":
    """Returns the run with its budget of seconds converted to a number of steps."""
    if self.budget_seconds is None:
      return self
    return dataclasses.replace(self, fields=self.fields | {"num_steps": steps})

  def with_seed(self, seed: int, **attributes: Any) -> "Run":
    """Returns the run with another seed, and other attributes if given."""
    fields = {"seed": seed} | self.fields | {"seed": seed}
    return dataclasses.replace(self, seed=seed, fields=fields, **attributes)


def label(run: Mapping[str, Any]) -> str:
  """Returns the name of a row: 'delta', 'delta, features=16', …

  The name of a counterpart ends with `COUNTERPART`.

  Args:
    run: attributes of a `Run`, or its record.
  """
  counterpart = COUNTERPART if run.get("width") == DENSE else ""
  parts = (run["attention"], point(run.get("across", {})), counterpart)
  return ", ".join(filter(None, parts))


def point(fields: Mapping[str, Any]) -> str:
  """Formats values with the last part of their fields: 'features=16, position=rotary'.

  Fields with the same last part have their full names:
  'encoder.features=8, decoder.features=16'.
  """
  names = titles(fields)
  return ", ".join(
    f"{names[field]}={_format_value(fields[field])}" for field in sorted(fields)
  )


def titles(fields: Iterable[str]) -> dict[str, str]:
  """Maps fields to the last part of their names, or to full names where ambiguous."""
  counts = Counter(map(short, fields))
  return {
    field: field if counts[short(field)] > 1 else short(field)
    for field in fields
  }


def _format_value(value: Any) -> str:
  """Formats a value for the name of a row, whose parts are separated by ', '."""
  if isinstance(value, list | tuple):
    return f"[{','.join(map(_format_value, value))}]"
  return str(value)


def short(field: str) -> str:
  """Returns the last part of a field's name: 'features' of 'model.features'."""
  return field.rpartition(".")[2]


def group_by(runs: Sequence[Run], key: str) -> list[list[Run]]:
  """Groups runs that share a property, in the order of each group's first run.

  Args:
    runs: runs of the plan.
    key: the shared property: 'row', 'family', 'shape' or 'identity'.
  """
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(getattr(run, key), []).append(run)
  return list(groups.values())
