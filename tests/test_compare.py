"""`compare.py`: what is planned, what is kept, what is told."""

import importlib
import itertools
import re

import pytest

from comparison import config as config_lib
from comparison import folder as folder_lib
from comparison import plan, records
from configs.compare import copy, mechanisms, objectives, translation
from settings.errors import ConfigError
from settings.field_values import put
from tests import commands
from tests.attention.forms import KINDS
from tests.comparison.plans import budgeted, comparison
from tests.refusals import assert_refused
from tests.tasks.text_cases import TEXT

_LISTS = {"decoder_attention": [["delta"], ["linear", "delta"]]}


def test_faults_are_told_before_anything_runs():
  def variant(place, **options):
    return (f"variants.v{place}", {"variants": {"v": options}})

  def of_task(place, **leaves):
    return (f"per_task.{place}", {"per_task": leaves})

  def halving(place, **leaves):
    return (f"halving.{place}", {"halving": leaves})

  def references(place, **found):
    return (f"references.{place}", {"references": found})

  two = {"batch_size": (8, 16)}
  assert_refused(
    lambda **changes: plan.plan(comparison(**changes)),
    *({"attention": x} for x in ("dnse", "lsh,lsh", "nosuch:x")),
    # No file of this name, and files that are none of a task.
    *({"tasks": x} for x in ("cpoy", "attentions", "compare/copy", "reformer")),
    *({"seeds": x} for x in ("1,x", "10000", "", "0,00")),
    {"num_stps": 3},
    ("modle.num_layers", {"modle": {"num_layers": 3}}),
    ("batch_size.x", {"batch_size": {"x": 3}}),
    references("txet", txet={"x": {"loss": 1.9}}),
    references("copy.x", copy={"x": 1.88}),
    references("copy.x.loss", copy={"x": {"loss": True}}),
    references("copy.GPT-2.5.loss", copy={"GPT-2.5": {"loss": ""}}),
    of_task("cpoy", cpoy={}),
    of_task("copy", copy=3),
    of_task("num_steps", num_steps=3),
    # A fault in the config of a run is named as it was typed.
    of_task("copy.num_stps", copy={"num_stps": 3}),
    # Dense attention cannot be trained either: no row of the comparison can.
    ("model", {"grid": {"model": {"num_layers": 10**9}}}),
    ("grid.num_steps", {"grid": {"num_steps": ""}}),
    ("grid.batch_size", {"grid": {"batch_size": "a,b"}}),
    halving("rungs", rungs="0.5,0.25"),
    halving("rungs[1]", rungs=(0.5, 1.0)),
    halving("rungs[0]", rungs="a"),
    halving("steps", steps=3),
    *(halving("seeds", seeds=x) for x in ("all", 0)),
    ("variants.dense", {"variants": {"dense": {}}}),
    *(variant(".name", name=x) for x in ("nosuch:x", "x")),
    variant(".rank", name="dense", rank=2),
    variant(".num_rounds", name="lsh", num_rounds=0),
    *(
      variant(".layers", name="delta", layers=x) for x in ("delta,flsh", "", 3)
    ),
    variant(".max_rate", name="delta", layers="flash", max_rate=2.0),
    ("across.seed", {"across": {"seed": (1, 2)}}),
    ("grid.model.decoder_attention", {"grid": {"model": _LISTS}}),
    ("across.num_steps", {"across": {"num_steps": ""}}),
    *({name: 3} for name in ("across", "grid")),
    *(
      ("across.batch_size", {"across": {"batch_size": x}})
      for x in ((8, 8), (8, "x"))
    ),
    ("across.batch_size", {"across": two, "grid": two}),
    {"budget_seconds": 0.0},
    *({"budget_flops": 1e9, **more} for more in ({}, {"budget_seconds": 1.0})),
    prefix="config.",
  )


@pytest.mark.parametrize(
  ("changes", "told"),
  [
    ({"attention": "dnse"}, "did you mean 'dense'"),
    ({"tasks": "cpoy"}, "no file configs/cpoy.py for 'cpoy'; did you"),
    ({"num_stps": 3}, "did you mean 'num_steps'?"),
  ],
)
def test_a_misspelt_word_is_told_what_was_meant(changes, told):
  with pytest.raises(ConfigError, match=re.escape(told)):
    plan.plan(comparison(**changes))


@pytest.mark.parametrize(
  "name",
  sorted(x.stem for x in (commands.ROOT / "configs/compare").glob("*.py")),
)
def test_every_comparison_names_leaves_that_its_tasks_have(name):
  """One config of each task can be made, at every point of the grid."""
  module = importlib.import_module(f"configs.compare.{name}")
  given = config_lib.parse(module.get_config())
  for task, across, point in itertools.product(
    given.task_names, given.across_points(), given.grid_points()
  ):
    leaves = given.fields(task) | across | point
    if leaves.get("task.path") == "":  # It is for the user to say.
      leaves["task.path"] = str(TEXT)
    # It refuses what the task, the model or the optimiser does not have.
    found = plan.config_of(task, plan.BASELINE, leaves)
    for leaf in {"num_steps", "batch_size"} & leaves.keys():
      assert getattr(found.train, leaf) == leaves[leaf]


def test_rows_of_the_translation_comparison_differ_in_the_encoder_alone():
  """Its file, as `plan` reads it, without the models."""
  mapping = translation.get_config().to_dict()
  mapping["task"]["path"] = "folder"
  given = config_lib.parse(mapping)
  leaves = given.fields("translation")
  assert len(given.mechanisms) == 6
  for name in given.mechanisms:
    found = plan.config_of("translation", name, leaves)
    slots = found.model.attentions
    names = [slots[f"{x}_attention"] for x in ("encoder", "decoder", "cross")]
    assert [one.name for [one] in names] == [name, "dense", "dense"]
    assert found.train.num_steps == 1000
    assert found.task.source == "files"


def test_every_mechanism_gets_the_parameters_of_dense():
  names = ",".join((*KINDS, "additive"))
  runs = plan.plan(comparison(attention=names, seeds="0,1"))
  dense = next(run for run in runs if run.attention == "dense")
  for run in runs:
    assert not run.obstacle
    # One unit of the feed-forward layers is the finest step there is.
    assert abs(run.parameters - dense.parameters) < 0.02 * dense.parameters
  additive = next(run for run in runs if run.attention == "additive")
  assert additive.unmatched_parameters > 1.1 * dense.parameters
  assert additive.fields["model.mlp_features"] < 512
  # Seeds come last, so that every mechanism has a result early.
  assert [run.seed for run in runs] == sorted(run.seed for run in runs)
  assert len({run.identity for run in runs}) == len(runs)
  [again, _] = plan.plan(comparison(attention="dense", seeds="0,1"))
  assert again.identity == dense.identity


def test_a_grid_is_every_combination_for_every_mechanism():
  grid = {"optimizer": {"learning_rate": "1e-3,3e-3"}, "batch_size": [8]}
  rows = {"attention": "dense,linear", "seeds": "0,1", "grid": grid}
  per_task = {"copy": {"num_steps": 7}}
  runs = plan.plan(comparison(**rows, per_task=per_task))
  assert len(runs) == 2 * 2 * 2
  assert len({run.identity for run in runs}) == 8
  assert len({run.family for run in runs}) == 4
  assert [run.grid for run in runs[:2]] == [
    {"optimizer.learning_rate": rate, "batch_size": 8} for rate in (1e-3, 3e-3)
  ]
  for run in runs:
    assert run.fields["num_steps"] == 7
    assert f"--config.batch_size={8}" in run.arguments


def test_a_variant_is_a_mechanism_with_options_of_its_own():
  variants = {"wide": {"name": "performer", "num_features": 4}}
  few = comparison(attention="performer,wide", variants=variants)
  performer, wide = plan.plan(few)
  assert wide.mechanism == performer.mechanism == "performer"
  options = {k: x for k, x in wide.fields.items() if "attention" in k}
  slots = ("encoder", "decoder", "cross")
  assert options == {f"model.{x}_attention.num_features": 4 for x in slots}
  assert not wide.obstacle
  assert "wide" in comparison(attention="all", variants=variants).mechanisms


def test_objectives_say_which_mechanism_cannot(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text(TEXT, encoding="utf-8")
  leaves = {"task": {"path": str(path), "context": 16, "vocab_size": 300}}
  leaves["attention"] = "dense,performer"
  runs = plan.plan(config_lib.parse(objectives.get_config().to_dict() | leaves))
  obstacles = {(run.task, run.attention): run.obstacle for run in runs}
  assert len(obstacles) == 6
  (told,) = (obstacle for obstacle in obstacles.values() if obstacle)
  assert obstacles["t5", "performer"] == told
  assert "performer cannot carry relative positions" in told


def test_a_task_may_lie_in_a_folder_of_configs():
  (run,) = plan.plan(comparison(tasks="paper/duplicate", attention="lsh"))
  assert run.arguments[0] == "--config=configs/paper/duplicate.py:lsh"
  assert "/" not in run.identity


def test_a_budget_of_operations_buys_fewer_steps_of_a_dearer_mechanism():
  runs = plan.plan(budgeted(attention="dense,performer", budget_flops=1e12))
  dense, performer = (run.fields["num_steps"] for run in runs)
  assert 1 < performer < dense


def test_a_folder_of_something_else_is_refused(tmp_path):
  (tmp_path / "letter.txt").write_text("")
  with pytest.raises(ConfigError, match="holds other files"):
    records.claim(tmp_path, {"tasks": "copy"})
  folder = tmp_path / "comparison"
  records.claim(folder, {"tasks": "copy", "num_steps": 3})
  records.claim(folder, {"tasks": "copy", "num_steps": 3})
  with pytest.raises(ConfigError, match=r"config\.num_steps is 3 there and 4"):
    records.claim(folder, {"tasks": "copy", "num_steps": 4})
  (folder / records.COMPARISON).write_text("{")
  with pytest.raises(ConfigError, match="is damaged; choose a new folder"):
    records.check(folder, {"tasks": "copy"})


_COPY = "--config=configs/compare/copy.py"


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((), "--config: missing; for example --config=configs/compare/copy.py"),
    (("report",), "--workdir: missing"),
    (("reprt",), "reprt: expected report, status, measure, pack or flags only"),
    (("--shard=3/2",), "--shard: expected i/n"),
    (("--config=configs/copy.py",), "config.tasks: missing"),
    (("report", "--workdir=nosuch"), "--workdir: no comparison in nosuch"),
    ((_COPY, "--workdir=nosuch", "--config.modl=3"), "config.modl: unknown"),
    ((_COPY, "--records=a.xz"), "--records: expected only with `report`"),
    (("status", "--workdir=nosuch", "--shard=1/2"), "--shard: not supported"),
    (("status", "--records=a"), "--records: expected only with `report` or"),
    (
      ("report", "--config=configs/compare/copy.py", "--config.seeds=1"),
      "--config: not supported by `report`",
    ),
    # What was typed is told from what the file has.
    (
      (_COPY, "--config.grid.model.features=1,2", "--config.model.features=4"),
      "config.model.features: config.grid.model.features sets it",
    ),
  ],
)
def test_wrong_arguments_are_one_line(arguments, message):
  told = commands.fault(commands.run("compare.py", *arguments))
  assert told.startswith(message)
  assert not (commands.ROOT / "nosuch").exists()


def test_the_whole_command_from_training_to_the_page(tmp_path):
  # Linear attention by another name, so that a name with a colon is taken
  # through every file of a comparison.
  (tmp_path / "their_module.py").write_text(
    "from attention import Attention, linear\n\n\n"
    "def state() -> Attention:\n  return linear()\n"
  )
  folder = tmp_path / "comparison"
  sizes = {"num_layers": 1, "features": 16, "mlp_features": 32}
  code, out, error = commands.run(
    "compare.py",
    _COPY,
    f"--workdir={folder}",
    "--config.attention=their_module:state,nystrom",
    *commands.flags({"tasks": "duplicate", "seeds": 0, "model": sizes}),
    *commands.flags({"num_steps": 4, "eval_every": 2, "batch_size": 8}),
    *commands.flags({"task": {"max_length": 3, "eval_size": 12}}),
    variables={"PYTHONPATH": str(tmp_path)},
  )
  assert code == 0, error
  assert "not supported: " in out
  found, _ = records.read(folder)
  done = next(r for r in found if r["status"] == records.DONE)
  measured = done["measured"]
  assert measured["notes"] == {}
  # Without a GPU there is no device that tells its own peak.
  missing = {name for name, value in measured.items() if value is None}
  assert missing == {"device_peak_bytes"}
  assert 0.0 < measured["approximation_error"] < 10.0
  assert measured["train_flops"] > 2 * measured["forward_flops"]
  # 8 positions: a causal state of H × (H + 1) a head and layer, no key.
  heads, width = 4, 4
  assert measured["cache_bytes"] == 4 * heads * width * (width + 1)
  shown = measured["map"]
  assert len(shown["weights"]) == heads
  assert len(shown["weights"][0]) == len(shown["query_labels"])
  for name in ("report.html", "report.md", "results.csv", "results.jsonl"):
    assert "their_module:state" in (folder / name).read_text()
  assert r"their\_module:state" in (folder / "report.tex").read_text()
  assert not list(folder.rglob("*:*"))
  assert "--config.num_steps=4" in done["arguments"]


def test_a_leaf_typed_for_all_runs_wins_over_those_of_a_task():
  """As `compare.py --config=configs/compare/mechanisms.py --config.num_steps=9`."""
  mapping = mechanisms.get_config().to_dict()
  mapping["num_steps"] = 9
  given = config_lib.parse(mapping, ["num_steps"])
  for task in given.task_names:
    assert given.fields(task)["num_steps"] == 9
    assert given.fields(task)["eval_every"] in (100, 200)  # Of the file.
  assert folder_lib.shared(given)["num_steps"] == 9
  mapping["per_task"]["copy"]["num_steps"] = 4
  given = config_lib.parse(mapping, ["num_steps", "per_task.copy.num_steps"])
  steps = [given.fields(task)["num_steps"] for task in given.task_names]
  assert steps == [4, 9, 9]
  # Without a command line, what the file has for a task is for that task.
  assert config_lib.parse(mapping).fields("recall")["num_steps"] == 1200


def test_a_typed_budget_wins_over_the_steps_of_a_file():
  mapping = mechanisms.get_config().to_dict() | {"num_steps": 7}
  given = config_lib.parse(
    mapping | {"budget_seconds": 9.0}, ["budget_seconds"]
  )
  for task in given.task_names:
    assert "num_steps" not in given.fields(task)
    assert given.fields(task)["eval_every"] in (100, 200)
  for typed in (["budget_seconds", "num_steps"], []):
    with pytest.raises(ConfigError, match="no num_steps with it"):
      config_lib.parse(mapping | {"budget_seconds": 9.0}, typed)


def test_without_feed_forward_layers_nothing_is_matched():
  """One unit would be a layer that dense attention does not have."""
  bare = comparison(attention="dense,delta", **{"model.mlp_features": 0})
  for run in plan.plan(bare):
    assert run.feed_forward == run.dense_feed_forward == 0
    assert run.parameters == run.unmatched_parameters


@pytest.mark.parametrize("field", ["grid", "across"])
@pytest.mark.parametrize("place", ["", "per_task.copy."])
def test_a_typed_leaf_that_every_row_sets_is_refused(field, place):
  mapping = copy.get_config().to_dict()
  mapping[field] = {"model": {"features": (16, 32)}}
  name = f"{place}model.features"
  put(mapping, name, 64)
  told = rf"^config\.{name}: config\.{field}\.model\.features sets it in every"
  with pytest.raises(ConfigError, match=told):
    config_lib.parse(mapping, [name])
  # A file may have a leaf for a reader who leaves the grid empty.
  config_lib.parse(mapping)


def test_a_section_of_a_task_that_is_left_out_may_stay():
  leaves = {"recall": {"num_steps": 3}}
  left_out = config_lib.parse({"tasks": "copy", "per_task": leaves})
  assert left_out.fields("copy") == {}
