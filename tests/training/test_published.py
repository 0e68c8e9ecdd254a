"""Runs that start from published weights, and runs that become such weights."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from configs import text
import models
from settings.errors import ConfigError
from tests.models.published.test_equality import FOLDERS
from training import (
  experiment,
  experiment_config,
  inference,
  published,
  workdir,
)
from training.checkpoint import Checkpoints

TEXT = "to be or not to be that is the question\n" * 20


def save_tokenizer(folder, vocabulary, unknown, *special):
  """Of words between spaces."""
  import tokenizers

  words = tokenizers.models.WordLevel(vocabulary, unk_token=unknown)
  tokenizer = tokenizers.Tokenizer(words)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens([*special])
  tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def config(tmp_path):
  """A config that starts from a small GPT-2."""
  path = tmp_path / "input.txt"
  path.write_text(TEXT)
  config = text.get_config().to_dict()
  config["task"] |= {"path": str(path), "context": 16}
  config["model"]["weights"] = str(FOLDERS["gpt2"])
  return config


def test_a_run_starts_from_weights(config):
  parsed = experiment_config.parse(config)
  run = experiment.create(parsed)
  p = models.load_pretrained(FOLDERS["gpt2"])
  state = run.init()
  jax.tree.map(
    np.testing.assert_array_equal, state.params, p.variables["params"]
  )
  assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, run.shapes)
  batch = run.task.train_batch(0)
  forward = jax.jit(models.forward, static_argnums=0)
  out = forward(run.model, state.variables, batch)
  wanted = jax.jit(p.logits)(p.variables, input_ids=batch["inputs"])
  np.testing.assert_array_equal(out, wanted)
  # What a run writes says all of it, also where the folder is gone.
  again = parsed.to_mapping()
  assert experiment_config.parse(again) == parsed
  again["model"]["weights"] = "/nowhere"
  restored = experiment_config.parse(again, restore=True)
  assert restored.model == parsed.model


def test_the_config_chooses_mechanism_dropout_and_dtype(config):
  config["model"] |= {
    "decoder_attention": {"name": "performer", "num_features": 16},
    "dropout_rate": 0.25,
    "dtype": "bfloat16",
    "features": 8,
  }
  model = experiment_config.parse(config).model
  assert models.slots(model) == "performer"
  assert (model.dropout_rate, model.dtype) == (0.25, "bfloat16")
  assert model.features == 24
  state = experiment.create(experiment_config.parse(config)).init()
  assert jax.tree.leaves(state.collections["constants"])


@pytest.mark.parametrize(
  ("leaf", "value"),
  [
    ("dropout_rate", 0.25),
    ("attention_dropout_rate", 0.125),
    ("dtype", "bfloat16"),
    ("param_dtype", "bfloat16"),
  ],
)
def test_a_config_chooses_each_of_these_beside_weights(config, leaf, value):
  without = experiment_config.parse(config).model
  config["model"][leaf] = value
  model = experiment_config.parse(config).model
  assert dataclasses.replace(without, **{leaf: value}) == model
  assert getattr(without, leaf) != value


@pytest.mark.parametrize(
  ("leaf", "value", "fault"),
  [
    ("weights", "/nowhere", "weights: /nowhere: no such folder"),
    ("weights", 3, "weights: expected a folder, got 3"),
    ("weights", str(FOLDERS["bert_masked"]), "kind: the weights in"),
    (
      *("decoder_attention", {"name": "linformer", "rank": 4}),
      "decoder_attention: linformer cannot be causal",
    ),
  ],
)
def test_weights_that_cannot_be_started_from(config, leaf, value, fault):
  config["model"][leaf] = value
  with pytest.raises(ConfigError) as info:
    experiment_config.parse(config)
  assert str(info.value).startswith(f"config.model.{fault}")


def test_tasks_that_are_larger_than_the_model(config):
  config["task"]["context"] = 41
  with pytest.raises(
    ConfigError, match=r"config.model.max_length: expected at"
  ):
    experiment.create(experiment_config.parse(config))


def test_the_vocabulary_of_the_weights_is_the_tasks(config, tmp_path):
  folder = tmp_path / "gpt2"
  shutil.copytree(FOLDERS["gpt2"], folder)
  vocabulary = {w: i + 40 for i, w in enumerate(TEXT.split()[:9])} | {"?": 0}
  save_tokenizer(folder, vocabulary, "?", "<|endoftext|>")
  config["model"]["weights"] = str(folder)
  parsed = experiment_config.parse(config)
  assert parsed.task.tokenizer == str(folder)
  run = experiment.create(parsed)
  assert run.task.encode("to be")[-2:] == [vocabulary["to"], vocabulary["be"]]


def test_a_run_is_weights_too(config, tmp_path):
  """From a run's folder, and from what is exported of it."""
  folder = tmp_path / "run"
  parsed = experiment_config.parse(config)
  run = experiment.create(parsed)
  workdir.write_config(folder, parsed)
  run.task.save(folder)
  checkpoints = Checkpoints(folder)
  checkpoints.save(run.init(), {})
  checkpoints.close()
  p = published.from_run(folder)
  assert p.architecture == "GPT2LMHeadModel"
  loaded = models.load_pretrained(folder)
  wanted = models.load_pretrained(FOLDERS["gpt2"])
  ids = np.arange(12)[None]
  np.testing.assert_allclose(
    jax.jit(loaded.logits)(loaded.variables, input_ids=ids),
    jax.jit(wanted.logits)(wanted.variables, input_ids=ids),
    rtol=1e-5,
    atol=1e-5,
  )
  config["model"]["weights"] = str(folder)
  experiment.create(experiment_config.parse(config)).init()


def test_a_published_decoder_goes_on_with_a_text(tmp_path):
  """Greedy tokens are those of the largest logits, one after another."""
  for name in ("config.json", "model.safetensors"):
    shutil.copy(FOLDERS["gpt2"] / name, tmp_path)
  vocabulary = {f"w{i}": i for i in range(60)} | {"<|endoftext|>": 60}
  with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
    published.open_weights(tmp_path)
  save_tokenizer(tmp_path, vocabulary, "w0")
  run, variables = published.open_weights(tmp_path)
  [found] = inference.generate_lines(
    run, variables, ["w5 w9 w17"], max_length=6
  )
  p = models.load_pretrained(tmp_path)
  ids = np.array([[5, 9, 17, 0, 0, 0, 0, 0, 0]])
  logits = jax.jit(p.logits)
  for t in range(3, 9):
    # Causal: what is not there yet changes nothing.
    ids[0, t] = np.argmax(logits(p.variables, input_ids=ids)[0, t - 1])
  assert found.split() == [f"w{i}" for i in ids[0, 3:]]


def test_weights_that_do_not_go_on():
  with pytest.raises(ConfigError, match="of kind 'encoder'; only a decoder"):
    published.open_weights(FOLDERS["bert_masked"])
