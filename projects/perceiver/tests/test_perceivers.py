"""Perceivers are trained on pixels and on bytes, restored, and drawn."""

import chex
import numpy as np
import PIL.Image
import pytest

from comparison.measurement import approximation
from configs import perceiver, perceiver_bytes
import models
from projects.perceiver import maps as latent_maps
from settings.errors import ConfigError
from tests import commands
from tests.models import tiny
from tests.models.published.test_equality import FOLDERS, compute
from tests.refusals import assert_refused
from tests.training.tiny import Parts
from training import experiment, experiment_config
from training.inference import generation
from training.pictures import attention_maps

TINY = {
  **{"num_latents": 5, "num_layers": 1, "num_heads": 2, "features": 16},
  **{"mlp_features": 16, "input_features": 16, "input_heads": 2},
  **{"output_heads": 2, "dropout_rate": 0.0},
}


def of_images(**model):
  config = perceiver.get_config().to_dict()
  config["model"] |= TINY | model
  return config | {"batch_size": 8}


def of_bytes(text, attention="dense", **model):
  config = perceiver_bytes.get_config(attention).to_dict()
  config["model"] |= TINY | model
  config["task"] |= {"path": str(text), "context": 31}
  config["optimizer"] |= {"learning_rate": 0.02, "warmup_steps": 1}
  return config | {"batch_size": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A Perceiver after a few steps on the digits."""
  folder = tmp_path_factory.mktemp("pixels") / "run"
  leaves = {"num_steps": 200, "log_every": 50, "model": TINY}
  leaves["optimizer"] = {"learning_rate": 0.02, "warmup_steps": 20}
  return folder, commands.trained(folder, "perceiver", **leaves)


@pytest.mark.thorough
def test_a_run_learns_and_draws(run, tmp_path):
  folder, out = run
  accuracy = float(out.split("accuracy")[-1].split()[0])
  assert accuracy > 0.3  # Guessing is 0.1.
  commands.assert_picture(folder / "attention.png")
  # A file of another size, pixel by pixel too.
  pixels = np.random.default_rng(0).integers(0, 256, (12, 9), np.uint8)
  file = tmp_path / "noise.png"
  PIL.Image.fromarray(pixels).save(file)
  arguments = [f"--workdir={folder}", f"--out={tmp_path}", f"--image={file}"]
  module = "training.commands.draw_attention"
  code, out, error = commands.run_module(module, *arguments)
  assert (code, error) == (0, "")
  commands.assert_picture(out.strip())
  found = commands.run_module(module, *arguments, "--query=1,1")
  assert commands.fault(found).startswith("--query: only models of patches ")
  PIL.Image.new("L", (2000, 2000)).save(file)
  told = commands.fault(commands.run_module(module, *arguments), code=1)
  assert told.startswith("out of memory (RESOURCE_EXHAUSTED: ")


@pytest.mark.thorough
def test_bytes_are_learnt_restored_and_drawn(text, tmp_path, monkeypatch):
  config = experiment_config.parse(of_bytes(text, "performer"))
  began = experiment.create(config, tmp_path)
  programs, state, losses = Parts.of(began).on(), began.init(), []
  for step in range(20):
    state, metrics = programs.train(state, began.task.train_batch(step))
    losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
  assert losses[-1] < 0.8 * losses[0], losses
  batch = began.task.train_batch(0)
  assert 0 < approximation.error(began.model, state.variables, batch) < 1
  drawn = []
  monkeypatch.setattr(
    attention_maps, "draw_maps", lambda path, maps: drawn.extend(maps)
  )
  path, batches = tmp_path / "a.png", began.task.eval_batches("validation")
  attention_maps.draw_attention(
    path, began.model, state.variables, began.task, batches
  )
  [shown] = drawn
  # Each latent over every position of the text, however long it is.
  assert shown.weights.shape == (2, 5, 31)
  assert sorted(shown.query_labels) == ["1", "2", "3", "4", "5"]
  # In the order of where they look.
  centres = shown.weights.mean(0) @ np.arange(31)
  assert (np.diff(centres) >= 0).all()
  assert (shown.key_labels[0], shown.key_labels[-1]) == ("<cls>", "<sep>")
  assert shown.axes == ("token", "latent")
  assert shown.mechanism == "performer"
  began.task.save(tmp_path)
  restored = experiment.create(config, tmp_path, restore=True)
  assert restored.task.target_vocab_size == 262
  with pytest.raises(ConfigError, match="cannot generate"):
    generation.generate_lines(restored, state.variables, ["the time"])


@pytest.mark.thorough
def test_every_map_is_named(text):
  config = of_bytes(text, num_layers=2)
  config["model"]["cross_attention"] = [{"name": "dense"}, {"name": "flash"}]
  began = experiment.create(experiment_config.parse(config))
  variables = began.init().variables
  [batch] = [next(iter(began.task.eval_batches("validation")))]
  example = {name: rows[:1] for name, rows in batch.items()}
  example["source"] = example["source"].copy()
  example["source"][0, 20:] = 0
  example["source_mask"] = example["source"] != 0
  maps = attention_maps.named_maps(began.model, variables, began.task, example)
  assert {
    name: (x.weights.shape, x.axes, x.mechanism) for name, x in maps.items()
  } == {
    "encoder_cross_attention": ((2, 5, 20), ("token", "latent"), "dense"),
    "encoder_1_self_attention": ((2, 5, 5), ("latent", "latent"), "dense"),
    "encoder_2_self_attention": ((2, 5, 5), ("latent", "latent"), "dense"),
    "decoder_cross_attention": ((2, 20, 5), ("latent", "output"), "flash"),
  }
  began = experiment.create(experiment_config.parse(of_images()))
  batch = next(iter(began.task.eval_batches("validation")))
  maps = attention_maps.named_maps(
    began.model, began.init().variables, began.task, {"image": batch["image"]}
  )
  read = maps["encoder_cross_attention"]
  assert read.key_labels[:9] == [*(f"0,{i}" for i in range(8)), "1,0"]
  assert maps["decoder_cross_attention"].query_labels == ["class"]


def test_panels_over_an_image(tmp_path, monkeypatch):
  """The sharpest latents, and the class rolled out, product by product."""
  parsed = experiment_config.parse(of_images(num_blocks=2, num_latents=14))
  sizes = {"target_vocab_size": 10, "input_shapes": {"image": (3, 4, 1)}}
  model = tiny.of_config(parsed.model, **sizes)
  rng = np.random.default_rng(0)
  read = rng.dirichlet(np.full(12, 0.3), (1, 2, 14))
  among = rng.dirichlet(np.ones(14), (1, 2, 14))
  asked = rng.dirichlet(np.ones(14), (1, 2, 1))
  maps = {"encoder/cross_attention": read, "encoder_0/self_attention": among}
  maps["decoder/cross_attention"] = asked
  monkeypatch.setattr(models, "attention_maps", lambda *unused: maps)
  drawn = {}

  def draw_panels(path, image, panels, heading):
    drawn.update({panel.title: panel.weights for panel in panels})

  monkeypatch.setattr(latent_maps.overlay, "draw_panels", draw_panels)
  latent_maps.draw_on_image(
    tmp_path / "a.png", model, {}, {"image": np.zeros((1, 3, 4, 1))}
  )
  looks = read[0].mean(0)
  mixed = (among[0].mean(0) + np.eye(14)) / 2
  rolled = asked[0].mean(0) @ mixed @ mixed @ looks
  np.testing.assert_allclose(
    drawn.pop("class, rolled out"), rolled.reshape(3, 4), atol=1e-12
  )
  assert len(drawn) == 10
  shown = {int(title.removeprefix("latent ")) - 1 for title in drawn}
  sharpness = np.square(looks).sum(1)
  left = set(range(14)) - shown
  assert sharpness[[*shown]].min() > sharpness[[*left]].max()
  for title, panel in drawn.items():
    latent = int(title.removeprefix("latent ")) - 1
    np.testing.assert_allclose(panel, looks[latent].reshape(3, 4))


@pytest.mark.thorough
def test_a_run_starts_from_published_weights(text):
  """A shorter text than that of the weights, whose tables stay whole."""
  weights = str(FOLDERS["perceiver"])
  config = of_bytes(text, weights=weights, head="tokens", dropout_rate=0.25)
  config["task"]["vocabulary"] = "characters"
  parsed = experiment_config.parse(config)
  assert parsed.model.num_latents == 6
  assert (parsed.model.vocab_size, parsed.model.max_length) == (61, 40)
  assert parsed.model.dropout_rate == 0.25
  began = experiment.create(parsed)
  state = began.init()
  p = models.load_pretrained(weights)
  chex.assert_trees_all_equal(state.params, p.variables["params"])
  batch = began.task.train_batch(0)
  logits = models.forward(began.model, state.variables, batch)
  assert logits.shape == (8, 31, 61)
  np.testing.assert_allclose(
    logits, compute(p, {"input_ids": batch["source"]})[:, :31], atol=1e-5
  )
  config["task"]["vocabulary"] = "bytes"
  with pytest.raises(ConfigError, match="vocab_size: expected at least the"):
    experiment.create(experiment_config.parse(config))


def test_faults():
  """Those of the model are told with the path of its leaf."""
  assert_refused(
    lambda **model: experiment.create(
      experiment_config.parse(of_images(**model))
    ),
    *({"fourier_bands": None}, {"num_latent": 3}, {"num_latents": None}),
    {"cross_attention": {"name": "nystrom", "num_landmarks": 2}},
    prefix="config.model.",
  )
  with pytest.raises(ConfigError, match=r"^config.model: "):
    experiment.create(experiment_config.parse(of_images(num_latents=10**9)))
