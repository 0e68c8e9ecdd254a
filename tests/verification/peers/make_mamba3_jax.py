"""Writes mamba3_jax.npz: results of the mixer of mamba3-jax.

python3.11 -m venv VENV
VENV/bin/pip install jax==0.10.2 flax==0.12.8
VENV/bin/pip install --no-deps mamba3-jax==1.0.1
JAX_PLATFORMS=cpu VENV/bin/python tests/verification/peers/make_mamba3_jax.py
"""

from flax import nnx
import jax
import jax.numpy as jnp
from mamba3_jax import modeling
from vectors import Draw, Vectors, jax_results

T, N, H, V, F = 29, 2, 4, 3, 6

OPEN = 1.2784645427610738
"""z, so that SiLU(z) is 1."""


def main() -> None:
  """Writes the vectors."""
  jax.config.update("jax_default_matmul_precision", "highest")
  file = Vectors("mamba3_jax", "mamba3-jax 1.0.1", jax_results)
  config = modeling.Mamba3Config(
    hidden_size=N * V // 2, state_size=H, head_dim=V, expand=2, chunk_size=8
  )

  def call(query, key, value, inputs, **params):
    p = {name.removeprefix("params/"): x for name, x in params.items()}
    mixer = modeling.Mamba3Mixer(config, layer_idx=0, rngs=nnx.Rngs(0))
    # The peer's decays use 1 + x or 1 / (1 − x) instead of softplus.
    rate = jnp.maximum(jax.nn.softplus(inputs @ p["decay_kernel"]), 1e-4)
    step = jax.nn.softplus(inputs @ p["step_kernel"] + p["step_bias"])
    given = (
      *(jnp.full(value.shape, OPEN), value),
      *(key + p["key_bias"], query + p["query_bias"], -rate, step),
      jax.nn.sigmoid(inputs @ p["trapezoid_kernel"]),
      inputs @ p["angle_kernel"],
    )
    mixer._project = lambda hidden: [hidden] * 8
    mixer._preprocess = lambda *projected: given
    mixer.D = nnx.Param(p["skip"])
    mixer.out_proj = lambda y: y
    out = mixer(inputs)
    out = out[0] if isinstance(out, tuple) else out
    return {"out": out.reshape(value.shape)}

  draw = Draw("mamba3-jax")
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
  file.add(
    "mamba3_mixer",
    call,
    witness="Mamba3Mixer, in chunks",
    mechanism="mamba3",
    function="mamba3",
    given=draw.qkv()
    | {"inputs": draw.normal(1, T, F)}
    | {f"params/{name}": x for name, x in params.items()},
  )
  file.write()


if __name__ == "__main__":
  main()
