"""Adds cases for make_jla.py: mechanisms with the gates of jla's layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jla.layers.linear_attention import GatedDeltaProduct, make_mixer
from jla.layers.rwkv7 import RWKV7TimeMix
from jla.models.config import LinearAttentionConfig
from jla.ops import reference
from vectors import Draw, Vectors

T, N, H, V, F, R = 29, 2, 4, 3, 6, 3

STEPS = {"step_bias": "dt_bias", "log_rate": "A_log"}
LOW_RANK = {"step_down": "f_proj.down.weight", "step_up": "f_proj.up.weight"}
PARAMS: dict[str, tuple[str, dict[str, str]]] = {
  "gated_linear": (
    "gla",
    {
      "gate_down": "gk_proj.down.weight",
      "gate_up": "gk_proj.up.weight",
      "gate_bias": "gk_proj.up.bias",
    },
  ),
  "delta": ("deltanet", {"rate_kernel": "b_proj.weight"}),
  "gated_delta": (
    "gated_deltanet",
    {"rate_kernel": "b_proj.weight", "step_kernel": "a_proj.weight", **STEPS},
  ),
  "kimi_delta": ("kda", {"rate_kernel": "b_proj.weight", **LOW_RANK, **STEPS}),
  "gated_delta_2": (
    "gdn2",
    {
      "erase_kernel": "b_proj.weight",
      "write_kernel": "w_proj.weight",
      **LOW_RANK,
      **STEPS,
    },
  ),
}
"""Layer kinds, and the paths of a mechanism's parameters in them."""

RULES = {
  "gla": "gla",
  "deltanet": "delta_rule",
  "gated_deltanet": "gated_delta_rule",
  "kda": "kda",
  "gdn2": "gdn2",
}


def shape(mechanism: str, name: str) -> tuple[int, ...]:
  """Returns the shape of a parameter."""
  channels = mechanism in ("kimi_delta", "gated_delta_2")
  return {
    "gate_down": (F, R),
    "gate_up": (R, N, H),
    "gate_bias": (N, H),
    "rate_kernel": (F, N),
    "step_kernel": (F, N),
    "step_bias": (N, H) if channels else (N,),
    "log_rate": (N,),
    "step_down": (F, R),
    "step_up": (R, N, H),
    "erase_kernel": (F, N, H),
    "write_kernel": (F, N, V),
  }[name]


def config(**options: Any) -> LinearAttentionConfig:
  """Returns a config with two heads and no convolution."""
  sizes = {"num_k_heads": N, "num_v_heads": N, "head_k_dim": H, "head_v_dim": V}
  return LinearAttentionConfig(
    **sizes, conv_size=0, gate_low_rank_dim=R, **options
  )


COMMON = {
  "key": jax.random.key(0),
  "std": 0.02,
  "norm_eps": 1e-6,
  "compute_dtype": "float32",
}


def replace_array(layer: Any, path: str, x: jax.Array) -> Any:
  """Returns the layer with one array replaced by another of equal size."""

  def at(layer):
    for name in path.split("."):
      layer = getattr(layer, name)
    return layer

  return eqx.tree_at(at, layer, x.reshape(at(layer).shape))


def gates(file: Vectors) -> None:
  """Adds β and decays that a layer computes from its inputs."""
  for mechanism, (kind, paths) in PARAMS.items():

    def call(query, key, value, inputs, kind=kind, paths=paths, **params):
      layer = make_mixer(kind, F, config(), **COMMON)
      for name, path in paths.items():
        layer = replace_array(layer, path, params[f"params/{name}"])
      unit = {} if kind == "gla" else {"use_qk_l2norm": True}
      rule = getattr(reference, RULES[kind])
      return {"out": rule(query, key, value, **layer.gates(inputs), **unit)[0]}

    draw = Draw(f"jla gates {mechanism}")
    file.add(
      f"jla_gates_{mechanism}",
      call,
      witness=f"the gates of its {kind} layer",
      mechanism=mechanism,
      function=mechanism,
      given=draw.qkv()
      | {"inputs": draw.normal(1, T, F)}
      | {
        f"params/{name}": draw.normal(*shape(mechanism, name), scale=0.7)
        for name in paths
      },
    )
  product(file)
  rwkv7(file)


def product(file: Vectors) -> None:
  """Adds Gated DeltaProduct; the call has the last of its three keys and values."""
  count = 3

  def call(query, key, value, inputs, **params):
    p = {name.removeprefix("params/"): x for name, x in params.items()}
    options = {"allow_neg_eigval": True, "num_householder": count}
    layer = GatedDeltaProduct(F, config(**options), **COMMON)
    layer = replace_array(layer, "b_proj.weight", p["rate_kernel"])
    layer = replace_array(layer, "a_proj.weight", p["step_kernel"])
    for name, path in STEPS.items():
      layer = replace_array(layer, path, p[name])

    def joined(name, last):
      kernel = p[f"other_{name}_kernel"]
      others = jax.nn.silu(jnp.einsum("BTF,FRNH->BTRNH", inputs, kernel))
      every = jnp.concatenate([others, last[:, :, None]], 2)
      return every.reshape(1, T * count, *every.shape[3:])

    gate_arrays = layer.gates(inputs)
    out, _ = reference.gated_delta_product(
      query,
      joined("key", key),
      joined("value", value),
      gate_arrays["g"],
      gate_arrays["beta"].reshape(1, T * count, N),
      use_qk_l2norm=True,
    )
    return {"out": out}

  draw = Draw("jla gates delta_product")
  params = {
    "rate_kernel": draw.normal(F, count, N),
    "step_kernel": draw.normal(F, N, scale=0.5),
    "step_bias": draw.normal(N),
    "log_rate": draw.normal(N),
    "other_key_kernel": draw.normal(F, count - 1, N, H),
    "other_value_kernel": draw.normal(F, count - 1, N, V),
  }
  file.add(
    "jla_gates_delta_product",
    call,
    witness="the gates of its GatedDeltaProduct",
    mechanism="delta_product",
    function="delta_product",
    given=draw.qkv()
    | {"inputs": draw.normal(1, T, F)}
    | {f"params/{name}": x for name, x in params.items()},
    options={"num_householder": count},
  )


class ConstantModule(eqx.Module):
  """Returns the same array for every input."""

  array: jax.Array
  compute_dtype: str = eqx.field(static=True, default="float32")

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the array."""
    del x
    return self.array


class Identity(eqx.Module):
  """Returns its input."""

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the input."""
    return x


class WithoutNorm(RWKV7TimeMix):
  """RWKV-7's layer without its group norm."""

  def _group_norm(self, o: jax.Array) -> jax.Array:
    return o.reshape(*o.shape[:2], -1)


def rwkv7(file: Vectors) -> None:
  """Adds RWKV-7's layer, without token shift, norm and output gate."""
  width = N * H

  def call(query, key, value, inputs, **params):
    p = {name.removeprefix("params/"): x for name, x in params.items()}
    layer = WithoutNorm(
      width,
      head_dim=H,
      layer_idx=0,
      n_layers=2,
      key=jax.random.key(0),
      lora_dims=(R, R, R, R),
      impl="reference",
      compute_dtype="float32",
    )
    layer = replace_array(layer, "mu", jnp.zeros((6, width)))
    for path, name in {
      "w_lora.down.weight": "decay_down",
      "w_lora.up.weight": "decay_up",
      "w_lora.up.bias": "decay_bias",
      "a_lora.down.weight": "rate_down",
      "a_lora.up.weight": "rate_up",
      "a_lora.up.bias": "rate_bias",
      "k_k": "removal_scale",
      "k_a": "rate_share",
      "r_k": "bonus",
    }.items():
      layer = replace_array(layer, path, p[name])
    flat = [ConstantModule(x.reshape(1, T, width)) for x in (query, key, value)]

    def replaced(layer):
      names = "r_proj", "k_proj", "v_proj", "g_lora", "o_proj"
      return [getattr(layer, name) for name in names]

    ones = ConstantModule(jnp.ones((1, T, width)))
    layer = eqx.tree_at(replaced, layer, [*flat, ones, Identity()])
    return {"out": layer(inputs, None)[0].reshape(1, T, N, H)}

  draw = Draw("jla gates rwkv7")
  heads = (N, H)
  params = {
    "decay_down": draw.normal(width, R, scale=0.5),
    "decay_up": draw.normal(R, *heads),
    "decay_bias": draw.normal(*heads),
    "rate_down": draw.normal(width, R, scale=0.5),
    "rate_up": draw.normal(R, *heads),
    "rate_bias": draw.normal(*heads),
    "removal_scale": draw.uniform(0.5, 1.5, *heads),
    "rate_share": draw.uniform(0.5, 1.5, *heads),
    "bonus": draw.normal(*heads),
  }
  file.add(
    "jla_gates_rwkv7",
    call,
    witness="RWKV7TimeMix",
    mechanism="rwkv7",
    function="rwkv7",
    given=draw.qkv(value=H)
    | {"inputs": draw.normal(1, T, width)}
    | {f"params/{name}": x for name, x in params.items()},
  )
