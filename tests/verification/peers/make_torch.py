"""Writes torch.npz: results and log-sum-exps of PyTorch's FlexAttention.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 numpy
    OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_torch.py

It is called without `torch.compile`, so it forms all pairs. On a CPU it refuses to give
gradients, though its dense form has them: the check is left out.
"""

import sys
from unittest import mock

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from vectors import Draw, Vectors

T, N, K = 29, 4, 2
SEGMENT_IDS = np.searchsorted((5, 17), np.arange(T), side="right")[None]
BOTH_IDS = {
  f"{x}_segment_ids": SEGMENT_IDS.astype(np.int32) for x in ("query", "key")
}


def attend(query, key, value, score_mod=None, mask_mod=None):
  """Returns the output and the log-sum-exp."""
  given = [x.transpose(1, 2) for x in (query, key, value)]
  mask = None
  if mask_mod is not None:
    mask = create_block_mask(mask_mod, 1, N, T, T, device="cpu")
  module = sys.modules[flex_attention.__module__]
  with mock.patch.object(module, "_validate_device"):
    out, lse = flex_attention(
      *given, score_mod, mask, enable_gqa=True, return_lse=True
    )
  return {"out": out.transpose(1, 2), "lse": lse.transpose(1, 2)}


def main() -> None:
  """Writes the vectors."""
  file = Vectors("torch", f"torch {torch.__version__.partition('+')[0]}")
  ids = torch.tensor(SEGMENT_IDS[0])
  slopes = torch.tensor([2.0 ** (-2 * (n + 1)) for n in range(N)])

  def causal(b, n, t, s):
    return s <= t

  def packed(b, n, t, s):
    return (s <= t) & (ids[t] == ids[s])

  def near(b, n, t, s):
    return (s >= t - 6) & (s <= t + 2)

  def cap(score, b, n, t, s):
    return 2.0 * torch.tanh(score / 2.0)

  def alibi(score, b, n, t, s):
    return score - slopes[n] * (t - s).abs()

  both = {"is_causal": True}
  alibi_bias = {"relative_bias": {"alibi_bias": [N, T]}}
  for name, mods, function, fixed, options in (
    ("causal", (None, causal), "dense", {}, both),
    ("cap", (cap, None), "dense", {}, {"logits_soft_cap": 2.0}),
    ("alibi", (alibi, None), "dense", {}, alibi_bias),
    ("packed", (None, packed), "dense", BOTH_IDS, both),
    ("near", (None, near), "sliding_window", {}, {"window": [6, 2]}),
    (
      "near_alibi",
      (alibi, near),
      "sliding_window",
      {},
      {"window": [6, 2], **alibi_bias},
    ),
  ):

    def call(query, key, value, mods=mods, **fixed):
      del fixed
      return attend(query, key, value, *mods)

    file.add(
      f"flex_{name}",
      call,
      witness=f"flex_attention, {name.replace('_', ' and ')}",
      mechanism=function,
      given=Draw(f"flex {name}").qkv(heads=N, kv_heads=K, value=4),
      fixed=fixed,
      options={**options, "return_lse": True},
    )
  file.write()


if __name__ == "__main__":
  main()
