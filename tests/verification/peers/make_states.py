"""Makes jla_states.npz and recurrentgemma.npz: recurrences of single channels.

    python3.12 -m venv VENV
    VENV/bin/pip install jax==0.11.2 flax==0.12.12 jax-linear-attention==0.1.0 \
      recurrentgemma==1.0.1
    VENV/bin/python tests/verification/peers/make_states.py
"""

import jax
import jax.numpy as jnp
from jla.ops import reference
import numpy as np
from recurrentgemma.jax.layers import RGLRU
from vectors import Draw, Vectors, jax_results

T, N, H, V = 29, 2, 4, 3
SEGMENT_IDS = np.searchsorted((5, 17), np.arange(T), side="right")[None]
SEGMENT_IDS = SEGMENT_IDS.astype(np.int32)
POSITIONS = np.concatenate([np.arange(n) for n in (5, 12, 12)])[None]


def mamba(file: Vectors) -> None:
  """The selective scan, with B and C of all channels or of each head's."""
  for name, heads in (("shared", 1), ("grouped", N)):
    draw = Draw(f"jla mamba1 {name}")
    given = {
      "query": draw.normal(1, T, heads, H),
      "key": draw.normal(1, T, heads, H),
      "value": draw.normal(1, T, N, V),
      "step": draw.uniform(0, 2, 1, T, N, V),
      "log_rate": draw.normal(N, H, V),
      "initial_state": draw.normal(1, N, H, V),
    }

    def call(query, key, value, step, log_rate, initial_state, segment_ids):
      def channels(x):
        return jnp.swapaxes(x, -2, -1).reshape(*x.shape[:-3], N * V, H)

      out, state = reference.mamba1(
        query,
        key,
        value.reshape(1, T, N * V),
        step.reshape(1, T, N * V),
        channels(-jnp.exp(log_rate)),
        initial_state=channels(initial_state),
        segment_ids=segment_ids,
        output_final_state=True,
      )
      state = jnp.swapaxes(state.reshape(1, N, V, H), 2, 3)
      return {"out": out.reshape(1, T, N, V), "state": state}

    file.add(
      f"jla_mamba1_{name}",
      call,
      witness="reference.mamba1",
      mechanism="mamba",
      function="mamba_attention",
      given=given,
      fixed={"segment_ids": SEGMENT_IDS},
      options={"return_state": True},
    )


def rg_lru(file: Vectors) -> None:
  """The layer, with and without segments."""
  draw = Draw("recurrentgemma rg_lru")
  given = {
    "query": draw.normal(1, T, N, H),
    "params/decay_kernel": draw.normal(N, H, H),
    "params/decay_bias": draw.normal(N, H),
    "params/input_kernel": draw.normal(N, H, H),
    "params/input_bias": draw.normal(N, H),
    "params/log_rate": draw.normal(N, H, scale=2.0),
  }
  segments = dict.fromkeys(
    ("query_segment_ids", "key_segment_ids"), SEGMENT_IDS
  )
  for name, fixed, positions in (
    ("whole", {}, np.arange(T)[None]),
    ("segments", segments, POSITIONS),
  ):

    def call(query, positions=positions, **given):
      p = {n.removeprefix("params/"): x for n, x in given.items() if "/" in n}
      gates = {
        f"{theirs}_gate": {"w": p[f"{ours}_kernel"], "b": p[f"{ours}_bias"]}
        for theirs, ours in (("a", "decay"), ("input", "input"))
      }
      params = {**gates, "a_param": p["log_rate"].reshape(-1)}
      x = query.reshape(1, T, N * H)
      out, _ = RGLRU(N * H, N).apply(
        {"params": params}, x, jnp.asarray(positions)
      )
      return {"out": out.reshape(1, T, N, H)}

    file.add(
      f"recurrentgemma_{name}",
      call,
      witness="RGLRU",
      mechanism="rg_lru",
      function="rg_lru",
      given=given,
      fixed=fixed,
    )


def main() -> None:
  """Writes the files."""
  jax.config.update("jax_default_matmul_precision", "highest")

  for add, peer, version in (
    (mamba, "jla_states", "jax-linear-attention 0.1.0"),
    (rg_lru, "recurrentgemma", "recurrentgemma 1.0.1"),
  ):
    file = Vectors(peer, version, jax_results)
    add(file)
    file.write()


if __name__ == "__main__":
  main()
