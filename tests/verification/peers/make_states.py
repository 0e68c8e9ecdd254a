"""Writes jla_states.npz, recurrentgemma.npz and mlstm_kernels.npz.

    python3.12 -m venv VENV
    VENV/bin/pip install jax==0.11.2 flax==0.12.12 jax-linear-attention==0.1.0 \
      recurrentgemma==1.0.1
    VENV/bin/pip install --no-deps mlstm-kernels==2.0.6
    VENV/bin/python tests/verification/peers/make_states.py
"""

import functools
import sys
from unittest import mock

import jax.numpy as jnp
from jla.ops import reference
import numpy as np
from recurrentgemma.jax.layers import RGLRU
from vectors import Draw, Vectors, jax_results

# mlstm-kernels imports its kernels with its plain functions.
sys.modules |= {
  name: mock.MagicMock() for name in ("jax_triton", "triton", "triton.language")
}
from mlstm_kernels.jax.chunkwise.native.fwbw import (  # noqa: E402
  mlstm_chunkwise__native_autograd,
)
from mlstm_kernels.jax.recurrent.native_sequence_scan import (  # noqa: E402
  mlstm_recurrent_sequence__native_fw,
)

T, N, H, V = 29, 2, 4, 3
SEGMENT_IDS = np.searchsorted((5, 17), np.arange(T), side="right")[None]
SEGMENT_IDS = SEGMENT_IDS.astype(np.int32)
POSITIONS = np.concatenate([np.arange(n) for n in (5, 12, 12)])[None]


def mamba(file: Vectors) -> None:
  """Adds the selective scan, with B and C for all channels or per head."""
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
      given=given,
      fixed={"segment_ids": SEGMENT_IDS},
      options={"return_state": True},
    )


def rg_lru(file: Vectors) -> None:
  """Adds the layer, with and without segments."""
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


def gates(draw: Draw) -> dict[str, np.ndarray]:
  """Draws log gates of mLSTM, some of them far from 0."""
  log_input = draw.normal(1, T, N, scale=2.0)
  log_input[:, (3, 11), -1] = 40.0, -40.0
  return {"log_decay": draw.decays(1, T, N), "log_input": log_input}


def mlstm(file: Vectors) -> None:
  """Adds the cell of jla, from an empty state."""
  for name, heads, epsilon in (("whole", N, 0.0), ("epsilon", N, 0.01)):
    draw = Draw(f"jla mlstm {name}")
    given = draw.qkv(T, heads) | gates(draw)

    def call(query, key, value, log_decay, log_input, epsilon=epsilon):
      empty = reference.mlstm_empty_state(1, N, H, V)
      state = empty._replace(m=jnp.zeros_like(empty.m))
      out, _ = reference.mlstm(
        *(query, key, value, log_decay, log_input),
        eps=epsilon,
        initial_state=state,
      )
      return {"out": out}

    file.add(
      f"jla_mlstm_{name}",
      call,
      witness="reference.mlstm",
      mechanism="mlstm",
      given=given,
      options={"epsilon": epsilon},
    )
  draw = Draw("jla mlstm segments")

  def packed(query, key, value, log_decay, log_input, segment_ids):
    out, _ = reference.mlstm(
      *(query, key, value, log_decay, log_input),
      eps=0.0,
      segment_ids=segment_ids,
    )
    return {"out": out}

  file.add(
    "jla_mlstm_segments",
    packed,
    witness="reference.mlstm",
    mechanism="mlstm",
    given=draw.qkv(T, N) | gates(draw),
    fixed={"segment_ids": SEGMENT_IDS},
  )


def mlstm_kernels(file: Vectors) -> None:
  """Adds the recurrent and the chunked form, with gates before log sigmoid."""
  draw = Draw("mlstm-kernels")
  given = draw.qkv(32, N) | {
    "inputs": draw.normal(1, 32, 6),
    "params/forget_kernel": draw.normal(6, N),
    "params/forget_bias": draw.normal(N),
    "params/input_kernel": draw.normal(6, N),
    "params/input_bias": draw.normal(N),
  }
  forms = {
    "recurrent": mlstm_recurrent_sequence__native_fw,
    "chunkwise": functools.partial(
      mlstm_chunkwise__native_autograd, chunk_size=8
    ),
  }
  for name, form in forms.items():

    def call(query, key, value, inputs, form=form, **params):
      p = {n.removeprefix("params/"): x for n, x in params.items()}
      forget, write = (
        jnp.moveaxis(inputs @ p[f"{x}_kernel"] + p[f"{x}_bias"], 1, 2)
        for x in ("forget", "input")
      )
      qkv = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
      out = form(*qkv, write, forget, eps=1e-3)
      return {"out": jnp.swapaxes(out, 1, 2)}

    file.add(
      f"mlstm_kernels_{name}",
      call,
      witness=name,
      mechanism="mlstm",
      function="mlstm",
      given=given,
      options={"epsilon": 1e-3},
    )


def main() -> None:
  """Writes the files."""
  for peer, version, *parts in (
    ("jla_states", "jax-linear-attention 0.1.0", mamba, mlstm),
    ("recurrentgemma", "recurrentgemma 1.0.1", rg_lru),
    ("mlstm_kernels", "mlstm-kernels 2.0.6", mlstm_kernels),
  ):
    Vectors(peer, version, jax_results).write(*parts)


if __name__ == "__main__":
  main()
