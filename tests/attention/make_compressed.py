"""Writes vectors of compressed attention and block indexers of transformers.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/attention/make_compressed.py

Writes `compressed.npz`: for a layer of each kind, what its compressors pool and what
they give before their norm, and what its attention reads and gives before its output is
rotated back (DeepSeek-V4); what indexers of blocks pool and select, where positions are
not rotated (Qwen4-Exp), and with padding on either side (GLM-5.3-Flash).
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

KINDS = {
  "hca": "heavily_compressed_attention",
  "csa": "compressed_sparse_attention",
}
CONFIG = transformers.DeepseekV4Config(
  vocab_size=11,
  hidden_size=14,
  num_hidden_layers=2,
  num_attention_heads=3,
  head_dim=10,
  q_lora_rank=9,
  o_groups=3,
  o_lora_rank=4,
  sliding_window=4,
  layer_types=list(KINDS.values()),
  compress_rates={KINDS["hca"]: 5, KINDS["csa"]: 3},
  index_n_heads=7,
  index_head_dim=8,
  index_topk=2,
  partial_rotary_factor=0.4,
  moe_intermediate_size=6,
  n_routed_experts=4,
  mlp_layer_types=["moe", "moe"],
)
LENGTH = 23


def fill(module, seed):
  """Draws the parameters of an indexer."""
  generator = torch.Generator().manual_seed(seed)
  for _, tensor in module.named_parameters():
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
      tensor.copy_(noise * 1.5 * tensor[0].numel() ** -0.5)
  return torch.randn(2, LENGTH, 14, generator=generator, dtype=torch.float64)


def of_qwen():
  """Returns the indexer of Qwen, whose keys are means."""
  config = transformers.AutoConfig.for_model("qwen4_exp_text")
  sizes = {"n_heads": 5, "kv_heads": 1, "head_dim": 8, "budget": 8}
  for name, size in (sizes | {"compress_ratio": 4}).items():
    setattr(config, f"indexer_{name}", size)
  config.hidden_size, config.rms_norm_eps = 14, 1e-3
  module = qwen.Qwen4ExpTextQSAIndexer(config, 0).double()
  inputs, arrays = fill(module, 5), {}

  def keep(name):
    def hook(module, inputs, out):
      # The last call of each row has all blocks.
      arrays.setdefault(f"{name}.in", []).append(inputs[0])
      arrays.setdefault(f"{name}.out", []).append(out)

    return hook

  module.q_layernorm.register_forward_hook(keep("query"))
  module.k_layernorm.register_forward_hook(keep("key"))
  flat = torch.ones(2, LENGTH, 8, dtype=torch.float64)
  visible = (
    torch.ones(LENGTH, LENGTH).tril().bool()[None, None].expand(2, 1, -1, -1)
  )
  with torch.no_grad():
    mask = module(inputs, (flat, 0 * flat), visible, None)
    rows = module.index_qk_proj(inputs)[..., -8:]
  per_row = len(arrays["key.out"]) // 2
  last = [per_row - 1, 2 * per_row - 1]
  return {
    "qwen.rows": rows,
    "qwen.pooled": torch.stack([arrays["key.in"][i] for i in last]),
    "qwen.index_key": torch.stack([arrays["key.out"][i] for i in last]),
    "qwen.index_query": arrays["query.out"][0],
    "qwen.selected": mask[:, 0] & visible[:, 0],
  }


def of_glm():
  """Returns the indexer of GLM, which pools keys by a softmax, with padding."""
  config = transformers.AutoConfig.for_model("glm5_next_text")
  config.hidden_size, config.q_lora_rank, config.qk_rope_head_dim = 14, 9, 4
  config.index_n_heads, config.index_head_dim = 5, 8
  config.index_topk, config.index_kpool = 6, 3
  config.index_kpool_always_select_tail = True
  module = glm.Glm5NextTextIndexer(config, 0).double()
  inputs = fill(module, 7)
  latent = inputs.flip(2)[..., :9].contiguous()
  places = torch.arange(LENGTH)[None]
  keep = torch.cat([places < 18, places >= 6])
  with torch.no_grad():
    indices = module(inputs, latent, keep, None).long()
    selected = torch.zeros(2, LENGTH, LENGTH + 1, dtype=torch.bool)
    selected.scatter_(2, torch.where(indices < 0, LENGTH, indices), True)
    return {
      "glm.keep": keep,
      "glm.index_query": module.wq_b(latent).view(2, LENGTH, 5, 8),
      "glm.index_weight": module.weights_proj(inputs) * (5 * 8) ** -0.5,
      "glm.rows": module.k_norm(module.wk(inputs)),
      "glm.gates": inputs @ module.index_kpool_compress_gate.T,
      "glm.bias": module.index_kpool_compress_ape,
      "glm.selected": selected[..., :LENGTH],
    }


def main():
  """Writes the file."""
  arrays = {**of_qwen(), **of_glm()}
  CONFIG._attn_implementation = "eager"
  own = deepseek.eager_attention_forward
  for layer, name in enumerate(KINDS):
    module = deepseek.DeepseekV4Attention(CONFIG, layer).double()
    generator = torch.Generator().manual_seed(layer)

    def normal(*shape, generator=generator):
      return torch.randn(shape, generator=generator, dtype=torch.float64)

    for path, tensor in module.named_parameters():
      scale = 1.5 * tensor[0].numel() ** -0.5 if tensor.ndim > 1 else 0.5
      scale = 0.7 if "position_bias" in path else scale
      with torch.no_grad():
        tensor.copy_(
          scale * normal(*tensor.shape) + path.endswith("norm.weight")
        )

    def attend(module, query, key, value, mask, name=name, **options):
      out, weights = own(module, query, key, value, mask, **options)
      arrays[f"{name}.query"] = query.transpose(1, 2)
      arrays[f"{name}.key"] = key.transpose(1, 2)
      arrays[f"{name}.out"] = out
      return out, weights

    deepseek.eager_attention_forward = attend
    compressors = {"entries": module.compressor}
    if name == "csa":
      indexer = module.compressor.indexer
      compressors["index"] = indexer
      indexer.scorer.register_forward_hook(
        lambda module, inputs, out, name=name: arrays.update(
          {
            f"{name}.index_query": inputs[0],
            f"{name}.index_key": inputs[1],
            f"{name}.index_weight": module.weights_proj(inputs[2])
            * (module.weights_scaling * module.softmax_scale),
          }
        )
      )
    inputs = normal(2, LENGTH, CONFIG.hidden_size)
    for part, one in compressors.items():
      prefix = f"{name}.{part}"
      one.kv_norm.register_forward_pre_hook(
        lambda module, inputs, prefix=prefix: arrays.update(
          {f"{prefix}.pooled": inputs[0]}
        )
      )
      with torch.no_grad():
        arrays[f"{prefix}.rows"] = one.kv_proj(inputs)
        arrays[f"{prefix}.gates"] = one.gate_proj(inputs)
      arrays[f"{prefix}.bias"] = one.position_bias
    arrays[f"{name}.sinks"] = module.sinks
    places = torch.arange(LENGTH)[None].expand(2, -1)
    rotary = deepseek.DeepseekV4RotaryEmbedding(CONFIG)
    embeddings = {x: rotary(inputs, places, x) for x in ("main", "compress")}
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
    is_near = (distance >= 0) & (distance < CONFIG.sliding_window)
    mask = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64)
    mask = mask.masked_fill(~is_near, -torch.inf)
    with torch.no_grad():
      module(inputs, embeddings, places, mask)
  arrays = {name: x.detach().numpy() for name, x in arrays.items()}
  path = pathlib.Path(__file__).with_name("compressed.npz")
  np.savez_compressed(
    path, **{n: x.astype(np.float32) for n, x in arrays.items()}
  )
  print(f"{path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
  main()
