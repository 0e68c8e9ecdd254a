"""One of several processes makes its rows of a batch, and no others."""

import numpy as np
import pytest

import tasks
from tests.here import here
from tests.tasks.text_cases import TEXT

LEAVES = {
  "copy": {"max_length": 6, "vocab_size": 8},
  "translation": {"num_train": 200, "num_validation": 20},
  "text": {"context": 16},
  "classification": {"max_length": 16, "vocabulary": "characters"},
  "image": {"shift": 1},
  "recall": {},
  "induction": {},
  "selective_copy": {},
  "listops": {},
  "pathfinder": {"size": 20, "num_dashes": 4, "num_distractors": 1},
  "needle": {},
  "state_tracking": {},
  "speech": {},
  "mixed": {
    "context": 40,
    "vocab_size": 320,
    "caption_rows": 2,
    "control_rows": 3,
    "expert_episodes": 2,
  },
}
KINDS = {
  "copy": ("encoder_decoder", "decoder", "encoder"),
  "translation": ("encoder_decoder",),
  "text": ("decoder", "encoder", "encoder_decoder"),
  "image": ("encoder",),
  "classification": ("encoder",),
  "listops": ("encoder",),
  "pathfinder": ("encoder",),
  "speech": ("encoder",),
}


def test_every_task_is_here():
  assert set(here(LEAVES)) == set(tasks.TASKS)


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    (name, kind)
    for name in here(LEAVES)
    for kind in KINDS.get(name, ("decoder",))
  ],
)
def test_rows_are_those_of_the_whole_batch(name, kind, tmp_path):
  entry, leaves = tasks.TASKS[name], dict(LEAVES[name])
  if name in ("text", "mixed"):
    leaves["path"] = str(tmp_path / "text.txt")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
  if name == "classification":
    leaves["path"] = str(tmp_path / "rows.tsv")
    rows = (f"{'ab'[i % 2]}\ttext number {i}\n" for i in range(60))
    (tmp_path / "rows.tsv").write_text("".join(rows))
  task = entry.make(
    entry.config_type(**leaves),
    kind=kind,
    batch_size=8,
    seed=3,
    workdir=tmp_path,
  )
  for step in (0, 5):
    whole = task.train_batch(step)
    for rows in (np.arange(4, 8), np.array([0, 3, 6])):
      part = task.train_batch(step, rows)
      assert part.keys() == whole.keys()
      for key, array in part.items():
        np.testing.assert_array_equal(array, whole[key][rows])
