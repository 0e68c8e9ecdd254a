"""Writes jla_recurrences.npz: recurrences of jax-linear-attention.

python3.12 -m venv VENV
VENV/bin/pip install jax==0.11.2 jax-linear-attention==0.1.0
VENV/bin/python tests/verification/peers/make_jla_recurrences.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jla.layers.rwkv6 import HGRN2
from jla.models.config import LinearAttentionConfig
from jla.ops import rwkv6 as rwkv6_rules
import numpy as np
from vectors import Draw, Vectors, jax_results

T, N, H, V, F, R = 29, 2, 4, 3, 6, 3
SEGMENT_IDS = np.searchsorted((5, 17), np.arange(T), side="right")[None]
SEGMENT_IDS = SEGMENT_IDS.astype(np.int32)
IDS = dict.fromkeys(("query_segment_ids", "key_segment_ids"), SEGMENT_IDS)


def hgrn2(file: Vectors) -> None:
  """Adds the layer, which projects to queries, forget logits and values."""
  config = LinearAttentionConfig(
    *(N, N, H, V), conv_size=0, output_gate=False, implementation="reference"
  )
  layer = HGRN2(6, config, key=jax.random.key(0), std=0.02, norm_eps=1e-6)

  def same(x):
    return x

  def replaced(x):
    return x.q_proj, x.f_proj, x.i_proj, x.g_norm, x.o_proj

  for name, fixed in (("whole", {}), ("segments", IDS)):

    def call(query, key, value, key_segment_ids=None, query_segment_ids=None):
      del query_segment_ids
      flat = [x.reshape(1, T, -1) for x in (query, key, value)]
      projections = [lambda _, x=x: x for x in flat]
      stripped = eqx.tree_at(replaced, layer, [*projections, same, same])
      out = stripped(jnp.zeros((1, T, 6)), key_segment_ids)
      return {"out": out.reshape(1, T, N, V)}

    file.add(
      f"jla_hgrn2_{name}",
      call,
      witness="layers.rwkv6.HGRN2",
      mechanism="hgrn2",
      function="hgrn2",
      given=Draw(f"jla hgrn2 {name}").qkv(),
      fixed=fixed,
      call={"scale": H**-0.5},
    )


def rwkv6(file: Vectors) -> None:
  """Adds the recurrent and the chunked form of the rule."""
  forms = {"reference": rwkv6_rules.reference, "chunked": rwkv6_rules.chunked}
  for name, rule in forms.items():
    draw = Draw(f"jla rwkv6 {name}")
    given = draw.qkv() | {
      "log_decay": draw.decays(1, T, N, H),
      "bonus": draw.normal(N, H),
      "initial_state": draw.normal(1, N, H, V),
    }

    def call(
      query, key, value, log_decay, bonus, initial_state, segment_ids, rule=rule
    ):
      out, state = rule(
        *(query, key, value, log_decay, bonus),
        initial_state=initial_state,
        segment_ids=segment_ids,
        output_final_state=True,
      )
      return {"out": out, "state": state}

    file.add(
      f"jla_rwkv6_{name}",
      call,
      witness=f"rwkv6.{name}",
      mechanism="rwkv6",
      given=given,
      fixed={"segment_ids": SEGMENT_IDS},
      options={"return_state": True},
    )
  draw = Draw("jla rwkv6 gates")
  params = {
    "decay_down": draw.normal(F, R),
    "decay_up": draw.normal(R, N, H),
    "decay_bias": draw.normal(N, H),
    "bonus": draw.normal(N, H),
  }
  given = draw.qkv() | {"inputs": draw.normal(1, T, F)}
  given |= {f"params/{name}": x for name, x in params.items()}

  def call(query, key, value, inputs, **given):
    p = {name.removeprefix("params/"): x for name, x in given.items()}
    low = jnp.tanh(inputs @ p["decay_down"])
    decay = jnp.tensordot(low, p["decay_up"], 1) + p["decay_bias"]
    rule = rwkv6_rules.reference
    out = rule(query, key, value, -jnp.exp(decay), p["bonus"], scale=1.0)[0]
    return {"out": out}

  file.add(
    "jla_rwkv6_gates",
    call,
    witness="rwkv6.reference, with the decays of its layer",
    mechanism="rwkv6",
    function="rwkv6",
    given=given,
  )


if __name__ == "__main__":
  file = Vectors("jla_recurrences", "jax-linear-attention 0.1.0", jax_results)
  file.write(hgrn2, rwkv6)
