"""The delta rule: each position replaces the value that a state stores for its key.

`attention.recurrent.recurrence` computes it; `attention.recurrent.gates` builds the
mechanisms and their gates.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates
from attention.recurrent.arrays import unit_length
from attention.recurrent.kernels import Implementation
from attention.recurrent.recurrence import recurrent_attention


@attention_function
def delta_rule_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  beta: Float[Array, "B T N"] | None = None,
  log_decay: Float[Array, "..."] | None = None,
  erase_key: Float[Array, "B T K H"] | None = None,
  erase_gate: Float[Array, "B T N H"] | None = None,
  write_gate: Float[Array, "B T N V"] | None = None,
  normalize_keys: bool = False,
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
  """Each position updates the value that a state stores for its key.

    out = delta_rule_attention(
      q, k, v, beta=beta, log_decay=log_decay, normalize_keys=True
    )

    S' = diag(e^g_t) S_{t−1}
    S_t = S' + β_t k_t (w_t ∘ v_t − S'ᵀ (b_t ∘ k_t))ᵀ        out_t = scale · S_tᵀ q_t

  with g = `log_decay`, for each head. The gates b and w default to 1; each update is
  then a step of gradient descent on ½|Sᵀk − v|². With keys of length 1 and β = 1,
  S_tᵀ k_t = v_t. If β|k|² > 2, the state grows exponentially. The keys of a softmax
  model have |k|² ≈ H, so use `normalize_keys=True`, or keys with |k| ≤ 1.
  All computation is in float32.

  With a separate erase key p, the update erases from the state before its decay:

    S_t = S' + β_t k_t (w_t ∘ v_t − S_{t−1}ᵀ (b_t ∘ p_t))ᵀ

  With p = e^g ∘ k, this is the rule above. With keys of length 1 and p = c k for a
  number c, the state may grow if βc > 1 + e^g.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    beta: β, the writing strength; None means 1, and requires an erase gate.
    log_decay: natural logarithms of the decays, at most 0: None for no decay
      (DeltaNet), `[B, T, N]` for one per head (Gated DeltaNet), or `[B, T, N, H]` for
      one per channel (Kimi Delta Attention).
    erase_key: p; the value that S_{t−1} stores for it is erased (Comba). None means
      that the value that S' stores for `key` is erased.
    erase_gate: b, the share of k or p that is erased, per channel (Gated DeltaNet-2).
    write_gate: w, the share of the value that is written.
    normalize_keys: whether to divide each query and key by its length √(|x|² + 10⁻⁶),
      as in the papers' models. `erase_key` is never normalized.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    initial_state: the state before the first position; None means 0.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, for one initial and one final state per segment.
    return_state: whether to return the last state as well.
    implementation: 'xla' or None; 'jla' is a GPU kernel of another package.

  Heads, results and errors: as in `gated_linear_attention`.

  Raises:
    ValueError: there is neither a `beta` nor an `erase_gate`.

  Cost, with C = `scan.CHUNK`: that of `gated_linear_attention`, and
  T·N·C·(C+2H+V) for the products of keys and the triangle.

  Paper: Parallelizing linear transformers with the delta rule over sequence length,
  arXiv:2406.06484; Gated delta networks, arXiv:2412.06464; Kimi Linear,
  arXiv:2510.26692; Comba, arXiv:2506.02475; Gated DeltaNet-2, arXiv:2605.22791.
  """
  if beta is None and erase_gate is None:
    raise ValueError(
      "beta: expected beta [B, T, N] or an erase_gate [B, T, N, H], got neither"
    )
  return recurrent_attention(**locals())


@attention_factory
def delta(
  max_rate: float = 1.0, implementation: Implementation | None = None
) -> Attention:
  """DeltaNet: the delta rule with keys of length 1 and β computed from the inputs.

    k_t, q_t ← k_t / |k_t|, q_t / |q_t|        β_t = max_rate · sigmoid(x_t · W_β)

  There is no decay.

  Args:
    max_rate: the largest β. Above 1, up to 2, a write may change the sign of the value
      stored for a key, which lets a state track permutations (arXiv:2411.12537).
    implementation: as in `gated_linear`.

  Returns:
    A causal `Attention` with `gates`, whose cache is one state of N·H² numbers per
    example. Its parameter is `rate_kernel [F, N]`.

  Raises:
    ValueError: `max_rate` is not above 0 and at most 2.

  The paper's model also has `short_convolution`, whose SiLU is the paper's, and
  `output_norm='rms'`. Paper: arXiv:2406.06484, section 3.3.
  """

  def init(key, dims):
    return {"rate_kernel": gates.kernel(key, dims.features, dims.num_heads)}

  return _delta_rule("delta", max_rate, init, implementation)


@attention_factory
def gated_delta(
  max_rate: float = 1.0, implementation: Implementation | None = None
) -> Attention:
  """Gated DeltaNet: `delta` with one decay per head, as in Mamba-2.

    g_t = −e^A softplus(x_t · W_a + b)

  Arguments and errors: as in `delta` (arXiv:2411.12537).

  Returns:
    An `Attention` like that of `delta`; its parameters are `rate_kernel [F, N]`,
    `step_kernel [F, N]`, `step_bias [N]` and `log_rate [N]` (A).

  The paper's model also has `short_convolution`, `output_norm='rms'` and
  `output_gate='silu'`; Qwen3-Next has three such layers for each layer of exact
  attention. Paper: Gated delta networks, arXiv:2412.06464, equation 10 and section 3.4.
  """

  def init(key, dims):
    rate, *steps = jax.random.split(key, 4)
    kernel = gates.kernel(rate, dims.features, dims.num_heads)
    return {"rate_kernel": kernel, **gates.step_params(steps, dims)}

  return _delta_rule(
    "gated_delta", max_rate, init, implementation, gates.step_decay
  )


@attention_factory
def kimi_delta(
  rank: int | None = None,
  max_rate: float = 1.0,
  implementation: Implementation | None = None,
  lower_bound: float | None = None,
) -> Attention:
  """Kimi Delta Attention (KDA): `delta` with one decay per channel.

    g_t = −e^A softplus(x_t · W₁ · W₂ + b)

  with A for each head and b for each channel. With a lower bound L < 0,

    g_t = L · sigmoid(e^A (x_t · W₁ · W₂ + b))

  Args:
    rank: R, the rank of W₁ `[F, R]` and W₂ `[R, N, H]`; None means H, as in the paper.
    max_rate: as in `delta`.
    implementation: as in `gated_linear`.
    lower_bound: L, the smallest log decay (GLM-5.3); None means no bound.

  Returns:
    An `Attention` like that of `delta`; its parameters are `rate_kernel [F, N]`,
    `step_down [F, R]`, `step_up [R, N, H]`, `step_bias [N, H]` and `log_rate [N]` (A).

  Raises:
    ValueError: as in `delta`, or `rank` is neither None nor a positive int, or
      `lower_bound` is not below 0.

  The paper's model also has `short_convolution`, `output_norm='rms'`,
  `output_gate='sigmoid'` with an `output_gate_rank` of H (equation 10), and three such
  layers for each layer of exact attention. Paper: Kimi Linear, arXiv:2510.26692,
  sections 3 and 4.
  """

  def init(key, dims):
    rate, *steps = jax.random.split(key, 5)
    kernel = gates.kernel(rate, dims.features, dims.num_heads)
    steps = gates.step_params(steps, dims, rank or dims.head_dim)
    return {"rate_kernel": kernel, **steps}

  decay = gates.step_decay
  if lower_bound is not None:
    decay = gates.bounded_decay(lower_bound)
  return _delta_rule("kimi_delta", max_rate, init, implementation, decay)


@attention_factory
def comba(max_rate: float = 1.0, correction: float = 0.02) -> Attention:
  """Comba: `gated_delta` with a separate erase key and a correction of the output.

    S_t = e^g_t S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ p_t)ᵀ        p_t = sigmoid(a) k_t
    out_t = scale · S_tᵀ (q_t − d k_t)

  with a and d for each head. The paper's α is e^g, and its β̃ sigmoid(a) β.

  Args:
    max_rate: the largest β; the paper's is 1. Above 1, up to 2, the state may grow if
      sigmoid(a) β > 1 + e^g.
    correction: the initial d of the output feedback. The paper's is 0.02 for small
      models and 1 for large ones.

  Returns:
    An `Attention` like that of `gated_delta`, with the additional parameters
    `feedback [N]` (a) and `correction [N]` (d).

  Raises:
    ValueError: as in `delta`.

  The paper's model also has `short_convolution`, `output_norm='rms'` and
  `output_gate='sigmoid'`. Queries and keys have length 1 before the correction. Paper:
  Improving bilinear RNNs with closed-loop control, arXiv:2506.02475, table 1, equations
  9 and 10.
  """

  def init(key, dims):
    rate, *steps = jax.random.split(key, 4)
    kernel = gates.kernel(rate, dims.features, dims.num_heads)
    return {
      "rate_kernel": kernel,
      "feedback": jnp.ones(dims.num_heads),
      "correction": jnp.full(dims.num_heads, correction),
      **gates.step_params(steps, dims),
    }

  def recurrence(params, query, key, value, **options):
    dtypes = query.dtype, key.dtype
    query, key = unit_length(query), unit_length(key)
    head_axis = (None, None, slice(None), None)
    query -= params["correction"][head_axis] * key
    erase_key = jax.nn.sigmoid(params["feedback"])[head_axis] * key
    query, key = query.astype(dtypes[0]), key.astype(dtypes[1])
    return recurrent_attention(
      query, key, value, erase_key=erase_key, **options
    )

  gate_fns = {"beta": gates.rate(max_rate), "log_decay": gates.step_decay}
  return gates.recurrent_mechanism(
    "comba", recurrence, init=init, gates=gate_fns
  )


@attention_factory
def gated_delta_2(
  rank: int | None = None,
  max_rate: float = 1.0,
  implementation: Implementation | None = None,
) -> Attention:
  """Gated DeltaNet-2: `kimi_delta` with separate erase and write gates.

    S_t = S' + k_t (w_t ∘ v_t − S'ᵀ (b_t ∘ k_t))ᵀ
    b_t = max_rate · sigmoid(x_t · W_b)        w_t = sigmoid(x_t · W_w)

  with b for each channel of the key and w for each of the value.

  Args:
    rank: as in `kimi_delta`.
    max_rate: the largest b (arXiv:2411.12537).
    implementation: as in `gated_linear`.

  Returns:
    An `Attention` like that of `kimi_delta`, with the parameters
    `erase_kernel [F, N, H]` and `write_kernel [F, N, V]` in place of `rate_kernel`.

  Raises:
    ValueError: as in `kimi_delta`.

  The paper's model also has `short_convolution`, `output_norm='rms'`, and
  `output_gate='sigmoid'` with an `output_gate_rank` of V, as in flash-linear-attention
  0.6.0. Paper: Gated DeltaNet-2: decoupling erase and write in linear attention,
  arXiv:2605.22791.
  """
  gates.check_rate(max_rate)

  def init(key, dims):
    erase, write, *steps = jax.random.split(key, 6)
    heads, features = dims.num_heads, dims.features
    return {
      "erase_kernel": gates.kernel(erase, features, heads, dims.head_dim),
      "write_kernel": gates.kernel(write, features, heads, dims.values),
      **gates.step_params(steps, dims, rank or dims.head_dim),
    }

  def gate(name, largest):
    return lambda params, inputs: (
      largest * jax.nn.sigmoid(gates.project(inputs, params[name]))
    )

  def recurrence(params, query, key, value, *, write_gate, **options):
    del params
    write_gate = gates.gate_per_channel(write_gate, value)
    options |= {"write_gate": write_gate, "normalize_keys": True}
    return recurrent_attention(query, key, value, **options)

  return gates.recurrent_mechanism(
    "gated_delta_2",
    recurrence,
    implementation=implementation,
    init=init,
    gates={
      "log_decay": gates.step_decay,
      "erase_gate": gate("erase_kernel", max_rate),
      "write_gate": gate("write_kernel", 1.0),
    },
    arrays={
      "erase_gate": Float[Array, "B T N H"],
      "write_gate": Float[Array, "B T N W"],
    },
  )


def _delta_rule(name, max_rate, init, implementation, log_decay=None):
  """The mechanism of a delta rule with queries and keys of length 1."""

  def recurrence(params, *qkv, **options):
    del params
    return recurrent_attention(*qkv, normalize_keys=True, **options)

  gate_fns = {"beta": gates.rate(max_rate)}
  if log_decay is not None:
    gate_fns["log_decay"] = log_decay
  return gates.recurrent_mechanism(
    name,
    recurrence,
    implementation=implementation,
    init=init,
    gates=gate_fns,
  )
