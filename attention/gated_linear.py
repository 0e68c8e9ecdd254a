"""Gated linear attention, and mechanisms that differ from it in their decays.

`attention.recurrent.recurrence` computes them; `attention.recurrent.gates` builds the
mechanisms and their gates.
"""

from collections.abc import Callable
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention.checks import check_choice
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.positions import alibi_slopes
from attention.recurrent import gates
from attention.recurrent.kernels import Implementation
from attention.recurrent.recurrence import recurrent_attention


@attention_function
def gated_linear_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "..."],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B *G N H V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
  implementation: Implementation | None = None,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B *G N H V"]]
):
  """Each query reads a decaying state, to which every position adds k vᵀ.

    out = gated_linear_attention(q, k, v, log_decay=log_decay)

    S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ        out_t = scale · S_tᵀ q_t

  with g = `log_decay`, for each head: a weighted sum of values without a normaliser.
  All computation is in float32.

  N is the largest of the head counts; the others divide it, as in GQA. For example, 24
  value heads may share 12 query and key heads, and 24 query heads may share 8 key and
  value heads. Consecutive heads share one.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    log_decay: natural logarithms of the decays, at most 0: `[B, T, N]` for one per
      head (RetNet, Mamba-2), or `[B, T, N, H]` for one per channel (GLA).
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    initial_state: S before the first position, from which the first segment continues;
      None means 0.
    segment_ids: `[B, T]`; where they change, the state restarts at 0, even at a masked
      position. Masked positions inside a segment need its id, unless `num_segments` is
      given.
    num_segments: G, for one initial and one final state per segment. Ids are then 0 …
      G−1, each of consecutive positions, and `initial_state` and the returned state are
      `[B, G, N, H, V]`. The state of an empty segment does not change. The
      output at masked positions is 0.
    return_state: whether to return the final state as well.
    implementation: 'xla' or None computes in chunks. 'jla' is a kernel of the package
      jax-linear-attention for an H100 or H200, bfloat16, and heads of `64` or `128`. It
      supports only first derivatives in reverse mode, needs `check_vma=False` inside
      `jax.shard_map`, and clips log decays at −30. Several devices divide the work only
      under `jax.set_mesh`; otherwise each computes all of it.
    scale: factor of the queries; None means 1/√H.

  Returns:
    `[B, T, N, V]` in the dtype of `query`, and with `return_state` the state
    `[B, N, H, V]`, or one for each of `num_segments`, in float32.

  Raises:
    ValueError: the mask varies along queries, `is_causal` is False, or
      `implementation` does not support the call.

  Cost, with C = `scan.CHUNK`: time T·N·(C·(H+V) + H·V), with decays for each
  channel also 2·T·N·H·log₂ C exponentials; memory B·T·N·(H+V), with gradients also
  one state for each chunk. With `num_segments` G, it is the cost of T + G·C positions,
  always with one state for each chunk; C is smaller if segments are short.

  Paper: Gated linear attention transformers, arXiv:2312.06635; RetNet,
  arXiv:2307.08621; Transformers are SSMs (Mamba-2), arXiv:2405.21060.
  """
  return recurrent_attention(**locals())


@attention_factory
def retention(implementation: Implementation | None = None) -> Attention:
  """Retention (RetNet): the state of head n decays by 1 − 2^(−5−n) per position.

    S_t = γ_n S_{t−1} + k_t v_tᵀ        out_t = S_tᵀ q_t / √H        γ_n = 1 − 2^(−5−n)

  It is `gated_linear_attention` with fixed (data-independent) decays. Heads beyond the
  twentieth have the decay of the twentieth, because float32 would round theirs to 1.

  Args:
    implementation: as in `gated_linear`.

  Returns:
    A causal `Attention` without variables, with the cache of `gated_linear`.

  The paper's model also has `position='rotary'`, `output_norm='group'` and
  `output_gate='silu'`. The paper divides each row of decays by the square root of its
  sum, and each result by max(|Σ weights|, 1); the group norm removes both factors, up to
  its ε, so they are omitted. Paper: Retentive network, arXiv:2307.08621, equations 5 to 8.
  """

  def log_decay(num_heads):
    heads = jnp.minimum(jnp.arange(num_heads), 19)
    return jnp.log1p(-(2.0 ** (-5.0 - heads)))

  return _fixed_decay("retention", log_decay, implementation)


@attention_factory
def lightning(
  depth: float = 0.0,
  implementation: Implementation | None = None,
  slopes: Literal["alibi", "geometric"] = "alibi",
) -> Attention:
  """Lightning attention (MiniMax-01): a fixed decay per head, slower in later layers.

    S_t = e^(−r_n) S_{t−1} + k_t v_tᵀ        out_t = S_tᵀ q_t / √H
    r_n = 2^(−8(n+1)/N) · (1 − depth + 10⁻⁵)

  It is `gated_linear_attention` with fixed (data-independent) decays. The rates r are
  ALiBi's slopes times a factor that depends on the depth.

  Args:
    depth: the relative depth of the layer, from 0 for the first to 1 for the last. Use
      a list of mechanisms, one per layer.
    implementation: as in `gated_linear`.
    slopes: 'geometric' for r_n as above, as in transformers, or 'alibi' for those of
      `alibi_slopes`, which differ if N is not a power of two.

  Returns:
    An `Attention` like that of `retention`.

  Raises:
    ValueError: `depth` is below 0 or above 1, or `slopes` is unknown.

  The paper's model also has `output_norm='rms_joint_first'` and
  `output_gate='sigmoid'`, and seven such layers for each layer of exact attention. The
  SiLU of queries, keys and values is left to `short_convolution` or
  `projection_activation` of the attention module. Unlike in the paper, queries are
  divided by √H unless a call sets the scale. Paper: MiniMax-01, arXiv:2501.08313,
  section 2.2.
  """
  if not 0.0 <= depth <= 1.0:
    raise ValueError(f"depth: expected 0 to 1, got {depth!r}")
  check_choice("slopes", slopes, ("alibi", "geometric"), may_be_none=False)

  def log_decay(num_heads):
    rates = alibi_slopes(num_heads)
    if slopes == "geometric":
      rates = 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)
    return -jnp.asarray(rates, jnp.float32) * (1.0 - depth + 1e-5)

  return _fixed_decay("lightning", log_decay, implementation)


def _fixed_decay(name, log_decay, implementation):
  """The mechanism with fixed decays, of which `log_decay` returns N."""

  def recurrence(params, query, *kv, **options):
    del params
    decay = log_decay(query.shape[2])[None, None]
    decay = jnp.broadcast_to(decay, query.shape[:3])
    return recurrent_attention(query, *kv, log_decay=decay, **options)

  return gates.recurrent_mechanism(
    name, recurrence, implementation=implementation
  )


@attention_factory
def gated_linear(
  rank: int = 16,
  temperature: float = 16.0,
  implementation: Implementation | None = None,
) -> Attention:
  """Gated linear attention (GLA): one decay per channel, computed from the inputs.

    g_t = log sigmoid(x_t · W₁ · W₂ + b) / τ

  Args:
    rank: R, the rank of the product of W₁ `[F, R]` and W₂ `[R, N, H]`.
    temperature: τ; larger values bring the decays closer to 1.
    implementation: as in `gated_linear_attention`; decoding is 'xla'.

  Returns:
    A causal `Attention` with `gates`, whose cache is one state of N·H² numbers per
    example. Its parameters are `gate_down [F, R]`, `gate_up [R, N, H]` and
    `gate_bias [N, H]`.

  Raises:
    ValueError: `rank` is not a positive int, or `temperature` is not above 0.

  The paper's model also has `output_norm='rms'` and `output_gate='silu'`. Paper:
  arXiv:2312.06635, equation 4 and section 4.4.
  """
  if not temperature > 0.0:
    raise ValueError(
      f"temperature: expected a number above 0, got {temperature!r}"
    )

  def init(key, dims):
    down, up = jax.random.split(key)
    heads = dims.num_heads, dims.head_dim
    return {
      "gate_down": gates.kernel(down, dims.features, rank),
      "gate_up": gates.kernel(up, rank, *heads),
      "gate_bias": jnp.zeros(heads),
    }

  def log_decay(params, inputs):
    x = gates.project(inputs, params["gate_down"], params["gate_up"])
    x += params["gate_bias"][None, None]
    return jax.nn.log_sigmoid(x) / temperature

  return gates.recurrent_mechanism(
    "gated_linear",
    implementation=implementation,
    init=init,
    gates={"log_decay": log_decay},
  )


@attention_factory
def hgrn2(
  lower_bound: float = 0.0, implementation: Implementation | None = None
) -> Attention:
  """HGRN2: gated linear attention with keys that are 1 minus the forget gates.

    f_t = γ + (1 − γ) sigmoid(k_t)
    S_t = diag(f_t) S_{t−1} + (1 − f_t) v_tᵀ        out_t = S_tᵀ silu(q_t)

  where the keys k_t are the logits of the forget gates. The scale defaults to 1.

  Args:
    lower_bound: γ, at least 0 and below 1. It grows with depth: use a list of
      mechanisms, one per layer, with l/L for layer l of L, the paper's initial bounds.
    implementation: as in `gated_linear`.

  Returns:
    A causal `Attention` without variables, with the cache of `gated_linear`.

  Raises:
    ValueError: `lower_bound` is below 0, or not below 1.

  The paper's model also has `output_norm='rms_joint'`. The paper trains γ
  for each channel, as a cumulative softmax over the layers. Paper:
  HGRN2: gated linear RNNs with state expansion, arXiv:2404.07904, section 3.
  """
  if not 0.0 <= lower_bound < 1.0:
    raise ValueError(
      f"lower_bound: expected at least 0 and below 1, got {lower_bound!r}"
    )

  def recurrence(params, query, key, value, *, scale, **options):
    del params
    dtypes = query.dtype, key.dtype
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    log_decay = jax.nn.log_sigmoid(key)
    if lower_bound > 0.0:
      log_decay += np.log1p(-lower_bound)
      log_decay = jnp.logaddexp(np.log(lower_bound), log_decay)
    key = (1.0 - lower_bound) * jax.nn.sigmoid(-key)
    return recurrent_attention(
      jax.nn.silu(query).astype(dtypes[0]),
      key.astype(dtypes[1]),
      value,
      log_decay=log_decay,
      scale=1.0 if scale is None else scale,
      **options,
    )

  return gates.recurrent_mechanism(
    "hgrn2", recurrence, implementation=implementation
  )


@attention_factory
def mamba2(
  implementation: Implementation | None = None,
  projection_bias: bool = False,
  step_factor: float = 1.0,
  min_step: float = 0.0,
  max_step: float | None = None,
) -> Attention:
  """Mamba-2's mixer: a step Δ, computed from the inputs, scales decay and input.

    Δ_t = softplus(f (x_t · W_Δ + c) + b_Δ), at least Δ_min and at most Δ_max
    S_t = e^(−Δ_t e^A) S_{t−1} + Δ_t k_t v_tᵀ        out_t = S_tᵀ q_t + D v_t

  with A, b_Δ and D for each head. The paper's B, C, x and A are k, q, v and e^A. The
  scale defaults to 1.

  Args:
    implementation: as in `gated_linear`.
    projection_bias: whether c is trained, as the parameter `projection_bias [N]`.
    step_factor: f, as in Falcon-H1.
    min_step: Δ_min.
    max_step: Δ_max; None means no limit.

  Returns:
    A causal `Attention` with `gates`, with the cache of `gated_linear`. Its
    parameters are `step_kernel [F, N]`, `step_bias`, `log_rate` (A) and `skip` (D),
    each `[N]`.

  Raises:
    ValueError: `min_step` is below 0, or above `max_step`.

  The paper's model also has `short_convolution` with biases, `output_gate='silu'`,
  `output_norm='rms_joint'` and `num_qk_heads`, with which heads share queries and keys.
  Paper: Transformers are SSMs, arXiv:2405.21060, sections 6 and 7.
  """
  if not 0.0 <= min_step <= (math.inf if max_step is None else max_step):
    raise ValueError(
      f"min_step: expected from 0 to max_step {max_step}, got {min_step!r}"
    )

  def init(key, dims):
    steps = gates.step_params(jax.random.split(key, 3), dims)
    if projection_bias:
      steps["projection_bias"] = jnp.zeros(dims.num_heads)
    return {**steps, "skip": jnp.ones(dims.num_heads)}

  def step(params, inputs):
    logits = gates.project(inputs, params["step_kernel"])
    if projection_bias:
      logits += params["projection_bias"][None, None]
    logits = step_factor * logits + params["step_bias"][None, None]
    steps = jax.nn.softplus(logits)
    if not min_step and max_step is None:
      return steps
    return jnp.clip(steps, min_step, max_step)

  def decay(params, inputs):
    return -step(params, inputs) * jnp.exp(params["log_rate"])[None, None]

  return gates.recurrent_mechanism(
    "mamba2",
    with_step_and_skip(recurrent_attention),
    implementation=implementation,
    init=init,
    gates={"log_decay": decay, "beta": step},
  )


def with_step_and_skip(recurrence: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a recurrence: multiplies its values by Δ (`beta`), and adds D v_t."""

  def run(params, query, key, value, *, beta, scale, **options):
    steps = (value * beta[..., None]).astype(value.dtype)
    scale = 1.0 if scale is None else scale
    out, state = recurrence(query, key, steps, scale=scale, **options)
    skip = params["skip"][None, None, :, None]
    return out + skip * value.astype(jnp.float32), state

  return run
