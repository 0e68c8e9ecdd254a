"""Measures the peak memory of loading published weights of Qwen3-0.6B's shape.

    python -m benchmarks.loading --stored=float32 --dtype=float32

It writes a folder with random weights (2.4 GB in float32), loads it in another process,
prints the peak resident memory of that process, and deletes the folder.
"""

import argparse
import json
import math
import multiprocessing
from pathlib import Path
import resource
import tempfile
import time

import jax
import numpy as np
from safetensors.numpy import save_file

import models

FEATURES, LAYERS, VOCAB = 1024, 28, 151936
HEADS, KV_HEADS, HEAD_DIM, MLP = 16, 8, 128, 3072
CONFIG = {
  "architectures": ["Qwen3ForCausalLM"],
  "model_type": "qwen3",
  "vocab_size": VOCAB,
  "hidden_size": FEATURES,
  "num_hidden_layers": LAYERS,
  "num_attention_heads": HEADS,
  "num_key_value_heads": KV_HEADS,
  "head_dim": HEAD_DIM,
  "intermediate_size": MLP,
  "max_position_embeddings": 40960,
  "rms_norm_eps": 1e-6,
  "rope_theta": 1e6,
  "tie_word_embeddings": True,
}


def shapes() -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the tensors by name."""
  layer = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, FEATURES),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, FEATURES),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, FEATURES),
    "self_attn.o_proj": (FEATURES, HEADS * HEAD_DIM),
    "self_attn.q_norm": (HEAD_DIM,),
    "self_attn.k_norm": (HEAD_DIM,),
    "mlp.gate_proj": (MLP, FEATURES),
    "mlp.up_proj": (MLP, FEATURES),
    "mlp.down_proj": (FEATURES, MLP),
    "input_layernorm": (FEATURES,),
    "post_attention_layernorm": (FEATURES,),
  }
  tensors = {"model.embed_tokens": (VOCAB, FEATURES), "model.norm": (FEATURES,)}
  for i in range(LAYERS):
    tensors |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
  return {f"{name}.weight": shape for name, shape in tensors.items()}


def write(folder: Path, dtype: str) -> None:
  """Writes a folder with random weights."""
  rng = np.random.default_rng(0)
  tensors = {}
  for name, shape in shapes().items():
    x = rng.standard_normal(shape, np.float32) / math.sqrt(shape[-1])
    tensors[name] = np.asarray(x, jax.numpy.dtype(dtype))
  save_file(tensors, folder / "model.safetensors", {"format": "pt"})
  (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")


def load(folder: Path, dtype: str, results: multiprocessing.Queue) -> None:
  """Loads the folder, and puts seconds and peak memory in bytes into `results`."""
  start = time.perf_counter()
  p = models.load_pretrained(folder, dtype=dtype)
  jax.block_until_ready(p.variables)
  seconds = time.perf_counter() - start
  peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  results.put((seconds, peak))


def main() -> None:
  """Parses the command line and measures."""
  parser = argparse.ArgumentParser(prog="python -m benchmarks.loading")
  parser.add_argument("--stored", default="float32")
  parser.add_argument("--dtype", default="float32")
  flags = parser.parse_args()
  # Separate processes, so that the peak excludes the writing.
  context = multiprocessing.get_context("spawn")
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for target, options in (
      (write, (folder, flags.stored)),
      (load, (folder, flags.dtype, results := context.Queue())),
    ):
      process = context.Process(target=target, args=options)
      process.start()
      process.join()
    size = (folder / "model.safetensors").stat().st_size
  seconds, peak = results.get(timeout=60)
  print(
    f"file {size / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB, {peak / size:.2f} "
    f"times the file, {seconds:.1f} s"
  )


if __name__ == "__main__":
  main()
