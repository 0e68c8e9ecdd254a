"""Writes ejkernel.npz: results of the XLA functions of ejkernel.

python3.12 -m venv VENV
VENV/bin/pip install ejkernel==0.0.80.3
JAX_PLATFORMS=cpu VENV/bin/python tests/verification/peers/make_ejkernel.py
"""

from typing import Any

from ejkernel.kernels import _xla as xla
import jax.numpy as jnp
import numpy as np
from vectors import Draw, Vectors, jax_results, unit

T, N, H, V = 29, 2, 4, 3


def results(pair) -> dict[str, Any]:
  """Names the results of a function that returns (out, state)."""
  return {"out": pair[0], "state": pair[1]}


def recurrences(file: Vectors) -> None:
  """Adds the gated delta rule and RWKV-7."""
  state = {"options": {"return_state": True}}
  # In its `recurrent_gla`, the gradient and the decays differ in shape.
  for chunked in (False, True):
    draw = Draw(f"ejkernel delta {chunked}")
    given = draw.qkv()
    given["query"], given["key"] = unit(given["query"]), unit(given["key"])

    def delta(query, key, value, beta, log_decay, initial_state, run=chunked):
      return results(
        xla.gated_delta_rule(
          *(query, key, value, beta, log_decay),
          initial_state=initial_state,
          use_qk_l2norm=False,
          use_chunked=run,
          chunk_size=8,
        )
      )

    file.add(
      f"ejkernel_delta{'_chunks' * chunked}",
      delta,
      witness=f"gated_delta_rule{', in chunks' * chunked}",
      mechanism="gated_delta",
      function="delta_rule_attention",
      given=given
      | {
        "beta": draw.uniform(0, 1, 1, T, N),
        "log_decay": draw.decays(1, T, N),
        "initial_state": draw.normal(1, N, H, V),
      },
      **state,
    )
  draw = Draw("ejkernel rwkv7")

  def rwkv7(query, key, value, log_decay, removal, replacement, initial_state):
    given = query, log_decay, key, value, replacement, removal
    return results(xla.rwkv7(*given, initial_state=initial_state))

  removed = unit(draw.normal(1, T, N, H))
  file.add(
    "ejkernel_rwkv7",
    rwkv7,
    witness="rwkv7",
    mechanism="rwkv7",
    given=draw.qkv()
    | {
      "log_decay": draw.decays(1, T, N, H),
      "removal": -removed,
      "replacement": removed * draw.uniform(0, 1, 1, T, N, H),
      "initial_state": draw.normal(1, N, H, V),
    },
    **state,
  )


def softmax(file: Vectors) -> None:
  """Adds soft caps, sinks and latent attention."""
  draw = Draw("ejkernel softmax")
  given = draw.qkv(heads=4, kv_heads=2, value=H) | {"sinks": draw.normal(4)}

  def attend(query, key, value, sinks, mask):
    outputs = xla.attention(
      *(query, key, value, jnp.asarray(mask)),
      softmax_aux=sinks,
      logits_soft_cap=2.0,
      dtype=jnp.float32,
      softmax_dtype=jnp.float32,
    )
    return {"out": outputs[0]}

  mask = np.random.RandomState(0).rand(1, 4, T, T) < 0.5
  file.add(
    "ejkernel_cap",
    attend,
    witness="attention, with sinks and a soft cap",
    mechanism="dense",
    given=given,
    fixed={"mask": mask},
    options={"logits_soft_cap": 2.0},
  )
  draw = Draw("ejkernel latent")

  def latent(query, latent, key_kernel, value_kernel):
    given = query, latent, key_kernel, value_kernel
    return {"out": xla.flash_mla(*given, causal=True)}

  file.add(
    "ejkernel_latent",
    latent,
    witness="flash_mla",
    mechanism="latent",
    given={
      "query": draw.normal(1, T, 3, H),
      "latent": draw.normal(1, T, 5),
      "key_kernel": draw.normal(5, 3, H, scale=0.5),
      "value_kernel": draw.normal(5, 3, V, scale=0.5),
    },
    options={"is_causal": True},
  )


if __name__ == "__main__":
  file = Vectors("ejkernel", "ejkernel 0.0.80.3", jax_results)
  file.write(recurrences, softmax)
