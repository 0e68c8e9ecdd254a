"""Decoders with experts or several mechanisms: other folders, configs, refusals."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.published import files, load
from models.published.catalog import FAMILIES
from tests.models.published.test_equality import (
  FOLDERS,
  assert_not_read,
  changed,
  compared,
  compute,
  expected,
  loaded,
  same,
)

EXPERT = "model.layers.2.block_sparse_moe.experts.3.w1.weight"


@pytest.mark.parametrize(
  ("case", "values", "message"),
  [
    (
      "mixtral",
      {"num_local_experts": 0},
      "num_local_experts: expected at least",
    ),
    (
      "mixtral",
      {"num_experts": 4},
      "num_experts: expected the value of num_local_",
    ),
    (
      "mixtral",
      {"num_experts_per_tok": 6},
      "num_experts_per_tok: expected at most num_local_experts",
    ),
    (
      "qwen3_moe",
      {"mlp_only_layers": [1, 1]},
      "mlp_only_layers: expected each",
    ),
    (
      "qwen3_5_moe_text",
      {"mlp_only_layers": [0]},
      "mlp_only_layers: expected []",
    ),
    (
      "gpt_oss",
      {"quantization_config": {"quant_method": "mxfp4"}},
      "quantization_config: MXFP4 tensors are not read here",
    ),
    (
      "gpt_oss",
      {"experts_per_token": 2},
      "experts_per_token: expected 3 (num_experts_per_tok), got 2",
    ),
    ("gpt_oss", {"rope_parameters": None}, "rope_parameters: missing"),
    ("gpt_oss", {"swiglu_alpha": 0.0}, "swiglu_alpha: expected greater than 0"),
  ],
)
def test_configs_that_are_not_read(case, values, message, tmp_path):
  place = f"{tmp_path / 'config.json'}: {message}"
  assert_not_read(case, tmp_path, place, **values)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda x: x.pop(EXPERT), f"{EXPERT}: missing"),
    (
      lambda x: x.update({EXPERT: x[EXPERT][:, :5].copy()}),
      f"{EXPERT}: expected shape (13, 20), got (13, 5)",
    ),
    (
      lambda x: x.update({EXPERT.replace("3", "5"): x[EXPERT]}),
      "no variable of this model uses it",
    ),
  ],
)
def test_tensors_of_an_expert_that_do_not_fit(change, message, tmp_path):
  assert_not_read("mixtral", tmp_path, message, change)


MULTIMODAL = pathlib.Path(__file__).parent / "multimodal"


@pytest.mark.parametrize(
  ("case", "family"),
  [
    ("qwen3_5", "qwen3_5_text"),
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    ("minimax_m3", "minimax_m3_vl_text"),
  ],
)
def test_text_of_a_multimodal_folder(case, family, tmp_path):
  """It is saved as a text model, with the same tensors."""
  p = models.load_pretrained(MULTIMODAL / case)
  with np.load(MULTIMODAL / case / "expected.npz") as arrays:
    inputs, wanted = {"input_ids": arrays["input.input_ids"]}, arrays["float32"]
  assert compared({}, compute(p, inputs), wanted) < 2e-5
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  assert again.family == p.family == family
  np.testing.assert_array_equal(compute(again, inputs), compute(p, inputs))
  if case == "minimax_m3":  # The tensors of the two have other names and sizes.
    return
  theirs = load_file(MULTIMODAL / case / "model.safetensors")
  ours = load_file(tmp_path / "model.safetensors")
  text = {
    name.replace("model.language_model", "model"): x
    for name, x in theirs.items()
    if "visual" not in name
  }
  assert text.keys() == ours.keys() < theirs.keys() | text.keys()
  assert all(np.array_equal(text[name], ours[name]) for name in ours)


@pytest.mark.parametrize(
  ("case", "is_tied"), [("qwen3_5", False), ("minimax_m3", True)]
)
def test_a_text_model_whose_config_alone_ties_the_head(case, is_tied, tmp_path):
  """MiniMax-M3 ties the head then; Qwen3.5 does not, as transformers shows."""
  shutil.copytree(MULTIMODAL / case, tmp_path, dirs_exist_ok=True)
  config = tmp_path / "config.json"
  content = json.loads(config.read_text())
  del content["tie_word_embeddings"]
  content["text_config"]["tie_word_embeddings"] = True
  config.write_text(json.dumps(content))
  opened = load.open_folder(tmp_path)
  assert opened.description.config.tie_embeddings == is_tied


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda x: {}, r"experts\.gate_up_proj: missing"),
    (lambda x: {"w3": x[None]}, r"experts\.3\.w3\.weight: expected rows of"),
    (lambda x: {"w3": x[:0]}, r"experts\.3\.w3\.weight: expected shape \("),
  ],
)
def test_an_expert_with_another_kernel_in_a_multimodal_folder(
  change, message, tmp_path
):
  shutil.copytree(MULTIMODAL / "minimax_m3", tmp_path, dirs_exist_ok=True)
  tensors = load_file(tmp_path / "model.safetensors")
  prefix = "language_model.model.layers.1.block_sparse_moe.experts.3"
  x = tensors.pop(f"{prefix}.w3.weight")
  tensors |= {f"{prefix}.{n}.weight": y.copy() for n, y in change(x).items()}
  save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=message):
    models.load_pretrained(tmp_path)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"audio_config": {}}, "audio_config: not supported for a text model"),
    ({"text_config": None}, "text_config: expected an object, got None"),
  ],
)
def test_multimodal_configs_that_are_not_read(values, message, tmp_path):
  shutil.copytree(MULTIMODAL / "qwen3_5", tmp_path, dirs_exist_ok=True)
  config = tmp_path / "config.json"
  config.write_text(json.dumps(json.loads(config.read_text()) | values))
  with pytest.raises(ValueError, match=f"config.json: {message}"):
    models.load_pretrained(tmp_path)


def test_tensors_of_olmo_hybrid_by_the_names_and_sizes_of_its_authors(tmp_path):
  """transformers writes convolutions in three equal chunks of all channels."""

  def change(tensors):
    prefix = "model.layers.0.linear_attn"
    names = [f"{prefix}.{x}_conv1d.weight" for x in "qkv"]
    whole = np.concatenate([tensors[name] for name in names])
    parts = np.split(whole, [30, 60])
    tensors |= {name: x.copy() for name, x in zip(names, parts, strict=True)}
    for layer, old, new in (
      (0, "attention_layer_norm", "input_layernorm"),
      (1, "feedforward_layer_norm", "post_attention_layernorm"),
    ):
      norm = tensors.pop(f"model.layers.{layer}.{old}.weight")
      tensors[f"model.layers.{layer}.{new}.weight"] = norm

  folder = changed("olmo_hybrid", tmp_path, change)
  same(
    models.load_pretrained(folder).variables, loaded("olmo_hybrid").variables
  )


@pytest.mark.parametrize(
  "case",
  [
    "mixtral",
    "qwen3_5_moe_text",
    "gpt_oss",
    "ministral3",
    "olmo_hybrid",
    "kimi_linear",
  ],
)
def test_another_mechanism(case, tmp_path):
  """It is loaded, has other logits, and is saved with the names of the family."""
  inputs, outputs = expected(case)
  p = models.load_pretrained(FOLDERS[case], attention="retention")
  out = compute(p, inputs)
  assert np.isfinite(out).all()
  assert compared(inputs, out, outputs["float32"]) > 0.01
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  np.testing.assert_array_equal(compute(again, inputs), out)


def test_a_null_names_no_layer_without_experts(tmp_path):
  folder = changed("qwen3_5_moe_text", tmp_path, mlp_only_layers=None)
  p = models.load_pretrained(folder)
  assert p.model == loaded("qwen3_5_moe_text").model


@pytest.mark.parametrize("exact", [[2, 4], []])
def test_lists_of_the_first_files_of_kimi_linear(exact):
  """An empty one is a model without exact attention, not one without a list."""
  config = files.read_config(FOLDERS["kimi_linear"])
  others = [i for i in range(1, 7) if i not in exact]
  lists = {"full_attn_layers": exact, "kda_layers": others}
  depth = {"num_hidden_layers": 6, "mlp_layer_types": None}
  old = config | depth | {"layer_types": None, "linear_attn_config": lists}
  made = FAMILIES["kimi_linear"].describe(old, (), "tokens").config
  names = [layer.name for layer in made.layers("decoder_attention")]
  wanted = {i + 1 for i, name in enumerate(names) if name == "latent"}
  assert wanted == {*exact}


def test_the_first_files_of_kimi_linear_have_other_keys(tmp_path):
  """Layers are counted from 1, and dense layers have the names of no experts."""

  def change(tensors):
    for name in [name for name in tensors if ".0.block_sparse_moe" in name]:
      tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)

  old = {
    "full_attn_layers": [2, 4],
    "kda_layers": [1, 3],
    "head_dim": 6,
    "num_heads": 3,
    "short_conv_kernel_size": 4,
  }
  new = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
  values = dict.fromkeys((*new, "layer_types"), ...)
  folder = changed(
    "kimi_linear", tmp_path, change, linear_attn_config=old, **values
  )
  p = models.load_pretrained(folder)
  assert p.model == loaded("kimi_linear").model
  same(p.variables, loaded("kimi_linear").variables)
