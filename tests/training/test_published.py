"""Runs that start from published weights, and runs that become such weights."""

import dataclasses
import json
import shutil

import chex
import jax
import numpy as np
import pytest

from configs import text
import models
from settings.errors import ConfigError
from tests.models.published.test_equality import FOLDERS, compute
from training import experiment, experiment_config, workdir
from training.checkpoint import Checkpoints
from training.inference import generation, published
from training.inference.conversation import Conversation

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
  chex.assert_trees_all_equal(state.params, p.variables["params"])
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
  performer = {"name": "performer", "num_features": 16}
  config["model"] |= {"decoder_attention": performer, "dropout_rate": 0.25}
  config["model"] |= {"dtype": "bfloat16", "features": 8}
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
    ("remat", "block"),
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
  checkpoints = Checkpoints(folder, parsed.train)
  checkpoints.save(run.init(), {})
  checkpoints.close()
  p = published.from_run(folder)
  assert p.architecture == "GPT2LMHeadModel"
  loaded = models.load_pretrained(folder)
  wanted = models.load_pretrained(FOLDERS["gpt2"])
  ids = np.arange(12)[None]
  found, expected = (
    jax.jit(p.logits)(p.variables, input_ids=ids) for p in (loaded, wanted)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  config["model"]["weights"] = str(folder)
  experiment.create(experiment_config.parse(config)).init()


def with_template(folder, before, case="gpt2", **sections):
  """A copy of a small decoder whose tokenizer puts ids before a text."""
  import tokenizers

  for name in ("config.json", "model.safetensors"):
    shutil.copy(FOLDERS[case] / name, folder)
  vocabulary = {f"w{i}": i for i in range(60)} | {"<|endoftext|>": 60}
  save_tokenizer(folder, vocabulary, "w0")
  file = folder / "tokenizer.json"
  tokenizer = tokenizers.Tokenizer.from_file(str(file))
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single=f"{before} $A",
    special_tokens=[(x, vocabulary[x]) for x in before.split()],
  )
  tokenizer.save(str(file))
  for name, leaves in sections.items():
    path = folder / f"{name}.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | leaves))


def greedy(folder, ids, count):
  """Ids of the largest logits, one after another."""
  p, length = models.load_pretrained(folder), len(ids)
  row = np.zeros((1, 41), int)  # Its logits are of 40, in one program for all.
  row[0, :length] = ids
  for t in range(length, length + count):
    row[0, t] = np.argmax(compute(p, {"input_ids": row[:, :-1]})[0, t - 1])
  return row[0, length : length + count].tolist()


def test_a_prompt_begins_as_the_tokenizer_says(tmp_path):
  with_template(tmp_path, "w7")
  run, variables = published.open_weights(tmp_path)
  assert run.task.encode("w5 w9") == [7, 5, 9]
  [found] = generation.generate_lines(run, variables, ["w5 w9"], max_length=4)
  wanted = greedy(tmp_path, [7, 5, 9], 4)
  assert found.split() == [f"w{i}" for i in wanted]
  assert wanted != greedy(tmp_path, [5, 9], 4)
  # Where the context is full, what is read again begins so as well.
  context = run.task.max_target_length
  count = context + 3
  options = {"max_length": count}
  [found] = generation.generate_lines(run, variables, ["w5 w9"], **options)
  text = [7, 5, 9, *greedy(tmp_path, [7, 5, 9], context - 2)]
  half = [7, *text[-(context // 2 - 1) :]]
  text += greedy(tmp_path, half, 5)
  assert found.split() == [f"w{i}" for i in text[3 : 3 + count]]
  talk = Conversation(run, variables, max_length=2)
  first = talk.answer("w5 w9").split()
  told = [7, 5, 9, *(int(word[1:]) for word in first), 11]
  assert first == [f"w{i}" for i in greedy(tmp_path, [7, 5, 9], 2)]
  second = talk.answer("w11").split()
  assert second == [f"w{i}" for i in greedy(tmp_path, told, 2)]


@pytest.mark.parametrize(("longest", "context"), [(1000, 1000), (2000, 1024)])
def test_a_context_has_at_most_1024_tokens(tmp_path, longest, context):
  sizes = {"max_position_embeddings": longest}
  with_template(tmp_path, "w7", "llama", config=sizes)
  run, _ = published.open_weights(tmp_path)
  assert run.task.max_target_length == context


@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_all_ends_end(tmp_path, file):
  """Those of both files, and what the vocabulary calls an end."""
  with_template(tmp_path, "w7")
  free = greedy(tmp_path, [7, 5, 9], 8)
  fresh = [i for i in range(1, 8) if free[i] not in free[:i]]
  place = fresh[len(fresh) // 2]
  with_template(tmp_path, "w7", **{file: {"eos_token_id": [59, free[place]]}})
  run, variables = published.open_weights(tmp_path)
  assert {60, 59, free[place]} <= {*run.task.eos_ids}
  for options in ({}, {"method": "beam", "beam_size": 1}):
    [found] = generation.generate_lines(
      run, variables, ["w5 w9"], max_length=8, **options
    )
    assert found.split() == [f"w{i}" for i in free[:place]]
  answer = Conversation(run, variables, max_length=8).answer("w5 w9")
  assert answer == found
  for wrong in ("2", [2.0], [True], -1, [[2]], 2**31):
    with_template(tmp_path, "w7", **{file: {"eos_token_id": wrong}})
    with pytest.raises(ConfigError, match="eos_token_id: expected an id, or a"):
      published.open_weights(tmp_path)


def test_weights_that_do_not_go_on():
  with pytest.raises(ConfigError, match="of kind 'encoder'; only a decoder"):
    published.open_weights(FOLDERS["bert_masked"])
  with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
    published.open_weights(FOLDERS["gpt2"])
