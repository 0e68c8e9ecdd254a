"""Fine-tunes a swapped model with an ordinary training run."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from models.published import load
from projects.swap import scores, variant
from projects.swap.records import MODELS, RUNS, Record
from projects.swap.settings import Choice, Settings
from projects.swap.source import Source
from settings.errors import RunError, one_line
from training import experiment, experiment_config, loop, workdir
from training.inference import generation, published


def add(
  record: Record,
  source: Source,
  choice: Choice,
  settings: Settings,
  folder: Path,
  swap: dict[str, Any],
) -> bool:
  """Fine-tunes one swapped model of a record, and adds the results to `swap`.

  If the run fails, for example because the model diverges, the record has a note with
  the reason, so that other mechanisms can be measured.

  Returns:
    False if a signal stopped the run.
  """
  name, notes = swap["folder"], record.setdefault("notes", {})
  note = f"finetune of {name}"
  notes.pop(note, None)
  try:
    results = finetune(source, choice, swap["kept"], settings, folder, name)
  except RunError as error:
    notes[note] = one_line(error)
    return True
  swap |= results or {}
  return results is not None


def finetune(
  source: Source,
  choice: Choice,
  kept: Collection[int],
  settings: Settings,
  folder: Path,
  name: str,
) -> dict[str, float] | None:
  """Trains the model in models/`name` with the usual loss, and replaces it.

  The run is in finetune/`name`, with checkpoints and metrics; a repeated call resumes
  it. The optimizer is AdamW without weight decay, with a warm-up over a tenth of the
  steps.

  Args:
    source: the original model and its text.
    choice: the mechanism.
    kept: indices of the modules that keep their own mechanism.
    settings: number of steps and learning rate.
    folder: folder of the swap.
    name: name of the model's folder.

  Returns:
    'finetune_loss' and 'finetune_accuracy'; None if a signal stopped the run.
  """
  weights, run_folder = folder / MODELS / name, folder / RUNS / name
  steps = settings.finetune_steps
  modules = [x for i, x in enumerate(source.modules) if i not in kept]
  description = variant.describe(source, choice.config, modules)
  mapping = published.text_mapping(
    weights,
    source.kind,
    {
      "path": settings.text,
      "context": source.context,
      "eval_batches": settings.batches,
      "tokenizer": str(source.vocabulary),
    },
    num_steps=steps,
    batch_size=settings.batch_size,
    seed=settings.seed,
    eval_every=steps,
    checkpoint_every=max(1, min(200, steps)),
    log_every=max(1, min(100, steps)),
    optimizer={
      "name": "adamw",
      "learning_rate": settings.finetune_rate,
      "schedule": "cosine",
      "warmup_steps": steps // 10,
      "final_fraction": 0.1,
      "b2": 0.99,
      "weight_decay": 0.0,
      "clip_norm": 1.0,
    },
  )
  # Import paths come from the options, not from the folder.
  attentions = {
    field: [{"name": layer.name, **layer.options} for layer in layers]
    for field, layers in description.config.attentions.items()
    if field != "cross_attention"
  }
  num_layers = max(map(len, attentions.values()))
  mapping["model"] |= {"num_layers": num_layers, **attentions}
  config = experiment_config.parse(mapping)
  workdir.check(run_folder, config)
  if workdir.final_metrics(run_folder, config) is None:
    run = experiment.begin(config, run_folder)
    if loop.run(run, run_folder, ends_process=True) is None:
      return None
  else:
    run = experiment.create(config, run_folder)
  variables = generation.restore_variables(run, run_folder)
  model = load.make_model(description)
  variant.save(source, model, variables, weights)
  metrics = scores.score(source, model, variables)
  return {f"finetune_{key}": value for key, value in metrics.items()}
