"""Writes fla.npz: results of flash-linear-attention's naive references.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 einops==0.8.2
    VENV/bin/pip install --no-deps fla-core==0.6.0
    OMP_NUM_THREADS=1 VENV/bin/python tests/verification/peers/make_fla.py

The functions are those of fla/ops/*/naive.py, to which its tests hold its kernels. They
are loaded by their paths, since `import fla` needs triton.
"""

import sys
import types
from typing import Any

from fla_delta import delta
from fla_naive import (
  CUTS,
  PACKED,
  SEGMENT_IDS,
  H,
  N,
  T,
  V,
  add_with_states,
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


def linear(file: Vectors) -> None:
  """Adds retention, linear attention and decaying states."""
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
    given=Draw("retention").qkv(heads=3),
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
    given=Draw("linear").qkv(),
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
    given = draw.qkv() | {
      "log_decay": draw.decays(1, T, N, *last),
      "initial_state": draw.normal(1, N, H, V),
    }
    facts = {"witness": witness, "mechanism": mechanism, **rule, **state}
    file.add(name, function, given=given, **facts)
  facts |= {**PACKED, "witness": "naive_recurrent_gla, states of segments"}
  states = states_of_segments(Draw("gla packed"), given)
  file.add("channel_decays_packed", packed(channels), given=states, **facts)
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


def other_states(file: Vectors) -> None:
  """Adds DeltaProduct, RWKV-7, MesaNet and log-linear attention."""
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
  witness = "naive_recurrent_gated_delta_product"
  facts = {"witness": witness, "mechanism": "delta_product"}
  add_with_states(file, "product", call, draw, given, **facts)
  dplr = peer("generalized_delta_rule/dplr").dplr_recurrence

  def call(query, key, value, removal, replacement, log_decay, initial_state):
    given = query, key, value, removal, replacement, log_decay
    out, state = dplr(*heads_first(*given), initial_state)
    return {"out": out.transpose(1, 2), "state": state}

  draw = Draw("dplr")
  given = draw.qkv()
  removed = unit(draw.normal(1, T, N, H))
  given |= {
    "log_decay": draw.decays(1, T, N, H),
    "removal": -removed,
    "replacement": removed * draw.uniform(0, 1, 1, T, N, H),
    "initial_state": draw.normal(1, N, H, V),
  }
  facts = {"witness": "dplr_recurrence", "mechanism": "rwkv7"}
  add_with_states(file, "dplr", call, draw, given, **facts)
  mesa = peer("mesa_net").naive_mesa_net_exact

  def call(query, key, value, log_decay, beta, regularizer, initial_state):
    given = query, key, value, log_decay, regularizer, beta
    out, kk, kv = mesa(*given, *torch.split(initial_state, H, dim=-1))
    return {"out": out, "state": torch.cat([kk, kv], -1)}

  draw = Draw("mesa")
  given = draw.qkv(value=H)
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
    given=given,
    **state,
  )
  first = given["initial_state"]
  given["initial_state"] = np.stack([x * first for x in (1, 2, 3, 4)], 1)
  file.add(
    "mesa_packed",
    packed(call),
    witness="naive_mesa_net_exact, states of segments",
    mechanism="mesa",
    given=given,
    **PACKED,
  )
  levels = peer("log_linear_attn").naive_log_linear_attn

  def call(query, key, value, log_decay, level_scales):
    return {"out": levels(query, key, value, log_decay, level_scales, None)}

  draw = Draw("levels")
  given = draw.qkv() | {
    "log_decay": draw.decays(1, T, N),
    "level_scales": draw.uniform(0, 2, 1, T, N, 6),
  }
  file.add(
    "levels",
    call,
    witness="naive_log_linear_attn",
    mechanism="log_linear",
    given=given,
  )


def softmax(file: Vectors) -> None:
  """Adds sinks, windows, forget gates, PaTH, stick-breaking, DSA and NSA."""
  attend = peer("attn").naive_parallel_attn
  draw = Draw("sinks")
  given = draw.qkv(heads=4, kv_heads=2) | {"sinks": draw.normal(4, scale=2.0)}

  def call(query, key, value, sinks):
    return {"out": attend(query, key, value, sink_bias=sinks)[0]}

  file.add(
    "sinks",
    call,
    witness="naive_parallel_attn, sinks",
    mechanism="dense",
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
    given=given | {"log_forget": draw.decays(1, T, 4)},
    options={"window": 8, "is_causal": True},
  )
  forget = peer("forgetting_attn").naive_forgetting_attn

  def call(query, key, value, log_forget):
    return {"out": forget(query, key, value, log_forget)}

  given = draw.qkv(heads=4, kv_heads=2)
  given |= {"log_forget": draw.decays(1, T, 4)}
  file.add(
    "forget",
    call,
    witness="naive_forgetting_attn",
    mechanism="dense",
    given=given,
    options={"is_causal": True},
  )
  path = peer("path_attn").naive_path_attn
  draw = Draw("path")
  given = draw.qkv(heads=4, kv_heads=2) | {
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

  facts = {"mechanism": "path"}
  file.add("path", call, witness="naive_path_attn", given=given, **facts)
  file.add(
    "path_forget",
    call,
    witness="naive_path_attn, forget gates divided by the scale",
    given=given | {"log_forget": draw.decays(1, T, 4)},
    **facts,
  )
  sticks = peer("stickbreaking_attn").naive_stickbreaking_attn
  # The first draws have a score of 0; the second have none.
  for seed, at_0 in ((0, True), (5, False)):
    given = Draw(f"sticks {seed}").qkv(heads=4, kv_heads=2)
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
        given=given,
        options={"attend_current": current},
      )
  selected(file, attend)


def selected(file: Vectors, attend: Any) -> None:
  """Adds DSA and NSA."""
  dsa = peer("dsa").naive_dsa
  draw = Draw("dsa")
  # All products are positive, so no two scores are 0: `torch.topk` selects any of
  # equal scores, and the function selects the earlier key.
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
  # The peer repeats values to the query heads.
  for name, fixed in (("dsa", {}), ("dsa_segments", ids)):
    file.add(
      name,
      call,
      witness="naive_dsa",
      mechanism="dsa",
      given=draw.qkv(heads=4, kv_heads=2) | index,
      fixed=fixed,
      options={"top_k": 7},
    )
  # The file of NSA imports two functions of Triton, which are not called.
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
    given=draw.qkv(heads=4, kv_heads=2)
    | {"branch_gates": draw.uniform(0, 1, 1, T, 4, 3)},
    fixed={"key_weights": even, "value_weights": even},
    options={"stride": size, "block_size": size, "num_blocks": 4, "window": 9},
  )


if __name__ == "__main__":
  file = Vectors("fla", "fla-core 0.6.0")
  file.write(linear, delta, other_states, softmax)
