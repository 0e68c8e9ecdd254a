"""Faults in every leaf of every config: one line that names it, or harmless."""

import copy
import importlib

import pytest

from settings.errors import ConfigError
from settings.field_values import flatten, put
from tests.here import is_here
from tests.training.test_experiment import CONFIGS as FILES
from tests.training.test_experiment import PAPER
from training import experiment, experiment_config

OF_DATA = (
  *("text", "bert", "perceiver_bytes", "gpt", "t5", "classify", "multi30k"),
)
# By one of these every leaf is at fault, whatever its type.
VALUES = (
  "ünïcödé\n" * 1000,
  "",
  None,
  float("nan"),
  float("inf"),
  -1,
  True,
  10**400,
  [],
  ["a", None],
  [[1]],
  {},
  {"a": {"b": 1}},
  object,
)


def config_of(name, *argument):
  """The file's config with all of its defaults, as a mapping."""
  config = importlib.import_module(f"configs.{name}").get_config(*argument)
  if name in OF_DATA:
    config.task.path = "nowhere"
  return experiment_config.parse(config).to_mapping()


CONFIGS = {name: config_of(name) for name in (*FILES, "duplicate", "reformer")}
CONFIGS |= {f"paper.{name}": config_of(f"paper.{name}") for name in PAPER}
if is_here("bahdanau"):
  CONFIGS["bahdanau"] = config_of("translation", "bahdanau")


def leaves():
  """(config, leaf), each leaf of each task and kind of model once."""
  seen = set()
  for name, config in CONFIGS.items():
    for leaf in [*flatten(config), "task", "model", "optimizer"]:
      section = leaf.partition(".")[0]
      kind = config.get(section, {})
      kind = (kind.get("name"), kind.get("kind")) if section != leaf else ()
      # Options of mechanisms are checked by their factories.
      is_option = leaf.count(".") == 2 and not leaf.endswith(".name")
      if not is_option and (leaf, kind) not in seen:
        seen.add((leaf, kind))
        yield name, leaf


LEAVES = sorted(leaves())


def changed(name, leaf, value):
  config = copy.deepcopy(CONFIGS[name])
  put(config, leaf, value)
  return config


def refusal(mapping, create=False):
  """The line that refuses a config; empty where it is accepted."""
  line = ""
  try:
    config = experiment_config.parse(mapping)
    if create:
      experiment.create(config)
  except ConfigError as error:
    line = str(error)
  assert "\n" not in line
  assert len(line) < 1100
  return line


# One of each kind of fault: no number, none at all, too small, a container.
USUAL = (VALUES[0], None, -1, ["a", None])


@pytest.mark.parametrize(
  "value",
  [
    pytest.param(
      value,
      marks=() if value in USUAL else pytest.mark.thorough,
      id=repr(value)[:20],
    )
    for value in VALUES
  ],
)
def test_a_leaf_of_a_wrong_type_is_named(value):
  for name, leaf in LEAVES:
    line = refusal(changed(name, leaf, value))
    if line:
      assert line.startswith("config."), (name, leaf, line)
      assert leaf.rpartition(".")[2] in line, (name, leaf, line)


def test_a_misspelt_leaf_is_named():
  for name, leaf in LEAVES:
    if leaf in ("task", "model") or leaf.endswith(".name"):
      continue  # What is in them, or what they are, is missing then.
    *_, last = leaf.rpartition(".")
    wrong = f"{leaf}z"
    config = changed(name, wrong, 1)
    line = refusal(config)
    assert line.startswith(f"config.{wrong}: unknown; "), (name, line)
    assert last in line


def test_a_size_that_no_machine_holds_is_refused():
  """What a size is of; steps and counts that cost nothing are not here."""
  value = 10**18
  sizes = {
    "batch_size",
    *(f"model.{x}" for x in ("num_layers", "num_heads", "features")),
    *("model.mlp_features", "task.vocab_size", "task.length"),
    *(f"task.num_{x}" for x in ("keys", "values", "fillers", "tokens")),
    "task.max_length",
  }
  tried = set()
  for name, leaf in LEAVES:
    # Data are read before the model is made.
    if name in (*OF_DATA, "translation", "bahdanau"):
      continue
    if leaf in sizes:
      line = refusal(changed(name, leaf, value), create=True)
      assert line.startswith("config."), (name, leaf, line)
      tried.add(leaf)
    if leaf == "task.eval_lengths":
      line = refusal(changed(name, leaf, [value]), create=True)
      assert line.startswith("config.batch_size: "), (name, line)
  assert tried == sizes


@pytest.mark.parametrize(
  ("leaf", "value"),
  [
    ("num_steps", 2**31),
    ("eval_every", 10**18),
    ("redraw_every", 2**31),
    ("optimizer.warmup_steps", 2**31),
    ("seed", 2**31),
  ],
)
def test_a_count_that_the_state_cannot_hold_is_refused(leaf, value):
  line = refusal(changed("copy", leaf, value))
  assert line.startswith(f"config.{leaf}: expected ")


@pytest.mark.parametrize("path", ["os:getcwd", "os:name", "builtins:max"])
@pytest.mark.parametrize(
  "leaf",
  [
    *("model.kind", "model.activation", "model.position", "model.norm_kind"),
    *("model.decoder_attention", "optimizer.name", "task.name"),
  ],
)
def test_an_import_path_of_something_else_is_named(leaf, path):
  line = refusal(changed("copy", leaf, path), create=True)
  assert line.startswith(f"config.{leaf}"), line
