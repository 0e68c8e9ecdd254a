"""Each kind of model is trained on a text, restored, and generates."""

import numpy as np
import pytest

from settings.errors import ConfigError
from tests import commands
from tests.tasks.text_cases import TEXT
from tests.training import tiny
from training import evaluate, experiment
from training.inference import generation

KINDS = {
  "decoder": {"position": "learned", "norm": "pre"},
  "encoder": {"position": "learned", "norm": "post"},
  "encoder_decoder": {"position": "t5", "norm": "pre"},
}


def config(path, kind, task, **model):
  return tiny.config(
    kind,
    {"path": str(path), **task},
    {"mlp_features": 32, "activation": "gelu", **model},
    num_steps=20,
    optimizer={"learning_rate": 0.02},
  )


def trained(run, steps=20):
  """Variables after some steps, and the loss of the first and of the last."""
  programs = tiny.Parts.of(run).on()
  state = programs.place(tiny.drawn(run))
  losses = []
  for step in range(steps):
    state, metrics = programs.train(state, run.task.train_batch(step))
    losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  values = evaluate.evaluate(
    programs.eval_step, programs.mesh, state.variables, run.task, "validation"
  )
  return state.variables, losses, values


# Each kind and each vocabulary.
@pytest.mark.parametrize(
  ("kind", "vocabulary"),
  [
    ("decoder", "characters"),
    ("encoder", "subwords"),
    ("encoder_decoder", "subwords"),
  ],
)
def test_a_text_is_learnt(tmp_path, kind, vocabulary):
  path = tmp_path / "text.txt"
  path.write_text(TEXT, encoding="utf-8")
  leaves = {
    **{"name": "text", "context": 16, "vocab_size": 300},
    "vocabulary": vocabulary,
  }
  found = config(path, kind, leaves, **KINDS[kind])
  run = experiment.create(found, tmp_path / "run")
  variables, losses, values = trained(run)
  assert np.isfinite(losses).all()
  assert losses[-1] < 0.9 * losses[0], losses
  assert values["loss"] < losses[0]
  assert values["unigram_loss"] == run.task.baselines["unigram_loss"]
  run.task.save(tmp_path / "run")
  path.unlink()
  restored = experiment.create(found, tmp_path / "run", restore=True)
  line = "the <extra_id_0> of" if kind == "encoder_decoder" else "the time"
  if kind == "encoder":
    with pytest.raises(ConfigError, match="an encoder-only model"):
      generation.generate_lines(restored, variables, [line])
    return
  assert restored.task.encode(line) == run.task.encode(line)
  output, empty = generation.generate_lines(restored, variables, [line, ""])
  assert output
  assert empty == ""


LABELS = {"name": "classification", "max_length": 8, "vocabulary": "characters"}


def test_labels_are_learnt(tmp_path):
  path = tmp_path / "rows.tsv"
  rows = ((("up", "a b c"), ("down", "c b d"))[i % 2] for i in range(80))
  path.write_text("".join(f"{label}\t{text}\n" for label, text in rows))
  found = config(path, "encoder", LABELS, tie_embeddings=False)
  run = experiment.create(found, tmp_path / "run")
  _, _, values = trained(run)
  assert values["accuracy"] == 1.0


def test_labels_share_no_table_with_tokens(tmp_path):
  path = tmp_path / "rows.tsv"
  path.write_text("a\tx\nb\ty\n" * 20)
  with pytest.raises(ConfigError, match=r"^config\.model\.tie_embeddings: "):
    experiment.create(config(path, "encoder", LABELS))


def test_a_run_says_what_has_to_be_beaten(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text(TEXT, encoding="utf-8")
  arguments = (
    "--config=configs/bert.py",
    f"--config.task.path={path}",
    "--config.task.vocab_size=300",
    "--config.task.context=16",
    "--config.num_steps=2",
    "--config.batch_size=8",
    "--config.model.num_layers=1",
    "--config.model.features=16",
    "--config.model.mlp_features=16",
    f"--workdir={tmp_path / 'run'}",
  )
  code, out, error = commands.run("train.py", *arguments)
  assert (code, error) == (0, "")
  names = [line.split()[0] for line in out.splitlines() if line.strip()]
  unigram, bigram = (
    [i for i, found in enumerate(names) if found == name]
    for name in ("unigram_loss", "bigram_loss")
  )
  assert len(unigram) == len(bigram) == 2
  assert unigram[0] == 1
  assert (tmp_path / "run/vocabulary/tokenizer.json").exists()
  # A finished run is told again, and its text is not needed for that.
  path.unlink()
  code, again, error = commands.run("train.py", *arguments)
  assert (code, error) == (0, "")
  first, *rest = again.splitlines()
  assert "had finished at step 2" in first
  assert rest == out.splitlines()[-len(rest) :]
