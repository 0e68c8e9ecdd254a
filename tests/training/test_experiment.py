"""Every config of every mechanism is valid, and faults are found early."""

import importlib
import sys
import types
from typing import Any

import chex
import jax
import numpy as np
import pytest

from attention import ATTENTIONS
from attention import mechanism as mechanisms
from settings.errors import ConfigError
from settings.field_values import put
from tests.attention.forms import KINDS
from tests.here import here, is_here
from tests.training.tiny import Parts, drawn
from training import experiment, experiment_config, step, workdir

_GENERATED = ("recall", "induction", "selective_copy", "needle", "listops")
PAPER = (*_GENERATED, "duplicate")
CONFIGS = here(
  (
    *("copy", "translation", "multi30k", "pathfinder", "text", "gpt", "bert"),
    *("t5", "classify", "perceiver", "perceiver_bytes", *_GENERATED),
  )
)


def load(name, attention="dense", **leaves):
  config = importlib.import_module(f"configs.{name}").get_config(attention)
  # Of a source that needs no data, nothing reads it.
  needs_none = config.task.get("source") in ("numbers", "digits")
  if ("path" in config.task or name == "text") and not needs_none:
    config.task.path = "somewhere"
  config.unlock()
  config.update_from_flattened_dict(leaves)
  return config


def _obstacle(attention, model):
  """Why a mechanism cannot be the only one of a model; None if it can."""
  record = mechanisms.example(attention)
  if model.kind == "decoder" and not mechanisms.can(record, "causal"):
    return "be causal"
  both_ways = model.kind in ("encoder", "perceiver")
  if both_ways and not mechanisms.can(record, "bidirectional"):
    return "attend in both directions"
  if model.get("position") == "t5" and not mechanisms.can(record, "relative"):
    return "carry relative positions"
  return None


@pytest.mark.parametrize(
  ("attention", "name"),
  [
    pytest.param(
      attention,
      name,
      marks=()
      if attention in KINDS or name == "copy"
      else pytest.mark.thorough,
    )
    for attention in ATTENTIONS
    for name in CONFIGS
  ],
)
def test_every_pair_is_valid_and_survives_json(name, attention):
  obstacle = _obstacle(attention, load(name).model)
  if obstacle is not None:
    # Dense under another name would be a lie.
    with pytest.raises(ConfigError, match=f"cannot {obstacle}"):
      experiment_config.parse(load(name, attention))
    return
  config = experiment_config.parse(load(name, attention))
  again = experiment_config.parse(config.to_mapping())
  assert again == config
  slots = {f: c for f, [c] in config.model.attentions.items()}
  used = {slot.name for slot in slots.values()}
  # Causal slots fall back to dense where the mechanism cannot serve them.
  assert used <= {attention, "dense"}
  assert attention in used
  folder = workdir.default(f"configs/{name}.py:{attention}", config)
  assert folder.parts[0] == "runs"
  assert folder.name.startswith(f"{name}-{next(iter(slots.values())).name}-")


@pytest.mark.parametrize(
  ("name", "mechanisms"),
  [
    *((name, ("performer",)) for name in PAPER[:-1]),
    (PAPER[-1], ("lsh",)),
    *(
      pytest.param(name, tuple(ATTENTIONS), marks=pytest.mark.thorough)
      for name in PAPER
    ),
  ],
)
def test_sizes_of_papers_are_made_with_what_can(name, mechanisms):
  made = 0
  for attention in mechanisms:
    config = load(f"paper.{name}", attention)
    if _obstacle(attention, config.model) is not None:
      continue
    run = experiment.create(experiment_config.parse(config))
    batch = run.task.train_batch(0)
    assert batch["targets"].shape[0] == config.batch_size
    made += 1
  assert made >= (8 if len(mechanisms) > 8 else 1)


def test_weights_and_biases_is_missed_before_anything_else(monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  mapping = load("copy").to_dict() | {"log": {"wandb": True}}
  with pytest.raises(ConfigError, match=r"^config\.log\.wandb:"):
    experiment_config.parse(mapping)
  # A run that was trained elsewhere is read without it.
  assert experiment_config.parse(mapping, restore=True).train.log.wandb


@pytest.mark.parametrize(
  ("leaf", "value", "fault"),
  [
    ("task.name", "cpoy", "unknown 'cpoy'; did you mean 'copy'"),
    ("task.name", ["copy"], "unknown \"['copy']\"; did you"),
    ("task.knd", "copy", "unknown; did you mean 'kind'?"),
    ("task.max_length", 0, ""),
    ("task.batch_size", 3, "unknown; did you mean config.batch_size?"),
    ("task", "copy", "expected named fields, got 'copy'"),
    ("tasks", "copy", "this is the config of a comparison"),
    ("model", 3, "expected named fields, got 3"),
    ("model.features", "1", "expected a valid inte"),
    ("model.window", 3, "unknown; an option of slidi"),
    ("model.encoder_attention.name", "dens", ""),
    ("model.encoder_attention", "dense,flash", "several names are a list; exp"),
    ("model.attention", {"rank": 3}, "rank: unknown;"),
    ("optimizer.schedule", "x", "expected 'con"),
    ("num_step", 3, "unknown; did you mean 'num_steps'?"),
    # Where a leaf of that name is.
    ("learning_rate", 0.1, "unknown; did you mean config.optimizer.learning_r"),
    ("learning_rat", 0.1, "unknown; did you mean config.optimizer.learning_r"),
  ],
)
def test_faults_name_the_leaf(leaf, value, fault):
  config = load("copy").to_dict()
  put(config, leaf, value)
  with pytest.raises(ConfigError) as info:
    experiment_config.parse(config)
  separator = "." if fault.startswith("rank") else ": "
  assert str(info.value).startswith(f"config.{leaf}{separator}{fault}")
  assert "\n" not in str(info.value)


def test_a_fault_of_two_leaves_names_the_one_that_is_told():
  with pytest.raises(ConfigError, match=r"^config\.model\.features: "):
    experiment_config.parse(load("copy", **{"model.num_heads": 3}))
  # Of a task that has no name here.
  mapping = load("copy").to_dict() | {"power": 1.0}
  mapping["task"]["name"] = "tests.training.tiny:RECALL"
  with pytest.raises(
    ConfigError, match=r"^config\.power: .*config\.task\.power"
  ):
    experiment_config.parse(mapping)


@pytest.mark.parametrize("field", ["dtype", "param_dtype"])
@pytest.mark.parametrize("name", here(["copy", "perceiver"]))
def test_float64_needs_a_jax_that_has_it(name, field):
  """Without it JAX computes in float32, and the config says otherwise."""
  config = load(name, **{f"model.{field}": "float64"})
  with pytest.raises(ConfigError) as info:
    experiment_config.parse(config)
  assert str(info.value) == (
    f"config.model.{field}: JAX computes in float32 by default; expected "
    "JAX_ENABLE_X64=1 in the environment with 'float64'"
  )
  with jax.enable_x64(True):
    assert getattr(experiment_config.parse(config).model, field) == "float64"


def test_an_option_is_told_by_the_slots_that_have_it():
  config = load("copy", "sliding_window").to_dict()
  config["model"]["attention"] = {"window": 3}
  with pytest.raises(ConfigError) as info:
    experiment_config.parse(config)
  assert str(info.value) == (
    "config.model.attention.window: unknown; did you mean config.model."
    "decoder_attention.window or config.model.encoder_attention.window?"
  )


def test_an_experiment_follows_from_its_config():
  sizes = {"num_layers": 1, "features": 8, "mlp_features": 8}
  leaves = {f"model.{name}": size for name, size in sizes.items()}
  config = experiment_config.parse(load("recall", **leaves))
  first, second = (experiment.create(config) for _ in range(2))
  states = [first.init(), second.init()]
  assert jax.tree.structure(states[0]) == jax.tree.structure(first.shapes)
  chex.assert_trees_all_equal(*states)
  assert "parameters" in experiment.describe(first)


def test_optimizer_fields_without_effect_are_told():
  plain = {
    **dict.fromkeys(("warmup_steps", "final_fraction", "weight_decay"), 0),
    **dict.fromkeys(("b1", "b2", "eps"), None),
  }
  for options, told in (
    ({"warmup_steps": 9, "schedule": "cosine", "final_fraction": 0.1}, []),
    (
      {"warmup_steps": 10},
      ["the warm-up of 10 steps (optimizer.warmup_steps) "],
    ),
    (
      {"schedule": "constant", "final_fraction": 0.1},
      ["optimizer.final_fracti"],
    ),
    ({"name": "adamw", "b1": 0.8, "b2": 0.9, "eps": 1e-6}, []),
    (
      {"name": "sgd", "b1": 0.8, "b2": 0.9, "eps": 1e-6},
      [
        f"optimizer.{name} has no effect: sgd d" for name in ("b1", "b2", "eps")
      ],
    ),
  ):
    options = {f"optimizer.{k}": v for k, v in {**plain, **options}.items()}
    config = experiment_config.parse(load("recall", num_steps=10, **options))
    remarks = experiment.describe(experiment.create(config)).split("; ")[2:]
    assert len(remarks) == len(told), remarks
    assert all(map(str.startswith, remarks, told)), remarks


def test_a_loss_of_a_task_knows_no_smoothing(monkeypatch):
  smooth = load("recall", **{"optimizer.label_smoothing": 0.1})
  experiment.create(experiment_config.parse(smooth))
  task_type = type(experiment.create(experiment_config.parse(smooth)).task)
  monkeypatch.setattr(task_type, "loss", step.cross_entropy, raising=False)
  with pytest.raises(ConfigError) as info:
    experiment.create(experiment_config.parse(smooth))
  assert str(info.value) == (
    "config.optimizer.label_smoothing: the task 'recall' has its own loss; "
    "expected 0, got 0.1"
  )
  experiment.create(experiment_config.parse(load("recall")))


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("field", ["vocab_size", "max_length"])
def test_a_model_is_at_least_as_large_as_its_task(side, field):
  sizes = {
    f"{x}_vocab_size" if y == "vocab_size" else f"max_{x}_length": 5
    for x in ("source", "target")
    for y in ("vocab_size", "max_length")
  }
  name = f"{side}_vocab_size" if field == "vocab_size" else f"max_{side}_length"
  task: Any = types.SimpleNamespace(**sizes | {name: 8}, shared_vocabulary=True)
  model = types.SimpleNamespace(head="token", vocab_size=9, max_length=9)
  config: Any = types.SimpleNamespace(model=model)
  found = experiment._sizes(config, task)
  assert [found[x] for x in sizes] == [9] * 4
  setattr(model, field, 8)
  assert experiment._sizes(config, task)[name] == 8
  setattr(model, field, 7)
  with pytest.raises(ValueError, match=rf"^{field}: expected .* 8, got 7$"):
    experiment._sizes(config, task)
  # Classes are not in a vocabulary, and a size may be free.
  model.head = "class"
  if name == "target_vocab_size":
    assert experiment._sizes(config, task)[name] == 8
  setattr(task, name, None)
  assert experiment._sizes(config, task)[name] is None


def test_what_the_task_cannot_serve_is_told():
  config = experiment_config.parse(load("copy", **{"task.kind": "duplicate"}))
  with pytest.raises(ConfigError, match=r"config\.model\.kind: "):
    experiment.create(config)
  missing = experiment_config.parse(load("text"))
  with pytest.raises(ConfigError, match="somewhere"):
    experiment.create(missing)


@pytest.mark.parametrize(
  "attention",
  [  # With parameters, and with constants; the others train in other tests.
    name
    if name in ("linformer", "lsh")
    else pytest.param(name, marks=pytest.mark.thorough)
    for name in ATTENTIONS
  ],
)
def test_every_mechanism_trains(attention, tmp_path):
  """A few steps from its own config, smaller: the loss falls."""
  is_causal = mechanisms.can(mechanisms.example(attention), "causal")
  sizes = {"num_layers": 1, "num_heads": 2, "features": 16, "mlp_features": 16}
  leaves = {f"model.{name}": size for name, size in sizes.items()}
  leaves |= {"optimizer.learning_rate": 0.01, "optimizer.warmup_steps": 1}
  task = "duplicate" if is_causal else "listops"
  config = load(task, attention, batch_size=8, **leaves)
  run = experiment.create(experiment_config.parse(config), tmp_path)
  programs = Parts.of(run).on()
  state, batch, losses = programs.place(drawn(run)), run.task.train_batch(0), []
  for _ in range(10):
    state, metrics = programs.train(state, batch)
    total, count = metrics["loss"]
    losses.append(float(total / count))
  assert np.isfinite(losses).all()
  assert losses[-1] < 0.9 * losses[0], losses


def test_what_draws_nothing_has_nothing_to_redraw(tmp_path):
  config = experiment_config.parse(load("copy", "dense", redraw_every=1))
  with pytest.raises(ConfigError, match=r"^config\.redraw_every: this model"):
    experiment.create(config, tmp_path)


def test_redrawing_draws_the_mechanism_anew(tmp_path):
  small = {f"model.{x}": 16 for x in ("features", "mlp_features")}
  small |= {"model.num_layers": 1, "batch_size": 8}
  config = load("recall", "performer", redraw_every=1, **small)
  config = experiment_config.parse(config)
  run = experiment.create(config, tmp_path)
  state, seen, programs = run.init(), [], Parts.of(run).on()
  for seed in (1, 2):
    at = state._replace(seed=np.int32(seed))
    new, _ = programs.update(at, run.task.train_batch(0))
    seen.append(new.collections["constants"])
  first, second = seen
  shapes = run.shapes.collections["constants"]
  chex.assert_trees_all_equal_shapes_and_dtypes(first, shapes)
  for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    assert (x != y).any()


OUTSIDE = """
from attention import Attention, linear


def state() -> Attention:
  return linear()


def undecodable() -> Attention:
  return linear()._replace(
    init_cache=None, decode=None, supports=linear().supports - {"decode"}
  )
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
  """A module of another project, with two mechanisms."""
  (tmp_path / "their_module.py").write_text(OUTSIDE)
  monkeypatch.syspath_prepend(tmp_path)
  return "their_module:state", "their_module:undecodable"


def test_a_mechanism_outside_the_project_is_used_as_one_of_its_own(outside):
  whole, undecodable = outside
  slots = ("encoder_attention", "decoder_attention", "cross_attention")
  for task in ("copy", "translation", "recall", "paper.recall"):
    config = experiment_config.parse(load(task, whole))
    used = {f: c for f, [c] in config.model.attentions.items()}
    assert {slot.name for slot in used.values()} == {whole}
    assert experiment_config.parse(config.to_mapping()) == config
    assert not experiment.dense_reasons(f"x.py:{whole}", config)
  config = experiment_config.parse(load("copy", undecodable))
  names = [config.model.attentions[slot][0].name for slot in slots]
  assert names == [undecodable, "dense", undecodable]
  assert experiment.dense_reasons(f"copy.py:{undecodable}", config) == [
    f"decoder: dense, because {undecodable} cannot decode token by token"
  ]
  folder = workdir.default(f"configs/copy.py:{undecodable}", config)
  assert folder.name.startswith("copy-their_module.undecodable-")
  with pytest.raises(ValueError, match=r"^attention: module .* has no 'stat'"):
    load("copy", "their_module:stat")
  wrong = load("copy", **{"model.cross_attention.name": "their_module:stat"})
  with pytest.raises(ConfigError, match=r"^config.model.cross_attention.name"):
    experiment_config.parse(wrong)


def test_why_dense_fills_a_slot():
  def told(file, attention, **leaves):
    config = experiment_config.parse(load(file, attention, **leaves))
    return experiment.dense_reasons(f"{file}.py:{attention}", config)

  assert told("copy", "linformer") == [
    "decoder: dense, because linformer cannot be causal"
  ]
  assert told("copy", "sliding_window") == [
    "cross: dense, because sliding_window cannot attend from one position at a "
    "time"
  ]
  assert not told("copy", "dense")
  if is_here("bahdanau"):
    assert not told("translation", "bahdanau")
  leaf = {"model.decoder_attention.name": "linear"}
  assert not told("copy", "linformer", **leaf)


def test_a_task_that_generates_needs_a_decoder_that_decodes(outside):
  _, undecodable = outside
  generating = {"num_layers": 1, "features": 16, "mlp_features": 16}
  leaves = {f"model.{name}": value for name, value in generating.items()}
  leaves["model.decoder_attention.name"] = undecodable
  for name in ("copy", "duplicate"):
    config = experiment_config.parse(load(name, **leaves))
    with pytest.raises(ConfigError, match=r"^config\.model\.decoder_attention"):
      experiment.create(config)
  # What only answers in one pass needs no cache.
  experiment.create(experiment_config.parse(load("recall", **leaves)))
  window = load("copy", **{"model.cross_attention.name": "sliding_window"})
  with pytest.raises(ConfigError, match=r"cross_attention: .* one position at"):
    experiment_config.parse(window)
