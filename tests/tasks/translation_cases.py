"""Small translation tasks."""

import tasks
from tasks import TranslationConfig


def make(batch_size=16, seed=0, workdir=None, restore=False, **fields):
  return tasks.TASKS["translation"].make(
    TranslationConfig(**fields),
    kind="encoder_decoder",
    batch_size=batch_size,
    seed=seed,
    workdir=workdir,
    restore=restore,
  )


def files(folder, **fields):
  return {"source": "files", "path": str(folder), "vocab_size": 100, **fields}
