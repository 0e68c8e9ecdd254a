"""Writes vectors of transformers' feed-forward layers with experts.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/models/make_experts.py

Writes `experts.npz`: for each layer its inputs, weights and outputs in float64, and
the load-balance loss of random logits with padding.
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

SIZES = {"hidden_size": 10, "vocab_size": 11}
LAYERS = {
  "deepseek": (
    deepseek.DeepseekV3MoE,
    transformers.DeepseekV3Config(
      **SIZES,
      moe_intermediate_size=7,
      n_routed_experts=12,
      num_experts_per_tok=3,
      n_shared_experts=2,
      n_group=4,
      topk_group=2,
      norm_topk_prob=True,
      routed_scaling_factor=2.5,
    ),
  ),
  "qwen": (
    qwen.Qwen3NextSparseMoeBlock,
    transformers.Qwen3NextConfig(
      **SIZES,
      moe_intermediate_size=7,
      shared_expert_intermediate_size=5,
      num_experts=6,
      num_experts_per_tok=2,
      norm_topk_prob=False,
    ),
  ),
  "gpt_oss": (
    gpt_oss.GptOssMLP,
    transformers.GptOssConfig(
      **SIZES,
      intermediate_size=9,
      num_local_experts=5,
      num_experts_per_tok=3,
      swiglu_alpha=1.3,
      swiglu_limit=0.8,
    ),
  ),
}


def main():
  """Writes the file."""
  arrays = {}
  for name, (kind, config) in LAYERS.items():
    config._experts_implementation = "eager"
    layer = kind(config).double()
    generator = torch.Generator().manual_seed(len(name))

    def normal(*shape, generator=generator):
      return torch.randn(shape, generator=generator, dtype=torch.float64)

    for path, tensor in layer.state_dict().items():
      scale = 0.3 if "bias" in path else tensor[0].numel() ** -0.5
      if name == "gpt_oss" and "proj" in path and "bias" not in path:
        scale = tensor.shape[1] ** -0.5
      tensor.copy_(1.5 * scale * normal(*tensor.shape))
      arrays[f"{name}.{path}"] = tensor.numpy()
    inputs = normal(2, 7, config.hidden_size)
    with torch.no_grad():
      out = layer(inputs)
    out = out[0] if isinstance(out, tuple) else out
    arrays |= {f"{name}/inputs": inputs.numpy(), f"{name}/out": out.numpy()}
  logits = 2.0 * normal(3 * 5, 4)
  mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
  for name, given in (("all", None), ("masked", mask)):
    loss = mixtral.load_balancing_loss_func((logits,), 4, 2, given)
    arrays[f"loss/{name}"] = loss.numpy()
  arrays |= {"loss/logits": logits.numpy(), "loss/mask": mask.numpy() > 0}
  np.savez_compressed(pathlib.Path(__file__).parent / "experts.npz", **arrays)


if __name__ == "__main__":
  main()
