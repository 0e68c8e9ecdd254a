"""Makes small models whose layers have states, and the logits of transformers.

    pip install torch==2.13.0 transformers==5.24.0
    OMP_NUM_THREADS=1 python tests/models/published/make_states.py

As `make_fixtures.py`, with rows padded on the right in `expected.npz` and on the left in
`left.npz`, and with single keys changed in `changed.npz`.
"""

import json

from make_fixtures import HERE, VOCAB, draw, tokens_of
import numpy as np
import torch
import transformers


def draw_states(model, seed, gain):
  """As `draw`, with states that last for some positions."""
  draw(model, seed, gain)
  generator = torch.Generator().manual_seed(seed + 1)
  for name, weight in model.named_parameters():
    noise = torch.randn(weight.shape, generator=generator)
    with torch.no_grad():
      if "Gemma" in type(model).__name__ and "norm" in name:
        weight.copy_(0.2 * noise)  # What they have beyond 1.
      elif name.endswith("A_log"):
        weight.copy_(0.7 * noise)
      elif name.endswith("dt_proj.bias"):
        weight.copy_(noise - 1.5)
      elif name.endswith(".D"):
        weight.copy_(1.0 + 0.3 * noise)
      elif name.endswith("recurrent_param"):
        weight.copy_(noise - 2.0)


def rows_apart(model, inputs):
  """Logits of every row without its padding, and zeros where it has some."""
  out = None
  for row in range(len(inputs["input_ids"])):
    keep = inputs["attention_mask"][row] > 0
    tokens = torch.tensor(inputs["input_ids"][row][keep][None])
    with torch.no_grad():
      logits = model(input_ids=tokens, use_cache=False).logits[0].numpy()
    if out is None:
      shape = *inputs["input_ids"].shape, logits.shape[-1]
      out = np.zeros(shape, np.float32)
    out[row, keep] = logits
  return out


def case(name, kind, config, changes, *, apart=False, gain=1.0):
  """Writes a folder.

  Args:
    name: of the folder.
    kind: a class of transformers.
    config: of the model, by name.
    changes: `{key: value}` of single keys that leave the shapes of all tensors.
    apart: whether transformers lets padding change a row, so that rows are alone.
    gain: of the kernels.
  """
  path = HERE / name
  made = getattr(transformers, kind)
  model = made(made.config_class(**config))
  draw_states(model, len(name), gain)
  model.eval().bfloat16()
  model.save_pretrained(path)
  (path / "generation_config.json").unlink(missing_ok=True)
  right = tokens_of(np.random.default_rng(61), 3, 19, 0, (19, 12, 1))
  shifts = 0, 7, 18
  left = {
    x: np.stack([np.roll(row, n) for row, n in zip(y, shifts, strict=True)])
    for x, y in right.items()
  }

  def logits(inputs, **values):
    theirs = made.config_class.from_pretrained(path, **values)
    loaded = made.from_pretrained(
      path,
      config=theirs,
      attn_implementation="eager",
      dtype=torch.float32,
    ).eval()
    if apart:
      return rows_apart(loaded, inputs)
    tensors = {x: torch.tensor(y) for x, y in inputs.items()}
    with torch.no_grad():
      return loaded(**tensors, use_cache=False).logits.numpy()

  for file, inputs in (("expected", right), ("left", left)):
    arrays = {f"input.{key}": value for key, value in inputs.items()}
    arrays["float32"] = logits(inputs)
    np.savez_compressed(path / f"{file}.npz", **arrays)
  found = {
    json.dumps({key: value}): logits(right, **{key: value})
    for key, value in changes.items()
  }
  np.savez_compressed(path / "changed.npz", **found)
  size = sum(file.stat().st_size for file in path.iterdir())
  print(name, size // 1024, "KiB")


def mamba():
  """Makes Mamba and Falcon Mamba."""
  sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 22,
    "num_hidden_layers": 3,
    "state_size": 5,
    "expand": 3,
    "time_step_rank": 4,
    "layer_norm_epsilon": 1e-3,
    "pad_token_id": None,
  }
  changes = {"layer_norm_epsilon": 0.1}
  untied = {"tie_word_embeddings": False, "use_bias": True}
  # A bias is in what convolutions read of padding there.
  case("mamba", "MambaForCausalLM", sizes | untied, changes, apart=True)
  falcon = {
    "mixer_rms_eps": 0.02,
    "use_conv_bias": False,
    "num_hidden_layers": 2,
  }
  changes = {"layer_norm_epsilon": 0.1, "mixer_rms_eps": 0.5}
  case("falcon_mamba", "FalconMambaForCausalLM", sizes | falcon, changes)


def recurrent_gemma():
  """Makes RecurrentGemma, whose layers ignore masks where they have a state."""
  sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "lru_width": 20,
    "intermediate_size": 58,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_window_size": 5,
    "attention_bias": True,
    "logits_soft_cap": 11.0,
    "rms_norm_eps": 1e-3,
    "block_types": ["recurrent", "attention"],
    "rope_parameters": {
      "rope_type": "default",
      "rope_theta": 500.0,
      "partial_rotary_factor": 0.5,
    },
    "pad_token_id": None,
  }
  rope = {
    "rope_type": "default",
    "rope_theta": 50.0,
    "partial_rotary_factor": 1.0,
  }
  changes = {
    "attention_window_size": 3,
    "logits_soft_cap": 2.0,
    "rms_norm_eps": 0.1,
    "rope_parameters": rope,
  }
  name = "recurrent_gemma"
  case(name, "RecurrentGemmaForCausalLM", sizes, changes, apart=True)


def xlstm():
  """Makes xLSTM, which reads no masks."""
  sizes = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_heads": 3,
    "qk_dim_factor": 0.625,
    "v_dim_factor": 0.875,
    "ffn_proj_factor": 1.7,
    "ffn_round_up_to_multiple_of": 7,
    "gate_soft_cap": 3.0,
    "output_logit_soft_cap": 9.0,
    "norm_eps": 1e-3,
    "eps": 0.02,
  }
  changes = {
    "gate_soft_cap": 1.0,
    "output_logit_soft_cap": 2.0,
    "norm_eps": 0.1,
    "eps": 0.5,
  }
  case("xlstm", "xLSTMForCausalLM", sizes, changes, apart=True, gain=1.5)


def main():
  """Writes the folders."""
  for make in (mamba, recurrent_gemma, xlstm):
    make()


if __name__ == "__main__":
  main()
