"""Retention: a state whose decay is fixed for each head (RetNet)."""

import jax.numpy as jnp

from attention import plug
from attention.recurrent import record


def retention() -> plug.Attention:
  """Retention (RetNet): head n forgets the share 2^(−5−n) of its state a position.

    S_t = γ_n S_{t−1} + k_t v_tᵀ        out_t = S_tᵀ q_t / √H        γ_n = 1 − 2^(−5−n)

  It is `gated_linear_attention` with decays that nothing is read for. Heads beyond
  the twentieth have the decay of the twentieth, which float32 can tell from 1.

  Returns:
    An `Attention` without variables, causal only, that decodes with one state of
    N·H² numbers for each example.

  The paper's model also has `position='rotary'`, `output_norm='group'` and
  `output_gate='silu'`.

  Paper: Retentive network, arXiv:2307.08621, equations 5 to 8.
  """

  def operands(params, query, key, value, given):
    del params, given
    heads = jnp.minimum(jnp.arange(query.shape[2]), 19)
    decay = jnp.log1p(-(2.0 ** (-5.0 - heads)))
    decay = jnp.broadcast_to(decay[None, None], query.shape[:3])
    return record.Operands(query, key, value, decay)

  return record.record("retention", operands)
