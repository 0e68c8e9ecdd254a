"""Writes fla_titans.npz: Titans' neural memory with the coefficients of fla.

python3.11 -m venv VENV
VENV/bin/pip install torch==2.13.0 einops==0.8.2
VENV/bin/pip install --no-deps fla-core==0.6.0
OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_fla_titans.py

Its references add a layer norm to the memory, whose gradient lacks parentheses: sums
over channels are not multiplied by D. So only what a chunk makes of gradients is theirs,
`combine_params`, and the gradients are those of equation 12.
"""

import sys
import types

from fla_naive import OPS, N, T, peer
import torch
from vectors import Draw, Vectors

H, V, SIZE = 4, 3, 6


def main() -> None:
  """Writes the vectors."""
  package = types.ModuleType("fla.ops.titans")
  package.__path__ = [str(OPS / "titans")]
  for name, path in (("fla", OPS.parent), ("fla.ops", OPS)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(path)]
  sys.modules["fla.ops.titans"] = package
  naive = peer("titans")

  def run(query, key, value, learning_rate, log_momentum, log_decay):
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    theta, eta, alpha = (
      x.transpose(1, 2)[..., None]
      for x in (
        *(learning_rate, torch.exp(log_momentum)),
        -torch.expm1(log_decay),
      )
    )
    memory = momentum = torch.zeros(1, N, H, V)
    outs = []
    for start in range(0, T, SIZE):
      q, k, v, *rates = (
        x[:, :, start : start + SIZE]
        for x in (query, key, value, theta, alpha, eta)
      )
      coefficients = naive.combine_params(*rates, q.shape[2])
      beta, beta_last, f, f_last, g, own, m_last, n_last = coefficients
      error = 2.0 * (k @ memory - v)
      scores = torch.tril(q @ k.transpose(2, 3)) * own
      out = beta[..., None] * (q @ memory) + f[..., None] * (q @ momentum)
      outs.append((out - scores @ error) / H**0.5)
      writes = [(x[..., None] * k).transpose(2, 3) @ error for x in (g, n_last)]
      memory, momentum = (
        beta_last[..., None, None] * memory
        + f_last[..., None, None] * momentum
        - writes[0],
        m_last[..., None, None] * momentum - writes[1],
      )
    return {"out": torch.cat(outs, 2).transpose(1, 2)}

  file = Vectors("fla_titans", "fla-core 0.6.0")
  draw = Draw("fla titans")
  file.add(
    "fla_titans",
    run,
    witness="titans.naive.combine_params, with the gradients of the paper",
    mechanism="titans",
    given=draw.qkv()
    | {
      "learning_rate": draw.uniform(0.0, 0.15, 1, T, N),
      "log_momentum": draw.uniform(-2.0, -0.1, 1, T, N),
      "log_decay": draw.uniform(-1.0, -0.1, 1, T, N),
    },
    options={"minibatch_size": SIZE},
  )
  file.write()


if __name__ == "__main__":
  main()
