"""Writes transformers_states.npz: recurrent layers of transformers.

python3.11 -m venv VENV
VENV/bin/pip install torch==2.13.0 transformers==5.24.0
OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_transformers_states.py
"""

import types

import torch
import transformers
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.mamba import modeling_mamba
from transformers.models.recurrent_gemma import modeling_recurrent_gemma
from vectors import Draw, Vectors

T, N, H, S, R = 29, 2, 4, 5, 3


def mamba(file: Vectors) -> None:
  """Adds the scans of Mamba and Falcon Mamba."""
  draw = Draw("hf mamba")
  given = {
    "query": draw.normal(1, T, N, H),
    "params/step_down": draw.normal(N, H, R, scale=0.5),
    "params/step_up": draw.normal(R, N, H),
    "params/step_bias": draw.normal(N, H),
    "params/key_kernel": draw.normal(N, H, S, scale=0.5),
    "params/query_kernel": draw.normal(N, H, S, scale=0.5),
    "params/log_rate": draw.normal(N, S, H),
    "params/skip": draw.normal(N, H),
  }
  for name, module, epsilon in (
    ("mamba", modeling_mamba, None),
    ("falcon", modeling_falcon_mamba, 0.01),
  ):
    norm = torch.nn.Identity()
    if epsilon:
      norm = module.FalconMambaWeightlessRMSNorm(1, epsilon)

    def call(query, module=module, norm=norm, **params):
      p = {n.removeprefix("params/"): x for n, x in params.items()}
      x = query.flatten(2)

      def project(kernel):
        return norm(x @ p[kernel].flatten(0, 1))

      step = project("step_down") @ p["step_up"].flatten(1)
      out = module.mamba_selective_scan(
        x.transpose(1, 2),
        step.transpose(1, 2),
        -torch.exp(p["log_rate"]).transpose(1, 2).flatten(0, 1),
        project("key_kernel").transpose(1, 2),
        project("query_kernel").transpose(1, 2),
        p["skip"].flatten(),
        delta_bias=p["step_bias"].flatten(),
        delta_softplus=True,
      )
      return {"out": out.transpose(1, 2).unflatten(2, (N, H))}

    file.add(
      f"hf_{name}",
      call,
      witness=f"{name}: mamba_selective_scan",
      mechanism="mamba",
      function="mamba",
      given=given,
      options={"norm_epsilon": epsilon} if epsilon else {},
    )


def rg_lru(file: Vectors) -> None:
  """Adds the layer of RecurrentGemma."""
  draw = Draw("hf rg_lru")
  given = {
    "query": draw.normal(1, T, N, H),
    "params/decay_kernel": draw.normal(N, H, H),
    "params/decay_bias": draw.normal(N, H),
    "params/input_kernel": draw.normal(N, H, H),
    "params/input_bias": draw.normal(N, H),
    "params/log_rate": draw.normal(N, H, scale=2.0),
  }
  config = types.SimpleNamespace(num_attention_heads=N, lru_width=N * H)

  def call(query, **params):
    p = {n.removeprefix("params/"): x for n, x in params.items()}
    parameters = {
      "recurrent_param": p["log_rate"].flatten(),
      "recurrent_gate_weight": p["decay_kernel"],
      "recurrent_gate_bias": p["decay_bias"],
      "input_gate_weight": p["input_kernel"],
      "input_gate_bias": p["input_bias"],
    }
    layer = modeling_recurrent_gemma.RecurrentGemmaRglru(config)
    arguments = query.flatten(2), torch.arange(T)[None]
    out = torch.func.functional_call(layer, parameters, arguments)
    return {"out": out.unflatten(2, (N, H))}

  file.add(
    "hf_rg_lru",
    call,
    witness="RecurrentGemmaRglru",
    mechanism="rg_lru",
    function="rg_lru",
    given=given,
  )


if __name__ == "__main__":
  file = Vectors(
    "transformers_states", f"transformers {transformers.__version__}"
  )
  file.write(mamba, rg_lru)
