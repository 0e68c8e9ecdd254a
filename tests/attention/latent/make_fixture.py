"""Writes results of transformers' DeepSeek-V3 attention, for latent attention.

    pip install torch==2.13.0 transformers==4.57.6
    python tests/attention/latent/make_fixture.py

Writes deepseek.npz in this folder: inputs, the weights of a layer under the names of
`MultiHeadAttention` with `latent`, what it returns in float64, and the gradient of
Σ out · cotangent by the inputs. The test needs neither of the two libraries.
"""

import pathlib

import numpy as np
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

HERE = pathlib.Path(__file__).parent
FEATURES, HEADS, RANK, OWN, SHARED, VALUE, LENGTH = 24, 3, 6, 8, 4, 12, 11


def main() -> None:
  """Writes the file."""
  torch.manual_seed(0)
  config = deepseek.DeepseekV3Config(
    hidden_size=FEATURES,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    q_lora_rank=None,
    kv_lora_rank=RANK,
    qk_nope_head_dim=OWN,
    qk_rope_head_dim=SHARED,
    v_head_dim=VALUE,
    rope_interleave=False,
    attn_implementation="eager",
  )
  layer = deepseek.DeepseekV3Attention(config, 0).eval().double()
  with torch.no_grad():
    for weight in layer.parameters():
      weight.copy_((0.3 * torch.randn(weight.shape)).float())
    layer.kv_a_layernorm.weight.copy_((1 + torch.rand(RANK)).float())
  inputs = torch.randn(2, LENGTH, FEATURES).double().requires_grad_()
  rotary = deepseek.DeepseekV3RotaryEmbedding(config)
  angles = rotary(inputs, torch.arange(LENGTH)[None])
  mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1).double()
  out, _ = layer(inputs, angles, mask[None, None])
  cotangent = torch.randn_like(out)
  (out * cotangent).sum().backward()
  weights = {name: x.detach().numpy() for name, x in layer.named_parameters()}
  up = weights["kv_b_proj.weight"].T.reshape(RANK, HEADS, OWN + VALUE)
  found = {
    "inputs": inputs,
    "out": out,
    "cotangent": cotangent,
    "gradient": inputs.grad,
    "query": weights["q_proj.weight"].T,
    "down_kernel": weights["kv_a_proj_with_mqa.weight"].T,
    "norm_scale": weights["kv_a_layernorm.weight"],
    "key_kernel": up[..., :OWN],
    "value_kernel": up[..., OWN:],
    "output": weights["o_proj.weight"].T,
  }
  arrays = {
    name: np.asarray(x.detach() if isinstance(x, torch.Tensor) else x)
    for name, x in found.items()
  }
  np.savez_compressed(HERE / "deepseek.npz", **arrays)


if __name__ == "__main__":
  main()
