"""Running statistics of batch norm: on many devices, on disk, and published."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import cvt
import models
from tests import commands
from tests.models import tiny
from tests.models.published.test_equality import compute
from training import checkpoint, experiment, experiment_config, parallel

TINY = {
  "depths": (1, 1),
  "num_heads": (2, 2),
  "features": (8, 16),
  "mlp_features": (8, 16),
  "dropout_rate": 0.0,
}


def make(kind="jit", splits=1, file=cvt):
  config = file.get_config().to_dict()
  config["model"] |= TINY
  config["optimizer"] |= {"accumulate_steps": splits, "warmup_steps": 0}
  config |= {"batch_size": 16, "parallel": kind, "num_steps": 2}
  return experiment.create(experiment_config.parse(config))


def step(run, kind, count):
  """The state after two steps on so many devices."""
  compiled = parallel.make(run.functions, kind, jax.devices()[:count])
  state = compiled.place_state(run.init())
  for index in range(2):
    batch = compiled.place_batch(run.task.train_batch(index))
    state, metrics = compiled.train(state, batch, np.int32(index))
  return jax.device_get((state, metrics))


@pytest.fixture(scope="module")
def single():
  return step(make(), "jit", 1)


# On devices, those of a Conformer are in make test.
@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "count"), [("jit", 8), ("pmap", 8)])
def test_devices_norm_by_the_whole_batch(single, kind, count):
  state, metrics = step(make(kind), kind, count)
  expected, wanted = single
  np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
  np.testing.assert_allclose(
    metrics["grad_norm"], wanted["grad_norm"], rtol=1e-4
  )
  for got, want in zip(
    jax.tree.leaves(state.collections["batch_stats"]),
    jax.tree.leaves(expected.collections["batch_stats"]),
    strict=True,
  ):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.thorough
def test_a_device_alone_would_norm_otherwise(single):
  """What the test above would miss: eight devices that do not ask each other."""
  functions = make("jit").functions
  state, _ = step(make()._replace(functions=functions), "pmap", 8)
  differences = jax.tree.map(
    lambda a, b: np.abs(a - b).max(),
    state.collections["batch_stats"],
    single[0].collections["batch_stats"],
  )
  assert max(jax.tree.leaves(differences)) > 1e-3


@pytest.mark.thorough
def test_statistics_move_a_tenth_of_the_way_and_evaluation_reads_them(single):
  run, (state, _) = make(), single
  first = run.init()
  moved = jax.tree.leaves(state.collections["batch_stats"])
  assert all(
    np.abs(a - b).max() > 1e-4
    for a, b in zip(
      moved, jax.tree.leaves(first.collections["batch_stats"]), strict=True
    )
  )
  batch = run.task.train_batch(0)
  variables = state.variables
  out = tiny.forward(run.model, variables, batch)
  variables = variables | {"batch_stats": first.collections["batch_stats"]}
  assert np.abs(tiny.forward(run.model, variables, batch) - out).max() > 1e-3


@pytest.mark.thorough
def test_micro_batches_move_them_in_turn():
  state, _ = step(make(splits=2), "jit", 1)
  for leaf in jax.tree.leaves(state.collections["batch_stats"]):
    assert np.isfinite(leaf).all()


@pytest.mark.thorough
def test_a_checkpoint_has_them(single, tmp_path):
  state, _ = single
  written = checkpoint.Checkpoints(tmp_path)
  written.save(state, {})
  written.close()
  restored, _ = checkpoint.Checkpoints(tmp_path).restore(make().shapes)
  for got, want in zip(
    jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
  ):
    np.testing.assert_array_equal(got, want)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["swin", "cvt"])
def test_a_run_becomes_published_weights(name, tmp_path):
  """Trained, drawn, exported, and read again with the same logits."""
  folder, out = tmp_path / "run", tmp_path / "published"
  code, printed, error = commands.run(
    "train.py",
    f"--config=configs/{name}.py",
    *(
      f"--config.model.{leaf}={','.join(map(str, x)) if isinstance(x, tuple) else x}"
      for leaf, x in TINY.items()
    ),
    "--config.num_steps=150",
    "--config.batch_size=32",
    "--config.log_every=30",
    "--config.optimizer.learning_rate=0.004",
    "--config.optimizer.warmup_steps=5",
    f"--workdir={folder}",
  )
  assert (code, error) == (0, "")
  assert (folder / "attention.png").stat().st_size > 1000
  accuracy = float(printed.split("accuracy")[-1].split()[0])
  assert accuracy > 0.15  # Guessing is 0.1.
  code, printed, error = commands.run(
    "generate.py", f"--workdir={folder}", f"--export={out}"
  )
  assert (code, error) == (0, "")
  p, again = models.load_pretrained(folder), models.load_pretrained(out)
  images = np.random.default_rng(0).standard_normal((3, 8, 8, 1), np.float32)
  np.testing.assert_array_equal(
    compute(again, {"pixel_values": images}),
    compute(p, {"pixel_values": images}),
  )
  assert again.family == name
  # Only what a family is can become one.
  other = dataclasses.replace(
    p.model.config, image_shape=(8, 6, 1), convolution=5
  )
  model = p.model.clone(config=other, image_shape=(8, 6, 1))
  with pytest.raises(ValueError, match=f"{name} does not fit: image_shape"):
    models.as_pretrained(model, p.variables)
