"""Writes transformers_4.npz: relative keys, which transformers 5 removed.

python3.11 -m venv VENV
VENV/bin/pip install torch==2.13.0 transformers==4.57.6
OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_transformers_4.py
"""

from modules import ConstantModule
import torch
from torch import nn
import transformers
from transformers.models.bert.modeling_bert import BertSelfAttention
from vectors import Draw, Vectors

T, N, H = 29, 2, 4


def main() -> None:
  """Writes the vectors."""
  version = f"transformers {transformers.__version__}"
  file = Vectors("transformers_4", version)
  config = transformers.BertConfig(
    hidden_size=N * H,
    num_attention_heads=N,
    max_position_embeddings=T,
    position_embedding_type="relative_key",
  )

  def attend(query, key, value, relative_keys, mask=None):
    module = BertSelfAttention(config).eval()
    names = "query", "key", "value"
    for name, x in zip(names, (query, key, value), strict=True):
      setattr(module, name, ConstantModule(x.flatten(2)))
    # Its table starts with the farthest key on the right.
    table = relative_keys.flip(0)
    module.distance_embedding = nn.Module()
    module.distance_embedding.forward = lambda distance: table[distance]
    out = module(query.new_zeros(1, T, N * H), mask)[0]
    return {"out": out.unflatten(2, (N, H))}

  draw = Draw("hf relative keys")
  given = draw.qkv(value=H) | {"relative_keys": draw.normal(2 * T - 1, H)}
  file.add(
    "hf_relative_keys",
    attend,
    witness="BertSelfAttention, relative_key",
    mechanism="dense",
    given=given,
  )

  positions = torch.arange(T)
  hidden = (positions[:, None] - positions[None]).abs() > 6
  mask = torch.zeros(T, T).masked_fill(hidden, -torch.inf)[None, None]
  file.add(
    "hf_relative_keys_window",
    lambda **given: attend(**given, mask=mask),
    witness="BertSelfAttention, relative_key and a mask",
    mechanism="sliding_window",
    given=given,
    options={"window": 6},
  )
  file.write()


if __name__ == "__main__":
  main()
