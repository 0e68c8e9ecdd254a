"""DeltaProduct: several delta-rule updates of a state at each position."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates
from attention.recurrent.kernels import Implementation
from attention.recurrent.recurrence import recurrent_attention


@attention_function
def delta_product_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T R K H"],
  value: Float[Array, "B T R U V"],
  *,
  beta: Float[Array, "B T R N"],
  log_decay: Float[Array, "..."] | None = None,
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
  """Each position decays the state once, then applies the delta rule to R keys.

    out = delta_product_attention(
      q, k, v, beta=beta, log_decay=log_decay, normalize_keys=True
    )

    S_t,0 = diag(e^g_t) S_{t−1}
    S_t,r = S_t,r−1 + β_t,r k_t,r (v_t,r − S_t,r−1ᵀ k_t,r)ᵀ        r = 1 … R
    out_t = scale · S_t,Rᵀ q_t

  with g = `log_decay`, for each head. The R factors I − β k kᵀ of a position are a
  product of generalised Householder reflections. With β up to 2, R of them let a state
  track permutations of R + 1 elements. With R = 1 it is `delta_rule_attention`. As
  there, the state grows exponentially if β|k|² > 2.

  Args:
    query: `[B, T, N, H]`.
    key: R keys for each position.
    value: the value of each key.
    beta: β, the writing strength of each key.
    log_decay: `[B, T, N]`, `[B, T, N, H]` or None, as in `delta_rule_attention`.
    normalize_keys: as in `delta_rule_attention`; the paper's models normalize keys
      and queries to length 1.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    initial_state: the state before the first position; None means 0.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, for one initial and one final state per segment.
    return_state: whether to return the last state as well.
    implementation: 'xla' or None; 'jla' is a GPU kernel of another package.

  Results and errors: as in `gated_linear_attention`.

  Cost: that of `delta_rule_attention` of T·R positions.

  Paper: DeltaProduct: improving state-tracking in linear RNNs via Householder products,
  arXiv:2502.10297.
  """
  return _recurrence(**locals())


def _recurrence(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T R K H"],
  value: Float[Array, "B T R U V"],
  *,
  log_decay: Float[Array, "..."] | None = None,
  beta: Float[Array, "B T R N"] | None = None,
  mask: Bool[Array, "..."] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = True,
  **options: Any,
) -> Any:
  """`recurrent_attention` with one decay and R updates per position.

  It runs over T·R positions. Of each R, the first has the decay and the last the query.
  """
  num_updates = key.shape[2]

  def flatten(x):
    return x.reshape(x.shape[0], -1, *x.shape[3:])

  def flatten_padded(x, index):
    """Puts `x` at position `index` of each R, and 0 at the others."""
    others = [(0, 0)] * (x.ndim - 2)
    updates = (index, num_updates - 1 - index)
    return flatten(jnp.pad(x[:, :, None], [(0, 0), (0, 0), updates, *others]))

  if mask is not None:
    keep: Any = checks.key_mask(mask, query, query)
    mask = jnp.repeat(keep, num_updates, axis=1)[:, None, None, :]
  if segment_ids is not None:
    segment_ids = jnp.repeat(segment_ids, num_updates, axis=1)
  out, state = recurrent_attention(
    flatten_padded(query, num_updates - 1),
    flatten(key),
    flatten(value),
    log_decay=None if log_decay is None else flatten_padded(log_decay, 0),
    beta=None if beta is None else flatten(beta),
    mask=mask,
    segment_ids=segment_ids,
    **options,
  )
  out = out[:, num_updates - 1 :: num_updates]
  return (out, state) if return_state else out


@attention_factory
def delta_product(
  num_householder: int = 2,
  max_rate: float = 2.0,
  implementation: Implementation | None = None,
) -> Attention:
  """Gated DeltaProduct: `gated_delta` with R updates per position.

    k_t,r = SiLU(x_t · W_r)        v_t,r = SiLU(x_t · U_r)        r < R
    β_t,r = max_rate · sigmoid(x_t · W_β,r)

  Keys and queries are normalized to length 1. The last of the R keys and values are
  those of the call.

  Args:
    num_householder: R.
    max_rate: as in `delta`. The paper's models track states with 2.
    implementation: as in `gated_linear`.

  Returns:
    An `Attention` like that of `gated_delta`; its parameters are
    `rate_kernel [F, R, N]`, `step_kernel [F, N]`, `step_bias [N]`, `log_rate [N]`, and
    with R > 1 `other_key_kernel [F, R−1, N, H]` and
    `other_value_kernel [F, R−1, N, V]`.

  Raises:
    ValueError: `num_householder` is not a positive int, or as in `delta`.

  The paper's model also has `short_convolution`, `output_norm='rms'` and
  `output_gate='silu'`. Unlike in the paper, only the keys and values of the last update
  are convolved: a mechanism has no state for the other convolutions. If the values of a
  call are not of width V, the earlier updates write zeros. Paper: arXiv:2502.10297,
  section 3.
  """
  others = num_householder - 1

  def init(key, dims):
    rate, keys, values, *steps = jax.random.split(key, 6)
    features, heads = dims.features, dims.num_heads
    params = {
      "rate_kernel": gates.kernel(rate, features, num_householder, heads),
      **gates.step_params(steps, dims),
    }
    if others:
      shape = features, others, heads
      params["other_key_kernel"] = gates.kernel(keys, *shape, dims.head_dim)
      params["other_value_kernel"] = gates.kernel(values, *shape, dims.values)
    return params

  def projection(name):
    return lambda params, inputs: jax.nn.silu(
      gates.project(inputs, params[name])
    )

  def recurrence(params, query, key, value, **options):
    del params
    keys = options.pop("other_keys", None)
    values = options.pop("other_values", None)
    dtypes = key.dtype, value.dtype
    key, value = (x.astype(jnp.float32)[:, :, None] for x in (key, value))
    if others:
      if values.shape[-1] != value.shape[-1]:
        values = jnp.zeros((*keys.shape[:-1], value.shape[-1]), jnp.float32)
      key = jnp.concatenate([keys, key], axis=2)
      value = jnp.concatenate([values, value], axis=2)
    key, value = key.astype(dtypes[0]), value.astype(dtypes[1])
    return _recurrence(query, key, value, normalize_keys=True, **options)

  gate_fns = {"beta": gates.rate(max_rate), "log_decay": gates.step_decay}
  arrays: dict[str, Any] = {"beta": Float[Array, "B T R N"]}
  if others:
    gate_fns["other_keys"] = projection("other_key_kernel")
    gate_fns["other_values"] = projection("other_value_kernel")
    arrays["other_keys"] = Float[Array, "B T X N H"]
    arrays["other_values"] = Float[Array, "B T X N W"]
  return gates.recurrent_mechanism(
    "delta_product",
    recurrence,
    implementation=implementation,
    init=init,
    gates=gate_fns,
    arrays=arrays,
  )
