"""Writes small published models, and the logits that transformers gives them.

    pip install torch==2.13.0 transformers==5.24.0
    OMP_NUM_THREADS=1 python tests/models/published/make_folders.py FOLDER …

Folders are here, in `multimodal/`, and in tests/published/ of projects. A new one has
a `config.json` with the class of transformers in `architectures` and sizes and keys
away from their defaults. The script adds what the folder lacks, and computes all
logits again:

    config.json        as transformers writes it
    model.safetensors  drawn wide: with transformers' own 0.02, attention is uniform and
                       hides most mistakes
    expected.npz       `input.NAME` of a call, and its logits: `float32` and, where an
                       array has this name, `float64`. Tokens are drawn; inputs of
                       images (`[B, H, W, C]`) and of speech are given. `of_others` are
                       the logits of the images `others`, of another size
    left.npz           the same for decoders, rows padded on the left
    changes.json       changes of config.json, where null takes a key out
    changes.npz        the logits with each of them, by number

Tests read these files and need neither of the two libraries. Older folders were written
by transformers 4.57.6; 5.24.0 gives all of them the same logits. Mamba-2 is of 5.23.0,
as 4.57.6 norms all groups of heads together, which its authors' code does not. xLSTM
needs the package `xlstm`.
"""

import inspect
import json
import math
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers

# Where padding changes a row in transformers, each row is computed alone.
APART = (
  "mamba",
  "mamba2",
  "recurrent_gemma",
  "xlstm",
  "falcon_h1",
  "nemotron_h",
)
# Blocks that shift with the padding of transformers.
LEFT_APART = (*APART, "deepseek_v4", "minimax_m3_vl_text")
# What no reader rounds.
EXACT = ("inv_freq", "_decay", "slope_rate")


def value(model, name, weight, generator, gain):
  """A parameter or a buffer; None for a buffer that is computed.

  Kernels have gain/√fan-in, norms 1 ± 0.2, biases ± 0.2, and tables ± 0.5.
  """
  noise = torch.randn(weight.shape, generator=generator)
  lower, kind = name.lower(), type(model).__name__
  steps = "linear_attn", "self_attn"
  if name.endswith("e_score_correction_bias"):
    return 0.3 * noise
  if name.endswith("tid2eid"):
    count = model.config.n_routed_experts
    order = torch.rand(len(weight), count, generator=generator).argsort(1)
    return order[:, : weight.shape[1]]
  if name.endswith("running_var"):
    return (0.5 * noise).exp()
  if name.endswith("running_mean"):
    return 0.5 * noise
  if name in dict(model.named_buffers()):
    return None
  if "norm" in lower or ".ln_" in lower:
    # Some scales are what they have beyond 1; a norm before a gate has all.
    from_one = any(x in kind for x in ("Gemma", "Qwen3Next", "Qwen3_5"))
    from_one &= not name.endswith("linear_attn.norm.weight")
    return 0.2 * noise + (name.endswith("weight") and not from_one)
  if name.endswith("A_log"):
    if not any(x in name for x in steps):
      return 0.7 * noise
    return torch.empty_like(noise).uniform_(1, 16, generator=generator).log()
  if name.endswith("dt_bias") and any(x in name for x in steps):
    # Steps of 0.001 to 0.1, so that a state lasts for many positions.
    low, high = math.log(0.001), math.log(0.1)
    step = torch.empty_like(noise).uniform_(low, high, generator=generator)
    return step.exp().expm1().log()
  if name.endswith("dt_proj.bias"):
    return noise - 1.5
  if name.endswith("recurrent_param"):
    return noise - 2.0
  if name.endswith(".D"):
    return 1.0 + 0.3 * noise
  if name.endswith("sinks") or "relative_attention_bias" in lower:
    return noise
  if weight.ndim == 1 or name.endswith("proj_bias"):
    return 0.2 * noise
  if any(x in lower for x in ("token", "latents", "position_embeddings")) or (
    "patch_embeddings" not in lower
    and any(x in lower for x in ("embed", "shared", "wte", "wpe"))
  ):
    return 0.5 * noise
  module = type(model.get_submodule(name.rpartition(".")[0])).__name__
  fan_in = weight.shape[0] if "Conv1D" in module else weight[0].numel()
  if name.endswith(("gate_up_proj", "down_proj")) and weight.ndim == 3:
    fan_in = weight.shape[1 if "GptOss" in kind else 2]
  return gain * noise / fan_in**0.5


def write_tensors(folder, gain=1.5):
  """Draws the weights of a folder, and completes its config."""
  config = json.loads((folder / "config.json").read_text())
  made = getattr(transformers, config["architectures"][0])
  model = made(made.config_class.from_dict(config))
  generator = torch.Generator().manual_seed(len(folder.name))
  for name, weight in [*model.named_parameters(), *model.named_buffers()]:
    drawn = value(model, name, weight, generator, gain)
    if drawn is not None:
      with torch.no_grad():
        weight.copy_(drawn)
  exact = {x: b for x, b in model.named_buffers() if x.endswith(EXACT)}
  # Half the bytes in the repository; the logits have these weights as float32.
  model.eval().bfloat16()
  for name, buffer in exact.items():
    place, _, last = name.rpartition(".")
    setattr(model.get_submodule(place), last, buffer)
  model.save_pretrained(folder)
  (folder / "generation_config.json").unlink(missing_ok=True)


def tokens(seed, vocab, pad):
  """Three rows of a call: whole, and two of which the ends are padding."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(5, vocab, (3, 19))
  mask = np.arange(19) < np.array([[19], [12], [1]])
  ids[~mask] = pad
  return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}


def on_the_left(inputs):
  """The same rows with their padding on the left."""
  shifts = (inputs["attention_mask"] == 0).sum(1)
  return {
    name: np.stack([np.roll(x, n) for x, n in zip(rows, shifts, strict=True)])
    for name, rows in inputs.items()
  }


def torch_inputs(inputs):
  """As PyTorch reads them: images have their channels first."""
  return {
    name: torch.tensor(x).permute(0, 3, 1, 2)
    if name == "pixel_values"
    else torch.tensor(x)
    for name, x in inputs.items()
  }


def logits(folder, inputs, *, apart, dtype="float32", **options):
  """What transformers computes of a call.

  Args:
    folder: of the model.
    inputs: of the call.
    apart: families whose rows are computed alone, without padding; zeros are there.
    dtype: of the computation.
    **options: of the call.
  """
  config = json.loads((folder / "config.json").read_text())
  made = getattr(transformers, config["architectures"][0])
  implementation = {"attn_implementation": "eager", "dtype": dtype}
  if transformers.__version__.startswith("5."):
    implementation["experts_implementation"] = "eager"
  model = made.from_pretrained(folder, **implementation).eval()

  if "use_cache" in inspect.signature(model.forward).parameters:
    options["use_cache"] = False

  def call(**arrays):
    with torch.no_grad():
      out = model(**torch_inputs(arrays), **options)
    return (out.logits if "logits" in out else out.last_hidden_state).numpy()

  if config["model_type"] not in apart:
    return call(**inputs)
  rows = [x > 0 for x in inputs["attention_mask"]]
  alone = [
    call(input_ids=ids[keep][None])[0]
    for ids, keep in zip(inputs["input_ids"], rows, strict=True)
  ]
  out = np.zeros((*inputs["input_ids"].shape, alone[0].shape[-1]), np.float32)
  for row, keep, one in zip(out, rows, alone, strict=True):
    row[keep] = one
  return out


def read(path):
  """The inputs of a call, and all arrays of a file."""
  with np.load(path) as file:
    arrays = dict(file)
  prefix = "input."
  names = [name for name in arrays if name.startswith(prefix)]
  return {x.removeprefix(prefix): arrays[x] for x in names}, arrays


def write(path, inputs, arrays):
  """A file that `read` reads."""
  named = {f"input.{name}": x for name, x in inputs.items()}
  np.savez_compressed(path, **(named | arrays))


def changed_logits(folder, inputs):
  """The logits of each change of a folder's config, by number."""
  path, out = folder / "changes.json", {}
  changes = json.loads(path.read_text()) if path.exists() else []
  config = json.loads((folder / "config.json").read_text())
  for number, change in enumerate(changes):
    kept = {
      x: y for x, y in (config | change).items() if change.get(x, 0) is not None
    }
    with tempfile.TemporaryDirectory() as name:
      shutil.copy(folder / "model.safetensors", name)
      (pathlib.Path(name) / "config.json").write_text(json.dumps(kept))
      out[str(number)] = logits(pathlib.Path(name), inputs, apart=APART)
  return out


def make(folder):
  """Adds what a folder lacks, and computes all logits again."""
  if not (folder / "model.safetensors").exists():
    write_tensors(folder)
  expected, left = folder / "expected.npz", folder / "left.npz"
  config = json.loads((folder / "config.json").read_text())
  if not expected.exists():
    pad = config.get("pad_token_id") or 0
    inputs = tokens(len(folder.name), config["vocab_size"], pad)
    write(expected, inputs, {})
    if config["architectures"][0].endswith("CausalLM"):
      write(left, on_the_left(inputs), {})
  inputs, arrays = read(expected)
  for dtype in ("float32", *{"float64"} & {*arrays}):
    arrays[dtype] = logits(folder, inputs, apart=APART, dtype=dtype)
  if "others" in arrays:
    of_others = {"pixel_values": arrays["others"]}
    interpolated = {"interpolate_pos_encoding": True}
    arrays["of_others"] = logits(folder, of_others, apart=(), **interpolated)
  write(expected, inputs, arrays)
  if left.exists():
    moved, _ = read(left)
    write(left, moved, {"float32": logits(folder, moved, apart=LEFT_APART)})
  if changes := changed_logits(folder, inputs):
    write(folder / "changes.npz", {}, changes)
  size = sum(file.stat().st_size for file in folder.iterdir())
  print(f"{folder.name:32s} {size / 1024:7.0f} KiB", flush=True)


if __name__ == "__main__":
  for name in sys.argv[1:]:
    make(pathlib.Path(name))
