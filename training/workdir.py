"""The folder of a run: where it is, whose it is, and whether it is done."""

from collections.abc import Mapping
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import models
from settings import json_text
from settings.errors import ConfigError
from settings.leaves import Leaves, flatten
from training import atomic, experiment_config, metrics
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
"""Name in the final metrics of a run that `patience` has ended: where and why."""

# When a run is looked at and saved, and which devices compute what: its parameters
# do not follow from these, but for rounding.
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

_NEW = (
  ("", "checkpoint_keep", "newest"),
  ("", "best_metric", "loss"),
  ("", "patience", 0),
  ("optimizer", "ema_decay", 0.0),
  ("task", "column", ""),
)
_FORMER_OPTIMIZER = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
_CHOICES = ("_attention", "_attention.name")
_UNSET = "not set"


def default(config_file: str, config: ExperimentConfig) -> Path:
  """`runs/<config file>-<mechanism>-<digest of the config>`."""
  attention, *_ = next(iter(config.model.attentions.values()))
  mapping = _mapping(config)
  for leaf in ("log", "profile_steps"):  # No number follows from them.
    mapping.pop(leaf)
  # So that a run which was begun before these leaves has its folder still.
  for section, leaf, unset in _NEW:
    leaves = mapping[section] if section else mapping
    if leaves.get(leaf) == unset:
      leaves.pop(leaf)
  text = json.dumps(mapping, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()[:8]
  stem = Path(config_file.partition(":")[0]).stem
  # Not all systems allow the colon of an import path in a file name.
  name = attention.name.replace(":", ".")
  return Path("runs") / f"{stem}-{name}-{digest}"


def check(workdir: Path, config: ExperimentConfig) -> None:
  """Checks that `workdir` is free, or holds a run that this config continues.

  A config continues its own run, and one of fewer steps where no learning rate
  on the way depends on their number. How often it logs, evaluates and saves may
  change, and the mesh. A leaf that was made after the run has its default there.

  Raises:
    ConfigError: it holds something else, or cannot be written.
  """
  check_writable("workdir", workdir)
  if not workdir.exists() or not any(workdir.iterdir()):
    return
  if not (workdir / CONFIG).exists():
    raise ConfigError(
      f"workdir: {workdir} holds other files and no run ({CONFIG}); choose a "
      "new folder"
    )
  written = _read(workdir)
  drawn, here = written.get(GENERATOR), process.generator()
  if drawn not in (None, here):
    raise ConfigError(
      f"workdir: the run in {workdir} draws its random numbers by {drawn!r}, and "
      f"this process by {here!r}; set JAX_DEFAULT_PRNG_IMPL={drawn}, or choose a "
      "new folder"
    )
  recorded, leaves = _recorded_leaves(_config(written)), _leaves(config)
  if recorded.get("task.name") != leaves["task.name"]:
    raise ConfigError(
      f"workdir: {workdir} holds a run of the task "
      f"{recorded.get('task.name')!r}, expected one of "
      f"{leaves['task.name']!r}; choose a new folder"
    )
  # Evaluations decide with which parameters such a run ends.
  decisive = ("eval_every",) if config.train.asks_best else ()
  differing = [
    leaf
    for leaf in {**recorded, **leaves}
    if recorded.get(leaf, _UNSET) != leaves.get(leaf, _UNSET)
    and (leaf not in _MAY_CHANGE or leaf in decisive)
  ]
  steps = recorded.get("num_steps")
  if differing == ["num_steps"] and isinstance(steps, int):
    _check_num_steps(workdir, steps, config)
  elif differing:
    # What fills a slot says most of a run, and how many steps it has the least.
    leaf = min(
      differing, key=lambda x: (x == "num_steps") - x.endswith(_CHOICES)
    )
    old, new = recorded.get(leaf, _UNSET), leaves.get(leaf, _UNSET)
    more = f" ({len(differing)} leaves differ)" if differing[1:] else ""
    raise ConfigError(
      f"workdir: {workdir} holds a run with another config: config.{leaf} is "
      f"{old!r} there and {new!r} here{more}; choose a new folder"
    )


def _recorded_leaves(written: Mapping[str, Any]) -> Leaves:
  """The leaves that a run wrote, with defaults for those that were made after it.

  As they were written where they cannot be read today, as with one that is gone.
  """
  # Follows from the model, and runs of an earlier version do not have it.
  written = {name: x for name, x in written.items() if name != SLOTS}
  try:
    return _leaves(experiment_config.parse(written, restore=True))
  except ConfigError:
    return flatten(written)


def _leaves(config: ExperimentConfig) -> Leaves:
  """The leaves of a config as JSON has them."""
  return flatten(json.loads(json.dumps(_mapping(config))))


def _mapping(config: ExperimentConfig) -> dict[str, Any]:
  """A config as its run recorded it before an optimiser could be without a number."""
  mapping = config.to_mapping()
  optimizer = mapping["optimizer"]
  optimizer |= {
    leaf: former
    for leaf, former in _FORMER_OPTIMIZER.items()
    if optimizer[leaf] is None
  }
  return mapping


def _check_num_steps(workdir: Path, old: int, config: ExperimentConfig) -> None:
  """Raises ConfigError where a run of `old` steps cannot become this one."""
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
  """Checks that a folder is there or can be made, and can be written to.

  Raises:
    ConfigError: it cannot; the message starts with `name`.
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
  """The config that `write_config` wrote, with its 'slots'.

  Raises:
    ConfigError: there is none, or it is not JSON.
  """
  return _config(_read(workdir))


def _config(written: Mapping[str, Any]) -> dict[str, Any]:
  """Without what is of the process that began the run."""
  process_fields = (XLA_FLAGS, GENERATOR, DEVICE)
  return {k: x for k, x in written.items() if k not in process_fields}


def _read(workdir: Path) -> dict[str, Any]:
  path = workdir / CONFIG
  try:
    config = json_text.loads(path.read_text("utf-8"))
  except (FileNotFoundError, NotADirectoryError):
    raise ConfigError(
      f"workdir: no run in {workdir}, which has no {CONFIG}; train.py --workdir "
      "makes one"
    ) from None
  except (ValueError, OSError) as error:
    raise ConfigError(f"workdir: cannot read {path}: {error}") from error
  if not isinstance(config, dict):
    raise ConfigError(f"workdir: {path} holds no config")
  return config


def make(workdir: Path) -> None:
  """Makes the folder of a run where there is none.

  Raises:
    ConfigError: it cannot be.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(
      f"workdir: {workdir} cannot be made: {error.strerror}"
    ) from error


def write_config(workdir: Path, config: ExperimentConfig) -> None:
  """Makes the folder and says in it which run it holds.

  The file has every leaf, in 'slots' which mechanism fills which slot (a config
  may have chosen dense where the mechanism of its name cannot serve), in
  'xla_flags' how this process compiles, in 'random_numbers' how it draws, and in
  'device' what it computes with.
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
  """The devices that a run was last started on; None of an older run."""
  return _read(workdir).get(DEVICE)


def final_metrics(
  workdir: Path, config: ExperimentConfig
) -> dict[str, dict[str, Any]] | None:
  """Split → metrics of a finished run; None if there is more to do."""
  records = [
    {name: value for name, value in record.items() if name != "seconds"}
    for record in metrics.read(workdir)
    if (record["step"] == config.train.num_steps or STOPPED in record)
    and record["split"] != "train"
  ]
  return {record.pop("split"): record for record in records} or None


def last_step(workdir: Path, config: ExperimentConfig) -> int:
  """The step that a finished run ended at; 0 if there is more to do."""
  results = final_metrics(workdir, config) or {}
  return max((values["step"] for values in results.values()), default=0)


def had_finished(workdir: Path, config: ExperimentConfig) -> str:
  """What is said of a run that is asked for again."""
  last = last_step(workdir, config) or config.train.num_steps
  newest = newest_step(workdir)
  lost = ""
  if newest < last:
    there = f"the newest is of step {newest}" if newest else "there is none"
    lost = f", but its last checkpoint is gone: {there}"
  return f"{workdir}: had finished at step {last} before{lost}; nothing is left to train"


def summary(workdir: Path, results: Mapping[str, Mapping[str, Any]]) -> str:
  """The slots, the final metrics and where everything is, for a reader."""
  lines = []
  if slots := read_config(workdir).get(SLOTS):
    lines += ["", f"slots: {slots}"]
  for split, values in results.items():
    lines += ["", f"{split}"]
    values = {name: v for name, v in values.items() if name != "step"}
    width = max(map(len, values), default=0)
    # What text says, as a signature, comes after the numbers.
    for name in sorted(values, key=lambda name: isinstance(values[name], str)):
      lines.append(f"  {name:<{width}}  {metrics.format_number(values[name])}")
  lines += ["", str(workdir)]
  for name, what in _CONTENTS.items():
    if (workdir / name).exists():
      lines.append(f"  {name:<{max(map(len, _CONTENTS))}}  {what}")
  return "\n".join(lines)


_CONTENTS = {
  CONFIG: "every leaf of the config",
  metrics.FILE: "one object a line: step, split, seconds, name → value",
  "tensorboard": "the same for TensorBoard",
  "profile": "a trace of some steps, for TensorBoard and Perfetto",
  "samples.txt": "held-out examples and what the model makes of them",
  "sentences.json": "counts that BLEU is made of, for each sentence",
  "attention.png": "what the mechanism's last layer attends to",
  "checkpoints": "parameters and optimiser, for generate.py",
  "vocabulary": "tokens of the task",
}
