"""Conformers are trained by CTC, on any number of devices, and drawn."""

import chex
import jax
import numpy as np
import pytest
import soundfile

from configs import conformer
import models
from settings.errors import ConfigError
from tests import commands
from tests.models.published.test_equality import FOLDERS
from tests.refusals import assert_refused
from tests.training.tiny import Parts
from training import experiment, experiment_config, metrics

TINY = {"num_layers": 1, "num_heads": 2, "features": 16, "mlp_features": 16}
TINY |= {"kernel_size": 5, "dropout_rate": 0.0}


def config_of(changes=(), **model):
  config = conformer.get_config().to_dict()
  config["model"] |= TINY | model
  config["task"] |= {"max_digits": 3, "eval_size": 19}
  return config | {"batch_size": 16} | dict(changes)


def create(changes=(), **model):
  return experiment.create(experiment_config.parse(config_of(changes, **model)))


@pytest.fixture(scope="module")
def steps():
  """Two steps of training, as one device takes them."""
  run = create()
  return run, *_train(run, "jit", 1)


def _train(run, kind, count):
  """The losses of two steps, the state, and the sums of an evaluation."""
  programs = Parts.of(run, parallel=kind).on(count)
  state = programs.place(run.init())
  losses = []
  for step in range(2):
    batch = run.task.train_batch(step)
    # Uneven: the rows of the first device are nearly all padding.
    batch["source_mask"][:2, 9:] = False
    state, metrics = programs.train(state, batch)
    losses.append(np.asarray(metrics["loss"]))
  held_out = next(run.task.eval_batches("validation"))
  sums = programs.evaluate(state.variables, held_out)
  return np.array(losses), jax.device_get(state), jax.device_get(sums)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "count"), [("jit", 8), ("pmap", 8)])
def test_devices_agree(steps, kind, count):
  """Losses, running statistics, parameters and evaluation."""
  run, losses, state, sums = steps
  got_losses, got, got_sums = _train(run, kind, count)
  np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
  for name, pair in sums.items():
    np.testing.assert_allclose(got_sums[name], pair, rtol=1e-5)
  first, second = (s.collections["batch_stats"] for s in (state, got))
  chex.assert_trees_all_close(second, first, rtol=1e-5, atol=1e-7)
  assert len(jax.tree.leaves(first)) == 2
  for leaf in jax.tree.leaves(first):
    assert not np.allclose(leaf, 0)
    assert not np.allclose(leaf, 1)


@pytest.mark.thorough
def test_micro_batches_move_running_statistics_in_turn(steps):
  optimizer = config_of()["optimizer"] | {"accumulate_steps": 2}
  run = create({"optimizer": optimizer})
  state, batch = run.init(), run.task.train_batch(0)
  state, _ = Parts.of(run).on().train(state, batch)
  found, whole = (
    jax.tree.leaves(jax.device_get(x.collections["batch_stats"]))
    for x in (state, steps[2])
  )
  for leaf, other in zip(found, whole, strict=True):
    assert np.isfinite(leaf).all()
    assert np.abs(leaf - other).max() > 1e-6


LONGER = {
  "model": TINY | {"features": 32},
  "task": {"max_digits": 3, "eval_size": 40},
  "num_steps": 120,
  "eval_every": 60,
  "checkpoint_every": 60,
  "optimizer": {"learning_rate": 0.01, "warmup_steps": 20},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A small Conformer after a few steps."""
  folder = tmp_path_factory.mktemp("speech") / "run"
  return folder, commands.trained(folder, "conformer", **LONGER)


@pytest.mark.thorough
def test_a_run_learns_and_draws(trained):
  folder, out = trained
  lines = metrics.read(folder)
  rates = [x["error_rate"] for x in lines if x["split"] == "validation"]
  assert len(rates) == 2
  assert rates[-1] < 0.5  # Nothing, or the commonest digit, is near 1.
  # What counts most comes first.
  assert out.index("error_rate") < out.rindex("loss")
  commands.assert_picture(folder / "attention.png")


@pytest.mark.thorough
def test_attention_over_a_file(trained, tmp_path):
  folder, _ = trained
  seconds = np.arange(3200) / 8000
  tone = np.sin(2 * np.pi * 770 * seconds) + np.sin(2 * np.pi * 1336 * seconds)
  tone[:800] = tone[1800:] = 0
  noise = 0.01 * np.random.default_rng(0).standard_normal(3200)
  soundfile.write(tmp_path / "5.wav", 0.4 * tone + noise, 8000)
  soundfile.write(tmp_path / "fast.wav", tone, 16000)
  soundfile.write(tmp_path / "long.wav", np.tile(tone, 10), 8000)

  def draw(*arguments):
    module = "training.commands.draw_attention"
    folders = (f"--workdir={folder}", f"--out={tmp_path / 'maps'}")
    return commands.run_module(module, *folders, *arguments)

  code, out, error = draw(f"--audio={tmp_path / '5.wav'}")
  assert (code, error) == (0, "")
  heard, path = out.splitlines()
  assert heard == "output: 5"
  commands.assert_picture(path)
  for arguments, message in (
    ([f"--audio={tmp_path / 'fast.wav'}"], "expected 8000 samples per second"),
    ([f"--audio={tmp_path / 'long.wav'}"], "expected 1 to "),
    (["--audio=/nowhere.wav"], "--audio: /nowhere.wav: no such file"),
    (["--text=5"], "text: expected a recording, got the text"),
    (["--image=a.png"], "--image: this run reads no images"),
    ([], "or --audio=FILE for a speech model"),
  ):
    assert message in commands.fault(draw(*arguments))


def test_configs_that_cannot_be():
  def made(**changes):
    config = conformer.get_config()
    for section, leaves in changes.items():
      config[section].update(leaves)
    experiment.create(experiment_config.parse(config))

  performer = {"name": "performer"}
  assert_refused(
    made,
    ("optimizer.label_smoothing", {"optimizer": {"label_smoothing": 0.1}}),
    ("model.kernel_size", {"model": {"kind": "encoder"}}),
    ("task.max_digits", {"task": {"name": "copy"}}),
    # It cannot carry relative positions.
    ("model.encoder_attention", {"model": {"encoder_attention": performer}}),
    prefix="config.",
  )
  folder = {"source": "folder", "path": "/nowhere"}
  assert_refused(made, ("/nowhere", {"task": folder}))


def test_weights_of_samples_are_refused_for_frames():
  weights = str(FOLDERS["wav2vec2_conformer_rotary"])
  config = config_of(weights=weights)
  parsed = experiment_config.parse(config)
  assert parsed.model.extractor is not None
  with pytest.raises(ConfigError, match=r"^config.model.extractor: it reads"):
    experiment.create(parsed)
  assert models.slots(parsed.model) == "dense"
