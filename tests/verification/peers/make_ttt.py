"""Writes ttt.npz: results of the authors' code of TTT-Linear.

git clone https://github.com/test-time-training/ttt-lm-jax
git -C ttt-lm-jax checkout 6f529b124c7fb5879b33c06926408b15add1d82f
python3.12 -m venv VENV
VENV/bin/pip install jax==0.11.2 flax==0.12.12
VENV/bin/python tests/verification/peers/make_ttt.py ttt-lm-jax
"""

import importlib.util
import pathlib
import sys
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from vectors import Draw, Vectors, jax_results

T, N, H, C = 28, 2, 4, 4


def layers(folder: pathlib.Path) -> Any:
  """Imports the authors' layers without their trainer."""
  path = folder / "ttt" / "models" / "ttt_layer.py"
  spec = importlib.util.spec_from_file_location("ttt_layer", path)
  module = importlib.util.module_from_spec(spec)
  names = "ttt", "ttt.infra", "ttt.infra.jax_utils"
  with mock.patch.dict(sys.modules, {x: mock.MagicMock() for x in names}):
    spec.loader.exec_module(module)
  return module


def ttt_linear(file: Vectors, folder: pathlib.Path) -> None:
  """Adds the inner loop of the layer, with its learning rates."""
  config = types.SimpleNamespace(
    hidden_size=N * H,
    num_attention_heads=N,
    mini_batch_size=C,
    max_sequence_length=T,
    rope_theta=1e4,
    initializer_range=0.02,
    ttt_base_lr=0.5,
    remat_mini_batch_group_size=1,
    remat_conv="",
    conv_width=4,
    output_ttt_stats=False,
  )
  layer = layers(folder).TTTLinear(config)

  def call(query, key, value, inputs, **params):
    p = {name.removeprefix("params/"): x for name, x in params.items()}
    variables = {
      "learnable_token_idx": p["position_offset"],
      "learnable_ttt_lr/kernel": p["rate_kernel"].T[..., None],
      "learnable_ttt_lr/bias": p["rate_bias"][:, None],
      "ttt_dense_0": p["initial_weights"],
      "ttt_bias_0": p["initial_bias"][:, None],
      "ttt_norm/scale": p["norm_scale"],
      "ttt_norm/bias": p["norm_bias"],
    }

    def run(layer):
      eta = layer.get_eta(inputs.reshape(1, T // C, C, N * H))
      heads = (
        x.reshape(1, T // C, C, N, H).transpose(0, 3, 1, 2, 4)
        for x in (query, key, value)
      )
      return layer.ttt(*heads, eta, None)[0]

    out = layer.apply({"params": variables}, method=run)
    return {"out": out.reshape(1, T, N, H)}

  draw = Draw("ttt")
  given = draw.qkv(T, value=H) | {"inputs": draw.normal(1, T, N * H)}
  params = {
    "rate_kernel": draw.normal(N * H, N),
    "rate_bias": draw.normal(N),
    "initial_weights": draw.normal(N, H, H),
    "initial_bias": draw.normal(N, H),
    "norm_scale": 1.0 + draw.normal(N, H, scale=0.3),
    "norm_bias": draw.normal(N, H, scale=0.3),
    "position_offset": draw.normal(C, scale=0.3),
  }
  given |= {f"params/{name}": x for name, x in params.items()}
  # JAX has renamed an argument.
  clip = mock.patch.object(jnp, "clip", lambda x, a_min: jnp.maximum(x, a_min))
  with clip:
    file.add(
      "ttt_authors",
      call,
      witness="TTTLinear.get_eta and TTTLinear.ttt",
      mechanism="ttt_linear",
      function="ttt_linear",
      given=given,
      options={"minibatch_size": C, "base_rate": 0.5},
    )


def main() -> None:
  """Writes the vectors."""
  jax.config.update("jax_default_matmul_precision", "highest")
  file = Vectors("ttt", "ttt-lm-jax 6f529b1", jax_results)
  ttt_linear(file, pathlib.Path(sys.argv[1]))
  file.write()


if __name__ == "__main__":
  main()
