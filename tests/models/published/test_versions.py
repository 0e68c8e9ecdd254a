"""Files of transformers 4 and 5 are the same models; no key is lost in silence."""

import dataclasses
import functools
import json
import pathlib
import shutil

import flax.traverse_util
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.published import files, load, rotary, weights
from models.published.catalog import FAMILIES
from models.published.keys import WITHOUT_EFFECT, Keys
from tests.models.published import test_equality as equality
from tests.models.published.test_equality import (
  FOLDERS,
  compared,
  compute,
  same,
  usual,
)
from tests.refusals import assert_refused

_HERE = pathlib.Path(__file__).parent / "versions"
CONFIGS = {
  f"{path.parent.name} {case}": config
  for path in sorted(_HERE.glob("*/configs.json"))
  for case, config in json.loads(path.read_text()).items()
}
"""'llama 5.23.0 yarn' -> its config.json."""
CASES = sorted(
  {case.replace(" 4.57.6", "") for case in CONFIGS if " 4." in case}
)
# Whose scaling alone differs from that of another case.
THOROUGH = {"llama plain", "llama linear", "llama llama3", "llama yarn"}
THOROUGH |= {"gemma3 plain"}
USUAL = tuple(case for case in CASES if case not in THOROUGH)
OLD, NEW = "4.57.6", "5.23.0"


def folder_of(case, config, path):
  """A folder as transformers wrote it."""
  path.mkdir(exist_ok=True)
  shutil.copy(_HERE / case.split()[0] / "model.safetensors", path)
  (path / "config.json").write_text(json.dumps(config))
  return path


def named(case, version):
  """'llama yarn' -> 'llama 5.23.0 yarn'."""
  return case.replace(" ", f" {version} ")


def description(config, names):
  """What a config.json describes; ValueError where it is refused."""
  made, kept = read(config, names)
  load.make_model(made)
  return made, kept


def read(config, names):
  """As `description`; no model is made."""
  keys = Keys(config)
  family, architecture = load._architecture(pathlib.Path(), keys)
  head = family.architectures[architecture]
  made = family.describe(keys, names, head)
  kept = {} if family.kept is None else family.kept(keys)
  keys.check(family.name, family.without_effect)
  return made, kept


def keys_read(config, names):
  """The keys that the description of a file reads, whether it has them or not."""
  keys = Keys(config)
  family, architecture = load._architecture(pathlib.Path(), keys)
  family.describe(keys, names, family.architectures[architecture])
  return keys.read


def names_of(case):
  """The tensors of a family."""
  return set(load_file(_HERE / case.split()[0] / "model.safetensors"))


@pytest.mark.parametrize("case", usual(CASES, *USUAL))
def test_logits_are_those_of_every_version(case, tmp_path):
  p = models.load_pretrained(
    folder_of(case, CONFIGS[named(case, NEW)], tmp_path / "new")
  )
  with np.load(_HERE / case.split()[0] / "expected.npz") as arrays:
    inputs = {x: arrays[x] for x in ("input_ids", "attention_mask")}
    wanted = arrays[case.split()[1]]
  assert compared(inputs, compute(p, inputs), wanted) < 2e-5


@pytest.mark.parametrize("case", CASES)
def test_versions_describe_one_model(case, tmp_path):
  """So does what is saved here, which says it in the words of both."""
  names = names_of(case)
  old, new = (CONFIGS[named(case, version)] for version in (OLD, NEW))
  assert description(old, names) == description(new, names)
  p = models.load_pretrained(folder_of(case, new, tmp_path / "new"))
  models.save_pretrained(tmp_path / "again", p)
  saved = files.read_config(tmp_path / "again")
  ours = load_file(tmp_path / "again" / "model.safetensors")
  theirs = load_file(tmp_path / "new" / "model.safetensors")
  assert all(np.array_equal(theirs[name], ours[name]) for name in theirs | ours)
  assert description(saved, names) == description(new, names)
  for version, keys in ((OLD, old), (NEW, new)):
    rope = {
      key for key in saved if key.startswith(("rope", "rotary", "partial"))
    }
    alone = {
      key: x for key, x in saved.items() if key in keys or key not in rope
    }
    assert description(alone, names) == description(new, names), version


def others(key, value):
  """Values that mean something else."""
  if isinstance(value, bool):
    return [not value]
  if isinstance(value, int):
    return [value + 2, 2 * value] if value else [1, 2]
  if isinstance(value, float):
    return [1.5 * value + 0.125]
  if isinstance(value, str):
    return ["relu", "gelu"] if "act" in key else [f"{value}2", "linear"]
  if isinstance(value, list):
    kinds = ("full_attention", "sliding_attention", "linear_attention")
    words = [[kind] * len(value) for kind in kinds if value and kind in value]
    return [*words, [*value, *value], value[::-1]]
  if isinstance(value, dict):
    inner = [{**value, k: o} for k, x in value.items() for o in others(k, x)]
    return [*inner, {**value, "unheard_of": 1}]
  return [3, True, "x", {"rope_type": "linear", "factor": 2.0}]


def altered(config):
  """Each key with each value that means something else."""
  for key, value in config.items():
    for other in others(key, value):
      if repr(other) != repr(value):
        yield key, other


def without_effect(config):
  family = FAMILIES[config["model_type"]]
  return {*WITHOUT_EFFECT, *family.without_effect, "max_position_embeddings"}


_ALL = {
  **{
    case: (config, _HERE / case.split()[0]) for case, config in CONFIGS.items()
  },
  **{
    name: (files.read_config(folder), folder)
    for name, folder in FOLDERS.items()
  },
}


@functools.cache
def case_of(case):
  """A file's content and the tensors beside it that are not copies of others."""
  config, folder = _ALL[case]
  family = FAMILIES[config["model_type"]]
  tensors = weights.by_table_name(family, files.read_tensors(folder))
  return config, frozenset(weights.without_copies(family, tensors))


_SAME = {
  # Layers take them in turn.
  ("recurrent_gemma", "block_types"): 2 * ["recurrent", "attention"],
  # 42 features, as with 7.
  ("xlstm", "ffn_round_up_to_multiple_of"): 14,
  ("falcon_h1_plain", "mamba_norm_before_gate"): True,  # It has no norm there.
  ("qwen3_moe", "use_sliding_window"): True,  # `sliding_window` is null.
  # They have no head of tokens.
  **{
    (family + kind, "tie_word_embeddings"): False
    for family in ("deberta_v2", "distilbert", "electra", "xlm_roberta")
    for kind in ("", "_classes", "_p2c")
  },
  # Both sets of `rope_parameters` have their own.
  **{
    (case, key): theta
    for case in ("deepseek_v4", "deepseek_v4_whole")
    for key, theta in (
      ("compress_rope_theta", 240000.125),
      ("rope_theta", 15000.125),
    )
  },
}
"""Values of a folder's key that mean what its own value means."""


@pytest.mark.parametrize("case", _ALL)
def test_no_key_is_lost(case):
  """A value that means something else changes the model, or is refused, or the key
  is on the list of those without effect, with the reason."""
  config, names = case_of(case)
  before, listed = description(config, names), without_effect(config)
  for key, other in altered(config):
    if key in listed or _SAME.get((case, key)) == other:
      continue
    try:
      after = description(config | {key: other}, names)
    except ValueError as error:
      after = str(error)
    assert after != before, f"{key}: {config[key]} -> {other} changes nothing"
    # No message is longer than three lines.
    assert len(after) < 240, after


_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
_WITH_KINDS = [case for case in _ALL if {*_KINDS} & {*_ALL[case][0]}]


@pytest.mark.parametrize("case", _WITH_KINDS)
def test_a_file_may_have_keys_of_layers_that_its_model_lacks(case):
  """transformers writes the keys of all kinds of layers whichever there are."""
  config, folder = _ALL[case]
  family, kinds = FAMILIES[config["model_type"]], {}
  names = weights.without_copies(
    family, weights.by_table_name(family, files.read_tensors(folder))
  )
  for key in {*_KINDS} & {*config}:
    for kind in {*config[key]}:
      made, _ = read(config | {key: [kind] * len(config[key])}, names)
      kinds[key, kind] = made.config
  assert len({*map(repr, kinds.values())}) == len(kinds)


def test_minimax_m3_by_the_keys_of_its_published_files():
  """As its class in transformers reads them."""
  config, folder = _ALL["minimax_m3_text"]
  names = set(load_file(folder / "model.safetensors"))
  sparse = {
    "sparse_num_index_heads": config["index_n_heads"],
    "sparse_index_dim": config["index_head_dim"],
    "sparse_block_size": config["index_block_size"],
    "sparse_topk_blocks": config["index_topk_blocks"],
    "sparse_local_block": config["index_local_blocks"],
    "sparse_attention_freq": [1, 0, 1, 0],
  }
  rest = {k: x for k, x in config.items() if not k.startswith("index_")}
  del rest["layer_types"], rest["mlp_layer_types"]
  more = {"sparse_attention_config": sparse, "moe_layer_freq": [0, 1, 0, 1]}
  assert description(rest | more, names) == description(config, names)
  more["sparse_attention_config"] = sparse | {"sparse_block_size": 4}
  changed = description(config | {"index_block_size": 4}, names)
  assert description(rest | more, names) == changed
  with pytest.raises(ValueError, match="mlp_layer_types: expected one number"):
    description(rest | more | {"moe_layer_freq": 2}, names)


def _has_one_set(config):
  """Whether a file of version 5 has the same rotary positions for all layers."""
  parameters = config.get("rope_parameters") or {}
  has_others = config["model_type"] in ("gpt_neox", "recurrent_gemma")
  return parameters.get("rope_theta") is not None and not has_others


@pytest.mark.parametrize("case", [x for x in _ALL if _has_one_set(_ALL[x][0])])
def test_rotary_positions_by_the_keys_of_version_4(case):
  """Each family reads both, though version 4 may not have it."""
  config, names = case_of(case)
  old = {x: y for x, y in config.items() if x != "rope_parameters"}
  scaling = dict(config["rope_parameters"])
  for name in ("rope_theta", "partial_rotary_factor"):
    if name in scaling:
      old[name] = scaling.pop(name)
  old["rope_scaling"] = scaling
  assert description(old, names) == description(config, names)


_VALUES = (True, False, 2, 0.5, "relu", [2, 2])
"""One of each type."""


_SHOWN_ELSEWHERE = (
  # They are the sizes of tensors, or of what a model may be given.
  *("architectures", "num_channels", "image_size"),
  *("max_source_positions", "n_positions"),
  # One line reads it for most decoders: in `llama_tied` and `gemma2_untied`.
  "tie_word_embeddings",
  "scale_decoder_outputs",  # In the next test.
  "inv_coeff_init_option",  # transformers cannot run it.
)


_SHOWN_ELSEWHERE_IN = {
  # One line reads it for two families.
  **{"mamba": {"use_conv_bias"}, "falcon_mamba": {"use_bias"}},
  "glm_moe_dsa": {"hidden_act", "norm_topk_prob"},
  # `bert.encoder` reads them, in cases of BERT.
  "nystromformer": {"hidden_act", "layer_norm_eps"},
  # `test_plain` compares another value, of one of them.
  **{"roberta": {"hidden_act"}, "xlm-roberta": {"hidden_act"}},
  # `test_deepseek` and `test_states` compare another value.
  **{"deepseek_v4": {"hidden_act"}, "nemotron_h": {"mlp_hidden_act"}},
}
"""Family -> keys that other tests show."""


def _changes(config, names, key, value=...):
  """Whether a value of a key, or none, is read as another model."""
  changed = {**config, key: value}
  if value is ...:
    del changed[key]
  try:
    return read(changed, names) != read(config, names)
  except ValueError:
    return value is ...


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_is_away_from_its_default_in_some_case(name):
  """One whose logits `make test` compares; or no other value is read at all."""
  without_a_case, shown = {}, set(_SHOWN_ELSEWHERE)
  shown |= _SHOWN_ELSEWHERE_IN.get(name, set())
  for case, (config, _) in _ALL.items():
    if config["model_type"] != name:
      continue
    names = case_of(case)[1]
    title = case.replace(f" {OLD}", "").replace(f" {NEW}", "")
    is_compared = title in (*USUAL, *equality.USUAL)
    for key in keys_read(config, names) - without_effect(config) - shown:
      without_a_case[key] = config, names
      if is_compared and key in config and _changes(config, names, key):
        shown.add(key)
  for key in without_a_case.keys() - shown:
    config, names = without_a_case[key]
    accepted = [x for x in _VALUES if _changes(config, names, key, x)]
    assert not accepted, f"{key} may be {accepted}"


_DEFAULTS = json.loads((_HERE.parent / "defaults.json").read_text())
"""Family -> the values that transformers takes for keys that a file lacks."""


_NOT_COMPARED = {
  "deepseek_v4": {"rope_parameters"},  # Shares of a head that is 512 wide.
  # They have as many as heads, and as wide a head as rotary positions have.
  **{
    name: {"num_key_value_heads", "head_dim"}
    for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
  },
  "cvt": {"padding_q", "padding_kv"},  # They follow the kernels, 3 by default.
  # Its folders have them by the names of the first files.
  "kimi_linear": {
    *("n_group", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
    *("num_experts", "num_local_experts", "num_key_value_heads"),
  },
}
"""Family -> keys whose defaults do not fit its folders."""

_PATTERNS = (
  "sliding_window_pattern",
  "max_window_layers",
  "use_sliding_window",
)
_PATTERNS += ("first_k_dense_replace", "no_rope_layer_interval")
_PATTERNS += ("global_attn_every_n_layers",)
"""Keys of older files, from which the kinds of layers follow."""


def _same_without(key, without, default, names):
  """Whether a model may lack a key; if so, it is the model with the default."""
  results = []
  for content in (without, {**without, key: default}):
    try:
      results.append(read(content, names))
    except ValueError as error:
      results.append(str(error))
  # A file without it may be refused, in which case nothing is assumed.
  if ": missing" in str(results[0]) and isinstance(results[0], str):
    return False
  assert results[0] == results[1], key
  return not isinstance(results[0], str)


@pytest.mark.parametrize("case", [case for case in _ALL if OLD not in case])
def test_a_key_that_a_file_lacks_has_the_default_of_transformers(case):
  config, names = case_of(case)
  family = FAMILIES[config["model_type"]]
  if "max_position_embeddings" in config:
    config = {**config, "max_position_embeddings": 2**20}  # As a window may be.
  skipped = without_effect(config) - keys_read(config, names) | {"per_layer"}
  skipped |= _NOT_COMPARED.get(family.name, set())
  defaults, compared = _DEFAULTS[family.name], 0
  for key in defaults.keys() - skipped:
    aliases = {key}
    if key in ("num_experts", "num_local_experts"):
      aliases = {"num_experts", "num_local_experts"}
    without = {name: x for name, x in config.items() if name not in aliases}
    if key == "rope_parameters":
      without = {
        name: x
        for name, x in config.items()
        if "rope" not in name and "rotary" not in name
      }
    if key == "num_key_value_heads":  # A divisor of the number of heads.
      heads = 2 * defaults[key]
      without |= {"num_attention_heads": heads, "hidden_size": 12 * heads}
    compared += _same_without(key, without, defaults[key], names)
  assert compared
  # Lists of the kinds of layers.
  layers = config.get("num_hidden_layers")
  plain = {
    name: x
    for name, x in config.items()
    if name not in _PATTERNS and not (isinstance(x, list) and len(x) == layers)
  }
  for key, default in defaults.get("per_layer", {}).items():
    without = {**plain, "num_hidden_layers": len(default)}
    assert _same_without(key, without, default, names), key


_OF_EACH_KIND = ("bert", "t5", "vit", "swin", "cvt", "perceiver")
_OF_EACH_KIND += ("wav2vec2_conformer_relative",)


@pytest.mark.parametrize("case", [x for x in _OF_EACH_KIND if x in FOLDERS])
def test_parameters_of_every_layer_have_their_dtype(case):
  """Those of a mechanism are float32 whatever it is."""
  config, names = case_of(case)
  made, _ = read(config, names)
  changed = dataclasses.replace(made.config, param_dtype="bfloat16")
  model = load.make_model(made._replace(config=changed))
  params = jax.eval_shape(
    lambda: models.initialize(model, jax.random.key(0), model.example())
  )["params"]
  found = {
    path: x.dtype
    for path, x in flax.traverse_util.flatten_dict(params, sep="/").items()
    if "_attention/attention/" not in path
  }
  assert len(found) > 10
  assert {path for path, dtype in found.items() if dtype != "bfloat16"} == set()


@pytest.mark.parametrize(
  ("case", "scales", "factor"),
  [
    # `t5` is of a file whose head is tied, `t5_v1_1` of one with its own.
    *(("t5", ..., 24**-0.5), ("t5_v1_1", ..., 1.0)),
    *(("t5", False, 1.0), ("t5", True, 24**-0.5)),
    *(("t5_v1_1", False, 1.0), ("t5_v1_1", True, 24**-0.5)),
  ],
)
def test_whether_t5_scales_is_a_key_of_its_own(case, scales, factor):
  """Version 5 divides by the root of `d_model` where this key says so."""
  config, folder = _ALL[case]
  config = (
    config if scales is ... else {**config, "scale_decoder_outputs": scales}
  )
  made, _ = description(config, set(files.read_tensors(folder)))
  assert made.config.output.logit_scale == pytest.approx(factor)


@pytest.mark.thorough
def test_what_a_key_changes_is_logits(tmp_path):
  case = f"gemma3 {NEW} linear"
  config, _ = _ALL[case]
  folder = folder_of(case, config, tmp_path / "changed")
  inputs = {"input_ids": np.arange(5, 27)[None]}
  before = compute(models.load_pretrained(folder), inputs)
  moved, listed = set(), without_effect(config)
  for key, other in altered(config):
    folder_of(case, config | {key: other}, folder)
    try:
      p = models.load_pretrained(folder)
    except ValueError:
      continue
    if key not in listed:
      after = compute(p, inputs)
      assert np.abs(after - before).max() > 1e-4, (key, other)
      moved.add(key)
  assert {"rope_parameters", "rms_norm_eps"} < moved


@pytest.mark.parametrize("case", ["llama 5.23.0 yarn", "bert_masked"])
def test_a_key_that_nobody_knows_is_refused(case):
  config, folder = _ALL[case]
  names = set(files.read_tensors(folder))
  for value in (1, False, "x", [1], {"a": 1}):
    with pytest.raises(
      ValueError, match=r"^unheard_of: not supported for \w+;"
    ):
      description(config | {"unheard_of": value}, names)
  assert description(config | {"unheard_of": None}, names)


_ABSOLUTE = {"position_embedding_type": "absolute"}
_NO_DECODER = {"is_decoder": False, "add_cross_attention": False}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_SIGMOID |= {"moe_layer_freq": 1}
_MAMBA = {"d_inner": 66, "d_model": 22, "rms_norm": True}
_UNREAD = {
  "bert_classes": {"num_labels": 3},
  "cohere2": {
    **{"use_qk_norm": False, "use_parallel_block": True, "rotary_pct": 1.0},
    **{"use_gated_activation": True, "use_parallel_embedding": False},
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
  },
  "deberta_v2": {
    **{"attention_head_size": 8, "embedding_size": 24, "conv_kernel_size": 0},
    **_ABSOLUTE,
    **_NO_DECODER,
  },
  "deepseek_v3": {**_SIGMOID, "mlp_bias": False},
  "deepseek_v32": {**_SIGMOID, "rope_interleave": True},
  "electra": _ABSOLUTE,
  "falcon_h1": {"mamba_use_mlp": True},
  "falcon_mamba": {**_MAMBA, "n_layer": 2},
  "gemma_untied": {"hidden_activation": "silu"},
  "glm_moe_dsa": {**_SIGMOID, "rope_interleave": True},
  "gpt_oss": {"experts_per_token": 3},
  "kimi_linear": {
    **{"mla_use_nope": True, "use_grouped_topk": True, "moe_layer_freq": 1},
    "moe_router_activation_func": "sigmoid",
  },
  f"llama {NEW} plain": {"rope_interleaved": False},
  "longformer": {
    **{"attention_mode": "longformer", "ignore_attention_mask": False},
    **_ABSOLUTE,
    **_NO_DECODER,
  },
  "mamba": {**_MAMBA, "n_layer": 3},
  "mamba2": {"rms_norm": True},
  "nemotron_h": {"attention_head_dim": 6},
  "nystromformer": {**_ABSOLUTE, "is_decoder": False},
  f"qwen2 {NEW} last": {"use_mrope": False},
  "qwen3_5_moe_text": {"attn_output_gate": True, "decoder_sparse_step": 1},
  "qwen3_5_text": {"attn_output_gate": True},
  "xlm_roberta": _ABSOLUTE,
}
"""Case -> keys of published files that transformers neither reads nor writes."""


@pytest.mark.parametrize("case", _UNREAD)
def test_keys_of_published_files_that_transformers_does_not_read(case):
  """They are accepted with the value that transformers assumes, and no other."""
  config, folder = _ALL[case]
  names = set(files.read_tensors(folder))
  expected = read(config, names)
  for key, value in _UNREAD[case].items():
    assert key not in config
    assert read({**config, key: value}, names) == expected, key
    for other in others(key, value):
      with pytest.raises(ValueError, match=f"^{key}: expected "):
        read({**config, key: other}, names)


def test_files_as_they_are(tmp_path):
  """A tied table that is there twice, buffers, and a pointer of Git LFS."""
  case = f"gpt2 {NEW} plain"
  folder = folder_of(case, CONFIGS[case], tmp_path / "gpt2")
  path = folder / "model.safetensors"
  tensors = load_file(path)
  plain = models.load_pretrained(folder).variables
  buffers = {
    "rotary_emb.inv_freq": np.ones(2, np.float32),
    "transformer.h.0.attn.rotary_emb.cos_cached": np.ones(3, np.float32),
  }
  table = tensors["transformer.wte.weight"]
  save_file({**tensors, **buffers, "lm_head.weight": table}, path)
  again = models.load_pretrained(folder).variables
  same(again, plain)
  # An untied head that is equal is read.
  folder_of(case, CONFIGS[case] | {"tie_word_embeddings": False}, folder)
  assert "output_embedding" not in plain["params"]
  save_file({**tensors, "lm_head.weight": table}, path)
  head = models.load_pretrained(folder).variables["params"]["output_embedding"]
  np.testing.assert_array_equal(head["embedding"], table.astype(np.float32))
  folder_of(case, CONFIGS[case], folder)
  save_file({**tensors, "lm_head.weight": table + 1}, path)
  with pytest.raises(ValueError, match=r"lm_head.weight: differs .* ties them"):
    models.load_pretrained(folder)
  path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
  with pytest.raises(ValueError, match="run `git lfs pull`"):
    models.load_pretrained(folder)


def test_what_is_refused():
  plain = {k: x for k, x in CONFIGS[f"llama {OLD} plain"].items() if x}
  llama = {"architectures": ["LlamaForCausalLM"]}
  two_types = {"type": "linear", "rope_type": "yarn", "factor": 2.0}

  def describe(**config):
    description(plain | config, names_of("llama"))

  assert_refused(
    describe,
    {"architectures": ["Qwen4ForCausalLM"]},
    {"model_type": "mistral", **llama},
    prefix="config.json: ",
  )
  assert_refused(
    describe,
    {"rope_theta": None},
    {"rope_parameters": {"rope_theta": None}},
    *({"rope_scaling": x} for x in ({"type": "su"}, two_types)),
    # Twice, and not the same.
    {"rope_theta": 8.0, "rope_parameters": {"rope_theta": 7.0}},
    {"partial_rotary_factor": 0.5},
  )


_TWO_SETS = {
  "full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False},
  "sliding_attention": {"rope_theta": 5.0},
}
_NULL = {
  "rope_type": "yarn",
  "factor": 4.0,
  "rope_theta": 5.0,
  "truncate": None,
}
_NEAR = {"layer_types": ["sliding_attention"] * 3}
_PATTERN = {"sliding_window_pattern": 2, "_sliding_window_pattern": 3}


@pytest.mark.parametrize(
  ("case", "changes"),
  [
    # As long as the segment, so that all attention is exact.
    ("nystromformer", {"num_landmarks": 32}),
    ("longformer", {"attention_window": [4]}),
    ("longformer", {"attention_window": 1}),
    ("longformer", {"hidden_act": "relu"}),
    (f"gemma3 {NEW} linear", _PATTERN),
    *(
      ("mamba2", {"time_step_limit": x})
      for x in ([-1.0, 2.0], [2.0, 1.0], [np.inf] * 2, [0.1, "x"], [np.nan, 1])
    ),
    *(("mamba2", {x: 5}) for x in ("num_heads", "n_groups")),
    *((x, {"rescale_prenorm_residual": True}) for x in ("mamba", "mamba2")),
    (f"qwen2 {NEW} plain", {"use_sliding_window": False, **_NEAR}),
    ("xlstm", {"v_dim_factor": 0.01}),
    ("recurrent_gemma", {"hidden_size": 25}),
    ("kimi_linear", {"num_key_value_heads": 1}),
    ("nemotron_h", {"n_groups": 5}),
    ("olmo_hybrid", {"linear_num_key_heads": 4}),
    ("deepseek_v3", {"first_k_dense_replace": -1}),
    *(
      (f"gpt2 {NEW} plain", {name: value})
      for name, value in (
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
      )
    ),
    *(
      ("t5", {name: value})
      for name, value in (
        ("is_encoder_decoder", False),
        ("is_gated_act", True),
        ("dense_act_fn", "gelu"),
        ("feed_forward_proj", "gated-relu"),
      )
    ),
    *(
      ("bert_masked", {name: value})
      for name, value in (
        ("tie_word_embeddings", False),
        ("is_decoder", True),
        ("add_cross_attention", True),
      )
    ),
    ("distilbert_masked", {"tie_word_embeddings": False}),
    ("bert_classes", {"num_labels": 9}),
    ("opt", {"_remove_final_layer_norm": True}),
    ("cohere2", {"sliding_window_pattern": 0}),
    *(
      (f"llama {NEW} yarn", {name: value})
      for name, value in (
        ("rope_parameters", _NULL),
        ("rope_parameters", [1]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 5.0}),
      )
    ),
    (f"gemma3 {NEW} linear", {"rope_parameters": {"full": {}}}),
    (f"gemma3 {NEW} linear", {"rope_parameters": _TWO_SETS}),
    ("ministral3", {"rope_parameters": _NULL | {"rope_type": "linear"}}),
  ],
)
def test_values_that_no_file_may_have(case, changes):
  config, folder = _ALL[case]
  names, key = set(files.read_tensors(folder)), next(iter(changes))
  with pytest.raises(ValueError, match=f"^{key}: "):
    read({**config, **changes}, names)
  read(config, names)


@pytest.mark.parametrize(
  ("given", "options"),
  [
    ([0.5, 0.5], {"min_step": 0.5, "max_step": 0.5}),
    ([0.0, 0.25], {"max_step": 0.25}),
    ([0.125, {"__float__": "Infinity"}], {"min_step": 0.125}),
    ([0.125, "Infinity"], {"min_step": 0.125}),
  ],
)
def test_limits_of_steps(given, options):
  config, folder = _ALL["mamba2"]
  names = set(files.read_tensors(folder))
  made, _ = read({**config, "time_step_limit": given}, names)
  (mechanism,) = {*made.config.layers("decoder_attention")}
  assert mechanism.options == options


@pytest.mark.parametrize("key", ["rotary_emb_base", "rotary_pct"])
def test_copies_alone_are_refused(key):
  """GPT-NeoX's classes write `rope_theta`, too, and do not read it."""
  config = dict(CONFIGS[f"gpt_neox {OLD} plain"])
  del config[key]
  with pytest.raises(ValueError, match=f"^{key}: missing; without it"):
    description(config, {"embed_out.weight"})


def test_copies_beside_a_set():
  """What version 5 writes of a GPT-NeoX that it read from a file of version 4."""
  config = dict(CONFIGS[f"gpt_neox {OLD} plain"])
  names = {"embed_out.weight"}
  expected = description(config, names)
  theta, share = config.pop("rotary_emb_base"), config.pop("rotary_pct")
  both = {"rope_theta": theta, "partial_rotary_factor": share}
  config |= {**both, "rope_parameters": {"rope_type": "default", **both}}
  assert description(config, names) == expected
  with pytest.raises(
    ValueError, match="rope_theta: the file has two different values"
  ):
    description(config | {"rope_theta": 7.0}, names)


def test_two_thetas_are_written_for_version_5_alone():
  """OLMo 3 has one `rope_theta` in version 4, which cannot say both."""
  plain = CONFIGS[f"olmo3 {NEW} yarn"]
  sets = plain["rope_parameters"]
  for theta, old in ((70.0, 70.0), (7.0, None)):
    exact = sets["full_attention"] | {"rope_theta": theta}
    config = plain | {"rope_parameters": sets | {"full_attention": exact}}
    written = rotary.both_versions(config, FAMILIES["olmo3"].rotary)
    assert written.get("rope_theta") == old
    assert description(config | written, ()) == description(config, ())


def test_windows_that_are_not_used():
  """As in the files of Qwen2.5; with windows, their width is read."""
  plain, last = (CONFIGS[f"qwen2 {OLD} {case}"] for case in ("plain", "last"))
  names = names_of("qwen2")
  for config, is_same in ((plain, True), (last, False)):
    wider = description(config | {"sliding_window": 7}, names)
    assert (wider == description(config, names)) == is_same


def test_rotary_positions_inside_of_a_default_scaling():
  """θ that `rope_scaling` alone has, as some files of version 4 do."""
  plain = CONFIGS[f"llama {OLD} plain"]
  names = names_of("llama")
  scaling = {"rope_type": "default", "rope_theta": plain["rope_theta"]}
  moved = {k: x for k, x in plain.items() if k != "rope_theta"}
  moved["rope_scaling"] = scaling
  assert description(moved, names) == description(plain, names)
