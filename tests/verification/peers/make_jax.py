"""Writes jax.npz: results of the attention of JAX and Flax.

python3.11 -m venv VENV
VENV/bin/pip install jax==0.10.2 flax==0.12.8
VENV/bin/python tests/verification/peers/make_jax.py
"""

import flax
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from vectors import Draw, Vectors, jax_results

T, S, H = 29, 31, 4


def main() -> None:
  """Writes the vectors."""
  jax.config.update("jax_default_matmul_precision", "highest")
  version = f"jax {jax.__version__}, flax {flax.__version__}"
  file = Vectors("jax", version, jax_results)
  attend = jax.nn.dot_product_attention
  draw = Draw("jax")
  given = {
    "query": draw.normal(1, T, 4, H),
    "key": draw.normal(1, S, 2, H),
    "value": draw.normal(1, S, 2, H),
  }
  facts = {"mechanism": "dense"}

  def call(query, key, value, bias, mask):
    return {"out": attend(query, key, value, bias, mask)}

  file.add(
    "jax_bias",
    call,
    witness="jax.nn.dot_product_attention, bias and mask",
    given=given | {"bias": draw.normal(1, 4, T, S)},
    fixed={"mask": draw.uniform(0, 1, 1, 4, T, S) < 0.5},
    **facts,
  )

  def call(query, key, value):
    options = {"is_causal": True, "return_residual": True}
    out, lse = attend(query, key, value, **options)
    return {"out": out, "lse": lse}

  square = {name: x[:, :T] for name, x in given.items()}
  file.add(
    "jax_lse",
    call,
    witness="jax.nn.dot_product_attention, causal, residuals",
    given=square,
    options={"is_causal": True, "return_lse": True},
    constant=["lse"],
    **facts,
  )

  def call(query, key, value, query_segment_ids, key_segment_ids):
    # Its mask separates packed examples.
    mask = nnx.make_attention_mask(
      query_segment_ids, key_segment_ids, jnp.equal
    )
    key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
    out = nnx.dot_product_attention(
      query, key, value, mask=mask.astype(bool), deterministic=True
    )
    return {"out": out}

  ids = np.arange(S, dtype=np.int32)[None] // 11
  file.add(
    "flax_segments",
    call,
    witness="flax.nnx.dot_product_attention, a mask of segments",
    given=given,
    fixed={"query_segment_ids": ids[:, :T], "key_segment_ids": ids},
    **facts,
  )
  for name, window in (("both", (5, 2)), ("left", (6, 0))):

    def call(query, key, value, window=window):
      out = attend(
        query, key, value, is_causal=not window[1], local_window_size=window
      )
      return {"out": out}

    file.add(
      f"jax_window_{name}",
      call,
      witness="jax.nn.dot_product_attention, a local window",
      mechanism="sliding_window",
      given=square,
      options={"window": window, "is_causal": not window[1]},
    )
  file.write()


if __name__ == "__main__":
  main()
