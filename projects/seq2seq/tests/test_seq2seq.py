"""The recurrent models: equal to their papers, to their own decoding, trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comparison.measurement import approximation
from configs import translation
import models
from projects.seq2seq.config import Seq2SeqConfig
from projects.seq2seq.tests import seq2seq_papers
from settings.errors import ConfigError
from tests.models import tiny
from tests.refusals import assert_refused
from training import experiment, experiment_config, loop, metrics
from training.inference import generation

SIZES = {"cell": "gru", "decoder": "luong", "num_layers": 1, "features": 8}
MECHANISMS = {
  "bahdanau": models.AttentionConfig("additive", {"width": 6}),
  "luong": models.AttentionConfig("multiplicative"),
}


def create(decoder, cell, *, shared_vocabulary=True, **changes):
  config = {"num_layers": 1, "features": 8, "decoder": decoder, "cell": cell}
  config |= {"cross_attention": MECHANISMS[decoder], **changes}
  sides = ("source", "target")
  sizes = {f"{side}_vocab_size": tiny.VOCAB_SIZE for side in sides}
  sizes |= {f"max_{side}_length": tiny.MAX_LENGTH for side in sides}
  return models.create(
    Seq2SeqConfig(**config), shared_vocabulary=shared_vocabulary, **sizes
  )


@pytest.fixture(scope="module")
def papers():
  """By decoder: a model of one layer and variables with no zero among them."""
  made = {}
  for decoder, cell in (("bahdanau", "gru"), ("luong", "lstm")):
    model = create(decoder, cell)
    variables = jax.tree.map(lambda leaf: leaf + 0.1, tiny.initialized(model))
    made[decoder] = model, variables
  return made


@pytest.mark.parametrize(
  ("attention", "fault"), [("additive", None), ("linear", "a recurrent model")]
)
def test_its_approximation_is_not_measured(attention, fault):
  """Nor is it a fault where the mechanism approximates nothing."""
  options = {"width": 6} if attention == "additive" else {}
  model = create(
    "luong", "gru", cross_attention=models.AttentionConfig(attention, options)
  )
  variables, batch = tiny.initialized(model), tiny.batch()
  if fault is None:
    assert approximation.error(model, variables, batch) is None
  else:
    with pytest.raises(ValueError, match=fault):
      approximation.error(model, variables, batch)


@pytest.mark.parametrize("decoder", MECHANISMS)
def test_it_is_the_model_of_the_paper(papers, decoder):
  model, variables = papers[decoder]
  reference = getattr(seq2seq_papers, decoder)
  batch = tiny.batch()
  params = jax.tree.map(lambda leaf: np.asarray(leaf, float), variables)
  logits = tiny.forward(model, variables, batch)
  maps = tiny.attention_maps(model, variables, batch)
  assert maps.keys() == {"decoder/cross_attention"}
  matrix = np.asarray(maps["decoder/cross_attention"])
  assert matrix.shape == (3, 1, 8, 6)
  for row, (source, inputs) in enumerate(
    zip(batch["source"], batch["inputs"], strict=True)
  ):
    source = source[source != 0]
    expected, alignments = reference(params["params"], source, inputs)
    np.testing.assert_allclose(logits[row], expected, atol=1e-5)
    length = len(source)
    np.testing.assert_allclose(
      matrix[row, 0, :, :length], alignments, atol=1e-5
    )
    assert not matrix[row, 0, :, length:].any()


@pytest.mark.parametrize("decoder", MECHANISMS)
def test_padding_and_the_future_change_nothing(papers, decoder):
  model, variables = papers[decoder]
  batch = tiny.batch()
  batch["source"][1] = 0  # Nothing at all.
  before = tiny.forward(model, variables, batch)
  assert np.isfinite(before).all()
  padding = ((0, 0), (2, 3))
  inputs = batch["inputs"].copy()
  inputs[:, 5:] = 2
  changed = {"source": np.pad(batch["source"], padding), "inputs": inputs}
  after = tiny.forward(model, variables, changed)
  np.testing.assert_allclose(before[:, :5], after[:, :5], atol=1e-6)
  assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3


@pytest.mark.parametrize(
  ("decoder", "cell", "changes"),
  [
    (
      *("bahdanau", "lstm"),
      {"num_heads": 2, "tie_embeddings": False, "dropout_rate": 0.5},
    ),
    ("luong", "gru", {"cross_attention": tiny.attention("linformer")}),
  ],
)
def test_decoding_equals_forward(decoder, cell, changes):
  model = create(
    decoder, cell, num_layers=2, shared_vocabulary=False, **changes
  )
  variables, batch = tiny.initialized(model), tiny.batch()
  logits = tiny.forward(model, variables, batch)
  np.testing.assert_allclose(
    tiny.step_by_step(model, variables, batch), logits, atol=1e-5
  )
  if model.config.dropout_rate:
    key = jax.random.key(0)
    dropped = tiny.forward(model, variables, batch, dropout_rng=key)
    assert np.abs(dropped - logits).max() > 1e-2


@pytest.mark.parametrize("decoder", MECHANISMS)
def test_beams_carry_their_own_state(papers, decoder):
  """The score of what a beam returns is that of a forward pass over it."""
  model, variables = papers[decoder]
  source = tiny.batch()["source"]
  beam = {"method": "beam", "beam_size": 3, "length_penalty": 0.0}
  call = {"source": source, "max_length": 8, "bos_id": 1, "eos_id": 2}
  tokens, scores = models.generate(model, variables, **call, **beam)
  tokens = np.asarray(tokens)
  inputs = np.concatenate([np.ones_like(tokens[:, :1]), tokens[:, :-1]], 1)
  logits = tiny.forward(model, variables, {"source": source, "inputs": inputs})
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  for row, ids in enumerate(tokens):
    length = min([*ids, 2].index(2) + 1, len(ids))
    total = log_probs[row, np.arange(length), ids[:length]].sum()
    np.testing.assert_allclose(scores[row], total, atol=1e-4)


@pytest.mark.parametrize("decoder", MECHANISMS)
def test_bfloat16_compute_keeps_float32_states(papers, decoder):
  model, variables = papers[decoder]
  config = dataclasses.replace(model.config, dtype="bfloat16")
  low, batch = model.clone(config=config), tiny.batch()
  logits = tiny.forward(low, variables, batch)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(
    logits, tiny.forward(model, variables, batch), atol=0.1
  )


@pytest.mark.parametrize(
  ("tied", "shared", "tables"),
  [
    (True, True, {"target"}),
    (True, False, {"source", "target"}),
    (False, True, {"source", "target", "output"}),
    (False, False, {"source", "target", "output"}),
  ],
)
def test_tables_that_are_shared(tied, shared, tables):
  model = create("luong", "gru", tie_embeddings=tied, shared_vocabulary=shared)
  params = jax.eval_shape(lambda: tiny.initialized(model))["params"]
  assert {x for x in params if "embedding" in x} == {
    f"{table}_embedding" for table in tables
  }


@pytest.mark.parametrize("decoder", MECHANISMS)
def test_where_dropout_is(decoder):
  """Of both embeddings and the outputs, and between the layers."""
  model = create(decoder, "gru", num_layers=3, dropout_rate=0.5)
  found = tiny.dropouts(model, tiny.initialized(model), tiny.batch())
  assert found.pop("") == 3
  assert found.pop("encoder") == 2
  assert found.pop("decoder") % 2 == 0  # A scan may trace its step again.
  assert not found


@pytest.mark.thorough
def test_the_loop_trains_it_on_copy(tmp_path):
  # As many rows as `generate_lines` decodes at a time: it compiles once.
  mapping = translation.get_config("luong").to_dict()
  mapping["model"] |= {"num_layers": 1, "features": 16}
  mapping |= {"num_steps": 40, "batch_size": 64, "log_every": 20}
  mapping |= {"parallel": "pmap", "optimizer": {"learning_rate": 0.02}}
  sizes = {"vocab_size": 4, "max_length": 3, "eval_size": 64}
  mapping["task"] = {"name": "copy", **sizes}
  run = experiment.create(experiment_config.parse(mapping))
  first = jax.device_get(run.init().params)
  loop.run(run, tmp_path)
  lines = metrics.read(tmp_path)
  losses = [line["loss"] for line in lines if line["split"] == "train"]
  assert losses[-1] < 0.7 * losses[0]
  assert (tmp_path / "attention.png").exists()
  variables = generation.restore_variables(run, tmp_path)
  # Adam without decay moves what has a gradient, and nothing else.
  moved = jax.tree.map(
    lambda new, old: float(np.abs(new - old).max()), variables["params"], first
  )
  assert min(jax.tree.leaves(moved)) > 0, moved
  assert "kernel" in moved["decoder"]["cross_attention"]["attention"]
  lines = generation.generate_lines(run, variables, ["1 2 3", "", "0"])
  assert lines[0].split()
  assert lines[1] == ""


@pytest.mark.parametrize("name", translation.RECURRENT)
def test_its_config_survives_json(name):
  config = experiment_config.parse(translation.get_config(name))
  assert config.model.decoder == name
  assert experiment_config.parse(config.to_mapping()) == config


def test_what_cannot_work_raises():
  assert_refused(
    lambda **changes: Seq2SeqConfig(**{**SIZES, **changes}),
    *({"cell": "gur"}, {"decoder": "loung"}, {"kind": "decoder"}),
    *({"num_layers": 0}, {"features": 9}),
    ("features", {"num_heads": 3}),
    *({"dropout_rate": 1.0}, {"dtype": "float8"}),
    {"cross_attention": tiny.attention("sliding_window")},
  )


def test_faults_in_a_config_name_the_leaf():
  def parse(**changes):
    config = translation.get_config("luong").to_dict()
    config["model"] |= changes
    experiment_config.parse(config)

  cases = {"norm": "pre"}, {"kind": "seq2sec"}, {"kind": 3}, {"cell": None}
  assert_refused(parse, *cases, prefix="config.model.")


def test_a_task_for_decoders_alone_refuses_it():
  config = translation.get_config("luong").to_dict()
  config["task"] = {"name": "recall"}
  with pytest.raises(ConfigError, match="kind: recall supports decoder, got"):
    experiment.create(experiment_config.parse(config))


def test_sizes_are_checked_when_the_model_is_made():
  rank = models.AttentionConfig("linformer", {"rank": 64})
  with pytest.raises(ValueError, match=r"^cross_attention: rank"):
    create("luong", "gru", cross_attention=rank)
  model = create("luong", "gru")
  batch = tiny.batch(length=tiny.MAX_LENGTH + 1)
  with pytest.raises(ValueError, match=r"^inputs: 13 positions"):
    models.forward(model, {}, batch)
