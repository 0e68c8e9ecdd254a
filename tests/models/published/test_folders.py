"""Folders of weights: what is wrong with one is told, and nothing is loaded."""

import json
import pathlib
import pickle
import re
import shutil
import tracemalloc
import uuid

from flax import traverse_util
import jax
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

import models
from models.published import files, load
from tests.here import here
from tests.models.published.test_equality import (
  CASES,
  FOLDERS,
  assert_not_read,
  changed,
  compared,
  compute,
  expected,
  loaded,
  same,
)


@pytest.fixture
def folder(tmp_path):
  """A copy of a small BERT that a test may spoil."""
  return changed("bert_masked", tmp_path / "bert")


QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (None, "missing"),
    (lambda x: x[:, :5].copy(), "expected shape (24, 24), got (24, 5)"),
    (
      lambda x: np.ones(x.shape, np.int32),
      "expected floating point numbers, got int32",
    ),
    (lambda x: np.where(x > 0, np.nan, x), "expected finite numbers"),
  ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
  def spoil(tensors):
    found = tensors.pop(QUERY)
    if change is not None:
      tensors[QUERY] = change(found)

  assert_not_read("bert_masked", tmp_path, f"{QUERY}: {message}", spoil)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("bert.encoder.layer.3.new", "no variable of this model uses it"),
    (QUERY.removeprefix("bert."), "appears twice, under two names"),
  ],
)
def test_tensors_that_are_too_many(tmp_path, name, message):
  def add(tensors):
    tensors[name] = tensors[QUERY]

  assert_not_read("bert_masked", tmp_path, message, add)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"architectures": ["NoSuchModel"]}, "architectures: 'NoSuchModel' is not"),
    ({"architectures": None}, "architectures: missing"),
    ({"architectures": ["A", "B"]}, "architectures: expected a list of one"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings: expected True"),
    ({"hidden_act": "mish"}, "hidden_act: expected one of relu, gelu"),
    ({"hidden_size": "24"}, "hidden_size: expected a valid integer, got"),
    ({"hidden_size": None}, "hidden_size: missing"),
    ({"num_attention_heads": 5}, "hidden_size: 24 is not divisible by"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"layer_norm_eps": "small"}, "layer_norm_eps: expected a valid number"),
    # At once, with no array of this size.
    ({"vocab_size": 2**40}, "expected sizes below 2³¹"),
  ],
)
def test_configs_that_cannot_be(tmp_path, values, message):
  where = f"{tmp_path / 'config.json'}: " if ":" in message else ""
  assert_not_read("bert_masked", tmp_path, f"{where}{message}", **values)


@pytest.mark.parametrize("name", ["padding_q", "padding_kv"])
def test_a_missing_padding_is_that_of_transformers(tmp_path, name):
  """1, and kernels of 5 need 2."""
  message = f"{name}: expected 2, half of kernel_qkv, got 1"
  assert_not_read("cvt", tmp_path, message, **{name: ...})


def test_a_model_of_another_size_is_refused_at_once(tmp_path):
  changed("bert_masked", tmp_path, vocab_size=2**28)
  with pytest.raises(ValueError, match=r"expected .* numbers, got shape"):
    models.load_pretrained(tmp_path)


def test_files_that_are_broken(folder):
  tensors, config = folder / "model.safetensors", folder / "config.json"
  whole = tensors.read_bytes()
  for content in (whole[:-1], whole[:20], b"{}" + whole, b"\xff" * 100):
    tensors.write_bytes(content)
    with pytest.raises(ValueError, match="not a complete safetensors file"):
      models.load_pretrained(folder)
  tensors.write_bytes(b"")
  with pytest.raises(ValueError, match="the file is empty"):
    models.load_pretrained(folder)
  tensors.write_bytes(whole)
  for content in (b"{", b"[]", b"\xff", b""):
    config.write_bytes(content)
    with pytest.raises(ValueError, match=r"json: (not JSON|expected an)"):
      models.load_pretrained(folder)
  config.unlink()
  with pytest.raises(FileNotFoundError, match=r"config.json: no such file"):
    models.load_pretrained(folder)
  with pytest.raises(FileNotFoundError, match="no such folder"):
    models.load_pretrained(folder / "nowhere")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_lead_to_files_of_the_folder(folder, tmp_path, name):
  outside = tmp_path / "outside"
  (folder / name).rename(outside)
  (folder / name).symlink_to(outside)
  with pytest.raises(ValueError, match=f"{name}: is a link to .*outside the"):
    models.load_pretrained(folder)
  inside = folder / "inside"
  outside.rename(inside)
  (folder / name).unlink()
  (folder / name).symlink_to(inside)
  p = models.load_pretrained(folder)
  # As in the hub's cache, whose files other folders share.
  content = inside.read_bytes()
  moved = jax.tree.map(lambda x: x + 1, p.variables)
  models.save_pretrained(folder, p._replace(variables=moved))
  assert inside.read_bytes() == content
  same(models.load_pretrained(folder).variables, moved)


def test_files_of_the_hub_are_links_to_its_blobs(folder, tmp_path):
  """Of models--…/snapshots/… to models--…/blobs/…, and of no other folder."""
  repository = tmp_path / "models--x"
  snapshot = repository / "snapshots" / "0f1e"
  for name in ("blobs", "others"):
    (repository / name).mkdir(parents=True)
  snapshot.mkdir(parents=True)
  shutil.copy(folder / "config.json", snapshot)
  link = snapshot / "model.safetensors"
  for name in ("blobs", "others"):
    content = repository / name / "9a8b"
    shutil.copy(folder / "model.safetensors", content)
    link.unlink(missing_ok=True)
    link.symlink_to(content)
    if name == "blobs":
      assert len(files.read_tensors(snapshot)) > 9
    else:
      with pytest.raises(ValueError, match=r"is a link to .*outside the"):
        files.read_tensors(snapshot)


@pytest.mark.parametrize(
  "dtype",
  [
    *("float64", "float32", "float16", "uint32", "int64", "int32", "int16"),
    *("int8", "uint8", "bool"),
  ],
)
def test_every_type_of_number_is_read(tmp_path, dtype):
  """As safetensors reads it, with numbers that other types have not."""
  array = np.array([[0, 1, -3], [200, 77, 5]]).astype(dtype)
  save_file({"x": array}, tmp_path / "model.safetensors")
  found = files.read_tensors(tmp_path)["x"].read()
  assert found.dtype == array.dtype
  np.testing.assert_array_equal(found, array)


def test_what_a_file_says_of_itself(folder):
  """transformers reads no file without its format."""
  p = loaded("bert_masked")
  models.save_pretrained(folder, p)
  with safetensors.safe_open(folder / "model.safetensors", "np") as file:
    assert file.metadata() == {"format": "pt"}
  config = files.read_config(folder)
  infinity = {"least": {"__float__": "Infinity"}, "text": "Infinity"}
  (folder / "more").mkdir()
  (folder / "more" / "config.json").write_text(json.dumps(infinity))
  assert files.read_config(folder / "more")["least"] == np.inf
  assert config["architectures"] == ["BertForMaskedLM"]
  assert config["dtype"] == config["torch_dtype"] == "float32"


def test_variables_that_could_not_be_loaded_are_not_saved(folder):
  p, content = (
    loaded("bert_masked"),
    (folder / "model.safetensors").read_bytes(),
  )
  params = traverse_util.flatten_dict(dict(p.variables["params"]))
  name = ("encoder_0", "self_attention", "query", "kernel")
  for change, message in (
    ({name: params[name] * np.nan}, "expected finite numbers"),
    ({name: params[name][:5]}, "expected shape .* got shape"),
    ({("more",): np.ones(3)}, "more: expected none, got shape"),
  ):
    wrong = traverse_util.unflatten_dict(params | change)
    q = p._replace(variables={**p.variables, "params": wrong})
    with pytest.raises(ValueError, match=f"^variables: .*{message}"):
      models.save_pretrained(folder, q)
  assert (folder / "model.safetensors").read_bytes() == content


class _Trap:
  """Writes a file when it is unpickled."""

  def __init__(self, path):
    self._path = path

  def __reduce__(self):
    return (pathlib.Path.touch, (self._path,))


def test_a_pickle_is_refused_and_not_read(folder, tmp_path):
  (folder / "model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match=r"model.safetensors: no such"):
    models.load_pretrained(folder)
  trap = tmp_path / "trap"
  for name in ("pytorch_model.bin.index.json", "pytorch_model.bin"):
    with (folder / name).open("wb") as file:
      pickle.dump(_Trap(trap), file)
    with pytest.raises(ValueError, match=f"{name}: is a pickle"):
      models.load_pretrained(folder)
  assert not trap.exists()


THEIRS = """
import pathlib
from attention import Attention, linear

pathlib.Path(TRACE).touch()


def factory(feature_map: str = "elu") -> Attention:
  return linear(feature_map=feature_map)


def plain(feature_map="elu"):
  pathlib.Path(TRACE + "-called").touch()
  return linear(feature_map=feature_map)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
  """A module of somebody else, and the file that it makes when it is imported."""
  trace = tmp_path / "trace"
  name = f"their_{uuid.uuid4().hex}"
  (tmp_path / f"{name}.py").write_text(
    THEIRS.replace("TRACE", repr(f"{trace}"))
  )
  monkeypatch.syspath_prepend(tmp_path)
  return name, trace


def test_a_folder_calls_nothing_but_factories(folder, theirs):
  """Not even a factory, unless the caller names it."""
  module, trace = theirs
  own = {"name": f"{module}:factory", "feature_map": "relu"}
  for layers in (own, [own], ["dense", own], f"{module}:factory", "os:getcwd"):
    changed("bert_masked", folder, attention_lab={"encoder_attention": layers})
    with pytest.raises(
      ValueError, match="folder of weights may not have; pass"
    ):
      models.load_pretrained(folder)
  assert not trace.exists()
  p = models.load_pretrained(folder, attention=own)
  assert trace.exists()
  [mechanism] = p.model.config.attentions["encoder_attention"]
  assert mechanism.options == {"feature_map": "relu"}
  models.save_pretrained(folder, p)
  with pytest.raises(ValueError, match="folder of weights may not have"):
    models.load_pretrained(folder)
  again = models.load_pretrained(folder, attention=own)
  assert again.model == p.model
  same(again.variables, p.variables)


def test_what_an_import_path_has_of_its_own_is_kept_or_left(folder, theirs):
  """The caller who names it again has its variables, another has none of them."""
  own = {"name": f"{theirs[0]}:factory", "feature_map": "hedgehog"}
  p = models.load_pretrained(folder, attention=own, key=jax.random.key(3))
  models.save_pretrained(folder, p)
  again = models.load_pretrained(folder, attention=own, key=jax.random.key(4))
  same(again.variables, p.variables)
  dense = models.load_pretrained(folder, attention="dense")
  same(dense.variables, loaded("bert_masked").variables)


def test_a_folder_with_weights_is_no_run(folder, theirs):
  """Whatever else is in it; and a run that is asked for as weights is data too."""
  module, trace = theirs
  run = {
    **{"num_steps": 1, "batch_size": 8, "eval_every": 1},
    "task": {"name": "text", "path": "input.txt"},
    "model": {
      **{"kind": "decoder", "num_layers": 1, "num_heads": 1, "features": 8},
      "mlp_features": 8,
      "decoder_attention": {"name": f"{module}:factory"},
    },
  }
  (folder / "checkpoints").mkdir()
  faults = {
    "architectures: missing": True,
    "a folder of weights imports": False,
  }
  for message, has_tensors in faults.items():
    if not has_tensors:
      (folder / "model.safetensors").unlink()
    for leaves in (
      {},
      {"decoder_attention": {"name": "os:system", "command": f"touch {trace}"}},
      {"position": f"{module}:plain"},
      {"activation": f"{module}:plain"},
      {"norm_kind": f"{module}:plain"},
      {"kind": f"{module}:plain"},
    ):
      content = run | {"model": run["model"] | leaves}
      (folder / "config.json").write_text(json.dumps(content))
      with pytest.raises(ValueError, match=message):
        models.load_pretrained(folder)
    for leaves in (
      {"task": {"name": f"{module}:plain"}},
      {"optimizer": {"name": f"{module}:plain"}},
    ):
      (folder / "config.json").write_text(json.dumps(run | leaves))
      with pytest.raises(ValueError, match=message):
        models.load_pretrained(folder)
  assert not trace.exists()


def test_shards(folder):
  """Several files and their index are one file."""
  tensors = load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  names = sorted(tensors)
  places = {
    name: f"model-0000{1 + i % 2}-of-00002.safetensors"
    for i, name in enumerate(names)
  }
  for shard in set(places.values()):
    part = {name: tensors[name] for name in names if places[name] == shard}
    save_file(part, folder / shard)
  index = folder / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": places}))
  sharded = models.load_pretrained(folder)
  same(sharded.variables, loaded("bert_masked").variables)
  content = index.read_bytes()
  # Written back, as after training: neither reader may find the old shards.
  changed = jax.tree.map(lambda x: x + 1, sharded.variables)
  models.save_pretrained(folder, sharded._replace(variables=changed))
  same(models.load_pretrained(folder).variables, changed)
  assert not index.exists()
  (folder / "model.safetensors").unlink()
  index.write_bytes(content)
  for weight_map, message in (
    (places | {"bert.more": places[names[0]]}, "bert.more is missing"),
    ({names[1]: places[names[1]]}, "is not in model.safetensors.index.json"),
    (places | {names[0]: places[names[1]]}, "is not in model.safetensors"),
    ({names[0]: "../secret"}, "expected files of this folder"),
    ({names[0]: 3}, "expected 'weight_map'"),
  ):
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=re.escape(message)):
      models.load_pretrained(folder)
  index.write_text(json.dumps({"weight_map": places}))
  (folder / places[names[0]]).unlink()
  for _ in range(2):
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
      models.load_pretrained(folder)
    (folder / "checkpoints").mkdir(exist_ok=True)  # It is no run all the same.


def test_tensors_are_read_one_at_a_time(tmp_path):
  """Opening a folder holds none of them; NumPy reports its memory to tracemalloc."""
  size = 2**18
  tensors = {str(i): np.full(size, i, np.float32) for i in range(8)}
  save_file(tensors, tmp_path / "model.safetensors")
  tracemalloc.start()
  try:
    opened = files.read_tensors(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < size
    for name, tensor in opened.items():
      assert (tensor.read() == tensors[name]).all()
    assert tracemalloc.get_traced_memory()[1] < 3 * 4 * size
  finally:
    tracemalloc.stop()


def test_old_names_prefixes_and_buffers(tmp_path):
  """What files of other years have differently changes nothing."""

  def age(tensors):
    for name in list(tensors):
      old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
      old = old.replace("LayerNorm.bias", "LayerNorm.beta")
      tensors[old.removeprefix("bert.")] = tensors.pop(name)
    tensors["embeddings.position_ids"] = np.arange(40)[None]
    tensors["pooler.dense.weight"] = np.ones((24, 24), np.float32)
    tensors["cls.seq_relationship.bias"] = np.ones((2,), np.float32)
    table = tensors["embeddings.word_embeddings.weight"]
    tensors["cls.predictions.decoder.weight"] = table

  changed("bert_masked", tmp_path, age)
  old = models.load_pretrained(tmp_path).variables
  same(old, loaded("bert_masked").variables)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(folder, dtype):
  """Halves are read, computed with, and written as they were."""
  before = models.load_pretrained(folder, dtype=dtype)
  assert {x.dtype.name for x in jax.tree.leaves(before.variables)} == {dtype}
  models.save_pretrained(folder / "again", before)
  after = models.load_pretrained(folder / "again", dtype=dtype)
  same(before.variables, after.variables)
  inputs, outputs = expected("bert_masked")
  out = compute(models.load_pretrained(folder / "again"), inputs)
  assert compared(inputs, out, outputs["float32"]) < 0.1


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_is_bit_exact(case, tmp_path):
  """The tensors, their names and the choices of config.json."""
  p = loaded(case)
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  assert again.model == p.model
  same(again.variables, p.variables)
  theirs = load_file(FOLDERS[case] / "model.safetensors")
  ours = load_file(tmp_path / "model.safetensors")
  unread = {name for name in theirs if "pooler" in name}
  assert set(theirs) - unread <= set(ours) | unread
  for name in ours:
    np.testing.assert_array_equal(ours[name], theirs[name])


LSH = {"name": "lsh", "chunk_size": 4}
PERFORMER = {"name": "performer", "num_features": 8}


@pytest.mark.parametrize(
  ("case", "chosen"),
  [
    # Constants that are integers.
    ("bert_masked", {"name": "bigbird", "block_size": 2, "num_random": 1}),
    # No keys, in a tensor of queries and keys and in one of their own.
    ("gpt2", LSH),
    # A tensor of which a part is that mechanism's.
    ("mamba2", {"name": "flash"}),
    ("qwen3_next", {"name": "flash"}),
    *(
      pytest.param(case, chosen, marks=pytest.mark.thorough)
      for case, chosen in (
        ("llama", LSH),
        ("qwen3_next", LSH),
        ("mamba2", LSH),
        *((x, PERFORMER) for x in here(["wav2vec2_conformer_rotary"])),
        # Variables of the same names as those of the mechanism it replaces.
        ("qwen3_next", {"name": "kimi_delta"}),
        ("mamba2", {"name": "gated_delta"}),
      )
    ),
  ],
)
def test_what_a_mechanism_keeps_and_lacks(case, chosen, tmp_path):
  p = models.load_pretrained(FOLDERS[case], attention=chosen)
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  for slot in p.model.config.attentions:
    assert again.model.config.layers(slot) == p.model.config.layers(slot)
  assert models.slots(again.model.config).startswith(chosen["name"])
  same(again.variables, p.variables)


def test_options_of_numpy_are_saved_as_numbers(tmp_path):
  """Such as those of a loop over `np.arange`."""
  chosen = {"name": "sliding_window", "window": (np.int64(3), np.int32(0))}
  p = models.load_pretrained(FOLDERS["gpt2"], attention=chosen)
  models.save_pretrained(tmp_path, p)
  [written] = json.loads((tmp_path / "config.json").read_text())[
    load.MECHANISMS
  ]["decoder_attention"]
  assert written == {"name": "sliding_window", "window": [3, 0]}


def test_another_mechanism_is_saved_with_its_variables(tmp_path):
  chosen = ["flash", PERFORMER]
  p = models.load_pretrained(FOLDERS["gpt2"], attention=chosen)
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  assert models.slots(again.model.config) == "flash + performer"
  same(again.variables, p.variables)
  # With its own attention it is the published model again.
  own = models.load_pretrained(tmp_path, attention="dense")
  assert models.slots(own.model.config) == "dense"
  same(own.variables, loaded("gpt2").variables)
  # Without its variables it is none.
  tensors = load_file(tmp_path / "model.safetensors")
  del tensors[
    "attention_lab/constants/decoder_1/self_attention/attention/projection"
  ]
  save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match="no tensor fills constants/decoder_1"):
    models.load_pretrained(tmp_path)


def test_tensors_of_a_replaced_mechanism_stay_in_the_folder(tmp_path):
  """Transformers reads the folder with its own attention, which has sinks."""
  p = models.load_pretrained(FOLDERS["gpt_oss"], attention=PERFORMER)
  for folder in (tmp_path / "once", tmp_path / "twice"):
    models.save_pretrained(folder, p)
    written = load_file(folder / "model.safetensors")
    for name, x in load_file(FOLDERS["gpt_oss"] / "model.safetensors").items():
      np.testing.assert_array_equal(written[name], x, name)
    p = models.load_pretrained(folder)


def test_what_replaces_a_recurrence_takes_nothing_of_its_own(tmp_path):
  """The projections are the folder's; a variable of the same name is drawn."""

  def shorten(tensors):
    for name in [x for x in tensors if ".1." in x or ".2." in x]:
      del tensors[name]

  changed("mamba2", tmp_path, shorten, num_hidden_layers=1)
  own, delta = (
    traverse_util.flatten_dict(
      models.load_pretrained(tmp_path, attention=chosen).variables, sep="/"
    )
    for chosen in (None, "gated_delta")
  )
  step = "params/decoder_0/self_attention/attention/step_kernel"
  assert own[step].shape == delta[step].shape
  assert np.abs(own[step] - delta[step]).max() > 0.01
  around = [path for path in delta if "/attention/" not in path]
  assert set(around) == {path for path in own if "/attention/" not in path}
  for path in around:
    np.testing.assert_array_equal(delta[path], own[path])


def test_layers_of_a_recurrence_and_of_another_mechanism(tmp_path):
  """A layer that keeps its mechanism keeps its tensors, whole."""
  chosen = ["mamba2", "flash", "mamba2"]
  p = models.load_pretrained(FOLDERS["mamba2"], attention=chosen)
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  assert models.slots(again.model.config) == "mamba2 + flash + mamba2"
  same(again.variables, p.variables)
  theirs = load_file(FOLDERS["mamba2"] / "model.safetensors")
  ours = load_file(tmp_path / "model.safetensors")
  name = "backbone.layers.{}.mixer.in_proj.weight"
  np.testing.assert_array_equal(ours[name.format(0)], theirs[name.format(0)])
  # Of the second layer the last rows, one for each head, are not there.
  second = theirs[name.format(1)].copy()
  second[-6:] = 0.0
  np.testing.assert_array_equal(ours[name.format(1)], second)
  assert "backbone.layers.1.mixer.D" not in ours


@pytest.mark.parametrize(
  "case", ["bert_masked", "t5", *here(["wav2vec2_conformer_relative"])]
)
def test_flash_in_place_of_dense_is_equal(case):
  inputs, outputs = expected(case)
  p = models.load_pretrained(FOLDERS[case], attention="flash")
  assert compared(inputs, compute(p, inputs), outputs["float32"]) < 2e-5


@pytest.mark.parametrize(
  ("case", "attention", "message"),
  [
    ("gpt2", "nosuch", "expected one of dense"),
    ("gpt2", "linformer", "cannot be causal"),
    ("gpt2", {"num_features": 3}, "expected a 'name'"),
    ("gpt2", {"name": "performer", "num_feature": 3}, "no such option"),
    # Keys that heads share are not made anew.
    ("mamba2", "latent", "num_qk_heads: latent computes a key and a value for"),
    ("qwen3_next", "latent", "num_kv_heads: latent computes a key"),
  ],
)
def test_mechanisms_that_cannot_serve(case, attention, message):
  with pytest.raises(ValueError, match=re.escape(message)) as info:
    models.load_pretrained(FOLDERS[case], attention=attention)
  assert "\n" not in str(info.value)


def test_float64_needs_its_switch():
  with pytest.raises(ValueError, match="jax_enable_x64"):
    models.load_pretrained(FOLDERS["gpt2"], dtype="float64")


@pytest.mark.parametrize(
  "case",
  [
    "bert_classes",
    "gpt2",
    "t5",
    "llama",
    "qwen3_next",
    *here(["perceiver_widths", "wav2vec2_conformer_relative", "vit"]),
    # Their models take a quarter of a second to make.
    *(
      pytest.param(case, marks=pytest.mark.thorough)
      for case in here(["cvt", "swin"])
    ),
  ],
)
def test_any_value_of_a_wrong_type_is_refused_or_harmless(case, tmp_path):
  """No other exception than a line that names config.json, or a tensor."""
  whole = json.loads((changed(case, tmp_path) / "config.json").read_text())
  refused = {}
  for name in whole:
    for value in ("x", -1, 2.5, [3], {"a": 1}, True, None):
      config = json.dumps(whole | {name: value})
      (tmp_path / "config.json").write_text(config)
      try:
        load.make_model(load.open_folder(tmp_path).description)
      except ValueError as error:
        refused[f"{name}: {value}"] = str(error)
  assert len({typed.partition(":")[0] for typed in refused}) > 6
  for typed, message in refused.items():
    assert message.startswith(str(tmp_path)), (typed, message)
