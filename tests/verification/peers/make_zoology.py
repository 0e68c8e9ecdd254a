"""Writes zoology.npz: results of the layer by the authors of Based.

git clone https://github.com/HazyResearch/zoology
git -C zoology checkout d88d6f5474f36998d82d5c3bd58a190248d0a669
python3.11 -m venv VENV
VENV/bin/pip install torch==2.13.0 einops==0.8.2
OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_zoology.py zoology

The projections of the layer return the arrays of a case.
"""

import sys
from unittest import mock

import einops  # noqa: F401 - imported before `sys.modules` is patched
import torch  # noqa: F401 - the same
from vectors import Draw, Vectors

T, N, H, V = 29, 2, 4, 3


def main() -> None:
  """Writes the vectors."""
  sys.path.insert(0, sys.argv[1])
  names = "opt_einsum", "zoology.utils"
  stubs = {x: mock.MagicMock() for x in names}
  # A decorator of `__init__`, which is never called.
  stubs["pydantic"] = mock.MagicMock(validate_call=lambda x: x)
  with mock.patch.dict(sys.modules, stubs):
    from zoology.mixers.based import Based
    from zoology.mixers.feature_maps.taylor import TaylorExp
  file = Vectors("zoology", "zoology d88d6f5")
  for view, causal in (
    ("linear", True),
    ("quadratic", True),
    ("linear", False),
  ):

    def call(query, key, value, view=view, causal=causal):
      layer_self = mock.MagicMock(
        apply_rotary=False,
        feature_dim=H,
        num_heads=N,
        num_key_value_heads=N,
        head_dim=V,
        train_view=view,
        causal=causal,
        eps=1e-12,
        feature_map=TaylorExp(H),
      )
      arrays = [x.flatten(2) for x in (query, key, value)]
      layer_self.proj_q, layer_self.proj_k, layer_self.proj_v = (
        (lambda _, x=x: x) for x in arrays
      )
      layer_self.proj_o = layer_self.dropout = lambda x: x
      out = Based.forward(layer_self, arrays[0])
      return {"out": out.unflatten(-1, (N, V))}

    direction = "causal" if causal else "bidirectional"
    file.add(
      f"zoology_{view}_{direction}",
      call,
      witness=f"Based, {view}, {direction}",
      mechanism="linear",
      function="linear",
      given=Draw(f"zoology {view} {direction}").qkv(),
      options={"feature_map": "taylor"},
      call={"is_causal": causal},
      definition=False,
    )
  file.write()


if __name__ == "__main__":
  main()
