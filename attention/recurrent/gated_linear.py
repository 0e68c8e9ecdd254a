"""Gated linear attention: a state that decays, and GLA's own decays.

The recurrence, and how it is computed chunk by chunk, is in `recurrence`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.recurrent import gates, parts, record, recurrence


@arguments.attention_function()
def gated_linear_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  log_decay: Float[Array, "..."],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B N H V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = False,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]
):
  """Each query reads a state to which every position adds, and which decays.

    S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ        out_t = scale · S_tᵀ q_t

  with g = `log_decay`, for each head. The result is a weighted sum of values that
  nothing divides. Everything is float32 for inputs of any dtype.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`; N is a multiple of K, query head n reads key head
      n // (N/K).
    value: `[B, T, K, V]`.
    log_decay: natural logarithms of the decays, at most 0: `[B, T, N]`, one for a
      head (RetNet, Mamba-2), or `[B, T, N, H]`, one for each channel (GLA).
    mask: key mask `[B, 1, 1, T]`, True = attend. A hidden position adds nothing,
      and nothing decays there.
    is_causal: must be True, because a state knows the past only.
    scale: None is 1/√H.
    initial_state: S before the first position; None is 0. The first segment goes
      on from it.
    segment_ids: `[B, T]`; where they change, the state begins anew, at 0.
    return_state: whether to return S_T as well.

  Returns:
    `[B, T, N, V]` in the dtype of `query`, and with `return_state` the state
    `[B, N, H, V]` in float32.

  Raises:
    ValueError: arguments do not fit together, the mask varies along queries, or
      `is_causal` is False.

  Cost, with C = `recurrence.CHUNK`: time T·N·(C·(H+V) + H·V), with decays for each
  channel also 12·T·N·H exponentials; memory B·T·N·(H+V), with gradients also one
  state for each chunk.

  Paper: Gated linear attention transformers, arXiv:2312.06635; RetNet,
  arXiv:2307.08621; Transformers are SSMs (Mamba-2), arXiv:2405.21060.
  """
  arguments.check_flag("return_state", return_state)
  inputs, state = recurrence.prepared(
    "gated_linear",
    query,
    key,
    value,
    log_decay,
    None,
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    initial_state=initial_state,
    segment_ids=segment_ids,
  )
  out, state = parts.attend(inputs, state)
  out = out.astype(query.dtype)
  return (out, state) if return_state else out


def gated_linear(rank: int = 16, temperature: float = 16.0) -> plug.Attention:
  """Gated linear attention (GLA): a decay for each channel, read from the inputs.

    g_t = log sigmoid(x_t · W₁ · W₂ + b) / τ

  Args:
    rank: R, of the product of W₁ `[F, R]` and W₂ `[R, N, H]`.
    temperature: τ; the larger it is, the nearer are the decays to 1.

  Returns:
    An `Attention` with `gates`, causal only, that decodes with one state of N·H²
    numbers for each example. Its parameters are `gate_down [F, R]`,
    `gate_up [R, N, H]` and `gate_bias [N, H]`.

  Raises:
    ValueError: `rank` is not a positive int, or `temperature` is not above 0.

  Its model also has `output_norm='rms'` and `output_gate='silu'`.

  Paper: Gated linear attention transformers with hardware-efficient training,
  arXiv:2312.06635, equation 4 and section 4.4.
  """
  arguments.check_at_least("rank", rank, 1)
  if not temperature > 0.0:
    raise ValueError(f"temperature: expected more than 0, got {temperature!r}")

  def init(key, dims):
    features = gates.width("gated_linear", dims)
    down, up = jax.random.split(key)
    heads = dims.num_heads, dims.head_dim
    return {
      "params": {
        "gate_down": gates.kernel(down, features, rank),
        "gate_up": gates.kernel(up, rank, *heads),
        "gate_bias": jnp.zeros(heads),
      }
    }

  def read(params, inputs):
    low = gates.project(inputs, params["gate_down"])
    x = gates.project(low, params["gate_up"]) + params["gate_bias"][None, None]
    return {"log_decay": jax.nn.log_sigmoid(x) / temperature}

  def operands(params, query, key, value, given):
    del params
    return record.Operands(query, key, value, given["log_decay"])

  return record.record(
    "gated_linear", operands, init=init, gates=read, reads=("log_decay",)
  )
