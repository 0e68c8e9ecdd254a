"""Writes jla.npz: results of jax-linear-attention's reference functions.

    python3.12 -m venv VENV
    VENV/bin/pip install jax==0.11.2 jax-linear-attention==0.1.0
    VENV/bin/python tests/verification/peers/make_jla.py

They run position by position, or form all T×S pairs. Segments are its `segment_ids`.
"""

import jax
import jax.numpy as jnp
from jla.layers import ssm
from jla.layers.attention import sink_attention
from jla.layers.forgetting_attention import forgetting_attention
from jla.layers.lightning_attention import lightning_decay_rates
from jla.ops import path_attention, reference, sparse_attention
from jla.ops.log_linear import log_linear_simple_gla_reference
from jla.ops.moba import moba_attention
from jla.ops.rwkv7 import rwkv7
from jla_gates import gates
import numpy as np
from vectors import Draw, Vectors, jax_results, unit

T, N, H, V, F = 29, 2, 4, 3, 6
SEGMENT_IDS = np.searchsorted((5, 17), np.arange(T), side="right")[None]
SEGMENT_IDS = SEGMENT_IDS.astype(np.int32)
BOTH_IDS = {f"{x}_segment_ids": SEGMENT_IDS for x in ("query", "key")}


def recurrences(file: Vectors) -> None:
  """Adds gated linear attention and delta rules."""
  # Mechanism: kind, function, decays per channel, and other gates by jla's names.
  erase_write = {"erase_gate": "b", "write_gate": "w"}
  for mechanism, kind, function, channels, others in (
    ("mamba2", "simple_gla", "gated_linear", False, {}),
    ("gated_linear", "gla", "gated_linear", True, {}),
    ("delta", "delta_rule", "delta_rule", None, {"beta": "beta"}),
    ("gated_delta", "gated_delta_rule", "delta_rule", False, {"beta": "beta"}),
    ("kimi_delta", "kda", "delta_rule", True, {"beta": "beta"}),
    ("gated_delta_2", "gdn2", "delta_rule", True, erase_write),
  ):
    draw = Draw(f"jla {mechanism}")
    given = draw.qkv()
    if others:
      given["query"], given["key"] = unit(given["query"]), unit(given["key"])
    widths = {"beta": (), "erase_gate": (H,), "write_gate": (V,)}
    for name in others:
      given[name] = draw.uniform(0, 1, 1, T, N, *widths[name])
    names = {"query": "q", "key": "k", "value": "v", **others}
    if channels is not None:
      given["log_decay"] = draw.decays(1, T, N, *([H] if channels else []))
      names["log_decay"] = "g"
    given["initial_state"] = draw.normal(1, N, H, V)
    rule = getattr(reference, kind)

    def call(initial_state, segment_ids, rule=rule, names=names, **given):
      out, state = rule(
        **{names[name]: x for name, x in given.items()},
        initial_state=initial_state,
        segment_ids=segment_ids,
        output_final_state=True,
      )
      return {"out": out, "state": state}

    file.add(
      f"jla_{kind}",
      call,
      witness=f"reference.{kind}",
      mechanism=mechanism,
      function=f"{function}_attention",
      given=given,
      fixed={"segment_ids": SEGMENT_IDS},
      options={"return_state": True},
    )
  draw = Draw("jla product")
  given = {
    "query": draw.normal(1, T, N, H),
    "key": unit(draw.normal(1, T, 3, N, H)),
    "value": draw.normal(1, T, 3, N, V),
    "beta": draw.uniform(0, 2, 1, T, 3, N),
    "log_decay": draw.decays(1, T, N),
    "initial_state": draw.normal(1, N, H, V),
  }

  def call(query, key, value, beta, log_decay, initial_state, segment_ids):
    key, value, beta = (
      x.reshape(1, T * 3, *x.shape[3:]) for x in (key, value, beta)
    )
    out, state = reference.gated_delta_product(
      *(query, key, value, log_decay, beta),
      initial_state=initial_state,
      segment_ids=segment_ids,
      output_final_state=True,
    )
    return {"out": out, "state": state}

  file.add(
    "jla_product",
    call,
    witness="reference.gated_delta_product",
    mechanism="delta_product",
    given=given,
    fixed={"segment_ids": SEGMENT_IDS},
    options={"return_state": True},
  )
  for depth, layer in ((0.0, 0), (0.5, 2)):

    def call(query, key, value, layer=layer):
      # Of five layers.
      rates = lightning_decay_rates(N, layer, 5)
      decay = jnp.broadcast_to(-rates, (1, T, N))
      return {"out": reference.simple_gla(query, key, value, decay)[0]}

    file.add(
      f"jla_lightning_{layer}",
      call,
      witness="lightning_decay_rates, simple_gla",
      mechanism="lightning",
      function="lightning",
      given=Draw("jla lightning").qkv(),
      options={"depth": depth},
    )


def gated(file: Vectors) -> None:
  """Adds mechanisms with their gates, and log-linear attention."""
  draw = Draw("jla mamba2")
  params = {
    "step_kernel": draw.normal(F, N, scale=0.5),
    "step_bias": draw.normal(N),
    "log_rate": draw.normal(N),
    "skip": draw.normal(N),
  }
  given = draw.qkv() | {"inputs": draw.normal(1, T, F)}

  def call(query, key, value, inputs, **params):
    p = {x.removeprefix("params/"): y for x, y in params.items()}
    step = jax.nn.softplus(inputs @ p["step_kernel"] + p["step_bias"])
    out = ssm.mamba2_ssd(
      *(value, step, -jnp.exp(p["log_rate"]), key, query),
      d=p["skip"],
      impl="reference",
    )[0]
    return {"out": out}

  def named(params):
    return {f"params/{x}": y for x, y in params.items()}

  file.add(
    "jla_mamba2_gates",
    call,
    witness="ssm.mamba2_ssd",
    mechanism="mamba2",
    function="mamba2",
    given=given | named(params),
  )
  levels = {
    "level_kernel": draw.normal(F, N, 16, scale=0.5),
    "level_gain": draw.normal(N, 16),
  }

  def call(query, key, value, inputs, **params):
    p = {x.removeprefix("params/"): y for x, y in params.items()}
    step = jax.nn.softplus(inputs @ p["step_kernel"] + p["step_bias"])
    raw = jnp.einsum("BTF,FNL->BTNL", inputs, p["level_kernel"])
    raw *= p["level_gain"]
    out = ssm.log_linear_mamba2_ssd(
      *(value, step, -jnp.exp(p["log_rate"]), key, query),
      level_scales=jax.nn.softplus(raw),
      d=p["skip"],
      impl="reference",
    )[0]
    return {"out": out}

  file.add(
    "jla_log_linear_gates",
    call,
    witness="ssm.log_linear_mamba2_ssd",
    mechanism="log_linear",
    function="log_linear",
    given=given | named(params | levels),
  )
  draw = Draw("jla levels")

  def call(query, key, value, log_decay, level_scales, segment_ids):
    gates = log_decay, level_scales
    out, _ = log_linear_simple_gla_reference(
      query, key, value, *gates, segment_ids=segment_ids
    )
    return {"out": out}

  file.add(
    "jla_levels",
    call,
    witness="log_linear_simple_gla_reference",
    mechanism="log_linear",
    given=draw.qkv()
    | {
      "log_decay": draw.decays(1, T, N),
      "level_scales": draw.uniform(0, 2, 1, T, N, 6),
    },
    fixed={"segment_ids": SEGMENT_IDS},
  )
  draw = Draw("jla mamba3")
  given = draw.qkv() | {"inputs": draw.normal(1, T, F)}
  params = {
    "step_kernel": draw.normal(F, N, scale=0.5),
    "step_bias": draw.normal(N),
    "decay_kernel": draw.normal(F, N, scale=0.5),
    "trapezoid_kernel": draw.normal(F, N, scale=0.5),
    "angle_kernel": draw.normal(F, 1, scale=0.5),
    "query_bias": draw.normal(N, H),
    "key_bias": draw.normal(N, H),
    "skip": draw.normal(N),
  }

  def call(query, key, value, inputs, **params):
    p = {x.removeprefix("params/"): y for x, y in params.items()}
    step = jax.nn.softplus(inputs @ p["step_kernel"] + p["step_bias"])
    # The peer's layer uses 1 + x or 1 / (1 − x) instead of softplus.
    rate = jnp.maximum(jax.nn.softplus(inputs @ p["decay_kernel"]), 1e-4)
    angles = (inputs @ p["angle_kernel"])[:, :, None]
    out, _ = ssm.mamba3_siso(
      *(query, key, value, -rate * step, step, inputs @ p["trapezoid_kernel"]),
      *(p["query_bias"], p["key_bias"]),
      jnp.broadcast_to(angles, (1, T, N, 1)),
      d=p["skip"],
      impl="reference",
    )
    return {"out": out}

  file.add(
    "jla_mamba3",
    call,
    witness="ssm.mamba3_siso",
    mechanism="mamba3",
    function="mamba3",
    given=given | named(params),
  )
  draw = Draw("jla rwkv7")
  removed = unit(draw.normal(1, T, N, H))
  given = draw.qkv() | {
    "log_decay": draw.decays(1, T, N, H),
    "removal": -removed,
    "replacement": removed * draw.uniform(0, 1, 1, T, N, H),
    "initial_state": draw.normal(1, N, H, V),
  }

  def call(query, key, value, log_decay, removal, replacement, **rest):
    given = query, key, value, log_decay, removal, replacement
    out, state = rwkv7(*given, output_final_state=True, scale=H**-0.5, **rest)
    return {"out": out, "state": state}

  file.add(
    "jla_rwkv7",
    call,
    witness="ops.rwkv7",
    mechanism="rwkv7",
    given=given,
    fixed={"segment_ids": SEGMENT_IDS},
    options={"return_state": True},
  )


def softmax(file: Vectors) -> None:
  """Adds sinks, forget gates, windows, PaTH, MoBA, NSA and DSA."""
  grouped = {"heads": 4, "kv_heads": 2}
  draw = Draw("jla sinks")

  def call(query, key, value, sinks, mask):
    return {"out": sink_attention(query, key, value, mask, sinks, scale=None)}

  mask = np.random.RandomState(0).rand(1, 4, T, T) < 0.5
  file.add(
    "jla_sinks",
    call,
    witness="sink_attention, a mask of pairs",
    mechanism="dense",
    given=draw.qkv(**grouped, value=H) | {"sinks": draw.normal(4)},
    fixed={"mask": mask},
  )
  given = draw.qkv(**grouped) | {"log_forget": draw.decays(1, T, 4)}
  for mechanism, window in (("dense", None), ("sliding_window", 6)):

    def call(query, key, value, log_forget, window=window, **ids):
      given = query, key, value, log_forget
      ids = {"segment_ids": ids["key_segment_ids"]}
      out = forgetting_attention(*given, sliding_window=window, **ids)
      return {"out": out}

    file.add(
      f"jla_forget_{mechanism}",
      call,
      witness="forgetting_attention",
      mechanism=mechanism,
      given=given,
      fixed=BOTH_IDS,
      options={"is_causal": True} | ({"window": 5} if window else {}),
    )
  draw = Draw("jla path")
  given = draw.qkv(**grouped) | {
    "householder": unit(draw.normal(1, T, 2, H)),
    "beta": draw.uniform(0, 2, 1, T, 2),
    "log_forget": draw.decays(1, T, 4),
  }

  def call(query, key, value, householder, beta, log_forget, **ids):
    # The peer multiplies the sums of forget gates by the scale; the paper does not.
    gates = householder, beta, log_forget * H**0.5
    ids = {"segment_ids": ids["key_segment_ids"]}
    out = path_attention.path_attention_reference(
      query, key, value, *gates, **ids
    )
    return {"out": out}

  file.add(
    "jla_path",
    call,
    witness="path_attention_reference, forget gates divided by the scale",
    mechanism="path",
    given=given,
    fixed=BOTH_IDS,
  )
  options = {"block_size": 4, "top_k": 3}
  file.add(
    "jla_moba",
    lambda query, key, value: {
      "out": moba_attention(query, key, value, **options)
    },
    witness="moba_attention",
    mechanism="moba",
    given=Draw("jla moba").qkv(**grouped, value=H),
    options=options,
  )
  draw, size = Draw("jla nsa"), 4

  def call(query, key, value, branch_gates, **even):
    del even
    gates = [branch_gates[..., i] for i in range(3)]
    options = {"block_size": size, "block_count": 4, "window_size": 9}
    return {"out": sparse_attention.nsa(query, key, value, *gates, **options)}

  even = np.full((2, size), 1 / size, np.float32)
  file.add(
    "jla_nsa",
    call,
    witness="sparse_attention.nsa",
    mechanism="nsa",
    given=draw.qkv(**grouped)
    | {"branch_gates": draw.uniform(0, 1, 1, T, 4, 3)},
    fixed={"key_weights": even, "value_weights": even},
    options={"stride": size, "block_size": size, "num_blocks": 4, "window": 9},
  )
  draw = Draw("jla dsa")

  def call(query, key, value, index_query, index_key, index_weight, **ids):
    ids = {"segment_ids": ids["key_segment_ids"]}
    index = index_query, index_key, index_weight
    scores = sparse_attention.dsa_index_scores(*index, **ids)
    chosen = sparse_attention.dsa_select(scores, 7)
    return {"out": sparse_attention.dsa(query, key, value, chosen, **ids)}

  file.add(
    "jla_dsa",
    call,
    witness="dsa_index_scores, dsa_select and dsa",
    mechanism="dsa",
    given=draw.qkv(**grouped)
    | {
      "index_query": draw.normal(1, T, 3, 6),
      "index_key": draw.normal(1, T, 6),
      "index_weight": draw.normal(1, T, 3),
    },
    fixed=BOTH_IDS,
    options={"top_k": 7},
  )


if __name__ == "__main__":
  file = Vectors("jla", "jax-linear-attention 0.1.0", jax_results)
  file.write(recurrences, gated, gates, softmax)
