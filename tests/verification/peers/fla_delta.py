"""Adds cases for make_fla.py: the delta rule, its gates and Comba."""

from typing import Any

from fla_naive import (
  PACKED,
  SEGMENT_IDS,
  H,
  N,
  T,
  V,
  heads_first,
  packed,
  peer,
  results,
  segmented,
  states_of_segments,
)
import numpy as np
import torch
from torch.nn import functional
from vectors import Draw, Vectors, unit


def delta_inputs(draw: Draw, channels: bool | None = None) -> dict[str, Any]:
  """Draws `qkv` with unit keys, β, decays and an initial state."""
  x = draw.qkv()
  x["query"], x["key"] = unit(x["query"]), unit(x["key"])
  # The rule replaces the values of repeated keys.
  x["key"][:, 20:24] = x["key"][:, 20:21]
  x["beta"] = draw.uniform(0, 1, 1, T, N)
  if channels is not None:
    x["log_decay"] = draw.decays(1, T, N, *([H] if channels else []))
  x["initial_state"] = draw.normal(1, N, H, V)
  return x


def delta(file: Vectors) -> None:
  """Adds the delta rule and its gates."""
  rule = {"function": "delta_rule_attention"}
  rule["options"] = {"return_state": True}
  plain, gated = peer("delta_rule"), peer("gated_delta_rule")
  kda, gdn2, comba = peer("kda"), peer("gdn2"), peer("comba")

  def call(query, key, value, beta, initial_state):
    given = heads_first(query, key, value, beta)
    out, state = plain.delta_rule_recurrence(*given, initial_state)
    return {"out": out.transpose(1, 2), "state": state}

  file.add(
    "delta",
    call,
    witness="delta_rule_recurrence",
    mechanism="delta",
    given=delta_inputs(Draw("delta")),
    **rule,
  )

  def recurrent(query, key, value, beta, log_decay, initial_state):
    given = query, key, value, beta, log_decay, None, initial_state, True
    return results(gated.naive_recurrent_gated_delta_rule(*given))

  def chunks(query, key, value, beta, log_decay, initial_state):
    given = query, key, value, log_decay, beta, 16, None, initial_state, True
    return results(gated.naive_chunk_gated_delta_rule(*given))

  def channels(query, key, value, beta, log_decay, initial_state):
    given = query, key, value, log_decay, beta, None, initial_state, True
    return results(kda.naive_recurrent_kda(*given))

  def channel_chunks(query, key, value, beta, log_decay, initial_state):
    given = query, key, value, log_decay, beta, None, initial_state, True
    return results(kda.naive_chunk_kda(*given, chunk_size=T))

  for name, function, witness, mechanism in (
    ("recurrent", recurrent, "naive_recurrent_gated_delta_rule", "gated_delta"),
    ("chunks", chunks, "naive_chunk_gated_delta_rule", "gated_delta"),
    ("channels", channels, "naive_recurrent_kda", "kimi_delta"),
    ("channel_chunks", channel_chunks, "naive_chunk_kda", "kimi_delta"),
  ):
    given = delta_inputs(Draw(name), channels=mechanism == "kimi_delta")
    if function == channel_chunks:
      # Its quotients of decays are not for −30 within a chunk.
      given["log_decay"] = np.maximum(given["log_decay"], -2.0)
    facts = {"witness": witness, "mechanism": mechanism, **rule}
    file.add(name, function, given=given, **facts)
    if function in (recurrent, channels):
      facts |= {**PACKED, "witness": f"{witness}, states of segments"}
      given = states_of_segments(Draw(f"{name} packed"), given)
      file.add(f"{name}_packed", packed(function), given=given, **facts)

  def without_state(query, key, value, beta, log_decay):
    given = query, key, value, log_decay, beta
    return {"out": kda.naive_recurrent_kda(*given)[0]}

  given = delta_inputs(Draw("segments"), channels=True)
  del given["initial_state"]
  file.add(
    "segments",
    segmented(without_state),
    witness="naive_recurrent_kda, each segment",
    mechanism="kimi_delta",
    function="delta_rule_attention",
    given=given,
    fixed={"segment_ids": SEGMENT_IDS},
  )
  for name in ("recurrent", "chunk"):
    draw = Draw(f"gates_{name}")
    given = delta_inputs(draw, channels=True)
    del given["beta"]
    given["erase_gate"] = draw.uniform(0, 1, 1, T, N, H)
    given["write_gate"] = draw.uniform(0, 1, 1, T, N, V)
    if name == "chunk":
      given["log_decay"] = np.maximum(given["log_decay"], -2.0)
    function = getattr(gdn2, f"naive_{name}_gdn2")

    def call(
      query,
      key,
      value,
      log_decay,
      erase_gate,
      write_gate,
      initial_state,
      function=function,
    ):
      gates = log_decay, erase_gate, write_gate
      return results(
        function(query, key, value, *gates, None, initial_state, True)
      )

    file.add(
      f"gates_{name}",
      call,
      witness=function.__name__,
      mechanism="gated_delta_2",
      given=given,
      **rule,
    )
  comba_cases(file, comba, rule)


def comba_cases(file: Vectors, comba: Any, rule: dict[str, Any]) -> None:
  """Adds Comba, as a rule and with its gates.

  `naive_recurrent_comba` decays the state before it erases: that is neither the rule of
  the peer's kernels nor the paper's (arXiv:2506.02475, equation 9), so the witness is
  `naive_chunk_comba`. The peer's layer differs from the paper in two things, which are
  not made here: it subtracts d·p from the query, not d·k, and it brings queries and p
  to length 1 after that, with which the factor of p is lost.
  """

  def call(query, key, value, erase_key, beta, log_decay, initial_state):
    return results(
      comba.naive_chunk_comba(
        q=query,
        k=key,
        v=value,
        p=erase_key,
        beta=beta,
        g=log_decay,
        initial_state=initial_state,
        output_final_state=True,
      )
    )

  draw = Draw("comba_rule")
  given = delta_inputs(draw, channels=False)
  given["erase_key"] = 0.5 * given["key"]
  facts = {"witness": "naive_chunk_comba", "mechanism": "comba"}
  file.add("comba_rule", call, given=given, **facts, **rule)

  def with_gates(query, key, value, inputs, **params):
    p = {name.removeprefix("params/"): x for name, x in params.items()}
    key = functional.normalize(key, dim=-1)
    step = functional.softplus(inputs @ p["step_kernel"] + p["step_bias"])
    out = comba.naive_chunk_comba(
      q=functional.normalize(query, dim=-1) - p["correction"][:, None] * key,
      k=key,
      v=value,
      p=torch.sigmoid(p["feedback"])[:, None] * key,
      beta=torch.sigmoid(inputs @ p["rate_kernel"]),
      g=-torch.exp(p["log_rate"]) * step,
    )[0]
    return {"out": out}

  draw = Draw("comba_gates")
  inputs, kernel = draw.normal(1, T, 6), draw.normal(6, N, scale=0.5)
  # The second head decays only at two positions, by about e⁻³⁰.
  inputs[..., 5], kernel[:, 1] = 0.0, [0, 0, 0, 0, 0, 8]
  inputs[:, (12, 25), 5] = 1.1875
  params = {
    "rate_kernel": draw.normal(6, N),
    "step_kernel": kernel,
    "step_bias": np.array([-2.0, -9.0], np.float32),
    "log_rate": np.array([-1.0, 3.4375], np.float32),
    "feedback": np.array([-0.5, 1.25], np.float32),
    "correction": np.array([0.0625, 0.6875], np.float32),
  }
  file.add(
    "comba_gates",
    with_gates,
    function="comba",
    given=draw.qkv()
    | {"inputs": inputs}
    | {f"params/{name}": x for name, x in params.items()},
    **facts,
  )
