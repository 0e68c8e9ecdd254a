"""Writes log decays with a lower bound, from GLM-5.3's forget gate in transformers.

pip install torch==2.13.0 transformers==5.24.0
python tests/attention/make_kimi_gate.py
"""

import pathlib
import types

import numpy as np
import torch
from transformers.models.glm5_next import modeling_glm5_next as modeling

HEADS, WIDTH, FEATURES = 3, 4, 7


def main():
  """Writes `kimi_gate.npz`."""
  config = types.SimpleNamespace(
    linear_head_dim=WIDTH,
    linear_num_heads=HEADS,
    hidden_size=FEATURES,
    linear_lower_bound=-3.5,
  )
  gate = modeling.Glm5NextTextForgetGate(config)
  generator = torch.Generator().manual_seed(0)
  arrays = {}
  for name, tensor in gate.state_dict().items():
    tensor.copy_(torch.randn(tensor.shape, generator=generator))
    arrays[name] = tensor.numpy()
  inputs = torch.randn((2, 5, FEATURES), generator=generator)
  with torch.no_grad():
    arrays |= {"inputs": inputs.numpy(), "log_decay": gate(inputs).numpy()}
  path = pathlib.Path(__file__).parent / "kimi_gate.npz"
  np.savez_compressed(path, **arrays)


if __name__ == "__main__":
  main()
