"""`swap.py` as a user meets it: rows, folders, restarts and faults."""

import csv
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from projects.swap import (
  finetune,
  measure,
  records,
  scores,
  source,
  transfer,
  variant,
)
from projects.swap.settings import Settings
from projects.swap.tests import swap_cases as cases
from settings.errors import ConfigError, RunError
from tests import commands
from training import experiment_config, workdir

HYBRID = "window_linear:window=4"
FLAGS = ("--keep=1", "--transfer_steps=10")
FLAGS += ("--finetune_steps=2", "--finetune_rate=0.01")


def swap(folder, *arguments):
  read = (f"--weights={folder / 'gpt2'}", f"--text={folder / 'input.txt'}")
  sizes = ("--context=20", "--batches=1")
  return commands.run("swap.py", *read, *sizes, *arguments)


def rows(out, name="results.csv"):
  with (out / name).open(encoding="utf-8") as file:
    return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A small GPT-2 with its tokenizer, and a text."""
  folder = tmp_path_factory.mktemp("swap")
  cases.settings("gpt2", folder)
  return folder


@pytest.fixture(scope="module")
def finished(place):
  """A swap that nothing interrupted: of one that serves, and one that cannot."""
  out = place / "out"
  attention = f"--attention={HYBRID},nystrom"
  code, printed, error = swap(place, f"--workdir={out}", attention, *FLAGS)
  assert (code, error) == (0, "")
  return out, printed


def test_a_row_for_each_model(finished):
  out, printed = finished
  own, hybrid, nystrom = rows(out)
  assert [own["attention"], hybrid["attention"]] == ["own", HYBRID]
  # The outputs come nearer by the transfer.
  assert float(hybrid["error"]) > 0.05
  assert float(hybrid["transfer_error"]) < 0.95 * float(hybrid["error"])
  assert float(hybrid["trained"]) > 0
  # The layer that is kept is the one that costs most.
  layers = [float(row["loss"]) for row in rows(out, "layers.csv")]
  assert len(layers) == 2
  assert int(hybrid["kept"]) == layers.index(max(layers))
  assert float(hybrid["loss"]) == pytest.approx(min(layers), rel=1e-6)
  assert hybrid["finetune_loss"] != hybrid["transfer_loss"]
  # All of them, as they are typed.
  assert hybrid["options"] == HYBRID.partition(":")[2]
  assert nystrom["options"].startswith("num_landmarks=")
  assert (nystrom["status"], nystrom["keep"]) == ("cannot serve", "")
  assert "cannot be causal" in nystrom["reason"]
  # Dense keeps all keys, the hybrid a window of them and a state.
  assert float(own["cache_token_bytes"]) == 2 * 2 * 24 * 4
  assert float(hybrid["cache_token_bytes"]) == 0
  assert "nystrom: decoder_attention: nystrom cannot be causal" in printed
  assert str(out / "report.html") in printed


def test_the_folder_is_the_model_of_the_row(finished, place):
  out, _ = finished
  _, row, _ = rows(out)
  model = source.read(cases.settings("gpt2", place, batches=1))
  p = models.load_pretrained(out / "models" / row["folder"])
  found = scores.score(model, p.model, p.variables)
  assert found["loss"] == pytest.approx(float(row["finetune_loss"]), rel=1e-5)
  assert found["accuracy"] == pytest.approx(float(row["finetune_accuracy"]))
  names = [one.name for one in p.model.config.layers("decoder_attention")]
  kept = int(row["kept"])
  assert (names[kept], names[1 - kept]) == ("dense", "window_linear")


def test_the_page_names_every_mechanism_and_has_its_figures(finished):
  out, _ = finished
  page = (out / "report.html").read_text()
  assert all(name in page for name in ("own", HYBRID, "nystrom"))
  assert page.count("<figure") == 3
  assert HYBRID in (out / "report.md").read_text()
  stems, kinds = ("quality-cost", "layers", "maps"), ("png", "svg")
  pictures = {f"{stem}.{kind}" for stem in stems for kind in kinds}
  assert {path.name for path in (out / "plots").iterdir()} == pictures


def test_a_fine_tuning_that_fails_is_a_note(monkeypatch, tmp_path):
  results = [RunError("step 3: loss is not finite"), None, {"finetune_loss": 2}]

  def finetune_next(*unused):
    result = results.pop(0)
    if isinstance(result, Exception):
      raise result
    return result

  monkeypatch.setattr(finetune, "finetune", finetune_next)
  row = {"folder": "delta", "kept": [1], "loss": 4.0}
  record = {"swaps": [row], "notes": {"long_step_seconds": "too long"}}

  def add():
    return finetune.add(record, None, None, None, tmp_path, row)

  assert add()
  assert (
    record["notes"].pop("finetune of delta") == "step 3: loss is not finite"
  )
  assert not add()  # A signal stopped it.
  assert "finetune_loss" not in row
  assert add()
  assert row["finetune_loss"] == 2
  assert record["notes"] == {"long_step_seconds": "too long"}


@pytest.mark.thorough
def test_a_transfer_that_diverges_is_not_used(place, tmp_path, monkeypatch):
  def diverge(model, variables, attention, mechanisms, *batches, **options):
    return jax.tree.map(lambda leaf: leaf * np.nan, mechanisms)

  monkeypatch.setattr(transfer, "fit", diverge)
  asked = cases.settings("gpt2", place, transfer_steps=1, attention=HYBRID)
  model, (choice,) = source.read(asked), asked.choices(20)
  record = measure.mechanism(model, choice, asked, tmp_path)
  assert record["notes"]["transfer"].startswith("diverged")
  (row,) = record["swaps"]
  assert "transfer_loss" not in row
  p = models.load_pretrained(tmp_path / "models" / row["folder"])
  found = scores.score(model, p.model, p.variables)
  assert found["loss"] == pytest.approx(row["loss"], rel=1e-5)


@pytest.mark.thorough
def test_started_again_it_continues(finished, place):
  out, _ = finished
  own = (out / "records" / "own.json").read_bytes()
  # As it is where the fine-tuning was stopped.
  record = records.read(out, HYBRID)
  wanted = record["swaps"][0].pop("finetune_loss")
  records.write(out, record)
  more = f"--attention={HYBRID},flash"
  code, _, error = swap(place, f"--workdir={out}", more, *FLAGS)
  assert (code, error) == (0, "")
  assert (out / "records" / "own.json").read_bytes() == own
  again = records.read(out, HYBRID)
  assert again["swaps"][0]["finetune_loss"] == pytest.approx(wanted, rel=1e-6)
  assert again["step_seconds"] == record["step_seconds"]
  # What is exact is equal, and has nothing to be fitted.
  found = {row["attention"]: row for row in rows(out)}
  loss = pytest.approx(float(found["own"]["loss"]), rel=1e-5)
  assert float(found["flash"]["loss"]) == loss
  assert float(found["flash"]["error"]) < 1e-5
  assert found["flash"]["transfer_loss"] == ""


def test_a_fault_is_one_line_and_writes_nothing(finished, place, tmp_path):
  """Of flags, of a choice, and of folders that hold something else."""
  (tmp_path / "notes.txt").write_text("mine")
  out = f"--workdir={tmp_path / 'out'}"
  for arguments, message in (
    ((out, "--batches=-1"), "--batches: expected at least 0"),
    ((out, "--text="), "--text: expected a text file"),
    ((out, "--keep=first"), "--keep: expected numbers of layers"),
    ((out, "--attention=flash:blocks=3"), "--attention: flash:blocks=3: blo"),
    ((), "--workdir: missing"),
    ((out, "--finetune_rate=0.1"), "--finetune_rate: needs --finetune_steps"),
    ((f"--workdir={tmp_path}",), "holds other files and no swap"),
    (
      (f"--workdir={finished[0]}", *FLAGS, "--finetune_steps=3"),
      "--finetune_steps is 2 there and 3 here",
    ),
  ):
    found = swap(place, *arguments)
    assert message in commands.fault(found)
    assert not found[1]
  assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
  ("name", "told"),
  [
    ("input.txt", "input.txt"),
    ("gpt2/tokenizer.json", "gpt2/tokenizer.json"),
    ("gpt2/model.safetensors", "--weights"),
  ],
)
def test_data_that_were_replaced_are_told(tmp_path, name, told):
  asked, model = cases.read("gpt2", tmp_path)
  out = tmp_path / "out"
  for data in (model.data, source.read(asked).data):
    with records.lock(out, asked, data):
      pass
  file = tmp_path / name
  if name == "input.txt":
    file.write_text(file.read_text()[::-1].replace("w", " w"))
  elif name.endswith(".json"):
    cases.write_tokenizer(file, "gpt2", words=29)
  else:
    tensors = load_file(file)
    first = sorted(tensors)[0]
    save_file(tensors | {first: -tensors[first]}, file)
  other = records.lock(out, asked, source.read(asked).data)
  message = f"a swap of other data: .*{told} is not"
  with pytest.raises(ValueError, match=message), other:
    pass


@pytest.mark.parametrize(
  ("case", "options", "message"),
  [
    ("gpt2", {"weights": "/nowhere"}, "--weights: /nowhere: no such folder"),
    ("gpt2", {"text": "/none.txt"}, "--text: no such file: /none.txt"),
    ("gpt2", {"text": "short.txt"}, "too few for --context=20"),
    ("gpt2", {"context": 41}, "--context: expected at most the 40 tokens"),
    ("gpt2", {"keep": (4,)}, "--keep: expected at most the 2 layers"),
    ("gpt2", {"batch_size": 9}, "--batch_size: expected a multiple of the"),
    ("gpt2", {"tokenizer": "/nowhere"}, "--tokenizer: no such file"),
    ("gpt2", {"tokenizer": "large.json"}, "more than the 61 of the model"),
    ("bert_classes", {}, "predicts no tokens"),
    ("perceiver", {}, "kind 'perceiver'; expected a Transf"),
    ("llama", {}, "has no tokenizer.json"),
  ],
)
def test_models_and_texts_that_are_refused(case, options, message, tmp_path):
  if case not in cases.FOLDERS:
    pytest.skip(f"the project of {case} is not here")
  cases.write_text(tmp_path / "input.txt")
  (tmp_path / "short.txt").write_text("w1 w2 w3 w4 w5 w6")
  cases.write_tokenizer(tmp_path / "large.json", "gpt2", words=70)
  if case == "gpt2":
    cases.write_folder(case, tmp_path / case)
  else:
    shutil.copytree(cases.FOLDERS[case], tmp_path / case)
  options = {"weights": case, "text": "input.txt", "context": 20, **options}
  for name in {"weights", "text", "tokenizer"} & options.keys():
    options[name] = str(tmp_path / options[name])
  with pytest.raises(ValueError, match=message) as info:
    source.read(Settings(**options))
  assert "\n" not in str(info.value)


def test_what_a_model_without_keys_cannot_be_given_is_told(tmp_path):
  """A model that was swapped before, for a mechanism without keys."""
  asked = cases.settings("gpt2", tmp_path, attention="flash")
  folder = tmp_path / "gpt2"
  models.save_pretrained(folder, models.load_pretrained(folder, "lsh"))
  model = source.read(asked)
  (choice,) = asked.choices(model.context)
  record = measure.mechanism(model, choice, asked, tmp_path)
  assert record["status"] == "cannot serve"
  assert record["reason"] == "the model has no keys of its own, only queries"


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["bert_masked", "t5"])
def test_encoders_and_both_stacks(case, tmp_path):
  asked, model = cases.read(
    case, tmp_path, attention="flash,linformer,window_linear", keep=(0, 1)
  )
  own = measure.original_row(model, asked)
  assert "cache_bytes" not in own
  sides = {module.side for module in model.modules}
  assert sides == ({"encoder"} if case != "t5" else {"encoder", "decoder"})
  flash, linformer, hybrid = (
    measure.mechanism(model, choice, asked, tmp_path)
    for choice in asked.choices(model.context)
  )
  loss = own["swaps"][0]["loss"]
  assert flash["swaps"][0]["loss"] == pytest.approx(loss, rel=1e-5)
  assert flash["error"] < 1e-5
  assert len(flash["layers"]) == len(model.modules)
  assert hybrid["status"] == "cannot serve"
  if case == "t5":
    assert "relative positions" in linformer["reason"]
    return
  whole, kept = (swap["loss"] for swap in linformer["swaps"])
  assert np.isfinite(whole)
  assert len({loss, whole, kept}) == 3
  target = tmp_path / "kept"
  variant.save(model, model.model, model.variables, target)
  assert models.load_pretrained(target).architecture == "BertForMaskedLM"


# Of a token: keys and values of the layers that keep them.
_OWN_CACHE = {"qwen3_next": 2 * (16 + 16) * 4, "mamba2": 0}
_FLASH_CACHE = {
  "qwen3_next": 3 * 6 * (10 + 5) * 4 + _OWN_CACHE["qwen3_next"],
  "mamba2": 3 * 6 * (10 + 8) * 4,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
  ("case", "other"), [("qwen3_next", "kimi_delta"), ("mamba2", "gated_delta")]
)
def test_a_recurrence_is_replaced_at_the_sizes_of_its_layers(
  case, other, tmp_path
):
  """Errors, losses, transfer, cache, folders and fine-tuning, in every layer."""
  options = {"attention": f"flash,{other},latent", "keep": (1,), "length": 24}
  options |= {"batches": 1, "transfer_steps": 10, "finetune_steps": 2}
  asked, model = cases.read(case, tmp_path, **options)
  own = measure.original_row(model, asked)
  assert own["cache_token_bytes"] == _OWN_CACHE[case]
  assert own["long_step_seconds"] > 0
  choices = asked.choices(model.context)
  flash, delta, latent = (
    measure.mechanism(model, choice, asked, tmp_path) for choice in choices
  )
  assert latent["status"] == "cannot serve"
  assert "computes its own keys and values" in latent["reason"]
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
    (swap,) = record["swaps"]
    p = models.load_pretrained(tmp_path / "models" / swap["folder"])
    found = scores.score(model, p.model, p.variables)
    assert found["loss"] == pytest.approx(swap[loss], rel=1e-5)
    names = [one.name for one in p.model.config.layers("decoder_attention")]
    assert names.count(record["name"]) == len(names) - 1
  (swap,) = flash["swaps"]
  places = (asked, tmp_path, swap["folder"])
  trained = finetune.finetune(model, choices[0], swap["kept"], *places)
  assert np.isfinite(trained["finetune_loss"])


def test_one_process_writes_in_a_folder(place, tmp_path):
  """Another waits for it, or chooses another folder."""
  asked = cases.settings("gpt2", place)

  def claim(settings):
    with records.lock(tmp_path, settings, {}):
      return [path.name for path in tmp_path.iterdir()]

  busy = pytest.raises(RunError, match="another process writes in")
  with records.lock(tmp_path, asked, {}), busy:
    claim(asked)
  other = cases.settings("gpt2", place, seed=1)
  with pytest.raises(ConfigError, match="holds another swap: --seed"):
    claim(other)
  assert sorted(claim(asked)) == ["models", "records", "swap.json"]


def test_a_mechanism_that_was_typed_by_its_path(tmp_path, monkeypatch):
  """It is trained from its folder, which is data and does not import it."""
  (tmp_path / "their_swap.py").write_text(
    "from attention import Attention, linear\n\n\n"
    "def mine(feature_map='elu') -> Attention:\n"
    "  return linear(feature_map=feature_map)\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  typed = "their_swap:mine:feature_map=hedgehog"
  options = {"attention": typed, "keep": (1,), "finetune_steps": 1}
  asked, model = cases.read("gpt2", tmp_path, **options)
  [choice] = asked.choices(model.context)
  record = measure.mechanism(model, choice, asked, tmp_path)
  (swap,) = record["swaps"]
  folder = tmp_path / "models" / swap["folder"]
  with pytest.raises(ValueError, match="folder of weights may not have"):
    models.load_pretrained(folder)
  places = (asked, tmp_path, swap["folder"])
  trained = finetune.finetune(model, choice, swap["kept"], *places)
  run = tmp_path / "finetune" / swap["folder"]
  config = experiment_config.parse(workdir.read_config(run), restore=True)
  names = [one.name for one in config.model.layers("decoder_attention")]
  assert names.count("their_swap:mine") == len(names) - 1
  assert names[swap["kept"][0]] == "dense"
  own = {"name": "their_swap:mine", "feature_map": "hedgehog"}
  layers = ["dense" if i in swap["kept"] else own for i in range(len(names))]
  p = models.load_pretrained(folder, attention=layers)
  found = scores.score(model, p.model, p.variables)
  assert found["loss"] == pytest.approx(trained["finetune_loss"], rel=1e-5)


@pytest.mark.thorough
def test_the_characters_of_a_run_are_its_vocabulary(tmp_path):
  """A run of characters is swapped and decoded, on another text as well."""
  text, other = tmp_path / "input.txt", tmp_path / "other.txt"
  text.write_text("to be or not to be that is the question\n" * 30)
  other.write_text("the beast in the house is not that\n" * 30)
  run, out = tmp_path / "run", tmp_path / "out"
  sizes = {"num_layers": 1, "num_heads": 2, "features": 16, "mlp_features": 16}
  task = {"path": str(text), "context": 16, "eval_batches": 1}
  leaves = {"task": task, "model": sizes, "num_steps": 2, "batch_size": 8}
  commands.trained(run, "text", **leaves)
  asked = (f"--weights={run}", f"--text={other}", "--attention=flash")
  more = ("--batches=1", f"--workdir={out}")
  code, _, error = commands.run("swap.py", *asked, *more)
  assert (code, error) == (0, "")
  own, flash = rows(out)
  assert float(own["loss"]) == pytest.approx(float(flash["loss"]), rel=1e-5)
  swapped = f"--workdir={out / 'models' / 'flash'}"
  options = (swapped, "--max_length=4")
  code, line, _ = commands.run("generate.py", *options, stdin="to be\n")
  assert code == 0
  assert line
  other.write_text("THE BEAST\n" * 100)
  found = commands.run("swap.py", *asked, f"--workdir={out}2")
  assert "the text has the character 'A'" in commands.fault(found)
