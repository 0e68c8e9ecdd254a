"""Gato is trained on text, captions and control, and drawn."""

import shutil
import types

from matplotlib.figure import Figure
import numpy as np
import PIL.Image
import pytest

from configs import gato
from projects.gato import captions
from projects.gato import maps as modality_maps
from settings.errors import ConfigError
from tasks import draws
from tests import commands
from tests.models import tiny
from tests.tasks.text_cases import TEXT
from training import experiment, experiment_config, metrics

TINY = {"num_layers": 2, "num_heads": 2, "features": 16, "mlp_features": 16}
SMALL = {
  **{"context": 40, "vocab_size": 320, "caption_rows": 4, "control_rows": 4},
  **{"expert_episodes": 4, "eval_size": 9, "play_episodes": 2},
}


def config_of(text, attention="dense", **changes):
  config = gato.get_config(attention).to_dict()
  config["model"] |= TINY
  config["task"] |= SMALL | {"path": str(text)}
  return config | {"batch_size": 16} | changes


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
  """Gato after a few steps."""
  folder = tmp_path_factory.mktemp("gato") / "run"
  leaves = {"num_steps": 30, "batch_size": 16, "log_every": 10, "model": TINY}
  leaves["task"] = SMALL | {"path": str(text)}
  leaves["optimizer"] = {"learning_rate": 0.01, "warmup_steps": 5}
  return folder, commands.trained(folder, "gato", **leaves)


@pytest.mark.thorough
def test_a_run_learns_plays_and_writes_captions(run):
  folder, out = run
  results = next(x for x in reversed(metrics.read(folder)) if "return" in x)
  assert results["text_loss"] < results["text_unigram_loss"] + 0.5
  assert 8 <= results["return"] <= 500
  # Written token by token, or judged from the true words before: the same.
  assert results["caption_exact"] == pytest.approx(results["caption_accuracy"])
  assert "return" in out
  assert out.index("return") < out.index("text_loss")
  samples = (folder / "samples.txt").read_text()
  assert samples.startswith("source     [image]\nreference  ")
  commands.assert_picture(folder / "attention.png")
  # It goes on with a text, too.
  flags = (f"--workdir={folder}", "--max_length=5")
  code, out, error = commands.run("generate.py", *flags, stdin="all good\n")
  assert (code, error, out.count("\n")) == (0, "", 1)


@pytest.mark.thorough
def test_a_run_writes_the_caption_of_a_file(run, tmp_path):
  folder, _ = run
  found = captions.draw(draws.split_key(0, "x"), np.arange(1), 2)
  file = tmp_path / "shapes.png"
  PIL.Image.fromarray(found.images[0]).save(file)
  module = "training.commands.draw_attention"
  arguments = [f"--workdir={folder}", f"--out={tmp_path}", f"--image={file}"]
  code, out, error = commands.run_module(module, *arguments)
  assert (code, error) == (0, "")
  assert out.startswith("output: ")
  commands.assert_picture(out.splitlines()[-1])
  found = commands.run_module(module, *arguments, "--query=1,1")
  assert commands.fault(found).startswith("--query: ")
  PIL.Image.new("L", (32, 32)).save(file)
  told = commands.fault(commands.run_module(module, *arguments))
  assert told.startswith(f"--image: {file}: expected an image of height")


def test_shares_are_summed_by_modality(text):
  run = experiment.create(experiment_config.parse(config_of(text)))
  variables = run.init().variables
  batch = run.task.train_batch(0)
  rows = {
    frozenset(run.task.modalities(ids)): row
    for row, ids in enumerate(batch["inputs"])
  }
  row = next(rows[kind] for kind in rows if "image" in kind)
  example = {name: x[row : row + 1] for name, x in batch.items()}
  found = modality_maps.shares(run.model, variables, run.task, example)
  assert found.modalities == ["image", "text"]
  maps = tiny.attention_maps(run.model, variables, example)
  length = int(np.flatnonzero(example["inputs"][0])[-1]) + 1
  for layer in range(2):
    weights = np.asarray(maps[f"decoder_{layer}/self_attention"])[0].mean(0)
    expected = weights[16:length, :16].sum(1).mean()
    assert found.weights[layer, 1, 0] == pytest.approx(expected, rel=1e-5)
  np.testing.assert_allclose(found.weights.sum(-1), 1, rtol=1e-5)
  # Images come first and cannot look at words.
  assert found.weights[:, 0, 1].tolist() == [0, 0]
  evenly = np.mean([16 / (t + 1) for t in range(16, length)])
  assert found.uniform[1, 0] == pytest.approx(evenly)


def test_faults_are_one_line(text):
  for section, leaf, message in (
    (
      "model",
      {"kind": "encoder_decoder"},
      "^config.model.local_positions: unk",
    ),
    ("task", {"path": "none.txt"}, "^none.txt: no such"),
  ):
    config = config_of(text)
    config[section] |= leaf
    with pytest.raises(ConfigError, match=message):
      experiment.create(experiment_config.parse(config))


@pytest.mark.thorough
def test_a_changed_text_is_refused(run, text, tmp_path):
  """A run continues on ids of the same meaning only."""
  folder, _ = run
  copy = tmp_path / "run"
  shutil.copytree(folder, copy)
  other = tmp_path / "other.txt"
  other.write_text(TEXT + 3000 * "plugh xyzzy ", encoding="utf-8")
  config = experiment_config.parse(config_of(other))
  with pytest.raises(ConfigError, match="they changed since this run began"):
    experiment.create(config, copy)


def test_a_table_of_shares_has_each_number_in_its_cell(monkeypatch):
  """One column of tables per layer, one row of them per example."""
  drawn = []
  monkeypatch.setattr(
    Figure, "savefig", lambda self, *x, dpi: drawn.append(self)
  )
  names, evenly = ["image", "text"], np.array([[0.8, 0.2], [0.45, 0.55]])
  weights = np.array([[[0.9, 0.1], [0.35, 0.65]], [[0.5, 0.5], [0.25, 0.75]]])
  rows = [modality_maps.Shares(names, weights[::n], evenly) for n in (1, -1)]
  modality_maps.draw_shares("shares.png", rows, ["dense", "lsh"])
  (figure,) = drawn
  np.testing.assert_allclose(figure.get_size_inches(), [6.7, 5.8])
  left, right, below, _ = figure.axes[:4]
  assert left.get_title() == "layer 1: dense"
  assert right.get_title() == "layer 2: lsh"
  assert not below.get_title()
  for axes in (left, figure.axes[3]):
    (image,) = axes.images
    assert image.get_array().tolist() == weights[0].tolist()
    assert image.get_clim() == (0, 1)
  for axes, queries in ((left, names), (right, ["", ""])):
    shown = axes.get_xticklabels(), axes.get_yticklabels()
    texts = [[label.get_text() for label in labels] for labels in shown]
    assert texts == [names, queries]
  # Keys are columns, queries are rows.
  assert {
    x.get_position(): (x.get_text(), x.get_color()) for x in left.texts
  } == {
    (0, 0): ("0.90\n(0.80)", "black"),
    (1, 0): ("0.10\n(0.20)", "white"),
    (0, 1): ("0.35\n(0.45)", "white"),
    (1, 1): ("0.65\n(0.55)", "black"),
  }
  for text in left.texts:
    assert (text.get_ha(), text.get_va()) == ("center", "center")


def model_of(*mechanisms):
  """What maps read of a model: the mechanisms of its layers."""
  layers = [types.SimpleNamespace(name=name) for name in mechanisms]
  config = types.SimpleNamespace(layers=lambda field: layers)
  return types.SimpleNamespace(config=config)


def test_one_example_of_each_kind_is_drawn(monkeypatch, tmp_path):
  """Those of one modality only where there is no other."""
  kinds = {1: "text", 2: "text", 3: "image", 4: "control"}
  task = types.SimpleNamespace(
    pad_id=0, modalities=lambda ids: [kinds[int(i)] for i in ids]
  )
  drawn = []
  for name, stand_in in (
    ("shares", lambda model, variables, task, x: x["inputs"].tolist()),
    ("draw_shares", lambda path, *found: drawn.append(found)),
  ):
    monkeypatch.setattr(modality_maps, name, stand_in)
  model = model_of("dense", "lsh")
  text, several, again = [1, 2, 0], [3, 1, 0], [1, 3, 3]
  other, unweighted = [4, 2, 2], [4, 3, 0]
  rows = np.array([unweighted, text, several, again, other])
  weights = np.ones((5, 3)) * (np.arange(5) > 0)[:, None]

  def draw(kept):
    batches = [{"inputs": rows[[i]], "weights": weights[[i]]} for i in kept]
    modality_maps.SharePictures.draw_attention(
      model, tmp_path / "a.png", {}, task, batches
    )
    return drawn.pop()

  assert draw(range(5)) == ([[several], [other]], ["dense", "lsh"])
  assert draw([1]) == ([[text]], ["dense", "lsh"])


@pytest.mark.parametrize(
  ("written", "words", "text"),
  [([7, 8, 2, 9], [7, 8], "7 8"), ([7, 8, 9, 6], [7, 8, 9, 6], "7 8 9 6")],
)
def test_a_caption_is_drawn_up_to_its_end(
  written, words, text, monkeypatch, tmp_path
):
  asked, seen = {}, []

  def generate(variables, prompt, **options):
    asked.update(options)
    return types.SimpleNamespace(tokens=np.array([written]))

  task = types.SimpleNamespace(
    read=lambda file: {"prompt": np.array([[3, 4]]), "patches": file},
    max_target_length=5,
    eos_id=2,
    decode=lambda ids: " ".join(map(str, ids)),
  )
  run = types.SimpleNamespace(task=task, generate=generate)
  for name, stand_in in (
    ("shares", lambda model, variables, task, example: seen.append(example)),
    ("draw_shares", lambda *unused: None),
  ):
    monkeypatch.setattr(modality_maps, name, stand_in)
  found = modality_maps.SharePictures.draw_input(
    model_of(), tmp_path / "a.png", run, {}, "file", None
  )
  assert found == text
  # The last word that is written is never read.
  assert asked == {"max_length": 4}
  assert seen[0]["inputs"].tolist() == [[3, 4, *words][:5]]
  assert seen[0]["patches"] == "file"
