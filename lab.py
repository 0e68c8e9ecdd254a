"""Python interface of the laboratory: the commands as functions, for notebooks.

    import lab
    run = lab.train("configs/copy.py:performer", **{"num_steps": 200})
    run.metrics().plot(x="step", y="loss")
    run.generate(["3 1 4 1 5"])

    results = lab.compare("configs/compare/recall.py", attention=["dense", "delta"])
    results.summary()[["row", "mean", "low", "high"]]
    results.curves("recall")

A `config` is a file with its arguments, as on a command line, or a ConfigDict.
`workdir` is the folder of the results, by default the one that the command uses; the
same call resumes a stopped run. `**fields` are config fields, such as
`**{"model.num_layers": 1}`. Tables are pandas DataFrames, figures are matplotlib
figures. An invalid argument raises a one-line `ConfigError`, and a failed run a
`RunError`.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from comparison import config as config_lib
from comparison import folder as folder_lib
from comparison import records as records_lib
from comparison import run as run_lib
from settings.errors import ConfigError, RunError
from settings.field_values import put
from settings.typed import split
from training import experiment as experiment_lib
from training import experiment_config, loop
from training import metrics as metrics_lib
from training import workdir as workdir_lib
from training.commands import config_flag
from training.devices import process
from training.inference import generation
from training.pictures import attention_maps
from training.pictures.example import make_example

if TYPE_CHECKING:
  import pandas as pd

# Importing pandas, SciPy and matplotlib takes three seconds, so only the functions that
# make tables and figures import them; generate.py needs none of them.

__all__ = [
  "Comparison",
  "ConfigError",
  "Run",
  "RunError",
  "compare",
  "load_comparison",
  "load_run",
  "sweep",
  "train",
]

# Orbax warns about intended behaviour.
logging.set_verbosity(logging.ERROR)


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of `train.py`, opened from its folder.

  Attributes:
    folder: folder of the run.
    experiment: task, model and compiled functions, created from the config.
  """

  folder: Path
  experiment: Any = dataclasses.field(repr=False)

  @property
  def config(self) -> Any:
    """The complete config."""
    return self.experiment.config

  @property
  def task(self) -> Any:
    """The task: batches, vocabulary and metrics."""
    return self.experiment.task

  @property
  def model(self) -> Any:
    """The model, a Linen module: `run.model.apply(run.variables(), …)`."""
    return self.experiment.model

  def metrics(self) -> "pd.DataFrame":
    """Reads metrics.jsonl as a table, one row per line: `step`, `split`, `loss`, …."""
    import pandas as pd

    return pd.DataFrame(metrics_lib.read(self.folder))

  def variables(self, step: int | None = None) -> Mapping[str, Any]:
    """Returns the model's variables at a checkpoint, by default the newest intact one.

    If the run keeps its best checkpoint (`checkpoint_keep`), that is the default.

    Raises:
      ConfigError: the run has no such checkpoint.
    """
    return generation.restore_variables(self.experiment, self.folder, step)

  def attention_maps(self, text: str, target: str | None = None) -> Any:
    """Draws the attention weights of every layer and head for a text.

    Args:
      text: input of the model: a source, or the prompt of a decoder-only model.
      target: output for a source; by default the model generates it.
    """
    _show_figures()
    variables = self.variables()
    example = make_example(self.experiment, variables, text, target)
    maps = attention_maps.named_maps(self.model, variables, self.task, example)
    return attention_maps.overview(list(maps.values()))

  def generate(self, lines: Sequence[str], **options: Any) -> list[str]:
    """Generates one output per line.

    Args:
      lines: sources, or prompts for a decoder-only model.
      **options: options of `training.inference.generation.generate_lines`, such as
        `max_length`, `seed`, `method` ('greedy', 'beam', 'sample') and the options
        of that method.

    Raises:
      ConfigError: the model does not accept a line or an option.
    """
    if isinstance(lines, str) or not isinstance(lines, Iterable):
      raise ConfigError(f"lines: expected a list of texts, got {lines!r}")
    variables = self.variables()
    return generation.generate_lines(
      self.experiment, variables, list(lines), **options
    )


def load_run(folder: str | Path) -> Run:
  """Opens the folder of a run.

  Raises:
    ConfigError: the folder has no run.
  """
  folder = Path(folder)
  config = experiment_config.parse(
    workdir_lib.read_config(folder), restore=True
  )
  return Run(folder, experiment_lib.create(config, folder, restore=True))


def train(
  config: Any,
  workdir: str | Path | None = None,
  *,
  stop_at: int | None = None,
  **fields: Any,
) -> Run:
  """Trains as `train.py` does, and prints progress; Ctrl-C saves.

  Args:
    config: `"configs/copy.py:performer"`, or a ConfigDict.
    workdir: folder of the run.
    stop_at: step at which to evaluate, save and end.
    **fields: config fields that replace those of the config.
  """
  if stop_at is not None and not (
    isinstance(stop_at, Integral) and stop_at > 0
  ):
    raise ConfigError(
      f"stop_at: expected a whole number of at least 1, got {stop_at}"
    )
  parsed = experiment_config.parse(_mapping(config, fields))
  name = config if isinstance(config, str) else "run"
  default = workdir_lib.default(name, parsed)
  folder = default if workdir is None else Path(workdir)
  workdir_lib.check(folder, parsed)
  if workdir_lib.final_metrics(folder, parsed) is not None:
    print(workdir_lib.finished_message(folder, parsed), flush=True)
  else:
    process.cache_programs()
    process.replace_unencodable()
    run = experiment_lib.begin(parsed, folder)
    print(f"{folder}: {experiment_lib.describe(run)}", flush=True)
    loop.run(run, folder, stop_at=stop_at)
  return load_run(folder)


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The results of a comparison.

  Attributes:
    folder: folder of the comparison, with report.html.
    records: one record per run, as in `comparison.records`.
  """

  folder: Path
  records: Sequence[Mapping[str, Any]] = dataclasses.field(repr=False)

  def frame(self) -> "pd.DataFrame":
    """Returns a table with one row per run, from `comparison.analysis.frame.runs`."""
    from comparison.analysis import frame

    return frame.runs(self.records)

  def summary(self) -> "pd.DataFrame":
    """Returns a table with one row per mechanism, the best of each task first.

    It is that of `comparison.analysis.summary.summarize`.
    """
    from comparison import records
    from comparison.analysis import summary

    return summary.summarize(
      self.frame(),
      records.planned_runs(self.folder),
      records.shared_settings(self.folder).get("reference"),
    )

  def curves(self, task: str, metric: str | None = None) -> Any:
    """Draws the learning curves of a task, one line per seed.

    Args:
      task: a value of the column `task`.
      metric: a metric; by default the main metric of the task, or the training loss.

    Raises:
      ValueError: the comparison has no such task or metric, or none of its runs has ended.
    """
    from comparison.analysis.task import by_task
    from comparison.report import figures, style

    _show_figures()
    tasks = by_task(self.records)
    if task not in tasks:
      raise ValueError(
        f"task: expected one of {', '.join(tasks)}, got {task!r}"
      )
    styles = style.styles(record["attention"] for record in self.records)
    metrics = sorted(set(tasks[task].curves["metric"]))
    if metric is not None and metric not in metrics:
      raise ValueError(
        f"metric: expected one of {', '.join(metrics)}, got {metric!r}"
      )
    with style.look():
      figure = figures.learning_curves(tasks[task], styles, metric)
    if figure is None:
      raise ValueError(f"task: no run of {task} has ended yet")
    return figure


def load_comparison(folder: str | Path) -> Comparison:
  """Opens the folder of a comparison, finished or not.

  Raises:
    ConfigError: the folder has no comparison.
  """
  folder = Path(folder)
  if not (folder / records_lib.COMPARISON).is_file():
    raise ConfigError(f"workdir: no comparison in {folder}")
  return Comparison(folder, records_lib.read(folder)[0])


def compare(
  config: Any, workdir: str | Path | None = None, **fields: Any
) -> Comparison:
  """Compares mechanisms as `compare.py` does.

  Args:
    config: `"configs/compare/recall.py"`, or a ConfigDict.
    workdir: folder of the comparison.
    **fields: config fields, such as `attention=["dense", "delta"]`, `seeds=3` (the
      seeds 0, 1 and 2) or `**{"grid.optimizer.learning_rate": [1e-3, 3e-3]}`.
  """
  from comparison.report import files

  process.replace_unencodable()
  if isinstance(fields.get("seeds"), Integral):
    fields["seeds"] = range(fields["seeds"])
  for name in ("attention", "tasks", "seeds"):
    values = fields.get(name, "")
    if isinstance(values, Iterable) and not isinstance(values, str):
      fields[name] = ",".join(map(str, values))
  parsed = config_lib.parse(_mapping(config, fields), set(fields))
  name = config if isinstance(config, str) else "comparison"
  default = folder_lib.default_workdir(name, parsed)
  folder = default if workdir is None else Path(workdir)
  parsed = folder_lib.with_recorded_eval_every(
    parsed, records_lib.shared_settings(folder), fields
  )
  run_lib.run(parsed, folder, after=files.report_updater(folder))
  files.write(folder)
  return load_comparison(folder)


def sweep(
  config: str,
  grid: Mapping[str, Sequence[Any]],
  seeds: int = 1,
  workdir: str | Path | None = None,
  **fields: Any,
) -> Comparison:
  """Compares all combinations of values of config fields, without a config file.

  Args:
    config: config of one run, such as `"configs/recall.py:delta"`. Layers use several
      mechanisms, separated by commas, in turn.
    grid: maps config fields to their values; each combination is a row.
    seeds: number of seeds of each row, from 0.
    workdir: folder of the comparison; by default a new folder.
    **fields: config fields of all runs.

  Raises:
    ConfigError: the config is invalid.
  """
  file, _, typed = config.partition(":")
  words = split(typed) or ["dense"]
  label = "+".join(words)
  path, configs = (
    Path(file).resolve(),
    Path(__file__).resolve().parent / "configs",
  )
  if not path.is_relative_to(configs):
    raise ConfigError(f"config: expected a file in configs/, got {file!r}")
  mapping = {
    "tasks": str(path.relative_to(configs).with_suffix("")),
    "attention": label,
    "variants": {label: {"layers": typed}} if len(words) > 1 else {},
    "seeds": seeds,
    "match_parameters": False,
    "across": dict(grid),
  }
  return compare(mapping, workdir, seeds=seeds, **fields)


def _show_figures() -> None:
  """Loads Jupyter's matplotlib backend; without it, notebooks show figures as text."""
  import matplotlib.pyplot as plt

  if "inline" in plt.get_backend():
    plt.switch_backend(plt.get_backend())


def _mapping(config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config as a mapping, with `fields` set."""
  if isinstance(config, str):
    config = config_flag.load(config)
  if not hasattr(config, "items"):
    raise ConfigError(
      f"config: expected FILE.py, FILE.py:MECHANISM or a ConfigDict, got "
      f"{config!r}"
    )
  mapping = _copy(config)
  for field, value in fields.items():
    put(mapping, field, value)
  return mapping


def _copy(section: Any) -> Any:
  """Copies nested sections to dicts, so that a caller's config does not change."""
  if hasattr(section, "to_dict"):
    section = section.to_dict()
  if not isinstance(section, Mapping):
    return section
  return {name: _copy(value) for name, value in section.items()}
