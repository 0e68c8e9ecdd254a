"""Writes authors.npz: results of the authors' code of MoBA and LoLCATs.

git clone https://github.com/MoonshotAI/MoBA
git -C MoBA checkout 61e456bc956c5a25fd9c84e5496b661329cb1b72
git clone https://github.com/HazyResearch/lolcats
git -C lolcats checkout 375df84f58417a57b78c875fa3f8fa76e84ab12e
python3.11 -m venv VENV
VENV/bin/pip install torch==2.13.0 transformers==5.23.0
OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_authors.py MoBA lolcats
"""

import importlib.util
import pathlib
import sys
from typing import Any
from unittest import mock

import torch
from vectors import Draw, Vectors

T, N, H, V = 29, 2, 4, 3


def load_module(path: pathlib.Path) -> Any:
  """Imports a file without its package."""
  spec = importlib.util.spec_from_file_location(f"peer.{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  stubs = dict.fromkeys(("peer", "peer.linear_attention"), mock.MagicMock())
  with mock.patch.dict(sys.modules, stubs):
    spec.loader.exec_module(module)
  return module


def moba(file: Vectors, folder: pathlib.Path) -> None:
  """Adds a case in which each query selects blocks of keys."""
  naive = load_module(folder / "moba" / "moba_naive.py").moba_attn_varlen_naive

  def call(query, key, value):
    given = (x[0] for x in (query, key, value))
    return {"out": naive(*given, torch.tensor([0, T]), T, 4, 3)[None]}

  draw = Draw("moba")
  names = "query", "key", "value"
  file.add(
    "moba",
    call,
    witness="MoBA 61e456b, moba_attn_varlen_naive",
    mechanism="moba",
    given={name: draw.normal(1, T, N, H) for name in names},
    options={"block_size": 4, "top_k": 3},
  )


def lolcats(file: Vectors, folder: pathlib.Path) -> None:
  """Adds softmax in a window, and Hedgehog features for earlier keys."""
  model = folder / "src" / "model"
  name = "linear_window_attention_sw.py"
  hybrid = load_module(
    model / "linear_attention" / name
  ).hybrid_attention_quadratic
  features = load_module(model / "feature_map.py")

  def call(query, key, value, query_kernel, key_kernel, mix):
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mapped = []
    for x, kernel in ((query, query_kernel), (key, key_kernel)):
      mlp = features.FeatureMapMLP(N, H, H, x.dtype, x.device)
      del mlp.layer
      mlp.layer = kernel
      mapped.append(features.init_feature_map("softmax_dim", mlp)(x))
    factor = torch.sigmoid(mix)[None, :, None, None]
    out, _ = hybrid(query, key, *mapped, value, factor, 1, 5)
    return {"out": out.transpose(1, 2)}

  draw = Draw("lolcats")
  file.add(
    "lolcats",
    call,
    witness="lolcats 375df84, hybrid_attention_quadratic",
    mechanism="window_linear",
    given={
      "query": draw.normal(1, T, N, H),
      "key": draw.normal(1, T, N, H),
      "value": draw.normal(1, T, N, V),
      "query_kernel": draw.normal(N, H, H),
      "key_kernel": draw.normal(N, H, H),
      "mix": draw.normal(N),
    },
    options={"window": 5, "is_causal": True},
  )


def main() -> None:
  """Writes the vectors."""
  file = Vectors("authors", "commits named in each row")
  for add, folder in zip((moba, lolcats), sys.argv[1:], strict=True):
    add(file, pathlib.Path(folder))
  file.write()


if __name__ == "__main__":
  main()
