r"""Swaps the mechanism of a trained model, and measures the result.

    python swap.py --weights=FOLDER --text=input.txt --attention=all --workdir=OUT
    python swap.py --weights=RUN --text=input.txt --workdir=OUT \
        --attention=performer:num_features=128,window_linear:window=16 \
        --keep=0,2 --transfer_steps=500 --finetune_steps=500

FOLDER has published weights, or is the workdir of a run. The same command
resumes a stopped swap; you can add mechanisms later. OUT gets report.html,
report.md, results.csv, layers.csv, plots/, and in models/ every swapped model
as a folder that `models.load_pretrained` and generate.py read.
"""

import importlib.util
from pathlib import Path
from typing import Any

# Imported first, because it reports missing packages.
import training  # noqa: F401  # isort: skip

from absl import flags

from settings.errors import ConfigError
from settings.fields import error_line
from training.commands import entry
from training.devices import process
from training.workdir import check_writable

_WEIGHTS = flags.DEFINE_string(
  "weights", "", "folder of published weights, or workdir of a run"
)
_TEXT = flags.DEFINE_string(
  "text", "", "UTF-8 file; 90 % to train on, the rest is held out"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the results")
_ATTENTION = flags.DEFINE_string(
  "attention",
  "all",
  "mechanisms, separated by commas: name or name:option=value",
)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer", "", "tokenizer.json of the text; by default that of --weights"
)
_CONTEXT = flags.DEFINE_integer(
  "context",
  None,
  "tokens per window; by default the model's context, at most 256",
)
_LENGTH = flags.DEFINE_integer(
  "length", None, "one more length at which time and memory are measured"
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "windows per batch")
_BATCHES = flags.DEFINE_integer(
  "batches", 20, "number of held-out batches for the loss; 0 uses all"
)
_KEEP = flags.DEFINE_list(
  "keep", "0", "numbers k: swaps all but the k most sensitive layers"
)
_TRANSFER_STEPS = flags.DEFINE_integer(
  "transfer_steps",
  0,
  "updates that fit each layer to the attention that it replaces",
)
_TRANSFER_RATE = flags.DEFINE_float(
  "transfer_rate", 1e-2, "first learning rate of the transfer"
)
_FINETUNE_STEPS = flags.DEFINE_integer(
  "finetune_steps", 0, "updates of the whole model after the transfer"
)
_FINETUNE_RATE = flags.DEFINE_float(
  "finetune_rate", 1e-4, "highest learning rate of the fine-tuning"
)
_SEED = flags.DEFINE_integer("seed", 0, "seed of all random numbers")


def main() -> None:
  """Measures every missing mechanism, and writes the report."""
  if _WORKDIR.value is None:
    raise ConfigError(
      "--workdir: missing; expected the folder of the results; --weights, --text and "
      "--attention are required as well"
    )
  if importlib.util.find_spec("projects.swap") is None:
    raise ConfigError("swap.py: projects/swap is not in this checkout")
  from projects.swap import finetune, measure, records, report, rows, source

  settings = _settings()
  folder = Path(_WORKDIR.value)
  check_writable("--workdir", folder)
  records.check(folder, settings)
  process.keep_freed_memory()
  process.cache_programs()
  model = source.read(settings)
  try:
    choices = settings.choices(model.context)
  except ValueError as error:
    raise ConfigError(f"--{error}") from error
  with records.lock(folder, settings, model.data):
    print(f"{folder}: {source.describe(model)}", flush=True)
    if records.read(folder, records.OWN) is None:
      records.write(folder, measure.original_row(model, settings))
    for choice in choices:
      record = records.read(folder, choice.label)
      # Unsupported mechanisms are tried again, which takes no time.
      if record is None or record["status"] == records.CANNOT:
        record = measure.mechanism(model, choice, settings, folder)
        records.write(folder, record)
      for swap in record.get("swaps", ()):
        if settings.finetune_steps and "finetune_loss" not in swap:
          places = settings, folder, swap
          if not finetune.add(record, model, choice, *places):
            return
          records.write(folder, record)
      print(rows.line(record), flush=True)
    print(report.write(folder, settings, records.read_all(folder)))
    print(folder / report.PAGE)


def _settings() -> Any:
  """Returns the checked values of the flags."""
  from projects.swap.settings import Settings, numbers

  for stage in ("transfer", "finetune"):
    rate, steps = flags.FLAGS[f"{stage}_rate"], flags.FLAGS[f"{stage}_steps"]
    if rate.present and not steps.value:
      raise ConfigError(f"--{rate.name}: needs --{steps.name}")
  try:
    return Settings(
      weights=_WEIGHTS.value,
      text=_TEXT.value,
      attention=_ATTENTION.value,
      tokenizer=_TOKENIZER.value,
      context=_CONTEXT.value,
      length=_LENGTH.value,
      batch_size=_BATCH_SIZE.value,
      batches=_BATCHES.value,
      keep=numbers(_KEEP.value),
      transfer_steps=_TRANSFER_STEPS.value,
      transfer_rate=_TRANSFER_RATE.value,
      finetune_steps=_FINETUNE_STEPS.value,
      finetune_rate=_FINETUNE_RATE.value,
      seed=_SEED.value,
    )
  except ValueError as error:
    raise ConfigError(f"--{error_line(error)}") from error


if __name__ == "__main__":
  entry.run(main)
