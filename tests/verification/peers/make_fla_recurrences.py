"""Writes fla_recurrences.npz: more recurrences of flash-linear-attention.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 einops==0.8.2
    VENV/bin/pip install --no-deps fla-core==0.6.0 flash-linear-attention==0.6.0
    OMP_NUM_THREADS=1 VENV/bin/python \
      tests/verification/peers/make_fla_recurrences.py

The functions are naive references, as in make_fla.py. A layer is loaded by its path,
with an identity for its projections and its norm, and with the naive reference of its
kernel.
"""

import importlib.util
import sys
import types
from typing import Any
from unittest import mock

from fla_naive import OPS, H, N, T, V, add_with_states, heads_first, peer
import torch
from torch.nn import functional
from vectors import Draw, Vectors, unit


def layer(name: str, **stubs: Any) -> Any:
  """Imports fla/layers/`name`.py with `stubs` in place of its imports."""
  path = OPS.parent / "layers" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(f"layer_{name}", path)
  module = importlib.util.module_from_spec(spec)
  imported = (
    *("fla", "fla.layers", "fla.layers.utils", "fla.modules", "fla.ops"),
    *("fla.modules.activations", "fla.modules.layernorm"),
    *("fla.modules.token_shift", "fla.modules.feature_map"),
    *(f"fla.ops.{x}" for x in ("gla", "gsa", "precond_gated_delta_rule")),
    "fla.ops.momentum_delta_rule",
  )
  with mock.patch.dict(sys.modules, {x: mock.MagicMock() for x in imported}):
    spec.loader.exec_module(module)
  for attribute, stub in stubs.items():
    setattr(module, attribute, stub)
  return module


def hgrn2(file: Vectors) -> None:
  """Adds the layer, with and without a lower bound."""
  gla = peer("gla").naive_recurrent_gla

  def rule(*, q, k, v, gk, **options):
    del options
    return gla(q, k, v, gk)

  forward = layer(
    "hgrn2",
    swish=functional.silu,
    fused_recurrent_gla=rule,
    unpad_hidden_states=lambda x, *rest: (x, None, None),
    repad_hidden_states=lambda x, *rest: x,
    get_layer_cache=lambda *rest: None,
    rms_norm_linear=lambda x, *rest: x,
  ).HGRN2Attention.forward

  for name, bound in (("first", 0.0), ("later", 0.375)):

    def call(query, key, value, bound=bound):
      flat = [x.flatten(2) for x in (query, key, value)]
      layer_self = mock.MagicMock(
        mode="chunk",
        layer_idx=int(bound > 0.0),
        use_short_conv=False,
        head_f_dim=H,
        head_i_dim=V,
      )
      layer_self.q_proj, layer_self.f_proj, layer_self.i_proj = (
        (lambda _, x=x: x) for x in flat
      )
      out, *_ = forward(layer_self, flat[0], lower_bound=torch.tensor(bound))
      return {"out": out.unflatten(-1, (N, V))}

    file.add(
      f"hgrn2_{name}",
      call,
      witness="layers.hgrn2.HGRN2Attention with naive_recurrent_gla",
      mechanism="hgrn2",
      function="hgrn2",
      given=Draw(f"hgrn2 {name}").qkv(),
      options={"lower_bound": bound},
      call={"scale": H**-0.5},
    )


def based(file: Vectors) -> None:
  """Adds Taylor features, computed for pairs of positions."""
  pairs = peer("based").naive_parallel_based

  def call(query, key, value):
    out = pairs(*heads_first(query, key, value))
    return {"out": out.transpose(1, 2)}

  file.add(
    "based",
    call,
    witness="naive_parallel_based",
    mechanism="linear",
    function="linear",
    given=Draw("based").qkv(),
    options={"feature_map": "taylor"},
    definition=False,
  )


def rwkv6(file: Vectors) -> None:
  """Adds the recurrent form of the rule; the chunked form has no gradients."""
  path = OPS / "rwkv6" / "recurrent_naive.py"
  spec = importlib.util.spec_from_file_location("recurrent_naive", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  recurrent = module.naive_recurrent_rwkv6

  def call(query, key, value, log_decay, bonus, initial_state):
    out, state = recurrent(
      *heads_first(query, key, value, log_decay),
      bonus,
      initial_state=initial_state,
      output_final_state=True,
    )
    return {"out": out.transpose(1, 2), "state": state}

  draw = Draw("rwkv6")
  given = draw.qkv() | {
    "log_decay": draw.decays(1, T, N, H),
    "bonus": draw.normal(N, H),
    "initial_state": draw.normal(1, N, H, V),
  }
  facts = {"witness": "naive_recurrent_rwkv6", "mechanism": "rwkv6"}
  add_with_states(file, "rwkv6", call, draw, given, **facts)


def gsa(file: Vectors) -> None:
  """Adds the rule with states, and the gates of the layer."""
  naive, slots, features = peer("gsa").naive_recurrent_gsa, 5, 6

  def call(query, key, value, log_decay, slot_weights, initial_state):
    keys, values = torch.split(initial_state, H, dim=-1)
    out, (keys, values) = naive(
      *(query, key, value, slot_weights, log_decay),
      initial_state=(keys.transpose(2, 3), values),
      output_final_state=True,
    )
    return {"out": out, "state": torch.cat([keys.transpose(2, 3), values], -1)}

  draw = Draw("gsa")
  given = draw.qkv() | {
    "log_decay": draw.decays(1, T, N, slots),
    "slot_weights": draw.uniform(0, 1, 1, T, N, slots),
    "initial_state": draw.normal(1, N, slots, H + V),
  }
  facts = {"witness": "naive_recurrent_gsa", "mechanism": "gsa"}
  add_with_states(file, "gsa", call, draw, given, **facts)

  def same(x, *rest):
    del rest
    return x

  # The mechanism has no activations of queries, keys, values and results.
  activations = types.SimpleNamespace(
    silu=same, logsigmoid=functional.logsigmoid
  )

  def rule(*, q, k, v, s, g, scale, **options):
    del options
    return naive(q, k, v, s, g, scale)

  forward = layer(
    "gsa",
    F=activations,
    fused_recurrent_gsa=rule,
    unpad_hidden_states=lambda x, *rest: (x, None, None),
    repad_hidden_states=same,
    get_layer_cache=lambda *rest: None,
    rms_norm_linear=same,
  ).GatedSlotAttention.forward

  def with_gates(query, key, value, inputs, **params):
    layer_self = mock.MagicMock(
      mode="chunk",
      use_short_conv=False,
      head_k_dim=H,
      head_v_dim=V,
      num_slots=slots,
      num_kv_groups=1,
      gate_logit_normalizer=8,
      feature_map=None,
      scale=1.0,
    )
    flat = [x.flatten(2) for x in (query, key, value)]
    layer_self.q_proj, layer_self.k_proj, layer_self.v_proj = (
      (lambda _, x=x: x) for x in flat
    )
    gates = inputs @ params["params/gate_kernel"].flatten(1)
    layer_self.f_proj = lambda _: gates
    return {"out": forward(layer_self, inputs)[0].unflatten(-1, (N, V))}

  draw = Draw("gsa gates")
  given = draw.qkv() | {"inputs": draw.normal(1, T, features)}
  given["params/gate_kernel"] = draw.normal(features, N, slots)
  file.add(
    "gsa_gates",
    with_gates,
    witness="layers.gsa.GatedSlotAttention with naive_recurrent_gsa",
    mechanism="gsa",
    function="gsa",
    given=given,
  )


def precond_delta(file: Vectors) -> None:
  """Adds the rule with decays per head or channel, and the gates of the layer.

  The cases have no initial state, because it would be two arrays.
  """
  gated = peer("precond_gated_delta_rule")
  gated = gated.naive_recurrent_precond_gated_delta_rule
  kda = peer("precond_kda").naive_recurrent_precond_kda

  def by_head(query, key, value, **gates):
    out, *_ = gated(
      *(query, key, value, gates["square_decay"], gates["log_decay"]),
      *(gates["square_rate"], gates["beta"]),
      log_atk_scale=gates["center"],
    )
    return {"out": out}

  def by_channel(query, key, value, **gates):
    # Its center has the axes `[B, H, 1]`.
    out, *_ = kda(
      *(query, key, value, gates["log_decay"], gates["square_decay"]),
      *(gates["square_rate"], gates["beta"]),
      log_atk_scale=gates["center"],
      x=1.75,
    )
    return {"out": out}

  for name, function, channels, options in (
    ("head", by_head, [], {"normalize_keys": True}),
    ("channel", by_channel, [H], {"squash": 1.75}),
  ):
    draw = Draw(f"precond {name}")
    given = draw.qkv() | {
      "beta": draw.uniform(0, 1, 1, T, N),
      "log_decay": draw.decays(1, T, N, *channels),
      "square_rate": draw.uniform(0, 1, 1, T, N),
      "square_decay": draw.decays(1, T, N),
      "center": draw.normal(N),
    }
    if channels:
      given["key"] = unit(given["key"])
    file.add(
      f"precond_delta_{name}",
      function,
      witness=(
        "naive_recurrent_precond_kda"
        if channels
        else "naive_recurrent_precond_gated_delta_rule"
      ),
      mechanism="precond_delta",
      given=given,
      options=options,
    )

  activations = types.SimpleNamespace(
    silu=lambda x: x, softplus=functional.softplus
  )
  forward = layer(
    "precond_gated_deltanet",
    F=activations,
    naive_recurrent_precond_gated_delta_rule=gated,
    unpad_hidden_states=lambda x, *rest: (x, None, None),
    repad_hidden_states=lambda x, *rest: x,
    get_layer_cache=lambda *rest: None,
  ).PrecondGatedDeltaNet.forward

  def with_gates(query, key, value, inputs, **params):
    p = {name.removeprefix("params/"): x for name, x in params.items()}
    layer_self = mock.MagicMock(
      **{"mode": "naive", "training": True, "use_short_conv": False},
      **{"use_gate": False, "allow_neg_eigval": False},
      **{"head_k_dim": H, "head_v_dim": V, "squash_x": 1.5, "squash_eps": 1e-6},
      **{"A_log": p["log_rate"], "A_log_atk": p["square_log_rate"]},
      **{"dt_bias": p["step_bias"], "dt_bias_atk": p["square_step_bias"]},
      log_atk_scale=p["center"],
    )
    flat = [x.flatten(2) for x in (query, key, value)]
    layer_self.q_proj, layer_self.k_proj, layer_self.v_proj = (
      (lambda _, x=x: x) for x in flat
    )
    (
      layer_self.b_proj,
      layer_self.a_proj,
      layer_self.b_atk_proj,
      layer_self.a_atk_proj,
    ) = (
      (lambda x, name=name: x @ p[name])
      for name in (
        *("rate_kernel", "step_kernel"),
        *("square_rate_kernel", "square_step_kernel"),
      )
    )
    layer_self.o_norm = layer_self.o_proj = lambda x: x
    return {"out": forward(layer_self, inputs)[0].unflatten(-1, (N, V))}

  draw, features = Draw("precond gates"), 6
  given = draw.qkv() | {"inputs": draw.normal(1, T, features)}
  given["params/center"] = draw.normal(N)
  for prefix in ("", "square_"):
    given |= {
      f"params/{prefix}rate_kernel": draw.normal(features, N),
      f"params/{prefix}step_kernel": draw.normal(features, N),
      f"params/{prefix}step_bias": draw.normal(N) - 2.0,
      f"params/{prefix}log_rate": draw.normal(N),
    }
  file.add(
    "precond_delta_gates",
    with_gates,
    witness="layers.precond_gated_deltanet.PrecondGatedDeltaNet",
    mechanism="precond_delta",
    function="precond_delta",
    given=given,
  )


if __name__ == "__main__":
  file = Vectors("fla_recurrences", "fla-core 0.6.0")
  file.write(hgrn2, rwkv6, based, gsa, precond_delta)
