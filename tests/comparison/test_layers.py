"""Mechanisms with options, layers that take several in turn, rows that cannot run."""

import types

import pytest

from comparison import layers, plan, records
from comparison import run as run_lib
from models import AttentionConfig, ModelConfig
from settings.errors import ConfigError, RunError
from tests.comparison.plans import comparison

SLOT = "--config.model.decoder_attention"
LAYERS = {"layers": "sliding_window:window=4,delta"}


def planned(**changes):
  sizes = {"model.num_layers": 2, "model.mlp_features": 32}
  return plan.plan(comparison(**{"tasks": "recall", **sizes, **changes}))


def of_slots(run):
  return [x for x in run.arguments if x.startswith(SLOT)]


def test_options_behind_a_name_are_those_of_a_variant():
  name = "attention.performer:performer"
  variants = {"wide": {"name": name, "num_features": 8, "kernel": "relu"}}
  typed = f"{name}:num_features=8:kernel=relu"
  *runs, window = planned(
    attention=f"wide,{typed},sliding_window:window=(4, 0)", variants=variants
  )
  for run in runs:
    assert run.mechanism == name
    assert run.options == "num_features=8:kernel=relu"
    typed_options = ["num_features=8", "kernel=relu"]
    assert of_slots(run) == [f"{SLOT}.{x}" for x in typed_options]
  assert runs[0].fields == runs[1].fields
  # Those that are not set, too.
  assert window.options == (
    "window=(4, 0):dilation=1:block_size=None:implementation=None:sinks=False:"
    "logits_soft_cap=None:forget=False"
  )
  alone = planned(attention=f"sliding_window:{window.options}")
  assert alone[0].options == window.options
  assert not set(window.identity) & set("/:")


@pytest.mark.parametrize(
  ("task", "layers", "words"),
  [
    ("recall", "sliding_window,delta", "sliding_window:window=8,delta"),
    (
      "recall",
      "sliding_window:window=4, delta",
      "sliding_window:window=4,delta",
    ),
    ("paper/recall", "sliding_window,delta", "sliding_window:window=64,delta"),
    (
      *("recall", "attention.performer:performer,lsh:num_rounds=3"),
      "attention.performer:performer:num_features=128,"
      "lsh:chunk_size=8:num_rounds=3",
    ),
  ],
)
def test_layers_have_the_sizes_that_a_row_of_each_has(task, layers, words):
  """As the file of the task has them."""
  both = {"both": {"layers": layers}}
  [run] = planned(tasks=task, attention="both", variants=both)
  assert of_slots(run) == [f"{SLOT}=[{words}]"]
  # The command that is shown makes the same model.
  config = plan.config_of(task, run.mechanism, run.fields)
  chosen = config.model.attentions["decoder_attention"]
  assert plan.config_of(task, layers, run.fields).model == config.model
  for layer in chosen:
    [alone] = plan.config_of(task, layer.name, {}).model.layers(
      "decoder_attention"
    )[:1]
    assert layer.options.keys() >= alone.options.keys()


def test_a_name_beside_layers_changes_no_run():
  """Folders that were made when it was needed go on."""
  layers = {"layers": "gated_delta,dense"}
  (old,), (new,) = (
    planned(attention="a", variants={"a": one | layers})
    for one in ({"name": "gated_delta"}, {})
  )
  assert old == new
  # What the digest of such a folder was made of.
  assert new.mechanism == "gated_delta"
  words = "[gated_delta,dense]"
  assert new.fields["model.decoder_attention"] == words


def test_a_slot_that_cannot_have_all_layers_is_dense():
  [run] = planned(tasks="copy", attention="both", variants={"both": LAYERS})
  assert run.slots == "dense · sliding_window + delta · dense"
  window, delta = run.options.split(",")
  assert window.startswith("sliding_window:window=4:dilation=1:block_size=None")
  assert delta.startswith("delta:max_rate=1.0:")


def test_lists_in_across_stay_lists():
  lists = [["delta"], ["sliding_window", "delta"]]
  across = {"model": {"decoder_attention": lists}}
  dense, *runs = planned(attention="dense") + planned(
    attention="dense", across=across
  )
  words = ["[delta]", "[sliding_window:window=8,delta]"]
  assert [of_slots(run) for run in runs] == [[f"{SLOT}={x}"] for x in words]
  assert [run.row for run in runs] == [
    f"recall, dense, decoder_attention={x}" for x in words
  ]
  assert [run.slots for run in runs] == ["delta", "sliding_window + delta"]
  for run in runs:
    assert run.dense_parameters == dense.parameters
    assert abs(run.parameters - dense.parameters) < 0.01 * dense.parameters
  # Every row would be the same, whatever its name.
  linear = planned(attention="linear", across=across)[0]
  assert "expected config.attention=dense" in linear.obstacle
  sizes = {"task": {"eval_lengths": ((128, 256), (512,))}}
  runs = planned(attention="dense", across=sizes)
  assert [r.across["task.eval_lengths"] for r in runs] == [(128, 256), (512,)]


def test_a_row_of_dense_does_not_keep_other_mechanisms_of_weights():
  """Plain 'dense' would be the windows of a Mistral."""
  window = AttentionConfig("sliding_window", {"window": (4, 0)})
  model = ModelConfig(
    kind="decoder",
    num_layers=2,
    num_heads=2,
    features=8,
    mlp_features=8,
    decoder_attention=(AttentionConfig("dense"), window),
  )
  published = types.SimpleNamespace(weights="folder", model=model)
  check = layers.check_mechanism_is_used
  with pytest.raises(
    ConfigError, match=r"weights, dense \+ sliding_window; exp"
  ):
    check("dense", {}, published)
  check("flash", {}, published)
  check("dense", {"model.decoder_attention": "dense"}, published)
  check("dense", {}, types.SimpleNamespace(weights="", model=model))


@pytest.mark.parametrize(
  ("changes", "told"),
  [
    ({"attention": "sliding_window:windw=8"}, "attention: .*: windw"),
    ({"attention": "sliding_widow:window=8"}, "attention: unknown 'sliding_w"),
    ({"attention": "no.module:f:x=1"}, "attention: no module named 'no'"),
    ({"attention": "lsh:num_rounds=2:x"}, "attention: expected name:option="),
    ({"variants": {"v": {"layers": "lsh:num_rounds=0"}}}, "variants.v.layers"),
    ({"variants": {"v": "delta,flash"}}, "variants.v: expected {'layers': "),
    (
      {"across": {"model": {"decoder_attention": [["dleta", "delta"]]}}},
      "across.model.decoder_attention: unknown 'dleta'",
    ),
  ],
)
def test_faults_are_one_line(changes, told):
  with pytest.raises(ConfigError, match=rf"^config\.{told}"):
    planned(**changes)


def test_rows_that_cannot_run_are_told_first(folder, trainer, capsys):
  given = {"attention": "dense,linformer,delta,bigbird", "tasks": "recall"}
  run_lib.run(comparison(**given), folder)
  first, second, last, *_ = capsys.readouterr().out.splitlines()
  told = "not supported: config.model.decoder_attention: {} cannot be causal; "
  assert first.startswith(f"recall, linformer: {told.format('linformer')}")
  assert second.startswith(f"recall, bigbird: {told.format('bigbird')}")
  assert last == (
    "2 of 4 rows cannot run; without them: --config.attention=dense,delta"
  )
  statuses = sorted(record["status"] for record in records.read(folder)[0])
  assert statuses == [records.DONE] * 2 + [records.UNSUPPORTED] * 2


def test_a_comparison_that_trains_nothing_is_a_fault(folder, trainer, tmp_path):
  none = comparison(tasks="recall", attention="linformer")
  with pytest.raises(RunError, match="nothing can be trained"):
    run_lib.run(none, tmp_path / "none")
  assert not (tmp_path / "none").exists()

  def fail(run, step):
    raise OSError("no disk")

  some = comparison(tasks="recall", attention="dense,linformer")
  loss, trainer.loss = trainer.loss, fail
  run_lib.run(some, folder)
  with pytest.raises(RunError, match="nothing was trained: every run failed"):
    run_lib.check_trained(folder)
  trainer.loss = loss
  run_lib.run(some, folder)
  run_lib.check_trained(folder)
