"""The config of a comparison: mechanisms, tasks, seeds and controlled quantities."""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from attention import ATTENTIONS
from attention import mechanism as mechanisms
from attention.names import suggestion, unknown_name
import models
from settings.build import build, check_section
from settings.errors import ConfigError
from settings.field_values import FieldValues, flatten
from settings.fields import STRICT, Count, Positive, Share, check, rest
from settings.suggest import did_you_mean
from settings.typed import literal, mechanism, split

_CONFIGS = Path(__file__).parents[1] / "configs"

LAYERS = "layers"
"""The key of a variant whose value lists mechanisms, which layers use in turn."""

APART = "apart"
"""The value of `Comparison.together` that measures every run separately."""
BUDGETS = ("budget_seconds", "budget_flops")
"""Fields that replace `num_steps`."""
FIRST_CHOOSING_SEED = 10_000
"""The first choosing seed; seeds below it are reported."""


def _values(entry: Any) -> list[Any]:
  """Lists the values of a field, given as one value, text with commas, or a list.

  A list inside a list is one value.
  """
  if isinstance(entry, str):
    return [literal(part) for part in split(entry)]
  if not isinstance(entry, list | tuple):
    return [entry]
  if len(entry) == 1 and isinstance(entry[0], str):
    # The command line gives a tuple of words as one word with commas.
    return _values(entry[0])
  values = [tuple(x) if isinstance(x, list) else x for x in entry]
  return [literal(x) if isinstance(x, str) else x for x in values]


@dataclass(frozen=True, config=STRICT)
class Halving:
  """Config of successive halving, which chooses the reported grid point.

  Attributes:
    rungs: increasing shares of the steps, such as 0.25,0.5. At each of them, the
      worse half of the points is stopped; rungs at the same step count once. Without
      rungs, all points are trained to the end.
    seeds: number of choosing seeds. They are 10000, 10001, …, so that no reported
      seed affects the choice.
  """

  rungs: Annotated[
    tuple[Share, ...], BeforeValidator(lambda entry: tuple(_values(entry)))
  ] = ()
  seeds: Count = 2

  def __post_init__(self):
    if sorted(set(self.rungs)) != list(self.rungs):
      raise ValueError(
        f"rungs: expected increasing shares of the steps, got {self.rungs}"
      )


@dataclass(frozen=True, config=STRICT)
class Comparison:
  """The validated config of a comparison; docs/comparing.md explains every field.

  Attributes:
    tasks: files in configs/, without '.py', separated by commas.
    attention: mechanisms, variants and import paths, separated by commas, each with
      its options: 'dense,sliding_window:window=8'; 'all' is every mechanism and
      variant.
    seeds: the seeds of the reported runs, separated by commas.
    match_parameters: whether the width of the feed-forward layers is changed so that
      every model has the parameter count of the model with dense attention.
    reference: name of the row with which all others are compared, such as 'dense';
      None compares them with the best row.
    budget_seconds: training time of every run, instead of `num_steps`.
    budget_flops: floating-point operations of every run, instead of `num_steps`.
    variants: name -> {'name': mechanism, option: value, …}, or
      {'layers': 'sliding_window:window=8,delta'}, which layers use in turn.
    grid: config field -> values; each row is reported with its best combination.
    across: config field -> values; every combination is a separate row.
    halving: how the point of the grid is chosen.
    together: whether runs that differ only in seed and learning rate are trained
      one after another and measured once.
    per_task: task -> config fields of its runs.
    references: task -> name -> {metric: value} from elsewhere, for the report.
    overrides: every other section or config field, for all runs.
  """

  tasks: str
  attention: str = "all"
  seeds: str = "0"
  match_parameters: bool = True
  reference: str | None = None
  budget_seconds: Positive | None = None
  budget_flops: Positive | None = None
  variants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  grid: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  across: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  halving: Halving = Halving()
  together: Literal["in_turn", "apart"] = "in_turn"
  per_task: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  references: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  _rest = rest("overrides")

  def __post_init__(self):
    for field in ("tasks", "attention", "seeds"):
      values = split(getattr(self, field))
      are_unique = 0 < len(values) == len(set(values))
      check(self, field, are_unique, "at least one value, without repetition")
    for task in self.task_names:
      if not _is_task(task):
        names = [x.stem for x in _CONFIGS.glob("[a-z]*.py")]
        raise ValueError(
          f"tasks: no file configs/{task}.py for {task!r}{suggestion(task, names)}"
        )
    self._check_tasks("per_task", "FIELD", "num_steps")
    for task, fields in self.per_task.items():
      check_section(f"config.per_task.{task}", fields)
    self._check_tasks("references", "NAME.METRIC", "nanoGPT.loss")
    for field, value, is_metric in _reference_values(self.references):
      is_number = isinstance(value, int | float) and not isinstance(value, bool)
      if not (is_metric and is_number):
        raise ValueError(
          f"references.{field}: expected a number for TASK.NAME.METRIC, got "
          f"{value!r}"
        )
    self._check_mechanisms()
    if self.reference is not None:
      known = self.reference.partition(", ")[0] in self.mechanisms
      check(self, "reference", known, f"one of {', '.join(self.mechanisms)}")
    self._check_seed()
    are_valid = all(
      x.isdecimal() and int(x) < FIRST_CHOOSING_SEED for x in split(self.seeds)
    )
    check(self, "seeds", are_valid, f"integers below {FIRST_CHOOSING_SEED}")
    numbers = self.seed_numbers
    check(self, "seeds", len(set(numbers)) == len(numbers), "each once")
    self._check_budget()
    self._check_points()
    if self.halving.rungs and not self.choosing_seeds:
      raise ValueError(
        "halving.rungs: expected a grid of at least two points, whose worse half the "
        f"rungs stop, or no rungs, (), got {self.halving.rungs}"
      )

  @property
  def task_names(self) -> list[str]:
    """The names of files in configs/."""
    return split(self.tasks)

  @property
  def mechanisms(self) -> list[str]:
    """Keys of `ATTENTIONS` and of `variants`, and import paths."""
    if self.attention == "all":
      return [*ATTENTIONS, *self.variants]
    return split(self.attention)

  @property
  def seed_numbers(self) -> list[int]:
    """The reported seeds, as numbers."""
    return [int(seed) for seed in split(self.seeds)]

  @property
  def choosing_seeds(self) -> list[int]:
    """The choosing seeds; none if the grid has fewer than two points."""
    if len(list(self.grid_points())) < 2:
      return []
    return [FIRST_CHOOSING_SEED + i for i in range(self.halving.seeds)]

  @property
  def grid_values(self) -> dict[str, list[Any]]:
    """Maps each config field of the grid to its values."""
    return _values_by_field(self.grid)

  def grid_points(self) -> Iterator[FieldValues]:
    """Yields every combination of the grid's values; only `{}` without a grid."""
    return _combinations(self.grid)

  def across_points(self) -> Iterator[FieldValues]:
    """Yields every combination of `across`, one per row; only `{}` without `across`."""
    return _combinations(self.across)

  def fields(self, task: str) -> FieldValues:
    """Returns the config fields of all runs of a task."""
    return flatten(self.overrides) | flatten(self.per_task.get(task, {}))

  def variant(self, label: str) -> tuple[str, dict[str, Any]]:
    """Returns the mechanism of a label, and its options.

    If layers use several mechanisms in turn, the option `LAYERS` has all of them, and
    the mechanism is the first.
    """
    options = dict(self.variants.get(label, {}).items())
    first = split(options[LAYERS])[0] if LAYERS in options else label
    name, name_options = mechanism(options.pop("name", first))
    return name, options if LAYERS in options else name_options | options

  def _check_tasks(self, field: str, suffix: str, example: str) -> None:
    """Raises ValueError if a key is not a task; the task need not be compared."""
    for task in getattr(self, field):
      if not _is_task(task):
        raise ValueError(
          f"{field}.{task}: no such task; "
          f"{did_you_mean(task, self.task_names)}; a field is {field}.TASK.{suffix}, "
          f"such as {field}.{self.task_names[0]}.{example}"
        )

  def _check_mechanisms(self):
    for label, variant in self.variants.items():
      if label in ATTENTIONS:
        raise ValueError(
          f"variants.{label}: already the name of a mechanism; expected another label"
        )
      if not hasattr(variant, "get"):
        raise ValueError(
          f"variants.{label}: expected {{'layers': 'delta,flash'}}, or "
          f"{{'name': 'lsh', 'chunk_size': 8}}, got {variant!r}"
        )
      if LAYERS in variant:
        _check_layers(f"variants.{label}", variant)
      else:
        check_mechanism(f"variants.{label}.name", variant.get("name"))
        _check_options(f"variants.{label}.", *self.variant(label))
    for name in self.mechanisms:
      check_mechanism("attention", name, self.variants)

  def _check_seed(self):
    """Raises ValueError if a section sets the seed, which only `seeds` may set."""
    sections = {
      "": self.overrides,
      "grid.": self.grid,
      "across.": self.across,
      **{f"per_task.{task}.": x for task, x in self.per_task.items()},
    }
    for prefix, section in sections.items():
      if "seed" in section:
        raise ValueError(
          f"{prefix}seed: expected only config.seeds, which sets the seeds of the "
          f"runs, got {section['seed']!r}"
        )

  def _check_points(self):
    for section in ("grid", "across"):
      for field, values in _values_by_field(getattr(self, section)).items():
        if not values:
          raise ValueError(f"{section}.{field}: expected at least one value")
        if any(value in values[:i] for i, value in enumerate(values)):
          raise ValueError(
            f"{section}.{field}: expected each value once, got {values}"
          )
        if section == "grid" and any(isinstance(x, tuple) for x in values):
          raise ValueError(
            f"grid.{field}: expected values that are not lists, got {values}; "
            f"across.{field} accepts lists, each a separate row"
          )
        for value in values:
          if isinstance(value, tuple) and field.endswith("_attention"):
            for word in value:
              check_mechanism(f"{section}.{field}", word)
    for field in flatten(self.across):
      if field in flatten(self.grid):
        raise ValueError(
          f"across.{field}: also set in grid; expected it either in across, where "
          "every value is a row, or in grid, where the best value is reported"
        )

  def _check_budget(self):
    budgets = [name for name in BUDGETS if getattr(self, name) is not None]
    check(self, "budget_flops", len(budgets) < 2, "one budget")
    fields = {*flatten(self.grid), *flatten(self.across)}
    fields.update(*map(self.fields, self.task_names))
    if budgets and "num_steps" in fields:
      raise ValueError(
        f"{budgets[0]}: determines the number of steps; expected no "
        "num_steps with it"
      )


def _reference_values(
  mapping: Mapping[str, Any], prefix: str = "", levels: int = 3
) -> Iterator[tuple[str, Any, bool]]:
  """Yields TASK.NAME.METRIC, its value, and whether it has all three levels.

  `flatten` would not tell a name with a dot, such as GPT-2.5, from two levels.
  """
  for name, value in mapping.items():
    if levels > 1 and hasattr(value, "items"):
      yield from _reference_values(value, f"{prefix}{name}.", levels - 1)
    else:
      yield prefix + name, value, levels == 1


def _is_task(name: str) -> bool:
  """Returns whether configs/ has a file with this name."""
  return (_CONFIGS / f"{name}.py").is_file()


def check_mechanism(field: str, typed: Any, also: Iterable[str] = ()) -> None:
  """Checks a mechanism and its options: 'sliding_window:window=8'.

  Args:
    field: the config field, for messages.
    typed: a key of `ATTENTIONS` or an import path, followed by options.
    also: other valid names.

  Raises:
    ValueError: there is no such mechanism, or it does not accept an option.
  """
  names = [*ATTENTIONS, *also]
  if typed in names:
    return
  try:
    name, options = mechanism(typed) if isinstance(typed, str) else (typed, {})
    if name not in names and ":" not in str(name):
      raise ValueError(unknown_name(name, [*names, "package.module:factory"]))
    mechanisms.find(name)
  except ValueError as error:
    raise ValueError(f"{field}: {error}") from None
  if options:
    _check_options(f"{field}: {typed}: ", name, options)


def _check_layers(field: str, variant: Mapping[str, Any]) -> None:
  """Raises ValueError unless a variant's layers are mechanisms and it has no options."""
  layers, extra = variant[LAYERS], set(variant) - {"name", LAYERS}
  if not isinstance(layers, str) or not split(layers):
    raise ValueError(
      f"{field}.{LAYERS}: expected mechanisms separated by commas, such as "
      f"'sliding_window:window=8,delta', got {layers!r}"
    )
  for layer in split(layers):
    check_mechanism(f"{field}.{LAYERS}", layer)
  if "name" in variant:
    check_mechanism(f"{field}.name", variant["name"])
  if extra:
    option = min(extra)
    raise ValueError(
      f"{field}.{option}: an option of a layer follows the layer's name; "
      f"expected {LAYERS}='{split(layers)[0]}:{option}={variant[option]},…'"
    )


def _check_options(field: str, name: str, options: dict[str, Any]) -> None:
  """Raises ValueError if a mechanism rejects options; missing ones may be set later."""
  placeholders = dict.fromkeys(
    mechanisms.required_names(mechanisms.find(name)), 1
  )
  try:
    models.AttentionConfig(name, placeholders | options)
  except ValueError as error:
    raise ValueError(f"{field}{error}") from None


def parse(mapping: Mapping[str, Any], typed: Iterable[str] = ()) -> Comparison:
  """Validates a config, a ConfigDict or parsed JSON.

  Args:
    mapping: the config.
    typed: config fields that the command line has set. A field for all runs replaces
      the values that `per_task` has in the file.

  Raises:
    ConfigError: the config is invalid, or the command line sets a field for all runs
      that `grid` or `across` also sets.
  """
  if "tasks" not in mapping and hasattr(mapping.get("task"), "items"):
    raise ConfigError(
      "config.tasks: missing: this is the config of a single run, for train.py; "
      "expected one of configs/compare/, such as configs/compare/copy.py"
    )
  typed = set(typed)
  comparison = build(Comparison, _drop_num_steps(dict(mapping.items()), typed))
  return _apply_typed_fields(comparison, typed)


def _drop_num_steps(mapping: dict[str, Any], typed: set[str]) -> dict[str, Any]:
  """Removes `num_steps` from a config if the command line has set a budget."""
  if not typed.intersection(BUDGETS):
    return mapping

  def without_steps(
    fields: Mapping[str, Any], prefix: str = ""
  ) -> dict[str, Any]:
    name = "num_steps"
    is_typed = prefix + name in typed
    return {k: x for k, x in fields.items() if k != name or is_typed}

  per_task = mapping.get("per_task") or {}
  sections = {
    task: without_steps(fields, f"per_task.{task}.")
    if hasattr(fields, "items")
    else fields
    for task, fields in per_task.items()
  }
  return without_steps(mapping) | ({"per_task": sections} if sections else {})


def _apply_typed_fields(comparison: Comparison, typed: set[str]) -> Comparison:
  """Removes from `per_task` the fields that the command line has set for all runs.

  Raises:
    ConfigError: `grid` or `across` also sets such a field.
  """
  for section in ("grid", "across"):
    for field in flatten(getattr(comparison, section)):
      tasks = [f"per_task.{task}.{field}" for task in comparison.task_names]
      for name in typed.intersection([field, *tasks]):
        raise ConfigError(
          f"config.{name}: config.{section}.{field} sets it in every run; expected "
          f"only --config.{section}.{field}"
        )
  per_task = {
    task: {
      field: value
      for field, value in flatten(fields).items()
      if field not in typed or f"per_task.{task}.{field}" in typed
    }
    for task, fields in comparison.per_task.items()
  }
  return dataclasses.replace(comparison, per_task=per_task)


def _values_by_field(mapping: Mapping[str, Any]) -> dict[str, list[Any]]:
  """Maps config fields to their values."""
  return {field: _values(entry) for field, entry in flatten(mapping).items()}


def _combinations(mapping: Mapping[str, Any]) -> Iterator[FieldValues]:
  """Yields every combination of the values of config fields."""
  values_by_field = _values_by_field(mapping)
  for values in itertools.product(*values_by_field.values()):
    yield dict(zip(values_by_field, values, strict=True))
