"""The workdir of a run: its path, its config, and whether the run has finished."""

from collections.abc import Mapping
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import models
from settings import atomic, json_text
from settings.errors import ConfigError
from settings.field_values import FieldValues, flatten
from training import experiment_config, metrics
from training.checkpoint import newest_step
from training.devices import process
from training.devices.mesh import AXES
from training.experiment_config import ExperimentConfig

CONFIG = "config.json"
SLOTS = "slots"
XLA_FLAGS = "xla_flags"
GENERATOR = "random_numbers"
DEVICE = "device"
STOPPED = "stopped"
"""Name in the final metrics of a run that ended early, of the step and the reason."""

# How often a run is evaluated and saved, and how devices share the work: these fields
# do not change its parameters, except for rounding.
_MAY_CHANGE = (
  "log_every",
  "eval_every",
  "checkpoint_every",
  "profile_steps",
  "model.remat",
  "log.tensorboard",
  "log.wandb",
  "log.project",
  *(f"mesh.{axis}" for axis in AXES),
)

_ADDED_FIELDS = (
  ("", "checkpoint_keep", "newest"),
  ("", "best_metric", "loss"),
  ("", "patience", 0),
  ("", "stopping_threshold", None),
  ("optimizer", "ema_decay", 0.0),
  ("task", "column", ""),
)
_FORMER_OPTIMIZER = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
_CHOICES = ("_attention", "_attention.name")
_UNSET = "not set"


def default(config_file: str, config: ExperimentConfig) -> Path:
  """Returns `runs/<config file>-<mechanism>-<digest of the config>`."""
  attention, *_ = next(iter(config.model.attentions.values()))
  mapping = _mapping(config)
  for field in ("log", "profile_steps"):  # They do not affect results.
    mapping.pop(field)
  # Runs that are older than these fields keep their folder.
  for section, field, unset in _ADDED_FIELDS:
    fields = mapping[section] if section else mapping
    if fields.get(field) == unset:
      fields.pop(field)
  text = json.dumps(mapping, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()[:8]
  stem = Path(config_file.partition(":")[0]).stem
  # Not all systems allow a colon, as in import paths, in file names.
  name = attention.name.replace(":", ".")
  return Path("runs") / f"{stem}-{name}-{digest}"


def check(workdir: Path, config: ExperimentConfig) -> None:
  """Checks that `workdir` is free, or holds a run that this config continues.

  A config continues its own run, and a run of fewer steps unless its learning rates
  depend on the number of steps. The frequencies of logging, evaluating and saving may
  change, and so may the mesh. Fields that did not exist when the run was started have
  their defaults.

  Raises:
    ConfigError: the folder has other content, or cannot be written to.
  """
  check_writable("workdir", workdir)
  if not workdir.exists() or not any(workdir.iterdir()):
    return
  if not (workdir / CONFIG).exists():
    raise ConfigError(
      f"workdir: {workdir} holds other files and no run ({CONFIG}); choose a "
      "new folder"
    )
  recorded = _read(workdir)
  recorded_generator, generator = recorded.get(GENERATOR), process.generator()
  if recorded_generator not in (None, generator):
    raise ConfigError(
      f"workdir: the run in {workdir} draws its random numbers by "
      f"{recorded_generator!r}, and this process by {generator!r}; set "
      f"JAX_DEFAULT_PRNG_IMPL={recorded_generator}, or choose a new folder"
    )
  recorded, fields = _recorded_fields(_config(recorded)), _fields(config)
  if recorded.get("task.name") != fields["task.name"]:
    raise ConfigError(
      f"workdir: {workdir} holds a run of the task "
      f"{recorded.get('task.name')!r}, expected one of "
      f"{fields['task.name']!r}; choose a new folder"
    )
  # The evaluations of such a run determine its final parameters.
  decisive = ("eval_every",) if config.train.tracks_best else ()
  differing = [
    field
    for field in {**recorded, **fields}
    if recorded.get(field, _UNSET) != fields.get(field, _UNSET)
    and (field not in _MAY_CHANGE or field in decisive)
  ]
  steps = recorded.get("num_steps")
  if differing == ["num_steps"] and isinstance(steps, int):
    _check_num_steps(workdir, steps, config)
  elif differing:
    # A mechanism is the most informative difference; the number of steps is the least.
    field = min(
      differing, key=lambda x: (x == "num_steps") - x.endswith(_CHOICES)
    )
    old, new = _differences(
      recorded.get(field, _UNSET), fields.get(field, _UNSET)
    )
    count = f" ({len(differing)} fields differ)" if differing[1:] else ""
    raise ConfigError(
      f"workdir: {workdir} holds a run with another config: config.{field} is "
      f"{old!r} there and {new!r} here{count}; choose a new folder"
    )


def _recorded_fields(recorded: Mapping[str, Any]) -> FieldValues:
  """Returns the config fields that a run recorded, with defaults for newer fields.

  They are returned as recorded if they are no longer valid, for example because a field
  was removed.
  """
  # Leave out the mechanisms, which follow from the model and which older runs lack.
  recorded = {name: x for name, x in recorded.items() if name != SLOTS}
  try:
    return _fields(experiment_config.parse(recorded, restore=True))
  except ConfigError:
    return flatten(recorded)


def _fields(config: ExperimentConfig) -> FieldValues:
  """Returns the config fields, with values as JSON represents them."""
  return flatten(json.loads(json.dumps(_mapping(config))))


def _mapping(config: ExperimentConfig) -> dict[str, Any]:
  """Returns the config with former defaults of optimiser fields that are now None."""
  mapping = config.to_mapping()
  optimizer = mapping["optimizer"]
  optimizer |= {
    field: default
    for field, default in _FORMER_OPTIMIZER.items()
    if optimizer[field] is None
  }
  return mapping


def _differences(old: Any, new: Any) -> tuple[Any, Any]:
  """Returns two values, or of two lists of sections only the fields that differ."""
  are_lists = isinstance(old, list) and isinstance(new, list)
  if not are_lists or len(old) != len(new):
    return old, new
  pairs = list(zip(old, new, strict=True))
  if not all(isinstance(x, dict) for pair in pairs for x in pair):
    return old, new

  def select(section, other):
    return {k: x for k, x in section.items() if x != other.get(k, _UNSET)}

  return [select(a, b) for a, b in pairs], [select(b, a) for a, b in pairs]


def _check_num_steps(workdir: Path, old: int, config: ExperimentConfig) -> None:
  """Raises ConfigError if this config cannot continue a run of `old` steps."""
  new, schedule = config.train.num_steps, config.train.optimizer.schedule
  if new < old:
    raise ConfigError(
      f"config.num_steps: {workdir} holds a run of {old} steps, which can be "
      f"continued but not shortened, got {new}; choose a new folder"
    )
  if new > old and schedule == "cosine":
    raise ConfigError(
      f"config.num_steps: {workdir} holds a run whose learning rate ends at step "
      f"{old} (optimizer.schedule='cosine'), so one of {new} steps differs from "
      "the first step on; choose a new folder. A run that begins with "
      "config.optimizer.schedule='constant' can be continued"
    )


def check_writable(name: str, folder: Path) -> None:
  """Checks that a folder exists or can be created, and can be written to.

  Raises:
    ConfigError: it cannot be created or written to; the message starts with `name`.
  """
  existing = folder
  try:
    while not existing.exists():
      existing = existing.parent
  except OSError as error:  # A name may be too long.
    raise ConfigError(f"{name}: {error.strerror}: {existing}") from error
  if not existing.is_dir():
    raise ConfigError(f"{name}: {existing} is not a folder")
  if not os.access(existing, os.W_OK):
    raise ConfigError(f"{name}: {existing} cannot be written to")


def read_config(workdir: Path) -> dict[str, Any]:
  """Returns the config that `write_config` wrote, with its 'slots'.

  Raises:
    ConfigError: the file is missing or is not JSON.
  """
  return _config(_read(workdir))


def _config(recorded: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the config without the fields that describe the process of the run."""
  process_fields = (XLA_FLAGS, GENERATOR, DEVICE)
  return {k: x for k, x in recorded.items() if k not in process_fields}


def _read(workdir: Path) -> dict[str, Any]:
  path = workdir / CONFIG
  try:
    config = json_text.loads(path.read_text("utf-8"))
  except (FileNotFoundError, NotADirectoryError):
    raise ConfigError(
      f"workdir: no run in {workdir}, which has no {CONFIG}; train.py --workdir "
      "creates one"
    ) from None
  except (ValueError, OSError) as error:
    raise ConfigError(f"workdir: cannot read {path}: {error}") from error
  if not isinstance(config, dict):
    raise ConfigError(f"workdir: {path} holds no config")
  return config


def make(workdir: Path) -> None:
  """Creates the folder of a run, if it does not exist.

  Raises:
    ConfigError: it cannot be created.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(
      f"workdir: {workdir} cannot be created: {error.strerror}"
    ) from error


def write_config(workdir: Path, config: ExperimentConfig) -> None:
  """Creates the folder and writes the config of its run.

  The file has all config fields. It also has 'slots', the mechanism of each attention
  module (a config may choose dense if a module does not support its mechanism);
  'xla_flags', the compiler flags of this process; 'random_numbers', its random number
  generator; and 'device', its devices.
  """
  make(workdir)
  content = {
    SLOTS: models.slots(config.model),
    XLA_FLAGS: process.flags(),
    GENERATOR: process.generator(),
    DEVICE: process.devices(),
    **config.to_mapping(),
  }
  text = json.dumps(content, indent=2, ensure_ascii=False)
  atomic.write_text(workdir / CONFIG, text + "\n")


def device(workdir: Path) -> str | None:
  """Returns the devices on which a run was last started; None for an older run."""
  return _read(workdir).get(DEVICE)


def final_metrics(
  workdir: Path, config: ExperimentConfig
) -> dict[str, dict[str, Any]] | None:
  """Maps the splits of a finished run to its metrics; None if it has not finished."""
  records = [
    {name: value for name, value in record.items() if name != "seconds"}
    for record in metrics.read(workdir)
    if (record["step"] == config.train.num_steps or STOPPED in record)
    and record["split"] != "train"
  ]
  return {record.pop("split"): record for record in records} or None


def last_step(workdir: Path, config: ExperimentConfig) -> int:
  """Returns the step at which a run finished; 0 if it has not finished."""
  results = final_metrics(workdir, config) or {}
  return max((values["step"] for values in results.values()), default=0)


def finished_message(workdir: Path, config: ExperimentConfig) -> str:
  """Returns the message for a run that has already finished."""
  last = last_step(workdir, config) or config.train.num_steps
  newest = newest_step(workdir)
  remark = ""
  if newest < last:
    others = f"the newest is of step {newest}" if newest else "there is none"
    remark = f", but its last checkpoint is gone: {others}"
  return f"{workdir}: had finished at step {last} before{remark}; nothing is left to train"


def summary(workdir: Path, results: Mapping[str, Mapping[str, Any]]) -> str:
  """Describes mechanisms, final metrics and files of a run for a reader."""
  lines = []
  if slots := read_config(workdir).get(SLOTS):
    lines += ["", f"slots: {slots}"]
  for split, values in results.items():
    lines += ["", f"{split}"]
    values = {name: v for name, v in values.items() if name != "step"}
    width = max(map(len, values), default=0)
    # Values that are text, such as a signature, come after the numbers.
    for name in sorted(values, key=lambda name: isinstance(values[name], str)):
      lines.append(f"  {name:<{width}}  {metrics.format_number(values[name])}")
  lines += ["", str(workdir)]
  for name, what in _CONTENTS.items():
    if (workdir / name).exists():
      lines.append(f"  {name:<{max(map(len, _CONTENTS))}}  {what}")
  return "\n".join(lines)


_CONTENTS = {
  CONFIG: "every field of the config",
  metrics.FILE: "one object per line: step, split, seconds, name → value",
  "tensorboard": "the same for TensorBoard",
  "profile": "a trace of some steps, for TensorBoard and Perfetto",
  "samples.txt": "held-out examples with the outputs of the model",
  "sentences.json": "counts for BLEU, for each sentence",
  "attention.png": "attention maps of the last layer",
  "checkpoints": "parameters and optimiser, for generate.py",
  "vocabulary": "tokens of the task",
}
