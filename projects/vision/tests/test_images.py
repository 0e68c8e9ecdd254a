"""Models of images are trained, taken up again, exported, and teach others."""

import chex
import numpy as np
import PIL.Image
import pytest

from configs import vit
import models
from projects.vision import distillation
from settings.errors import ConfigError
from tests import commands
from tests.models.published.test_equality import FOLDERS, compute
from training import experiment, experiment_config
from training.inference import published

TINY = {"num_layers": 1, "num_heads": 2, "features": 16, "mlp_features": 16}
TINY["dropout_rate"] = 0.0


def config_of(**model):
  config = vit.get_config().to_dict()
  config["model"] |= TINY | model
  return config | {"batch_size": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A ViT after a few steps on the digits."""
  folder = tmp_path_factory.mktemp("images") / "run"
  leaves = {"num_steps": 150, "batch_size": 64, "log_every": 50, "model": TINY}
  leaves["optimizer"] = {"learning_rate": 0.02, "warmup_steps": 20}
  return folder, commands.trained(folder, "vit", **leaves)


def test_a_run_learns_and_draws(run):
  folder, out = run
  accuracy = float(out.split("accuracy")[-1].split()[0])
  assert accuracy > 0.3  # Guessing is 0.1.
  commands.assert_picture(folder / "attention.png")


@pytest.mark.thorough
def test_attention_over_a_file(run, tmp_path):
  folder, _ = run
  pixels = np.random.default_rng(0).integers(0, 256, (12, 9), np.uint8)
  file = tmp_path / "noise.png"
  PIL.Image.fromarray(pixels).save(file)

  def draw(*arguments):
    module = "training.commands.draw_attention"
    folders = (f"--workdir={folder}", f"--out={tmp_path / 'maps'}")
    return commands.run_module(module, *folders, *arguments)

  for query in ([], ["--query=5,3"]):
    code, out, error = draw(f"--image={file}", *query)
    assert (code, error) == (0, "")
    commands.assert_picture(out.strip())
  for arguments, message in (
    ([f"--image={file}", "--query=6,0"], "--query: expected a row below 6"),
    ([f"--image={file}", "--query=1"], "--query: expected a row below 6"),
    (["--image=/nowhere.png"], "--image: /nowhere.png: no such file"),
    (["--text=1"], "text: expected an image, got the text"),
    ([], "--text: expected the text that the model reads, or --image"),
  ):
    assert message in commands.fault(draw(*arguments))
  PIL.Image.fromarray(np.stack([pixels] * 3, -1)).save(file)
  message = commands.fault(draw(f"--image={file}"))
  assert "expected 1 channels, as in the images of this run, got 3" in message


def test_a_run_becomes_published_weights(run, tmp_path):
  folder, _ = run
  out = tmp_path / "published"
  flags = (f"--workdir={folder}", f"--export={out}")
  code, printed, error = commands.run("generate.py", *flags)
  assert (code, error) == (0, "")
  assert "ViTForImageClassification" in printed
  p = models.load_pretrained(out)
  same = models.load_pretrained(folder)
  images = np.random.default_rng(0).standard_normal((2, 8, 8, 1), np.float32)
  batch = {"pixel_values": images}
  np.testing.assert_array_equal(compute(p, batch), compute(same, batch))
  assert p.config["image_size"] == 8


@pytest.mark.thorough
def test_a_run_starts_from_weights_of_another_image_size(run):
  """Positions are those of the weights, and interpolated for the task."""
  folder, _ = run
  config = config_of(weights=str(folder))
  parsed = experiment_config.parse(config)
  assert parsed.model.image_shape == (8, 8, 1)
  began = experiment.create(parsed)
  state = began.init()
  p = published.from_run(folder)
  chex.assert_trees_all_equal(state.params, p.variables["params"])
  batch = began.task.train_batch(0)
  logits = models.forward(began.model, state.variables, batch)
  assert logits.shape == (8, 1, 10)
  other = experiment_config.parse(config_of(weights=str(FOLDERS["vit"])))
  with pytest.raises(ConfigError, match="expected the 1 channels of the task"):
    experiment.create(other)


def test_a_student_learns_both_labels(run):
  folder, _ = run
  config = config_of(distillation=True, teacher=str(folder))
  began = experiment.create(experiment_config.parse(config))
  assert isinstance(began.task, distillation.DistillationTask)
  batch = began.task.train_batch(3)
  plain = experiment.create(experiment_config.parse(config_of()))
  own = plain.task.train_batch(3)
  np.testing.assert_array_equal(batch["image"], own["image"])
  np.testing.assert_array_equal(batch["targets"][:, :1], own["targets"])
  teacher = models.load_pretrained(folder)
  taken_for = compute(teacher, {"pixel_values": own["image"]})
  np.testing.assert_array_equal(batch["targets"][:, 1], taken_for.argmax(-1))
  assert batch["weights"].shape == (8, 2)
  # Held-out batches have the truth for both, and are judged by the mean.
  held_out = next(iter(began.task.eval_batches("validation")))
  np.testing.assert_array_equal(
    held_out["targets"][:, 0], held_out["targets"][:, 1]
  )
  logits = np.zeros((8, 2, 10), np.float32)
  logits[:, 0, 0], logits[:, 1, 1] = 1.0, 2.0
  hits, count = began.task.metric_sums(logits, held_out)["accuracy"]
  assert hits == (held_out["targets"][:, 0] == 1).sum()
  assert count == 8
  state = began.init()
  params = state.params
  assert set(params["head"]) == {"classes", "distilled"}
  assert len(params["patches"]["positions"]) == 2 + 16


@pytest.mark.parametrize(
  ("model", "message"),
  [
    ({"distillation": True}, "config.model.teacher: expected a folder"),
    ({"teacher": "/nowhere"}, "config.model.teacher: expected a folder"),
    ({"distillation": True, "teacher": "/nowhere"}, "config.model.teacher"),
    (
      {"distillation": True, "teacher": str(FOLDERS["gpt2"])},
      "a classifier of",
    ),
    (
      {"distillation": True, "teacher": str(FOLDERS["vit"])},
      "expected images of shape",
    ),
    ({"patch_size": None}, "config.model.patch_size: expected a valid integer"),
    ({"patch_size": 9}, "config.model.patch_size: expected at most 8"),
    ({"teacher": 3}, "config.model.teacher: expected a valid string, got 3"),
  ],
)
def test_faults(model, message):
  with pytest.raises(ConfigError, match=message):
    experiment.create(experiment_config.parse(config_of(**model)))


def test_a_run_of_before_it_was_a_kind_is_read():
  new = experiment_config.parse(config_of())
  mapping = new.to_mapping()
  mapping["model"] |= {"kind": "encoder", "local_positions": False}
  assert experiment_config.parse(mapping, restore=True) == new
