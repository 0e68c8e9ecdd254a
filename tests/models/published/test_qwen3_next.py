"""Qwen3-Next: layers that differ in heads and widths, generation, refusals."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from tests.models import tiny
from tests.models.published.test_equality import FOLDERS, compute, expected

FOLDER = FOLDERS["qwen3_next"]


def tokens():
  """The rows of the folder, and their logits by transformers."""
  inputs, outputs = expected("qwen3_next")
  return inputs["input_ids"], inputs["attention_mask"], outputs["float32"]


def test_layers_differ():
  config = models.load_pretrained(FOLDER).model.config
  assert models.slots(config) == " + ".join(["gated_delta"] * 3 + ["dense"])
  sizes = [
    (one.num_heads, one.slot.num_qk_heads, one.kv_heads, one.query_dim)
    for one in config.decoder_configs
  ]
  assert sizes == [(6, 2, 6, 10)] * 3 + [(4, None, 2, 16)]
  turned = [one.position for one in config.decoder_configs]
  assert turned == ["none"] * 3 + ["rotary"]


def test_token_by_token():
  """Every step of a row gives the logits that transformers has for all of it."""
  p = models.load_pretrained(FOLDER)
  ids, mask, wanted = tokens()
  got = tiny.step_by_step(p.model, p.variables, {"inputs": jnp.asarray(ids)})
  difference = np.abs(np.asarray(got) - wanted)[mask > 0].max()
  assert difference < 2e-5 * np.abs(wanted[mask > 0]).max()


def test_a_prompt_at_once_and_then_token_by_token():
  p = models.load_pretrained(FOLDER)
  ids, _, _ = tokens()
  wanted = np.asarray(compute(p, {"input_ids": ids}))
  lengths = np.array([5, 11, 1])

  @jax.jit
  def read(prompts, lengths):
    _, state = p.model.apply(
      p.variables, None, *ids.shape, method="start", mutable=["cache", "memory"]
    )
    return p.model.apply(
      {**p.variables, **state},
      prompts,
      lengths,
      method="prefill",
      mutable=["cache"],
    )

  logits, state = read(ids[:, :11], lengths)
  decode = jax.jit(
    lambda state, ids: p.model.apply(
      {**p.variables, **state}, ids, method="decode", mutable=["cache"]
    )
  )
  rows = np.arange(3)
  for more in range(6):
    at = lengths + more
    difference = np.abs(np.asarray(logits) - wanted[rows, at - 1]).max()
    assert difference < 2e-5 * np.abs(wanted).max()
    logits, state = decode(state, jnp.asarray(ids[rows, at]))


def test_greedy_generation_takes_the_largest_logits():
  p = models.load_pretrained(FOLDER)
  ids, _, _ = tokens()
  prompt = ids[:, :6]
  out = models.generate(
    p.model, p.variables, prompt=prompt, max_length=8, bos_id=0, eos_id=-1
  )
  whole = np.concatenate([prompt, out.tokens], axis=1)
  logits = compute(p, {"input_ids": whole})
  np.testing.assert_array_equal(
    out.tokens, np.asarray(logits)[:, 5:-1].argmax(-1)
  )


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"num_experts": 8}, "num_experts: expected 0, as only feed-forward"),
    ({"num_experts": None}, "num_experts: expected 0"),
    (
      {"rope_scaling": {"rope_type": "yarn"}},
      "rope_scaling: factor: missing",
    ),
    ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim: expected 4"),
    ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
    ({"layer_types": ["full_attention"]}, "layer_types: expected 4 of linear"),
    (
      {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
      "layer_types: expected 4 of linear_attention and full_attention",
    ),
    (
      {"linear_num_key_heads": 4},
      "decoder_around[0].num_qk_heads: expected a divisor of num_heads 6",
    ),
    ({"partial_rotary_factor": 0.2}, "position: rotary turns pairs"),
  ],
)
def test_configs_that_are_not_read(values, message, tmp_path):
  shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
  path = tmp_path / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | values))
  with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")) as info:
    models.load_pretrained(tmp_path)
  assert "\n" not in str(info.value)


def test_an_absent_number_of_experts_is_that_of_transformers(tmp_path):
  shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
  path = tmp_path / "config.json"
  theirs = json.loads(path.read_text())
  del theirs["num_experts"]
  path.write_text(json.dumps(theirs))
  with pytest.raises(ValueError, match=r"num_experts: expected 0, .* got 512"):
    models.load_pretrained(tmp_path)


def test_layers_without_their_types_are_three_to_one(tmp_path):
  shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
  path = tmp_path / "config.json"
  theirs = json.loads(path.read_text()) | {"layer_types": None}
  path.write_text(json.dumps(theirs))
  assert (
    models.load_pretrained(tmp_path).model
    == models.load_pretrained(FOLDER).model
  )


def test_layers_that_predict_several_tokens_are_left_out(tmp_path):
  """Transformers does not read them either."""
  shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
  path = tmp_path / "model.safetensors"
  tensors = load_file(path)
  save_file({**tensors, "mtp.fc.weight": np.ones((24, 48), np.float32)}, path)
  with_more = models.load_pretrained(tmp_path)
  own = models.load_pretrained(FOLDER)
  jax.tree.map(
    np.testing.assert_array_equal, with_more.variables, own.variables
  )


@pytest.mark.parametrize(
  "place", ["linear_attn.in_proj_ba", "self_attn.q_proj"]
)
def test_a_tensor_in_the_wrong_layer_is_refused(place, tmp_path):
  """Each layer has the tensors of its kind, and no others."""
  shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
  path = tmp_path / "model.safetensors"
  tensors = load_file(path)
  here, there = (0, 3) if place.startswith("linear") else (3, 0)
  wrong = f"model.layers.{there}.{place}.weight"
  right = tensors[f"model.layers.{here}.{place}.weight"]
  save_file({**tensors, wrong: right}, path)
  with pytest.raises(ValueError, match=f"{wrong}: no variable of this model"):
    models.load_pretrained(tmp_path)


def test_what_replaces_both_mechanisms_keeps_what_is_around(tmp_path):
  """Exact attention in every layer, which transformers has in the last alone."""
  ids, _, wanted = tokens()

  def logits(attention):
    p = models.load_pretrained(FOLDER, attention=attention)
    return p, np.asarray(compute(p, {"input_ids": ids}))

  def apart(one, other):
    return np.abs(one - other).max() / np.abs(other).max()

  p, flash = logits("flash")
  assert apart(flash, logits("dense")[1]) < 2e-5
  assert apart(flash, wanted) > 0.1
  models.save_pretrained(tmp_path, p)
  again = models.load_pretrained(tmp_path)
  assert models.slots(again.model.config) == "flash"
  np.testing.assert_array_equal(compute(again, {"input_ids": ids}), flash)
  # In the last layer alone it is the published model.
  _, in_last = logits(["gated_delta"] * 3 + ["flash"])
  assert apart(in_last, logits(None)[1]) < 2e-5


def test_keys_of_its_own_are_refused():
  with pytest.raises(ValueError, match=r"^num_kv_heads: latent makes a key"):
    models.load_pretrained(FOLDER, attention="latent")


def test_a_run_of_it_is_told_what_no_family_has():
  p = models.load_pretrained(FOLDER)
  with pytest.raises(ValueError, match=r"^no published family is this model: "):
    models.as_pretrained(p.model, p.variables)
