"""Writes gka.npz: results of fla and of the authors' code of Gated KalmaNet.

    git clone https://github.com/fla-org/flash-linear-attention
    git -C flash-linear-attention checkout \
      b22c42ca8db30bf34cad5f3d2040c08c40fb4667
    git clone https://github.com/awslabs/hybrid-model-factory
    git -C hybrid-model-factory checkout \
      04b6242b8a87e4496e4ade65eb2ec6a8b23b262a
    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 einops==0.8.2 triton==3.5.1 numpy==2.4.6
    VENV/bin/pip install --no-deps fla-core==0.6.0
    OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_gka.py \
      flash-linear-attention hybrid-model-factory

Triton's interpreter runs the authors' kernel of one position, which has no gradients.
Layers have an identity for their projections and their norm.
"""

import contextlib
import importlib.util
import os
import pathlib
import sys
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

from fla_naive import PACKED, H, N, T, V, packed, peer
import numpy as np
import torch
import torch._dynamo
from torch.nn import functional
import triton
import triton.language as tl
from vectors import Draw, Vectors, unit

FEATURES = 6


@triton.jit
def exponential(x):
  """Replaces the function of fla that the kernel imports."""
  return tl.exp(x)


def load_module(path: pathlib.Path, stubs: tuple[str, ...] = ()) -> Any:
  """Imports a file, with mocks of the packages `stubs`."""
  spec = importlib.util.spec_from_file_location(f"peer.a.{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  mocks = {name: mock.MagicMock() for name in stubs}
  with mock.patch.dict(sys.modules, mocks):
    spec.loader.exec_module(module)
  return module


def without_gradients(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
  """Returns `x` with gradients of 0."""
  return x.detach() + 0.0 * like.sum()


def rule(file: Vectors, naive: Any) -> None:
  """Adds the rule with exact solutions, with segments, and with five iterations."""

  def call(solve, gates, arrays, state):
    query, key, value = arrays
    log_decay, beta, alpha = gates
    # fla multiplies keys and values by the square root of their weight.
    root = torch.sqrt(beta)[..., None]
    out, (kk, kv) = solve(
      *(query, root * key, root * value, log_decay, log_decay, alpha),
      initial_state=torch.split(state, H, dim=-1),
      output_final_state=True,
    )
    return {"out": out, "state": torch.cat([kk, kv], -1)}

  def exact(query, key, value, log_decay, beta, alpha, initial_state):
    def solve(*args, **options):
      return naive.naive_recurrent_gka(*args, ridge_ratio=0.125, **options)

    gates = log_decay, beta, alpha
    return call(solve, gates, (query, key, value), initial_state)

  def iterated(query, key, value, log_decay, beta, alpha, initial_state):
    def solve(*args, **options):
      solver = naive.naive_recurrent_gka_chebyshev
      return solver(*args, num_iter=5, **options)

    gates = log_decay, beta, alpha
    results = call(solve, gates, (query, key, value), initial_state)
    return {name: without_gradients(x, query) for name, x in results.items()}

  draw = Draw("gka")
  given = draw.qkv(value=H)
  given["query"], given["key"] = unit(given["query"]), unit(given["key"])
  half = draw.normal(1, N, H, H, scale=0.5)
  given |= {
    "log_decay": draw.decays(1, T, N),
    "beta": draw.uniform(0.25, 1, 1, T, N),
    "alpha": draw.uniform(0, 1, 1, T, N),
    "initial_state": np.concatenate(
      [half @ half.swapaxes(2, 3), draw.normal(1, N, H, H)], -1
    ),
  }
  facts = {"mechanism": "gka"}
  options = {"ridge_ratio": 0.125, "return_state": True}
  file.add(
    "gka",
    exact,
    witness="fla b22c42c, naive_recurrent_gka",
    given=given,
    options=options,
    **facts,
  )
  file.add(
    "gka_iterations",
    iterated,
    witness="fla b22c42c, naive_recurrent_gka_chebyshev",
    given=given,
    options={"num_iterations": 5, "return_state": True},
    definition=False,
    constant=("out", "state"),
    **facts,
  )
  first = given["initial_state"]
  given["initial_state"] = np.stack([x * first for x in (1, 2, 3, 4)], 1)
  file.add(
    "gka_packed",
    packed(exact),
    witness="fla b22c42c, naive_recurrent_gka, states of segments",
    given=given,
    fixed=PACKED["fixed"],
    options=PACKED["options"] | options,
    **facts,
  )


def arguments(name: str) -> dict[str, np.ndarray]:
  """Draws queries, keys, values, inputs and parameters of a layer."""
  draw = Draw(name)
  given = draw.qkv() | {"inputs": draw.normal(1, T, FEATURES)}
  for gate in ("rate", "alpha"):
    given[f"params/{gate}_kernel"] = draw.normal(FEATURES, N)
    given[f"params/{gate}_bias"] = draw.normal(N)
  return given | {
    "params/step_kernel": draw.normal(FEATURES, N),
    "params/step_bias": draw.normal(N) - 2.0,
    "params/log_rate": draw.normal(N),
  }


def layer(params: dict[str, torch.Tensor], arrays: Any, **more: Any) -> Any:
  """Returns a stub of a layer whose projections return arrays and gates."""
  stub = mock.MagicMock(
    **{"use_gate": False, "use_beta_gate": True, "use_v_conv": True},
    **{"use_alpha_connection": True, "use_forgetting_gate": True},
    **{"use_forgetting_gate_kk": True, "training": True, "num_iter": 30},
    A_log=params["params/log_rate"],
    dt_bias=params["params/step_bias"],
    **more,
  )
  stub.a_proj = lambda x: x @ params["params/step_kernel"]
  stub.b_proj, stub.alpha_proj = (
    (
      lambda x, gate=gate: (
        x @ params[f"params/{gate}_kernel"] + params[f"params/{gate}_bias"]
      )
    )
    for gate in ("rate", "alpha")
  )
  stub.q_proj, stub.k_proj, stub.v_proj = ((lambda _, x=x: x) for x in arrays)
  for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
    setattr(stub, name, lambda *, x, **rest: (x, None))
  stub.o_norm = stub.o_proj = lambda x: x
  return stub


def fla_layer(file: Vectors, folder: pathlib.Path, naive: Any) -> None:
  """Adds the gates of fla's layer, with exact solutions."""
  module = load_module(
    folder / "fla" / "layers" / "gka.py",
    (
      *("fla", "fla.layers", "fla.layers.utils", "fla.modules", "fla.ops"),
      *("fla.modules.l2norm", "fla.ops.gka"),
    ),
  )

  def kernel(*, num_iter, cu_seqlens, **options):
    return naive.naive_recurrent_gka(**options)

  module.chunk_gka = kernel
  module.l2_norm = lambda x: functional.normalize(x, dim=-1)
  module.get_layer_cache = lambda *rest: None
  module.unpad_hidden_states = lambda x, *rest: (x, None, None)
  module.repad_hidden_states = lambda x, *rest: x

  def call(query, key, value, inputs, **params):
    arrays = [x.flatten(2) for x in (query, key, value)]
    sizes = dict.fromkeys(
      ("num_heads", "num_k_heads", "num_v_heads", "num_expanded_heads"), N
    )
    stub = layer(params, arrays, head_dim=H, head_v_dim=V, **sizes)
    stub.scale, stub.ridge_ratio = H**-0.5, 0.125
    stub._expand = lambda x, heads, _: x.unflatten(-1, (heads, -1))
    out = module.GatedKalmaNet.forward(stub, inputs)[0]
    return {"out": out.unflatten(-1, (N, V))}

  file.add(
    "gka_gates",
    call,
    witness="fla b22c42c, layers.gka.GatedKalmaNet with naive_recurrent_gka",
    mechanism="gka",
    function="gka",
    given=arguments("gka gates"),
    options={"ridge_ratio": 0.125},
  )


def authors_layer(file: Vectors, folder: pathlib.Path) -> None:
  """Adds the authors' layer and its kernel, one position at a time."""
  package = "training/src/hmf/model/hybrid_zoo/layers/gated_kalmanet"
  stubs = (
    *("fla", "fla.modules", "fla.ops", "fla.ops.simple_gla", "fla.ops.utils"),
    *("fla.ops.utils.op", "peer", "peer.a", "peer.a.chebyshev_iteration"),
    *("peer.sp_p2p_utils", "peer.low_rank_linear", "peer.a.ops"),
    *("peer.a.ops.chebyshev", "peer.a.sequence_parallel"),
    "peer.a.ops.chebyshev.chunk_dk_backward_gating_sp",
    "peer.a.sequence_parallel.gka_sp_utils",
    "peer.a.ops.chebyshev.gka_chebyshev_solve",
  )
  chebyshev = folder / package / "ops" / "chebyshev"
  solver = load_module(chebyshev / "gka_chebyshev_solve.py", stubs)
  solver.exp = exponential
  simple = peer("simple_gla").naive_recurrent_simple_gla
  solver.fused_recurrent_simple_gla = simple
  module = load_module(folder / package / "gka.py", stubs)
  module.torch_decoding_one_step = solver.torch_decoding_one_step

  class Cache(dict):
    def update(self, *, recurrent_state, conv_state, layer_idx, offset):
      self[0] = {"conv_state": conv_state, "recurrent_state": recurrent_state}

  def call(query, key, value, inputs, **params):
    state = torch.zeros(1, N, H, H), torch.zeros(1, N, H, V)
    cache, outs = Cache(), []
    cache.update(
      recurrent_state=state, conv_state=(None,) * 3, layer_idx=0, offset=0
    )
    for t in range(T):
      now = [x[:, t : t + 1].detach() for x in (query, key, value, inputs)]
      stub = layer(
        {name: x.detach() for name, x in params.items()},
        [x.flatten(2) for x in now[:3]],
        sequence_parallel_group=None,
        **{"head_dim": V, "num_q_heads": N, "num_q_groups": 1, "layer_idx": 0},
        **{"gla_scale": H**-0.5, "ridge_strength": 0.02},
        solver_type="chebyshev",
      )
      stub._expand_kv = lambda *flat: [x.unflatten(-1, (N, -1)) for x in flat]
      out, *_ = module.GatedKalmaNet.forward(
        stub, now[3], past_key_values=cache
      )
      outs.append(out.unflatten(-1, (N, V)))
    return {"out": without_gradients(torch.cat(outs, 1), query)}

  context = contextlib.nullcontext()
  with mock.patch("torch.cuda.device", return_value=context):
    file.add(
      "gka_kernel",
      call,
      witness=(
        "hybrid-model-factory 04b6242, GatedKalmaNet with "
        "torch_decoding_one_step"
      ),
      mechanism="gka",
      function="gka",
      given=arguments("gka kernel"),
      definition=False,
      constant=("out",),
    )


def main() -> None:
  """Writes the vectors."""
  fla, authors = map(pathlib.Path, sys.argv[1:])
  naive = load_module(fla / "fla" / "ops" / "gka" / "naive.py")
  file = Vectors("gka", "commits named in each row")
  rule(file, naive)
  fla_layer(file, fla, naive)
  authors_layer(file, authors)
  file.write()


if __name__ == "__main__":
  main()
