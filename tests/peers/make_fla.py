"""Makes what flash-linear-attention's reference of Comba gives.

    pip install torch==2.13.0 einops
    pip install --no-deps fla-core==0.6.0
    python tests/peers/make_fla.py

Writes fla_comba.npz in this folder: inputs, parameters under the names of
`attention.comba`, what the peer's function was given, its results, and the gradients of
Σ out · out_cotangent + Σ state · state_cotangent. The test needs no other library.

The function is `naive_chunk_comba`, to which the peer's tests hold its kernels. Its
`naive_recurrent_comba` decays the state before it erases: that is not its kernels' rule,
nor the paper's (arXiv:2506.02475, equation 9). The script prints how far it is away.

The peer's layer differs from the paper in two things, which are not made here: it
subtracts d·p from the query, not d·k, and it brings queries and p to length 1 after
that, with which the factor of p is lost.
"""

import importlib.util
import pathlib
from typing import Any

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
BATCH, LENGTH, HEADS, KEY, VALUE, FEATURES = 1, 71, 2, 8, 5, 6
EXPONENT = 3.4012
"""A, so that Δ = 1 decays by e⁻³⁰."""


def peer(name: str) -> Any:
  """The module fla/ops/`name`/naive.py; `import fla` itself needs triton."""
  found = importlib.util.find_spec("fla")
  path = pathlib.Path(found.origin).parent / "ops" / name / "naive.py"
  spec = importlib.util.spec_from_file_location(f"fla_{name}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def unit(x: torch.Tensor) -> torch.Tensor:
  """Vectors of length 1."""
  return x * torch.rsqrt((x**2).sum(-1, keepdim=True) + 1e-6)


def main() -> None:
  """Writes the file."""
  draw = torch.Generator().manual_seed(0)

  def normal(*shape):
    return torch.randn(shape, generator=draw)

  inputs = normal(BATCH, LENGTH, FEATURES)
  params = {
    "rate_kernel": normal(FEATURES, HEADS),
    "step_kernel": normal(FEATURES, HEADS),
    "step_bias": torch.tensor([-2.0, -9.0]),
    "log_rate": torch.tensor([-1.0, EXPONENT]),
    "feedback": torch.tensor([-0.5, 1.2]),
    "correction": torch.tensor([0.02, 0.7]),
  }
  raw = {
    "query": normal(BATCH, LENGTH, HEADS, KEY),
    "key": normal(BATCH, LENGTH, HEADS, KEY),
  }
  # Keys that repeat, and two decays of the second head that are near −30.
  raw["key"][:, 40:44] = raw["key"][:, 40:41]
  kernel = params["step_kernel"][:, 1]
  wanted = 9.0 + torch.tensor([0.5413, 0.6])
  for position, step in zip((30, 66), wanted, strict=True):
    now = inputs[0, position]
    inputs[0, position] += kernel * (step - now @ kernel) / (kernel @ kernel)

  steps = torch.nn.functional.softplus(
    inputs @ params["step_kernel"] + params["step_bias"]
  )
  of_heads = (None, None, slice(None), None)
  key = unit(raw["key"])
  given = {
    "q": unit(raw["query"]) - params["correction"][of_heads] * key,
    "k": key,
    "v": normal(BATCH, LENGTH, HEADS, VALUE),
    "p": torch.sigmoid(params["feedback"])[of_heads] * key,
    "beta": torch.sigmoid(inputs @ params["rate_kernel"]),
    "g": -torch.exp(params["log_rate"]) * steps,
    "initial_state": normal(BATCH, HEADS, KEY, VALUE),
  }
  given = {name: x.requires_grad_() for name, x in given.items()}
  module = peer("comba")
  out, state = module.naive_chunk_comba(**given, output_final_state=True)
  other, _ = module.naive_recurrent_comba(**given)
  print("decays down to", given["g"].amin().item())
  print("largest value", out.abs().amax().item())
  print("naive_recurrent_comba is away by", (other - out).abs().amax().item())
  cotangents = torch.randn(out.shape, generator=draw), normal(*state.shape)
  loss = (out * cotangents[0]).sum() + (state * cotangents[1]).sum()
  gradients = torch.autograd.grad(loss, list(given.values()))
  arrays = {
    "inputs": inputs,
    **{f"params/{name}": x for name, x in params.items()},
    **{f"raw/{name}": x for name, x in raw.items()},
    **{f"given/{name}": x for name, x in given.items()},
    **{f"gradient/{n}": x for n, x in zip(given, gradients, strict=True)},
    "out": out,
    "state": state,
    "out_cotangent": cotangents[0],
    "state_cotangent": cotangents[1],
  }
  arrays = {name: x.detach().numpy() for name, x in arrays.items()}
  assert all(x.dtype == np.float32 for x in arrays.values())
  np.savez_compressed(HERE / "fla_comba.npz", **arrays)


if __name__ == "__main__":
  main()
