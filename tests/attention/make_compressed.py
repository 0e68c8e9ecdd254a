"""Makes vectors of the compressed attention of DeepSeek-V4 by transformers.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/attention/make_compressed.py

Writes `compressed.npz`: for a layer of each kind, what its compressors pool and what
they give before their norm, and what its attention reads and gives before its output is
rotated back.
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek

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


def main():
  """Writes the file."""
  arrays = {}
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
