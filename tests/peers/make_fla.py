"""Makes fla.npz: what flash-linear-attention's naive references compute.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 einops==0.8.2
    VENV/bin/pip install --no-deps fla-core==0.6.0
    OMP_NUM_THREADS=1 VENV/bin/python tests/peers/make_fla.py

The functions are those of fla/ops/*/naive.py, to which its tests hold its kernels. They
are loaded by their paths, since `import fla` needs triton.
"""

import importlib.util
import itertools
import pathlib
import sys
import types
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from vectors import Draw, Vectors, unit

OPS = pathlib.Path(importlib.util.find_spec("fla").origin).parent / "ops"
T, N, H, V = 29, 2, 4, 3
CUTS = (0, 5, 17, T)
"""Where segments begin; a peer without segments is called for each."""


def peer(name: str) -> Any:
  """The module fla/ops/`name`/naive.py."""
  path = OPS / name / "naive.py"
  spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
  """`[B, T, N, …]` as `[B, N, T, …]`, and back."""
  return [x.transpose(1, 2) for x in tensors]


def segmented(call):
  """`call` for each segment on its own, with no state at the start."""

  def run(segment_ids=None, **given):
    del segment_ids
    parts = [
      call(**{n: x[:, a:b] for n, x in given.items()})["out"]
      for a, b in itertools.pairwise(CUTS)
    ]
    return {"out": torch.cat(parts, 1)}

  return run


SEGMENT_IDS = np.searchsorted(CUTS, np.arange(T), side="right")[None] - 1


def qkv(
  draw: Draw, length=T, heads=N, kv_heads=None, value=V
) -> dict[str, Any]:
  """Query, key and value."""
  kv_heads = kv_heads or heads
  return {
    "query": draw.normal(1, length, heads, H),
    "key": draw.normal(1, length, kv_heads, H),
    "value": draw.normal(1, length, kv_heads, value),
  }


def delta_inputs(draw: Draw, channels: bool | None = None) -> dict[str, Any]:
  """As `qkv`, with keys of length 1, rates, decays and a first state."""
  x = qkv(draw)
  x["query"], x["key"] = unit(x["query"]), unit(x["key"])
  # Keys that repeat are replaced.
  x["key"][:, 20:24] = x["key"][:, 20:21]
  x["beta"] = draw.uniform(0, 1, 1, T, N)
  if channels is not None:
    x["log_decay"] = draw.decays(1, T, N, *([H] if channels else []))
  x["initial_state"] = draw.normal(1, N, H, V)
  return x


def results(pair) -> dict[str, torch.Tensor]:
  """The results of a function that returns (out, state)."""
  return {"out": pair[0], "state": pair[1]}


def linear(file: Vectors) -> None:
  """Retention, linear attention and states that decay."""
  retention = peer("retention").naive_retention

  def call(query, key, value):
    out = retention(*heads_first(query, key, value))
    return {"out": out.transpose(1, 2)}

  file.add(
    "retention",
    call,
    witness="naive_retention",
    mechanism="retention",
    function="retention",
    given=qkv(Draw("retention"), heads=3),
  )
  normalised = peer("linear_attn").naive_recurrent_linear_attn

  def call(query, key, value):
    query, key = functional.elu(query) + 1, functional.elu(key) + 1
    return {"out": normalised(query, key, value, normalize=True)[0]}

  file.add(
    "linear",
    call,
    witness="naive_recurrent_linear_attn",
    mechanism="linear",
    function="linear_attention",
    given=qkv(Draw("linear")),
    options={"is_causal": True},
  )
  simple, gla = peer("simple_gla"), peer("gla").naive_recurrent_gla
  rule = {"function": "gated_linear_attention"}
  state = {"options": {"return_state": True}}

  def call(query, key, value, log_decay, initial_state):
    given = query, key, value, log_decay
    return results(
      simple.naive_recurrent_simple_gla(*given, initial_state=initial_state)
    )

  def chunks(query, key, value, log_decay, initial_state):
    given = query, key, value, log_decay, initial_state
    return results(simple.naive_chunk_simple_gla(*given, True, chunk_size=16))

  def channels(query, key, value, log_decay, initial_state):
    return results(gla(query, key, value, log_decay, initial_state, True))

  def without_state(query, key, value, log_decay):
    return {"out": gla(query, key, value, log_decay)[0]}

  for name, function, witness, mechanism, last in (
    ("head_decays", call, "naive_recurrent_simple_gla", "mamba2", []),
    ("head_decays_in_chunks", chunks, "naive_chunk_simple_gla", "mamba2", []),
    ("channel_decays", channels, "naive_recurrent_gla", "gated_linear", [H]),
  ):
    draw = Draw(name)
    given = qkv(draw) | {
      "log_decay": draw.decays(1, T, N, *last),
      "initial_state": draw.normal(1, N, H, V),
    }
    facts = {"witness": witness, "mechanism": mechanism, **rule, **state}
    file.add(name, function, given=given, **facts)
  given = {x: y for x, y in given.items() if x != "initial_state"}
  file.add(
    "channel_decays_of_segments",
    segmented(without_state),
    witness="naive_recurrent_gla, each segment",
    mechanism="gated_linear",
    given=given,
    fixed={"segment_ids": SEGMENT_IDS},
    **rule,
  )


def delta(file: Vectors) -> None:
  """The delta rule and its gates."""
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
  """Comba, as a rule and with its gates.

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
  # The second head decays at two positions alone, by about e⁻³⁰.
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
    given=qkv(draw)
    | {"inputs": inputs}
    | {f"params/{name}": x for name, x in params.items()},
    **facts,
  )


def other_states(file: Vectors) -> None:
  """DeltaProduct, RWKV-7, MesaNet and log-linear attention."""
  product = peer("gated_delta_product").naive_recurrent_gated_delta_product
  draw = Draw("product")
  given = {
    "query": draw.normal(1, T, N, H),
    "key": unit(draw.normal(1, T, 2, N, H)),
    "value": draw.normal(1, T, 2, N, V),
    "beta": draw.uniform(0, 2, 1, T, 2, N),
    "log_decay": draw.decays(1, T, N),
    "initial_state": draw.normal(1, N, H, V),
  }

  def call(query, key, value, beta, log_decay, initial_state):
    return results(
      product(
        query,
        *(x.flatten(1, 2) for x in (key, value)),
        log_decay,
        beta.flatten(1, 2),
        H**-0.5,
        initial_state=initial_state,
        num_householder=2,
      )
    )

  state = {"options": {"return_state": True}}
  file.add(
    "product",
    call,
    witness="naive_recurrent_gated_delta_product",
    mechanism="delta_product",
    function="delta_product_attention",
    given=given,
    **state,
  )
  dplr = peer("generalized_delta_rule/dplr").dplr_recurrence

  def call(query, key, value, removal, replacement, log_decay, initial_state):
    given = query, key, value, removal, replacement, log_decay
    out, state = dplr(*heads_first(*given), initial_state)
    return {"out": out.transpose(1, 2), "state": state}

  draw = Draw("dplr")
  given = qkv(draw)
  removed = unit(draw.normal(1, T, N, H))
  given |= {
    "log_decay": draw.decays(1, T, N, H),
    "removal": -removed,
    "replacement": removed * draw.uniform(0, 1, 1, T, N, H),
    "initial_state": draw.normal(1, N, H, V),
  }
  file.add(
    "dplr",
    call,
    witness="dplr_recurrence",
    mechanism="rwkv7",
    function="rwkv7_attention",
    given=given,
    **state,
  )
  mesa = peer("mesa_net").naive_mesa_net_exact

  def call(query, key, value, log_decay, beta, regularizer, initial_state):
    given = query, key, value, log_decay, regularizer, beta
    out, kk, kv = mesa(*given, *torch.split(initial_state, H, dim=-1))
    return {"out": out, "state": torch.cat([kk, kv], -1)}

  draw = Draw("mesa")
  given = qkv(draw, value=H)
  given["query"], given["key"] = unit(given["query"]), unit(given["key"])
  half = draw.normal(1, N, H, H, scale=0.5)
  given |= {
    "log_decay": draw.decays(1, T, N),
    "beta": draw.uniform(0, 1, 1, T, N),
    "regularizer": draw.uniform(0.25, 1.5, N, H),
    "initial_state": np.concatenate(
      [half @ half.swapaxes(2, 3), draw.normal(1, N, H, H)], -1
    ),
  }
  file.add(
    "mesa",
    call,
    witness="naive_mesa_net_exact",
    mechanism="mesa",
    function="mesa_attention",
    given=given,
    **state,
  )
  levels = peer("log_linear_attn").naive_log_linear_attn

  def call(query, key, value, log_decay, level_scales):
    return {"out": levels(query, key, value, log_decay, level_scales, None)}

  draw = Draw("levels")
  given = qkv(draw) | {
    "log_decay": draw.decays(1, T, N),
    "level_scales": draw.uniform(0, 2, 1, T, N, 6),
  }
  file.add(
    "levels",
    call,
    witness="naive_log_linear_attn",
    mechanism="log_linear",
    function="log_linear_attention",
    given=given,
  )


def softmax(file: Vectors) -> None:
  """Sinks, windows, forget gates, PaTH, sticks, DSA and NSA."""
  attend = peer("attn").naive_parallel_attn
  draw = Draw("sinks")
  given = qkv(draw, heads=4, kv_heads=2) | {"sinks": draw.normal(4, scale=2.0)}

  def call(query, key, value, sinks):
    return {"out": attend(query, key, value, sink_bias=sinks)[0]}

  for mechanism in ("dense", "flash"):
    file.add(
      f"sinks_{mechanism}",
      call,
      witness="naive_parallel_attn, sinks",
      mechanism=mechanism,
      function=f"{mechanism}_attention",
      given=given,
      options={"is_causal": True},
    )

  def call(query, key, value, sinks, log_forget):
    options = {"window_size": 9, "g": log_forget, "sink_bias": sinks}
    return {"out": attend(query, key, value, **options)[0]}

  file.add(
    "window",
    call,
    witness="naive_parallel_attn, a window, sinks and forget gates",
    mechanism="sliding_window",
    function="sliding_window_attention",
    given=given | {"log_forget": draw.decays(1, T, 4)},
    options={"window": 8, "is_causal": True},
  )
  forget = peer("forgetting_attn").naive_forgetting_attn

  def call(query, key, value, log_forget):
    return {"out": forget(query, key, value, log_forget)}

  given = qkv(draw, heads=4, kv_heads=2)
  given |= {"log_forget": draw.decays(1, T, 4)}
  for mechanism in ("dense", "flash"):
    file.add(
      f"forget_{mechanism}",
      call,
      witness="naive_forgetting_attn",
      mechanism=mechanism,
      function=f"{mechanism}_attention",
      given=given,
      options={"is_causal": True},
    )
  path = peer("path_attn").naive_path_attn
  draw = Draw("path")
  given = qkv(draw, heads=4, kv_heads=2) | {
    "householder": unit(draw.normal(1, T, 2, H)),
    "beta": draw.uniform(0, 2, 1, T, 2),
  }

  def call(query, key, value, householder, beta, log_forget=None):
    # The peer multiplies the sums of forget gates by the scale; the paper does not.
    if log_forget is None:
      forget = query.new_zeros(1, T, 4)
    else:
      forget = log_forget * H**0.5
    given = query, key, value, householder, beta, forget
    return {"out": path(*given, H**-0.5, 16)}

  facts = {"mechanism": "path", "function": "path_attention"}
  file.add("path", call, witness="naive_path_attn", given=given, **facts)
  file.add(
    "path_forget",
    call,
    witness="naive_path_attn, forget gates divided by the scale",
    given=given | {"log_forget": draw.decays(1, T, 4)},
    **facts,
  )
  sticks = peer("stickbreaking_attn").naive_stickbreaking_attn
  # One score of the first draws is 0, none of the second.
  for seed, at_0 in ((0, True), (5, False)):
    given = qkv(Draw(f"sticks {seed}"), heads=4, kv_heads=2)
    query = given["query"].reshape(T, 2, 2, H)
    scores = np.einsum("tkgh,skh->kgts", query, given["key"][0])
    assert at_0 == np.any(np.tril(scores == 0)), seed
    for current in (False, True):

      def call(query, key, value, current=current):
        return {"out": sticks(query, key, value, attend_current=current)[0]}

      file.add(
        f"sticks{'_current' * current}{'_at_0' * at_0}",
        call,
        witness="naive_stickbreaking_attn",
        mechanism="stick_breaking",
        function="stick_breaking_attention",
        given=given,
        options={"attend_current": current},
      )
  selected(file, attend)


def selected(file: Vectors, attend: Any) -> None:
  """DSA and NSA."""
  dsa = peer("dsa").naive_dsa
  draw = Draw("dsa")
  # All products are positive, so no two scores are 0: which of equal scores
  # `torch.topk` takes is open, and here it is the earlier.
  index = {
    "index_query": draw.uniform(0, 2, 1, T, 3, 6),
    "index_key": draw.uniform(0, 2, 1, T, 6),
    "index_weight": draw.normal(1, T, 3),
  }
  cuts = torch.tensor(CUTS)

  def call(query, key, value, query_segment_ids=None, **rest):
    given = query, key, value, rest["index_query"], rest["index_key"]
    cu_seqlens = None if query_segment_ids is None else cuts
    return {
      "out": dsa(*given, rest["index_weight"], topk=7, cu_seqlens=cu_seqlens)
    }

  ids = {f"{x}_segment_ids": SEGMENT_IDS for x in ("query", "key")}
  # Its result has the width of the values repeated to the query's heads.
  for name, fixed in (("dsa", {}), ("dsa_segments", ids)):
    file.add(
      name,
      call,
      witness="naive_dsa",
      mechanism="dsa",
      function="dsa_attention",
      given=qkv(draw, heads=4, kv_heads=2) | index,
      fixed=fixed,
      options={"top_k": 7},
    )
  # nsa's file imports two functions in triton, which are not called here.
  stub = types.ModuleType("stub")
  stub.prepare_chunk_offsets = stub.mean_pooling = None
  for name in ("fla", "fla.ops", "fla.ops.utils", "fla.ops.utils.pooling"):
    sys.modules[name] = stub
  nsa = peer("nsa")
  size, blocks = 4, -(-T // 4)

  def call(query, key, value, branch_gates, **even):
    del even

    def mean(x):
      x = functional.pad(x, (0, 0, 0, 0, 0, blocks * size - T))
      return x.unflatten(1, (blocks, size)).mean(2)

    small, scale = mean(key), H**-0.5
    compressed, _ = nsa.naive_nsa_compression(
      query, small, mean(value), size, scale
    )
    chosen = nsa.naive_nsa_topk(query, small, 4, size, scale)
    exact = nsa.naive_nsa_selection(query, key, value, chosen, size)
    near = attend(query, key, value, window_size=9)[0]
    gates = branch_gates.unsqueeze(-1).unbind(3)
    parts = zip(gates, (compressed, exact, near), strict=True)
    return {"out": sum(gate * x for gate, x in parts)}

  draw = Draw("nsa")
  even = np.full((2, size), 1 / size, np.float32)
  file.add(
    "nsa",
    call,
    witness="naive_nsa_compression, _topk and _selection",
    mechanism="nsa",
    function="nsa_attention",
    given=qkv(draw, heads=4, kv_heads=2)
    | {"branch_gates": draw.uniform(0, 1, 1, T, 4, 3)},
    fixed={"key_weights": even, "value_weights": even},
    options={"stride": size, "block_size": size, "num_blocks": 4, "window": 9},
  )


def main() -> None:
  """Writes the file."""
  file = Vectors("fla", "fla-core 0.6.0")
  for add in (linear, delta, other_states, softmax):
    add(file)
  file.write()


if __name__ == "__main__":
  main()
