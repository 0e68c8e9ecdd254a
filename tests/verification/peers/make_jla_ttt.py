"""Writes jla_ttt.npz: TTT-Linear of jax-linear-attention.

python3.12 -m venv VENV
VENV/bin/pip install jax==0.11.2 jax-linear-attention==0.1.0
VENV/bin/python tests/verification/peers/make_jla_ttt.py

Its mini-batches do not restart with a segment, so segments start where one does.
"""

import jax
from jla.ops import ttt
import numpy as np
from vectors import Draw, Vectors, jax_results

T, N, H, C = 29, 2, 4, 4
SEGMENT_IDS = np.searchsorted((8, 20), np.arange(T), side="right")[None]


def functions(file: Vectors) -> None:
  """Adds the recurrent form, mini-batches and learned offsets."""
  forms = {"reference": ttt.ttt_linear_reference, "dual": ttt.ttt_linear_dual}
  for name, rule in forms.items():

    def call(query, key, value, learning_rate, segment_ids, rule=rule, **given):
      scale = ttt.default_token_scale(C) + given["position_offset"]
      out, _ = rule(
        *(query, key, value, learning_rate),
        ln_weight=given["norm_scale"],
        ln_bias=given["norm_bias"],
        w0=given["initial_weights"],
        b0=given["initial_bias"],
        mini_batch_size=C,
        token_scale=jax.numpy.maximum(scale, 0.0),
        segment_ids=segment_ids,
      )
      return {"out": out}

    draw = Draw(f"jla ttt {name}")
    file.add(
      f"jla_ttt_{name}",
      call,
      witness=f"ttt.ttt_linear_{name}",
      mechanism="ttt_linear",
      given=draw.qkv(T, value=H)
      | {
        "learning_rate": draw.uniform(0.0, 0.5, 1, T, N),
        "initial_weights": draw.normal(N, H, H),
        "initial_bias": draw.normal(N, H),
        "norm_scale": 1.0 + draw.normal(N, H, scale=0.3),
        "norm_bias": draw.normal(N, H, scale=0.3),
        "position_offset": draw.normal(C, scale=0.3),
      },
      fixed={"segment_ids": SEGMENT_IDS.astype(np.int32)},
      options={"minibatch_size": C},
    )


def main() -> None:
  """Writes the vectors."""
  jax.config.update("jax_default_matmul_precision", "highest")
  file = Vectors("jla_ttt", "jax-linear-attention 0.1.0", jax_results)
  functions(file)
  file.write()


if __name__ == "__main__":
  main()
