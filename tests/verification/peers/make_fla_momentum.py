"""Writes fla_momentum.npz: Momentum DeltaNet of flash-linear-attention.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 einops==0.8.2
    VENV/bin/pip install --no-deps fla-core==0.6.0 flash-linear-attention==0.6.0
    OMP_NUM_THREADS=1 VENV/bin/python \
      tests/verification/peers/make_fla_momentum.py

The functions are naive references, as in make_fla.py. fla's M has the other sign.
"""

import types
from unittest import mock

from fla_naive import H, N, T, V, add_with_states, peer
from make_fla_recurrences import layer
import torch
from torch.nn import functional
from vectors import Draw, Vectors, unit

NAIVE = peer("momentum_delta_rule")
FACTS = {"mechanism": "momentum_delta"}


def call(
  query, key, value, beta, eta, log_decay, momentum_decay, initial_state
):
  """Calls the rule, which erases from the decayed state, as in the layer."""
  memory, momentum = torch.split(initial_state, H, dim=2)
  out, states = NAIVE.recurrent_momentum_delta_rule_ref(
    *(query, key, value, log_decay, momentum_decay),
    log_decay.exp()[..., None] * key,
    *(beta, eta),
    initial_S=memory,
    initial_M=-momentum,
    output_final_state=True,
  )
  return {"out": out, "state": torch.cat([states[0], -states[1]], 2)}


def chunked_call(query, key, value, beta, eta, log_decay, momentum_decay):
  """Calls the peer's chunked form, with chunks of 16 positions."""
  erase = log_decay.exp()[..., None] * key
  out, _ = NAIVE.chunk_momentum_delta_rule_ref(
    *(query, key, value, erase, log_decay, momentum_decay, beta, eta),
    chunk_size=16,
  )
  return {"out": out}


def rule(file: Vectors) -> None:
  """Adds the rule with states, segments and chunks."""
  draw = Draw("momentum delta")
  given = draw.qkv()
  given["key"] = unit(given["key"])
  given |= {
    "beta": draw.uniform(0.25, 1, 1, T, N),
    "eta": draw.uniform(0, 1, 1, T, N),
    "log_decay": draw.decays(1, T, N),
    "momentum_decay": draw.decays(1, T, N) - 0.25,
  }
  chunks = {name: x for name, x in given.items() if name != "query"}
  chunks = {"query": given["query"], **chunks}
  given["initial_state"] = draw.normal(1, N, 2 * H, V)
  add_with_states(
    *(file, "momentum_delta", call, draw, given),
    witness="recurrent_momentum_delta_rule_ref",
    **FACTS,
  )
  file.add(
    "momentum_delta_chunks",
    chunked_call,
    witness="chunk_momentum_delta_rule_ref",
    given=chunks,
    **FACTS,
  )


def gates(file: Vectors) -> None:
  """Adds the gates of the layer."""
  activations = types.SimpleNamespace(
    silu=lambda x: x,
    softplus=functional.softplus,
    sigmoid=torch.sigmoid,
    tanh=torch.tanh,
  )

  def kernel(*, q, k, v, p, log_alpha, log_mu, beta, eta, **options):
    assert options["use_qk_l2norm_in_kernel"]
    assert options["use_p_times_alpha"]
    q, k = (x * (x.square().sum(-1, True) + 1e-6) ** -0.5 for x in (q, k))
    erase = log_alpha.exp()[..., None] * k
    return NAIVE.recurrent_momentum_delta_rule_ref(
      q, k, v, log_alpha, log_mu, erase, beta, eta
    )

  module = layer(
    "momentum_deltanet",
    F=activations,
    chunk_momentum_delta_rule=kernel,
    get_layer_cache=lambda *rest: None,
  )
  features = 6

  def with_gates(query, key, value, inputs, **params):
    p = {name.removeprefix("params/"): x for name, x in params.items()}
    layer_self = mock.MagicMock(
      **{"mode": "chunk", "training": True, "use_short_conv": False},
      **{"qk_activation": "silu", "qk_norm": "l2", "use_gate": False},
      **{"use_beta": True, "use_output_correction": True},
      **{"use_p_times_alpha": True, "allow_neg_eigval": False},
      **{"min_log_mu": -2.0, "tau": features**0.5},
      **{"num_heads": N, "num_v_heads": N, "head_k_dim": H, "head_v_dim": V},
      **{"A_log": p["log_rate"], "dt_bias": p["step_bias"]},
      **{"Mu_log": p["momentum_log_rate"], "mu_bias": p["momentum_step_bias"]},
      **{"log_factor": p["log_factor"], "D_log": p["log_correction"]},
    )
    flat = [x.flatten(2) for x in (query, key, value)]
    layer_self.q_proj, layer_self.k_proj, layer_self.v_proj = (
      (lambda _, x=x: x) for x in flat
    )
    (
      layer_self.a_proj,
      layer_self.m_proj,
      layer_self.b_proj,
      layer_self.e_proj,
    ) = (
      (lambda x, name=name: x @ p[f"{name}_kernel"])
      for name in ("step", "momentum_step", "rate", "eta")
    )
    layer_self.o_norm = layer_self.o_proj = lambda x: x
    out = module.MomentumDeltaNet.forward(layer_self, inputs)[0]
    return {"out": out.unflatten(-1, (N, V))}

  draw = Draw("momentum delta gates")
  given = draw.qkv() | {"inputs": draw.normal(1, T, features)}
  for name in ("eta", "rate", "step", "momentum_step"):
    given[f"params/{name}_kernel"] = draw.normal(features, N)
  for prefix in ("", "momentum_"):
    given[f"params/{prefix}step_bias"] = draw.normal(N) - 2.0
    given[f"params/{prefix}log_rate"] = draw.normal(N)
  for name in ("log_factor", "log_correction"):
    given[f"params/{name}"] = draw.normal(N)
  file.add(
    "momentum_delta_gates",
    with_gates,
    witness="layers.momentum_deltanet.MomentumDeltaNet",
    mechanism="momentum_delta",
    function="momentum_delta",
    given=given,
  )


if __name__ == "__main__":
  file = Vectors("fla_momentum", "fla-core 0.6.0")
  file.write(rule, gates)
