"""Which configs continue the run of a folder, and files with a digest."""

import errno
import hashlib
import json
import os

import jax
import numpy as np
import pytest

from configs import copy, duplicate
from models.published import files
from settings import atomic
from settings.errors import ConfigError, RunError
from settings.field_values import put
from tests import commands
from training import experiment, experiment_config, ownership, workdir


def config(schedule="constant", of=copy, **leaves):
  mapping = of.get_config().to_dict()
  for leaf, value in {"optimizer.schedule": schedule, **leaves}.items():
    put(mapping, leaf, value)
  return experiment_config.parse(mapping)


def fault(folder, **leaves):
  with pytest.raises(ConfigError) as info:
    workdir.check(folder, config(**leaves))
  assert "\n" not in str(info.value)
  return str(info.value)


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_a_run_is_continued_where_the_schedule_allows(tmp_path, schedule):
  workdir.write_config(tmp_path, config(schedule, num_steps=2))
  workdir.check(tmp_path, config(schedule, num_steps=4))
  line = fault(tmp_path, schedule=schedule, num_steps=1)
  assert "holds a run of 2 steps, which can be continued but not sh" in line


def test_a_cosine_ends_where_it_was_said_to(tmp_path):
  workdir.write_config(tmp_path, config("cosine", num_steps=2))
  workdir.check(tmp_path, config("cosine", num_steps=2, log_every=1))
  line = fault(tmp_path, schedule="cosine", num_steps=4)
  assert line.startswith("config.num_steps: ")
  assert "ends at step 2 (optimizer.schedule='cosine')" in line
  # The schedule is part of what was trained already.
  line = fault(tmp_path, schedule="constant", num_steps=4)
  assert "config.optimizer.schedule is 'cosine' there" in line


def rewrite(folder, change):
  """Changes the config that a run wrote, as an earlier version has it."""
  path = folder / workdir.CONFIG
  mapping = json.loads(path.read_text())
  change(mapping)
  path.write_text(json.dumps(mapping))


def test_a_leaf_that_a_run_does_not_know_has_its_default(tmp_path):
  def forget(mapping):
    del mapping["slots"], mapping["model"]["decoder_around"]
    del mapping["task"]["eval_lengths"]

  workdir.write_config(tmp_path, config())
  rewrite(tmp_path, forget)
  workdir.check(tmp_path, config())
  line = fault(tmp_path, **{"task.eval_lengths": [50]})
  assert "config.task.eval_lengths is [] there and [50] here" in line


MAY_CHANGE = {
  **{"log_every": 7, "eval_every": 7, "checkpoint_every": 7},
  **{"profile_steps": "1:2", "model.remat": "block", "log.tensorboard": False},
  **{"log.wandb": True, "log.project": "other"},
  **{"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.sequence": 2},
}
DECIDES = {
  **{"seed": 1, "batch_size": 8, "redraw_every": 2, "decode_method": "beam"},
  **{"checkpoint_keep": "best", "patience": 2, "parallel": "pmap"},
  **{"optimizer.name": "lion", "optimizer.learning_rate": 0.5},
  **{"optimizer.warmup_steps": 3, "optimizer.final_fraction": 0.5},
  **{"optimizer.b1": 0.5, "optimizer.b2": 0.5, "optimizer.eps": 0.5},
  **{"optimizer.weight_decay": 0.5, "optimizer.clip_norm": 0.5},
  **{"optimizer.accumulate_steps": 2, "optimizer.label_smoothing": 0.5},
  **{"optimizer.ema_decay": 0.5, "optimizer.eps_root": 0.5},
  **{"task.vocab_size": 9, "model.num_heads": 1, "model.dtype": "bfloat16"},
}


@pytest.mark.parametrize("leaf", [*MAY_CHANGE, *DECIDES])
def test_each_leaf_either_may_change_or_decides(tmp_path, monkeypatch, leaf):
  # Weights & Biases need not be installed.
  monkeypatch.setattr(experiment_config, "find_spec", lambda name: True)
  workdir.write_config(tmp_path, config())
  changed = {leaf: (MAY_CHANGE | DECIDES)[leaf]}
  if leaf in MAY_CHANGE:
    workdir.check(tmp_path, config(**changed))
  else:
    assert f"config.{leaf} is " in fault(tmp_path, **changed)


def test_evaluations_decide_in_a_run_that_asks_for_the_best(tmp_path):
  best = {"checkpoint_keep": "best"}
  workdir.write_config(tmp_path, config(**best))
  line = fault(tmp_path, **best, eval_every=7)
  assert line.endswith(
    "eval_every is 400 there and 7 here; choose a new folder"
  )


FORMER = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
"""Numbers of AdamW, which runs recorded of every optimiser where none was typed."""


@pytest.mark.parametrize(
  ("name", "differs"),
  [
    ("adamw", ""),
    ("sgd", ""),  # It takes none of them.
    ("novograd", "optimizer.b2 is 0.999 there and 0.25 here (2 fields differ)"),
  ],
)
def test_a_run_with_the_numbers_of_adamw_is_the_same_where_it_was(
  tmp_path, name, differs
):
  untyped = dict.fromkeys([f"optimizer.{x}" for x in ("b1", "b2", "eps")])
  new = {"optimizer.name": name, **untyped, "optimizer.weight_decay": 0.0}
  workdir.write_config(tmp_path, config(**new))
  rewrite(tmp_path, lambda mapping: mapping["optimizer"].update(FORMER))
  typed = {f"optimizer.{leaf}": value for leaf, value in FORMER.items()}
  folders = {
    workdir.default("configs/copy.py", config(**leaves))
    for leaves in (new, new | typed)
  }
  if differs:
    assert differs in fault(tmp_path, **new)
  else:
    workdir.check(tmp_path, config(**new))
  assert len(folders) == 1 + bool(differs)


def test_a_folder_is_named_after_what_is_computed():
  """As before some fields were there, and wherever it is logged."""
  first = workdir.default("configs/copy.py:dense", config())
  for leaves in ({"log.project": "other"}, {"profile_steps": "1:2"}):
    assert workdir.default("a/copy.py", config(**leaves)) == first
  mapping = config().to_mapping()
  new = ("checkpoint_keep", "best_metric", "patience", "stopping_threshold")
  for field in (*new, "log", "profile_steps"):
    del mapping[field]
  del mapping["optimizer"]["ema_decay"]
  text = json.dumps(mapping, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()[:8]
  assert str(first) == f"runs/copy-dense-{digest}"


def test_a_leaf_inside_a_list_has_its_default(tmp_path):
  def of_layers(norm):
    around = {"output_norm": norm}
    return config(of=duplicate, **{"model.decoder_around": [around]})

  workdir.write_config(tmp_path, of_layers("rms"))

  def forget(mapping):
    for around in mapping["model"]["decoder_around"]:
      del around["output_gate"]

  rewrite(tmp_path, forget)
  workdir.check(tmp_path, of_layers("rms"))
  with pytest.raises(
    ConfigError, match=r"decoder_around is \[{'.*'rms'}\] there"
  ):
    workdir.check(tmp_path, of_layers("group"))


@pytest.mark.parametrize("place", ["model", "task", "optimizer"])
def test_a_leaf_that_only_a_run_knows_is_told(tmp_path, place):
  def age(mapping):
    mapping[place]["older"] = 3
    del mapping["model"]["decoder_around"]

  workdir.write_config(tmp_path, config())
  rewrite(tmp_path, age)
  line = fault(tmp_path)
  assert f"config.{place}.older is 3 there and 'not set' here" in line


def test_an_option_that_only_a_run_has_is_told(tmp_path):
  flash = {"name": "flash", "block_size": 8}
  workdir.write_config(tmp_path, config())
  rewrite(tmp_path, lambda x: x["model"].update(decoder_attention=flash))
  line = fault(tmp_path, **{"model.decoder_attention.name": "flash"})
  assert "decoder_attention.block_size is 8 there and 'not set' here" in line


def test_another_mechanism_is_told_before_all_else(tmp_path):
  """The number of steps, which differs too, is not what is wrong."""
  workdir.write_config(tmp_path, config("cosine", num_steps=2))
  other = {"model.decoder_attention": {"name": "flash"}, "batch_size": 3}
  line = fault(
    tmp_path, schedule="cosine", num_steps=4, seed=5, log_every=1, **other
  )
  assert line == (
    f"workdir: {tmp_path} holds a run with another config: "
    "config.model.decoder_attention.name is 'dense' there and 'flash' here "
    "(4 fields differ); choose a new folder"
  )


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"num_steps": "x"}', "{}"])
def test_a_damaged_config_is_told(tmp_path, text):
  (tmp_path / workdir.CONFIG).write_text(text)
  assert fault(tmp_path).startswith("workdir: ")


def test_a_run_of_another_task_is_told_as_one(tmp_path):
  workdir.write_config(tmp_path, config())
  rewrite(tmp_path, lambda mapping: mapping.update(task={"name": "needle"}))
  told = (
    f"workdir: {tmp_path} holds a run of the task 'needle', expected one of"
  )
  assert fault(tmp_path).startswith(told)


def test_a_run_of_before_images_left_the_transformer_is_read():
  new = config()
  mapping = new.to_mapping()
  mapping["model"] |= {"patch_size": None, "image_shape": None}
  mapping["model"] |= {"distillation": False, "local_positions": False}
  assert experiment_config.parse(mapping, restore=True) == new
  mapping["model"]["distillation"] = True
  with pytest.raises(ConfigError, match=r"model.distillation: unknown"):
    experiment_config.parse(mapping, restore=True)


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
  script = tmp_path.with_suffix(".py")
  script.write_text(
    "import pathlib, sys\n"
    "from training import ownership\n"
    "with ownership.lock(pathlib.Path(sys.argv[1])):\n"
    "  pass\n"
  )

  def other():
    return commands.run(script, str(tmp_path))

  before, longer = config(num_steps=20), config(num_steps=40)
  workdir.write_config(tmp_path, before)
  with ownership.lock(tmp_path):
    with pytest.raises(RunError, match="another process writes in"):
      experiment.begin(longer, tmp_path)
    assert workdir.read_config(tmp_path)["num_steps"] == 20
    code, _, error = other()
    assert code == 1
    assert "workdir: another process writes in" in error
  assert other() == (0, "", "")


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
  def refuse(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(ownership.fcntl, "flock", refuse)
  with ownership.lock(tmp_path), ownership.lock(tmp_path):
    pass


def test_what_another_process_began_meanwhile_is_kept(tmp_path):
  """`check` had found the folder free."""
  workdir.check(tmp_path, config(num_steps=2, of=duplicate))
  workdir.write_config(tmp_path, config(num_steps=2))
  before = (tmp_path / workdir.CONFIG).read_bytes()
  with pytest.raises(ConfigError, match="holds a run with another config"):
    experiment.begin(config(num_steps=2, of=duplicate), tmp_path)
  with pytest.raises(ConfigError, match=r"config.seed is 0 there and 1 here"):
    experiment.begin(config(num_steps=2, seed=1), tmp_path)
  assert (tmp_path / workdir.CONFIG).read_bytes() == before


def test_a_folder_is_claimed_once(tmp_path):
  folder, name = tmp_path / "a", "what.json"
  for _ in range(2):
    ownership.claim(folder, name, {"seeds": (0, 1), "text": None})
  with pytest.raises(
    ConfigError, match="another process started something else"
  ):
    ownership.claim(folder, name, {"seeds": (0, 2), "text": None})
  content = atomic.read_json(folder / name)
  assert content == {"seeds": [0, 1], "text": None}
  with ownership.lock(folder), pytest.raises(RunError):
    ownership.claim(folder, name, content, wait=False)


def test_processes_of_two_hosts_may_have_one_id(tmp_path, monkeypatch):
  """One writes a file between the writing and the renaming of the other."""
  path, replace, nested = tmp_path / "a.json", atomic.os.replace, [b"second"]

  def meanwhile(partial, target):
    if nested:
      atomic.write_bytes(path, nested.pop())
    replace(partial, target)

  monkeypatch.setattr(atomic.os, "replace", meanwhile)
  monkeypatch.setattr(atomic.os, "getpid", lambda: 1)
  atomic.write_bytes(path, b"first")
  assert [x.name for x in tmp_path.iterdir()] == ["a.json"]
  assert path.read_bytes() == b"first"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
  path = tmp_path / "a.json"
  path.mkdir()
  with pytest.raises(OSError):
    atomic.write_bytes(path, b"text")
  assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_is_too_long_is_told(tmp_path):
  with pytest.raises(ConfigError, match=r"^workdir: File name too long: "):
    workdir.check_writable("workdir", tmp_path / ("x" * 300))


def test_another_byte_is_another_file(tmp_path):
  path = tmp_path / "a.json"
  content = {"accuracy": 0.125, "rows": [1, None], "per_seed": {3: "a"}}
  atomic.write_json(path, content)
  content = json.loads(json.dumps(content))
  assert atomic.read_json(path) == content
  whole = path.read_bytes()
  for place in range(len(whole)):
    changed = bytearray(whole)
    changed[place] ^= 1 << int(np.random.default_rng(place).integers(8))
    path.write_bytes(changed)
    found = atomic.read_json(path)
    values = None if found is None else {k: found.get(k) for k in content}
    assert values in (None, content), place
    if place < len(whole) - 1:  # All but the end of its line is needed.
      path.write_bytes(whole[:place])
      assert atomic.read_json(path) is None


def test_another_generator_is_told_and_costs_nothing(tmp_path):
  """Its keys are of another shape, which is no damage."""
  workdir.write_config(tmp_path, config())
  content = json.loads((tmp_path / workdir.CONFIG).read_text())
  assert content["random_numbers"] == "threefry2x32"
  for name, value, told in (
    ("jax_default_prng_impl", "rbg", "'rbg'"),
    ("jax_threefry_partitionable", False, "'threefry2x32, JAX_THREEFRY_PARTI"),
  ):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
      line = fault(tmp_path)
    finally:
      jax.config.update(name, before)
    assert "draws its random numbers by 'threefry2x32', and this" in line
    assert f"process by {told}" in line
    assert "set JAX_DEFAULT_PRNG_IMPL=threefry2x32" in line
  workdir.check(tmp_path, config())
  rewrite(tmp_path, lambda mapping: mapping.pop("random_numbers"))
  workdir.check(tmp_path, config())


@pytest.mark.parametrize("depth", [101, 1_200, 100_000])
def test_a_config_that_is_nested_too_deep_is_one_line(tmp_path, depth):
  for nested in (
    '{"a": ' * depth + "1" + "}" * depth,
    '{"a": ' + "[" * depth + "]" * depth + "}",
  ):
    (tmp_path / workdir.CONFIG).write_text(nested)
    with pytest.raises(ConfigError, match="nested deeper than 100 levels"):
      workdir.read_config(tmp_path)
    (tmp_path / "record.json").write_text(nested)
    assert atomic.read_json(tmp_path / "record.json") is None
    with pytest.raises(ValueError, match=r"config.json: not JSON \(nested"):
      files.read_config(tmp_path)
  (tmp_path / workdir.CONFIG).write_text('{"a": ' * 99 + "[1]" + "}" * 99)
  assert workdir.read_config(tmp_path).keys() == {"a"}
