"""`swap.py` as a user meets it: rows, folders, restarts and faults."""

import csv
import json

import numpy as np
import pytest

import models
from projects.swap import scores, source, variant
from projects.swap.settings import Settings
from projects.swap.tests import swap_cases as cases
from tests import commands

ATTENTION = "window_linear:window=4,nystrom"


def swap(folder, *arguments, case="gpt2"):
  return commands.run(
    "swap.py",
    f"--weights={folder / case}",
    f"--text={folder / 'input.txt'}",
    "--context=20",
    "--batches=2",
    *arguments,
  )


def rows(out, name="results.csv"):
  with (out / name).open(encoding="utf-8") as file:
    return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A small GPT-2 with its tokenizer, and a text."""
  folder = tmp_path_factory.mktemp("swap")
  cases.settings("gpt2", folder)
  return folder


FLAGS = (
  f"--attention={ATTENTION}",
  "--keep=0,1",
  "--length=24",
  "--transfer_steps=20",
  "--finetune_steps=4",
  "--finetune_rate=0.01",
)


@pytest.fixture(scope="module")
def finished(place):
  """A swap that nothing interrupted."""
  out = place / "out"
  code, printed, error = swap(place, f"--workdir={out}", *FLAGS)
  assert (code, error) == (0, "")
  return out, printed


@pytest.mark.thorough
def test_a_row_for_each_model(finished):
  out, printed = finished
  found = rows(out)
  assert [(row["attention"], row["keep"]) for row in found] == [
    ("own", "0"),
    ("window_linear:window=4", "0"),
    ("window_linear:window=4", "1"),
    ("nystrom", ""),
  ]
  own, hybrid, kept, nystrom = found
  loss = float(own["loss"])
  # The outputs come nearer by the transfer.
  assert float(hybrid["error"]) > 0.05
  assert float(hybrid["transfer_error"]) < 0.9 * float(hybrid["error"])
  assert int(hybrid["trained"]) > 0
  # The layer that is kept is the one that costs most.
  of_layers = [
    float(row["loss"])
    for row in rows(out, "layers.csv")
    if row["attention"] == hybrid["attention"]
  ]
  assert len(of_layers) == 3
  assert int(kept["kept"]) == of_layers.index(max(of_layers))
  assert abs(float(kept["loss"]) - loss) < abs(float(hybrid["loss"]) - loss)
  assert hybrid["finetune_loss"] != kept["finetune_loss"]
  assert nystrom["status"] == "cannot serve"
  assert "cannot be causal" in nystrom["reason"]
  # Dense keeps all keys, the hybrid a window of them and a state.
  assert float(own["cache_token_bytes"]) == 3 * 2 * 24 * 4
  assert float(hybrid["cache_token_bytes"]) == 0
  assert float(own["long_step_seconds"]) > 0
  assert "nystrom: decoder_attention: nystrom cannot be causal" in printed
  assert str(out / "report.html") in printed


@pytest.mark.thorough
def test_the_folders_are_the_models_of_the_rows(finished, place):
  out, _ = finished
  asked = Settings(
    weights=str(place / "gpt2"),
    text=str(place / "input.txt"),
    context=20,
    batches=2,
  )
  model = source.read(asked)
  for row in rows(out)[1:3]:
    folder = out / "models" / row["folder"]
    p = models.load_pretrained(folder)
    found = scores.scored(model, p.model, p.variables)
    assert found["loss"] == pytest.approx(float(row["finetune_loss"]), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(row["finetune_accuracy"]))
    names = [one.name for one in p.model.config.layers("decoder_attention")]
    swapped = row["attention"].partition(":")[0]
    kept = [int(i) for i in row["kept"].split()]
    assert names == [
      "dense" if i in kept else swapped for i in range(len(names))
    ]
  code, line, _ = commands.run(
    "generate.py", f"--workdir={folder}", "--max_length=4", stdin="w1 w2\n"
  )
  assert code == 0
  assert line.startswith("w")


@pytest.mark.thorough
def test_the_page_names_every_mechanism_and_has_its_figures(finished):
  out, _ = finished
  page = (out / "report.html").read_text()
  for name in ("own", "window_linear:window=4", "nystrom"):
    assert name in page
  assert page.count("<figure>") == 3
  assert page.count("<svg") == 3 + 4 + 3
  text = (out / "report.md").read_text()
  assert "| `own`" in text
  assert {path.name for path in (out / "plots").iterdir()} == {
    f"{stem}.{kind}"
    for stem in ("quality-cost", "layers", "maps")
    for kind in ("png", "svg")
  }


@pytest.mark.thorough
def test_started_again_it_continues(finished, place):
  out, _ = finished
  records = out / "records"
  own = (records / "own.json").read_bytes()
  # As it is where the fine-tuning of the second model was stopped.
  path = records / "window_linear-window=4.json"
  record = json.loads(path.read_text())
  wanted = record["swaps"][1].pop("finetune_loss")
  path.write_text(json.dumps(record))
  more = f"{FLAGS[0]},flash,sliding_window:window=19"
  code, _, error = swap(place, f"--workdir={out}", more, *FLAGS[1:])
  assert (code, error) == (0, "")
  assert (records / "own.json").read_bytes() == own
  again = json.loads(path.read_text())
  assert again["swaps"][1]["finetune_loss"] == pytest.approx(wanted, rel=1e-6)
  assert again["step_seconds"] == record["step_seconds"]
  found = {(row["attention"], row["keep"]): row for row in rows(out)}
  # What is exact is equal, as is a window over the whole context.
  for name in ("flash", "sliding_window:window=19"):
    row = found[name, "0"]
    loss = float(found["own", "0"]["loss"])
    assert float(row["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(row["error"]) < 1e-5
    assert row["transfer_loss"] == ""


def test_a_small_swap_from_the_command_to_the_page(place, tmp_path):
  """Of a mechanism that is exact and one that cannot serve, trained a little."""
  out = tmp_path / "out"
  arguments = (f"--workdir={out}", "--attention=flash,nystrom", "--batches=1")
  code, _, error = swap(place, *arguments, "--finetune_steps=2")
  assert (code, error) == (0, "")
  own, flash, nystrom = rows(out)
  assert float(flash["loss"]) == pytest.approx(float(own["loss"]), rel=1e-5)
  assert float(flash["error"]) < 1e-5
  assert float(flash["finetune_loss"]) != float(flash["loss"])
  assert nystrom["status"] == "cannot serve"
  p = models.load_pretrained(out / "models" / flash["folder"])
  assert models.slots(p.model.config) == "flash + flash + flash"
  page = (out / "report.html").read_text()
  assert all(name in page for name in ("own", "flash", "nystrom"))
  # Another swap does not go into the same folder.
  code, _, error = swap(place, *arguments, "--finetune_steps=3")
  assert code == 2
  assert "--finetune_steps is 2 there and 3 here" in error
  assert error.count("\n") == 1


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--weights=/nowhere"], "--weights: /nowhere: no such folder"),
    (["--text=/nowhere.txt"], "--text: no such file: /nowhere.txt"),
    (["--text="], "--text: expected a text file"),
    (["--context=41"], "--context: expected at most the 40 tokens"),
    (["--attention=perfomer"], "did you mean 'performer'"),
    (["--attention=flash:blocks=3"], "--attention: flash:blocks=3: blocks"),
    (["--keep=4"], "--keep: expected at most the 3 layers"),
    (["--keep=first"], "--keep: expected numbers of layers"),
    (["--tokenizer=/nowhere"], "--tokenizer: no such file"),
    (["--batches=-1"], "--batches: expected at least 0"),
  ],
)
def test_a_fault_is_one_line_and_writes_nothing(place, arguments, message):
  out = place / "faulty"
  code, printed, error = swap(place, f"--workdir={out}", *arguments)
  assert (code, printed) == (2, "")
  assert error.count("\n") == 1
  assert message in error
  assert not out.exists()


def test_faults_of_the_folder_and_the_text(place, tmp_path):
  code, _, error = swap(place)
  assert code == 2
  assert "--workdir: missing" in error
  (tmp_path / "notes.txt").write_text("mine")
  code, _, error = swap(place, f"--workdir={tmp_path}")
  assert code == 2
  assert "holds other files and no swap" in error
  short = tmp_path / "short.txt"
  short.write_text("w1 w2 w3 w4 w5 w6")
  code, _, error = swap(place, f"--workdir={tmp_path}/out", f"--text={short}")
  assert code == 2
  assert "too few for --context=20" in error
  # A folder without a tokenizer, and one that knows more than the model.
  (place / "gpt2" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
  try:
    code, _, error = swap(place, f"--workdir={tmp_path}/out")
    assert code == 2
    assert "has no tokenizer.json" in error
    cases.write_tokenizer(tmp_path / "large.json", "gpt2", words=70)
    code, _, error = swap(
      place, f"--workdir={tmp_path}/out", f"--tokenizer={tmp_path}/large.json"
    )
    assert code == 2
    assert "more than the 61 of the model" in error
  finally:
    (tmp_path / "tokenizer.json").rename(place / "gpt2" / "tokenizer.json")


def test_a_model_that_predicts_no_tokens(tmp_path):
  asked = cases.settings("bert_masked", tmp_path)
  path = tmp_path / "bert_masked"
  (path / "config.json").write_text(
    (cases.FOLDERS["bert_classes"] / "config.json").read_text()
  )
  (path / "model.safetensors").write_bytes(
    (cases.FOLDERS["bert_classes"] / "model.safetensors").read_bytes()
  )
  with pytest.raises(ValueError, match="predicts no tokens"):
    source.read(asked)
  if "perceiver" not in cases.FOLDERS:
    pytest.skip("projects/perceiver is not here")
  perceiver = cases.FOLDERS["perceiver"]
  for file in ("config.json", "model.safetensors"):
    (path / file).write_bytes((perceiver / file).read_bytes())
  with pytest.raises(ValueError, match="kind 'perceiver'; expected a Transf"):
    source.read(asked)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["bert_masked", "t5"])
def test_encoders_and_both_stacks(case, tmp_path):
  from projects.swap import measure

  asked, model = cases.read(
    case, tmp_path, attention="flash,linformer,window_linear"
  )
  own = measure.own(model, asked)
  assert "cache_bytes" not in own
  sides = {place.side for place in model.places}
  assert sides == ({"encoder"} if case != "t5" else {"encoder", "decoder"})
  flash, linformer, hybrid = (
    measure.mechanism(model, choice, asked, tmp_path)
    for choice in asked.choices(model.context)
  )
  loss = own["swaps"][0]["loss"]
  assert flash["swaps"][0]["loss"] == pytest.approx(loss, rel=1e-5)
  assert flash["error"] < 1e-5
  assert len(flash["layers"]) == len(model.places)
  assert hybrid["status"] == "cannot serve"
  if case == "t5":
    assert "relative positions" in linformer["reason"]
  else:
    assert linformer["swaps"][0]["loss"] != loss
    assert np.isfinite(linformer["swaps"][0]["loss"])
    target = tmp_path / "kept"
    variant.save(model, model.model, model.variables, target)
    assert models.load_pretrained(target).architecture == "BertForMaskedLM"


_BYTES = 4
# Of a token: keys and values of the layers that keep them.
_OWN_CACHE = {"qwen3_next": 2 * (16 + 16) * _BYTES, "mamba2": 0}
_FLASH_CACHE = {
  "qwen3_next": 3 * 6 * (10 + 5) * _BYTES + _OWN_CACHE["qwen3_next"],
  "mamba2": 3 * 6 * (10 + 8) * _BYTES,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("case", "other"),
  [("qwen3_next", "kimi_delta"), ("mamba2", "gated_delta")],
)
def test_a_recurrence_is_replaced_at_the_sizes_of_its_layers(
  case, other, tmp_path
):
  """Errors, losses, transfer, cache, folders and fine-tuning, in every layer."""
  from projects.swap import finetune, measure

  asked, model = cases.read(
    case,
    tmp_path,
    attention=f"flash,{other},latent",
    batches=1,
    keep=(1,),
    transfer_steps=10,
    finetune_steps=2,
  )
  own = measure.own(model, asked)
  assert own["cache_token_bytes"] == _OWN_CACHE[case]
  flash, delta, latent = (
    measure.mechanism(model, choice, asked, tmp_path)
    for choice in asked.choices(model.context)
  )
  assert latent["status"] == "cannot serve"
  assert "makes keys and values of its own" in latent["reason"]
  assert flash["cache_token_bytes"] == _FLASH_CACHE[case]
  assert delta["cache_token_bytes"] == 0
  before, after = (
    np.square([layer[name] for layer in delta["layers"]]).sum()
    for name in ("error", "transfer_error")
  )
  assert after < before
  # Flash is exact: only what is recurrent loses by it.
  errors = [layer["error"] for layer in flash["layers"]]
  assert min(errors[:3]) > 0.1
  if case == "qwen3_next":
    assert errors[3] < 1e-5
  # Its variables have the names of those of the model's own mechanism, which
  # stay in the layer that is kept.
  for record, loss in ((flash, "loss"), (delta, "transfer_loss")):
    assert record["status"] == "done"
    for swap in record["swaps"]:
      folder = tmp_path / "models" / swap["folder"]
      p = models.load_pretrained(folder)
      found = scores.scored(model, p.model, p.variables)
      assert found["loss"] == pytest.approx(swap[loss], rel=1e-5)
      names = [one.name for one in p.model.config.layers("decoder_attention")]
      assert names.count(record["name"]) == len(names) - swap["keep"]
  trained = finetune.finetune(
    model, asked, tmp_path, flash["swaps"][0]["folder"]
  )
  assert np.isfinite(trained["finetune_loss"])


def test_what_a_model_without_keys_cannot_be_given_is_told(tmp_path):
  """A model that was swapped before, for a mechanism without keys."""
  from projects.swap import measure

  asked = cases.settings("gpt2", tmp_path, attention="flash")
  folder = tmp_path / "gpt2"
  models.save_pretrained(folder, models.load_pretrained(folder, "lsh"))
  model = source.read(asked)
  (choice,) = asked.choices(model.context)
  record = measure.mechanism(model, choice, asked, tmp_path)
  assert record["status"] == "cannot serve"
  assert record["reason"] == "the model has no keys of its own, only queries"


@pytest.mark.thorough
def test_the_characters_of_a_run_are_its_vocabulary(tmp_path):
  """A run of characters is swapped and decoded, on another text as well."""
  text = tmp_path / "input.txt"
  text.write_text("to be or not to be that is the question\n" * 30)
  run = tmp_path / "run"
  code, _, error = commands.run(
    "train.py",
    "--config=configs/text.py",
    f"--config.task.path={text}",
    "--config.task.context=16",
    "--config.task.eval_batches=1",
    "--config.num_steps=2",
    "--config.batch_size=8",
    "--config.model.num_layers=1",
    "--config.model.num_heads=2",
    "--config.model.features=16",
    "--config.model.mlp_features=16",
    f"--workdir={run}",
  )
  assert code == 0, error
  other = tmp_path / "other.txt"
  other.write_text("the beast in the house is not that\n" * 30)
  out = tmp_path / "out"
  code, _, error = commands.run(
    "swap.py",
    f"--weights={run}",
    f"--text={other}",
    "--attention=flash",
    "--batches=1",
    f"--workdir={out}",
  )
  assert (code, error) == (0, "")
  own, flash = rows(out)
  assert float(own["loss"]) == pytest.approx(float(flash["loss"]), rel=1e-5)
  code, line, _ = commands.run(
    "generate.py",
    f"--workdir={out / 'models' / 'flash'}",
    "--max_length=4",
    stdin="to be\n",
  )
  assert code == 0
  assert line
  other.write_text("THE BEAST\n" * 100)
  code, _, error = commands.run(
    "swap.py", f"--weights={run}", f"--text={other}", f"--workdir={out}2"
  )
  assert code == 2
  assert "the text has the character 'A'" in error
