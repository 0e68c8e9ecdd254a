"""A checkpoint comes back as it was saved, or is not used at all."""

import errno
import json
import re
import shutil
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from settings.errors import ConfigError
from tests.training.corruption import flip_a_byte
from tests.training.tiny import make_batch, make_parts
from training import checkpoint, metrics, workdir
from training.checkpoint import Checkpoints, digests
from training.config import TrainConfig
from training.inference import generation


def save(workdir, *steps):
  parts, state = make_parts()
  checkpoints = Checkpoints(workdir, parts.config)
  for step in steps:
    params = jax.tree.map(lambda leaf, s=step: leaf + s, state.params)
    at = state._replace(step=jnp.int32(step), params=params)
    checkpoints.save(at, {"meter": [step, 0.1]})
  checkpoints.close()
  return state


def restore(workdir, like, **options):
  config = make_parts()[0].config
  checkpoints = Checkpoints(workdir, config, **options)
  try:
    return checkpoints.restore(like)
  finally:
    checkpoints.close()


def test_round_trip(tmp_path):
  assert restore(tmp_path, make_parts()[1]) is None
  like = save(tmp_path, 1, 2)
  state, record = restore(tmp_path, jax.eval_shape(lambda: like))
  assert record == {"meter": [2, 0.1]}
  expected = like._replace(
    step=jnp.int32(2), params=jax.tree.map(lambda leaf: leaf + 2, like.params)
  )
  assert digests(state) == digests(expected)
  assert jax.tree.structure(state) == jax.tree.structure(like)


@pytest.mark.parametrize("has_finished", [False, True])
def test_a_last_checkpoint_that_is_gone_is_told(tmp_path, capsys, has_finished):
  like = save(tmp_path, 1, 2, 3)
  split = "validation" if has_finished else "train"
  record = {"step": 3, "split": split, "seconds": 1.0, "loss": 1.0}
  (tmp_path / metrics.FILE).write_text(json.dumps(record) + "\n")
  train = TrainConfig(num_steps=3, batch_size=1)
  config: Any = types.SimpleNamespace(train=train)
  run: Any = types.SimpleNamespace(shapes=like, config=config)
  generation.restore_variables(run, tmp_path)
  assert "gone" not in workdir.finished_message(tmp_path, config)
  assert not capsys.readouterr().err
  shutil.rmtree(tmp_path / "checkpoints" / "3")
  generation.restore_variables(run, tmp_path, step=1)
  assert not capsys.readouterr().err
  generation.restore_variables(run, tmp_path)
  told = "step 3, with which this run finished, is gone; .* of step 2"
  assert bool(re.search(told, capsys.readouterr().err)) == has_finished
  told = workdir.finished_message(tmp_path, config)
  assert "its last checkpoint is gone: the newest is of step 2" in told
  told = workdir.finished_message(tmp_path / "new", config)
  assert "its last checkpoint is gone: there is none" in told


def test_the_newest_three_are_kept(tmp_path):
  save(tmp_path, 1, 2, 3, 4, 5)
  kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
  assert kept == ["3", "4", "5"]


def test_an_older_checkpoint_gets_seed_and_peak_from_the_config(tmp_path):
  parts, state = make_parts(learning_rate=3e-3, ema_decay=0.9)
  state, _ = parts.on().update(state, make_batch())
  checkpoints = Checkpoints(tmp_path, parts.config)
  checkpoints.save(checkpoint._without_numbers(state), {})
  checkpoints.close()
  [saved] = (tmp_path / "checkpoints").iterdir()
  assert not any("seed" in path.name for path in saved.rglob("*"))
  checkpoints = Checkpoints(tmp_path, parts.config, read_only=True)
  restored, _ = checkpoints.restore(jax.eval_shape(lambda: state))
  checkpoints.close()
  assert int(restored.seed) == parts.config.seed == 1
  assert digests(restored._asdict()) == digests(state._asdict())


def test_a_step_is_an_integer_of_a_checkpoint(tmp_path):
  like = save(tmp_path, 1, 2)
  checkpoints = Checkpoints(tmp_path, make_parts()[0].config, read_only=True)
  assert checkpoints.restore(like, step=1)[0].step == 1
  for wrong in (True, 1.0, "1", 3):
    message = rf"^step: expected one of \[1, 2\], got {wrong!r}$"
    with pytest.raises(ConfigError, match=message):
      checkpoints.restore(like, step=wrong)
  checkpoints.close()


def test_a_damaged_step_is_saved_again(tmp_path, capfd):
  like = save(tmp_path, 1, 2)
  flip_a_byte(tmp_path, 2)
  save(tmp_path, 2)
  # A killed save leaves a folder of another name.
  (tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
  assert checkpoint.newest_step(tmp_path) == 2
  assert restore(tmp_path, like, read_only=True)[0].step == 2
  assert "corrupt" not in capfd.readouterr().err
  assert checkpoint.newest_step(tmp_path / "nowhere") == 0


def test_errors_of_a_disk_or_a_system_are_not_of_a_file():
  of_system = "EIO EACCES EPERM ESTALE ENOMEM EMFILE ENFILE ETIMEDOUT ENOTCONN"
  for name in of_system.split():
    assert checkpoint._is_system_error(OSError(getattr(errno, name), name))
  for error in (FileNotFoundError(errno.ENOENT, "gone"), ValueError("EIO")):
    assert not checkpoint._is_system_error(error)


def test_saving_survives_donation(tmp_path):
  _, state = make_parts()
  state = jax.jit(lambda s: jax.tree.map(jnp.copy, s))(state)
  expected = digests(state)
  checkpoints = Checkpoints(tmp_path, make_parts()[0].config)
  checkpoints.save(state, {})
  step = jax.jit(
    lambda s: jax.tree.map(lambda leaf: leaf + 1, s), donate_argnums=0
  )
  for _ in range(20):
    state = step(state)
  jax.block_until_ready(state)
  checkpoints.close()
  assert digests(restore(tmp_path, make_parts()[1])[0]) == expected


def test_a_flipped_byte_is_reported_and_the_one_before_used(tmp_path, capfd):
  like = save(tmp_path, 1, 2, 3)
  flip_a_byte(tmp_path, 3)
  state, _ = restore(tmp_path, like, read_only=True)
  assert state.step == 2
  error = capfd.readouterr().err
  assert error.startswith("checkpoint 3 is corrupt and not used: ")
  assert error.count("\n") == 1


def test_an_empty_step_is_reported_and_makes_room(tmp_path, capfd):
  like = save(tmp_path, 1, 2)
  (tmp_path / "checkpoints" / "7").mkdir()
  assert restore(tmp_path, like)[0].step == 2
  assert capfd.readouterr().err.count("\n") == 1
  save(tmp_path, 3)
  kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
  assert kept == ["1", "2", "3"]
  assert restore(tmp_path, like)[0].step == 3


@pytest.mark.parametrize(
  "fault", [OSError(errno.EIO, "Input/output error"), MemoryError("16 GB")]
)
def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch, fault, capfd):
  """The checkpoint may be intact, and going on before it would delete it."""
  like = save(tmp_path, 1, 2)

  def fail(self, *unused, **options):
    raise fault

  monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "restore", fail)
  with pytest.raises(type(fault)):
    restore(tmp_path, like)
  assert "corrupt" not in capfd.readouterr().err


def test_nothing_intact_is_an_error_and_nothing_is_deleted(tmp_path):
  like = save(tmp_path, 1, 2)
  for step in (1, 2):
    flip_a_byte(tmp_path, step)
  with pytest.raises(ConfigError, match="none of the checkpoints"):
    restore(tmp_path, like)
  assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
  "change",
  [
    lambda p: {**p, "kernel": p["kernel"].astype(jnp.bfloat16)},
    lambda p: {**p, "kernel": p["kernel"][:2]},
    lambda p: {**p, "other": p["kernel"]},
    lambda p: {"kernel": p["kernel"]},
  ],
)
def test_another_dtype_shape_or_structure_is_refused(tmp_path, change, capfd):
  like = save(tmp_path, 1)
  with pytest.raises(ConfigError):
    restore(tmp_path, like._replace(params=change(like.params)))
  assert capfd.readouterr().err.count("\n") == 1


def test_a_digest_does_not_depend_on_how_a_leaf_is_cut():
  """Parts of arrays that are longer than what is mixed at once, and of few bits."""
  rng = np.random.default_rng(0)
  for whole in (
    rng.normal(size=(300, 500)).astype(np.float32),
    rng.normal(size=(6, 5, 4)).astype(jnp.bfloat16),
    rng.integers(0, 2, (6, 4)).astype(bool),
  ):
    expected = checkpoint._sum_shard(whole, (0,) * whole.ndim, whole.shape)
    half, third = whole.shape[0] // 2, whole.shape[-1] // 3
    found = 0
    for rows in (slice(0, half), slice(half, None)):
      for columns in (slice(0, third), slice(third, None)):
        corner = (rows.start, *(0,) * (whole.ndim - 2), columns.start)
        part = whole[rows, ..., columns]
        found += checkpoint._sum_shard(part, corner, whole.shape)
    assert found % 2**64 == expected


def test_other_shapes_are_no_damage(tmp_path, capfd):
  """What may be a variable of JAX costs no checkpoint."""
  like = save(tmp_path, 1, 2)
  params = jax.tree.map(lambda x: jnp.zeros((*x.shape, 2)), like.params)
  with pytest.raises(ConfigError) as info:
    restore(tmp_path, like._replace(params=params))
  assert "remove" not in str(info.value)
  assert "JAX_DEFAULT_PRNG_IMPL=threefry2x32" in str(info.value)
  assert "has shape" in str(info.value)
  error = capfd.readouterr().err
  assert error.startswith("checkpoint 2 is of other shapes and not used: ")
  assert restore(tmp_path, like)[1] == {"meter": [2, 0.1]}


def test_digests_tell_values_places_dtypes_and_shapes_apart():
  seen = {
    digests(array)[""]
    for array in (
      np.zeros(4, np.float32),
      np.zeros(4, np.int32),
      np.zeros((2, 2), np.float32),
      np.array([0, 0, 0, 1e-45], np.float32),
      np.array([0, 0, 1e-45, 0], np.float32),
    )
  }
  assert len(seen) == 5
