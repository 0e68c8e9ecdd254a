"""Lists the mechanisms and hyperparameters that the contract tests."""

import importlib

import jax
import numpy as np

from attention import ATTENTIONS, bigbird_random_blocks, definitions
from attention.definitions import delta_rule, gated_linear, recurrent
from attention.definitions.linear import (
  elu_plus_one,
  hedgehog_features,
  taylor_features,
)
from attention.definitions.nystrom import depthwise_convolution
from attention.definitions.shared import visible_tokens
from attention.testing import Mechanism


def definition_of(name):
  """Returns the definition of a recurrence with its gates."""
  for module in (gated_linear, delta_rule):
    if hasattr(module, name):
      return getattr(module, name)
  module = importlib.import_module(f"attention.definitions.{name}")
  return getattr(module, name)


def _mechanism(name, definition, options, *facts, **more):
  return Mechanism(ATTENTIONS[name], definition, options, *facts, **more)


def _inputs(key):
  """Returns the inputs of gates, which are the keys here, in float64."""
  return np.asarray(key, np.float64).reshape(*np.shape(key)[:2], -1)


def _logits_options(variables, key, options, call):
  """Returns a mechanism's sinks, soft cap and forget gates for its definition."""
  params, logits = variables.get("params", {}), {}
  inputs = _inputs(key)
  if options.get("sinks") == "inputs":
    logits["sinks"] = inputs @ params["sink_kernel"]
    mask = call.get("mask")
    if mask is not None and mask.shape[2] == 1:
      visible = np.swapaxes(np.asarray(mask)[:, :, 0], 1, 2)
      logits["sinks"] = np.where(visible, logits["sinks"], 0.0)
  elif options.get("sinks"):
    logits["sinks"] = params["sinks"]
  if "logits_soft_cap" in options:
    logits["logits_soft_cap"] = options["logits_soft_cap"]
  if options.get("forget"):
    gates = inputs @ params["forget_kernel"] + params["forget_bias"]
    logits["log_forget"] = -np.logaddexp(0.0, -gates)
  return logits


def _softmax(name, **options):
  """Returns dense, flash or window attention, also with sinks and gates."""
  define = getattr(definitions, f"{name}_attention")
  rest = {k: v for k, v in options.items() if k in ("window", "dilation")}

  def attend(variables, query, key, value, **call):
    call = {**_logits_options(variables, key, options, call), **call}
    return define(query, key, value, **rest, **call)

  facts = {"sparse": bool(rest), "cache": "nothing" if rest else "length"}
  return _mechanism(name, attend, options, not options.get("sinks"), **facts)


def _multiplicative(**options):
  def attend(variables, *qkv, **call):
    kernel = variables["params"]["kernel"] if options["general"] else None
    return definitions.multiplicative_attention(*qkv, kernel=kernel, **call)

  return _mechanism("multiplicative", attend, options, cache="length")


_FEATURE_MAPS = {"elu": elu_plus_one, "taylor": taylor_features}


def _linear(**options):
  def attend(variables, *qkv, **call):
    assert not variables
    feature_map = _FEATURE_MAPS[options["feature_map"]]
    return definitions.linear_attention(*qkv, feature_map=feature_map, **call)

  return _mechanism("linear", attend, options, cache="nothing")


def _hedgehog():
  def attend(variables, query, key, value, **call):
    params = variables["params"]
    return definitions.linear_attention(
      np.einsum("BTNH,NHI->BTNI", query, params["query_kernel"]),
      np.einsum("BSKH,KHI->BSKI", key, params["key_kernel"]),
      value,
      feature_map=hedgehog_features,
      **call,
    )

  return _mechanism(
    "linear", attend, {"feature_map": "hedgehog"}, cache="nothing"
  )


def _window_linear(**options):
  def attend(variables, *qkv, **call):
    params = variables["params"]
    return definitions.window_linear_attention(
      *qkv, **params, **options, **call
    )

  return _mechanism("window_linear", attend, options, cache="nothing")


def _performer(**options):
  kernel = options.get("kernel", "softmax")

  def attend(variables, *qkv, **call):
    projection = variables["constants"]["projection"]
    return definitions.performer_attention(
      *qkv, projection=projection, kernel=kernel, **call
    )

  return _mechanism("performer", attend, options, cache="nothing")


def _linformer(**options):
  def attend(variables, *qkv, **call):
    params = variables["params"]
    assert ("value_projection" in params) != options["shared"]
    assert params["key_projection"].ndim == (3 if options["per_head"] else 2)
    return definitions.linformer_attention(*qkv, **params, **call)

  return _mechanism("linformer", attend, options, normalised=False)


def _additive(**options):
  def attend(variables, *qkv, **call):
    return definitions.additive_attention(*qkv, **variables["params"], **call)

  return _mechanism("additive", attend, options, cache="length")


def _nystrom(**options):
  rest = {k: v for k, v in options.items() if k != "conv_kernel_size"}

  def attend(variables, *qkv, **call):
    params = variables.get("params", {})
    assert ("conv_kernel" in params) == ("conv_kernel_size" in options)
    out = definitions.nystrom_attention(*qkv, **rest, **call)
    for kernel in params.values():
      mask = call.get("mask")
      out += depthwise_convolution(qkv[2], kernel, mask=mask)
    return out

  return _mechanism("nystrom", attend, options, normalised=False)


def _bigbird(**options):
  size, num_random = options["block_size"], options["num_random"]

  def attend(variables, query, *rest, **call):
    raw = np.asarray(variables["constants"]["key"], np.uint32)
    random_blocks = bigbird_random_blocks(
      jax.random.wrap_key_data(raw),
      num_heads=query.shape[2],
      num_blocks=-(-query.shape[1] // size),
      num_random=num_random,
    )
    return definitions.bigbird_attention(
      query, *rest, block_size=size, random_blocks=random_blocks, **call
    )

  return _mechanism("bigbird", attend, options, pads=False)


def _lsh(**options):
  def attend(variables, query, value, **call):
    return definitions.lsh_attention(
      query,
      value,
      rotations=variables["constants"]["rotations"],
      chunk_size=options["chunk_size"],
      **call,
    )

  return _mechanism(
    "lsh", attend, options, sparse=True, past_error=1e-6, cache="length"
  )


def _window_2d(**options):
  rest = {k: v for k, v in options.items() if k != "relative"}

  def attend(variables, *qkv, **call):
    params = variables.get("params", {})
    assert ("relative_bias" in params) == options.get("relative", True)
    return definitions.window_2d_attention(
      *qkv, grid=None, **rest, **params, **call
    )

  return _mechanism("window_2d", attend, options, sparse=True, pads=False)


def _strided_2d(**options):
  def attend(variables, *qkv, **call):
    assert not variables
    return definitions.strided_2d_attention(*qkv, grid=None, **options, **call)

  return _mechanism("strided_2d", attend, options, sparse=True, pads=False)


def _recurrent(name, **options):
  definition = definition_of(name)
  # The definition takes these from the variables.
  in_variables = (
    *("rank", "num_levels", "num_slots", "projection_bias"),
    "num_iterations",
  )
  rest = {k: v for k, v in options.items() if k not in in_variables}

  def attend(variables, query, key, value, **call):
    params = variables.get("params", {})
    if params:
      rest["inputs"] = _inputs(key)
    return definition(query, key, value, **rest, **params, **call)

  return _mechanism(
    name,
    attend,
    options,
    normalised=False,
    bounded=False,
    one_matrix=name not in ("gated_delta_2", "delta_product"),
    cache="nothing",
  )


def _elementwise(name, **options):
  definition = definition_of(name)
  rest = {k: options[k] for k in options if k == "norm_epsilon"}

  def attend(variables, query, value=None, **call):
    return definition(query, value, **rest, **variables["params"], **call)

  return _mechanism(
    name,
    attend,
    options,
    normalised=False,
    bounded=False,
    one_matrix=False,
    cache="nothing",
  )


def _differential(**options):
  def attend(variables, *qkv, **call):
    p = variables["params"]
    weight = np.exp(np.sum(p["query_1"] * p["key_1"])) + options["start"]
    weight -= np.exp(np.sum(p["query_2"] * p["key_2"]))
    return definitions.differential_attention(*qkv, weight=weight, **call)

  return _mechanism(
    "differential", attend, options, normalised=False, cache="length"
  )


def _latent(**options):
  def attend(variables, query, key, value=None, **call):
    p = {name: np.asarray(x) for name, x in variables["params"].items()}
    inputs = _inputs(key)
    size = len(p["norm_scale"])
    # Masked positions may have any values.
    with np.errstate(all="ignore"):
      x = inputs @ p["down_kernel"]
      latent, shared = x[..., :size], x[..., size:]
      latent = latent / np.sqrt(
        np.mean(latent**2, axis=-1, keepdims=True) + 1e-6
      )
    return definitions.latent_attention(
      query,
      latent * p["norm_scale"],
      key_kernel=p["key_kernel"],
      value_kernel=p["value_kernel"],
      shared_key=shared,
      value=value,
      **call,
    )

  return _mechanism("latent", attend, options, cache="length")


def _moba(**options):
  def attend(variables, *qkv, **call):
    assert not variables
    return definitions.moba_attention(*qkv, **options, **call)

  return _mechanism("moba", attend, options, cache="length")


def _indexed_moba(**options):
  def attend(variables, query, key, value, **call):
    inputs = _inputs(key)
    if "mask" in call:
      inputs = np.where(call["mask"][:, 0, 0, :, None], inputs, 0.0)
    call |= {x: options[x] for x in ("block_size", "top_k", "local_blocks")}
    for name in ("index_query", "index_key"):
      kernel, scale = (
        variables["params"][f"{name}_{x}"] for x in ("kernel", "scale")
      )
      x = np.tensordot(inputs, kernel, 1)
      x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-3)
      call[name] = _rotate_half(x * (1 + scale))
    return definitions.moba_attention(query, key, value, **call)

  return _mechanism("moba", attend, options, cache="length")


def _compressed(**options):
  sizes = {x: options[x] for x in ("window", "top_k") if x in options}
  cache = "length" if options["stride"] else "nothing"

  def attend(variables, query, key, value=None, *, mask=None, **call):
    p = {name: np.asarray(x) for name, x in variables["params"].items()}
    inputs = _inputs(key)
    batch, length, _ = inputs.shape
    keep = visible_tokens(mask, batch, length)
    inputs = np.where(keep[..., None], inputs, 0.0)

    def project(name):
      return np.tensordot(inputs, p[f"{name}_kernel"], 1)

    def normalize(x, scale=1.0):
      x = np.asarray(x, np.float64)
      return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def pool(name, rows, ones=()):
      gates, bias = project(f"{name}_gate"), p[f"{name}_bias"]
      gates, bias = (x.reshape(*x.shape[:-1], *ones, -1) for x in (gates, bias))
      return definitions.compressed_entries(rows, gates, bias, keep=keep)

    kv = normalize(project("kv"), p["kv_scale"])[:, :, None]
    entries = values = np.zeros((batch, 0, 1, kv.shape[-1]))
    if options["stride"]:
      pooled = pool("entry", project("entry"))
      entries = values = normalize(pooled, p["entry_scale"])[:, :, None]
    if "top_k" in options:
      pooled = pool("index", project("index"))
      call["index_key"] = normalize(pooled, p["index_scale"])
      call["index_query"] = project("index_query")
      call["index_weight"] = project("index_weight") / np.sqrt(
        options["num_index_heads"] * options["index_dim"]
      )
    if value is not None:
      values = np.zeros((batch, 0, *np.shape(value)[2:]))
      if options["stride"]:
        shape = (batch, length, p["entry_bias"].shape[1], length, kv.shape[-1])
        rows = np.broadcast_to(np.eye(length)[None, :, None, :, None], shape)
        weights = pool("entry", rows, ones=(1,)).mean(axis=-1)
        visible = np.where(keep[..., None, None], value, 0.0)
        values = np.einsum("bms,bskv->bmkv", weights, visible)
    return definitions.compressed_attention(
      normalize(query),
      kv,
      kv if value is None else value,
      stride=options["stride"] or length + 1,
      entries=entries,
      entry_values=values,
      sinks=p["sinks"],
      mask=mask,
      **sizes,
      **call,
    )

  return _mechanism(
    "compressed", attend, options, normalised=False, cache=cache
  )


def _nsa(**options):
  rest = {k: v for k, v in options.items() if k != "compress_size"}

  def attend(variables, query, key, value, **call):
    p = dict(variables["params"])
    inputs = _inputs(key)
    with np.errstate(all="ignore"):  # Masked positions may have any values.
      x = np.tensordot(inputs, p.pop("gate_kernel"), 1)
      gates = recurrent.sigmoid(x)
    return definitions.nsa_attention(
      query, key, value, branch_gates=gates, **p, **rest, **call
    )

  return _mechanism("nsa", attend, options, normalised=False, cache="length")


def _stick_breaking(**options):
  def attend(variables, *qkv, **call):
    assert not variables
    return definitions.stick_breaking_attention(*qkv, **options, **call)

  is_strict = not options["attend_current"]
  return _mechanism(
    "stick_breaking",
    attend,
    options,
    normalised=False,
    sparse=is_strict,
    cache="length",
  )


def _path(**options):
  def attend(variables, query, key, value, **call):
    p = {name: np.asarray(x) for name, x in variables["params"].items()}
    inputs = _inputs(key)
    # Masked positions may have any values.
    with np.errstate(all="ignore"):
      w = np.tensordot(inputs @ p["householder_down"], p["householder_up"], 1)
      w /= np.sqrt(np.sum(w**2, axis=-1, keepdims=True) + 1e-6)
      rate = inputs @ p["rate_kernel"] + p["rate_bias"]
      beta = 2 * np.exp(-np.logaddexp(0.0, -rate))
    call = {**_logits_options(variables, key, options, call), **call}
    return definitions.path_attention(
      query, key, value, householder=w, beta=beta, **call
    )

  return _mechanism("path", attend, options, cache="length")


def _rotate_half(x):
  """Rotates the first half of features `[B, T, …, D]` by their positions."""
  pairs = x.shape[-1] // 4
  frequency = 1e4 ** (-np.arange(pairs) / pairs)
  shape = (1, x.shape[1], *[1] * (x.ndim - 3), pairs)
  angle = (np.arange(x.shape[1])[:, None] * frequency).reshape(shape)
  sin, cos = np.sin(angle), np.cos(angle)
  left, right, rest = np.split(x, [pairs, 2 * pairs], axis=-1)
  rotated = left * cos - right * sin, right * cos + left * sin
  return np.concatenate([*rotated, rest], axis=-1)


def _dsa(**options):
  heads, size = options["num_index_heads"], options["index_dim"]

  def attend(variables, query, key, value, **call):
    inputs = _inputs(key)
    if "mask" in call:
      inputs = np.where(call["mask"][:, 0, 0, :, None], inputs, 0.0)
    params = dict(variables["params"])
    norm = [params.pop(f"index_key_{x}", None) for x in ("scale", "bias")]
    arrays = {
      name.removesuffix("_kernel"): np.tensordot(inputs, kernel, 1)
      for name, kernel in params.items()
    }
    if "index_key_norm" in options:
      x = arrays["index_key"]
      x = x - np.mean(x, axis=2, keepdims=True)
      x /= np.sqrt(np.mean(x**2, axis=2, keepdims=True) + 1e-6)
      arrays["index_key"] = x * norm[0] + norm[1]
    # With `index_rotary_dim`, a model rotates the arrays.
    for name in ("index_query", "index_key"):
      if "index_rotary_dim" not in options:
        arrays[name] = _rotate_half(arrays[name])
    arrays["index_weight"] /= np.sqrt(heads * size)
    call = {"is_causal": False, "top_k": options["top_k"], **arrays, **call}
    return definitions.dsa_attention(query, key, value, **call)

  return _mechanism("dsa", attend, options, cache="length")


MECHANISMS = (
  _softmax("dense"),
  _softmax("dense", sinks=True, logits_soft_cap=2.0, forget=True),
  _softmax("flash", block_size=(8, 5)),
  _softmax(
    "flash", block_size=(8, 5), sinks=True, logits_soft_cap=2.0, forget=True
  ),
  _softmax("dense", sinks="inputs"),
  _softmax("sliding_window", window=3, sinks="inputs"),
  _multiplicative(general=True),
  _softmax("sliding_window", window=3),
  _softmax(
    "sliding_window", window=3, sinks=True, logits_soft_cap=2.0, forget=True
  ),
  _softmax("sliding_window", window=(2, 1), dilation=2),
  _softmax("sliding_window", window=(3, 0), dilation=(1, 2, 1, 2)),
  _linear(feature_map="elu"),
  _linear(feature_map="taylor"),
  _hedgehog(),
  _bigbird(block_size=2, num_random=1),
  _performer(num_features=16),
  _performer(num_features=16, kernel="relu"),
  _window_linear(window=3),
  _linformer(rank=5, shared=True, per_head=False),
  _linformer(rank=5, shared=False, per_head=True),
  _lsh(num_rounds=2, num_buckets=4, chunk_size=4),
  _additive(width=6),
  _nystrom(num_landmarks=4),
  _nystrom(num_landmarks=5, conv_kernel_size=3),
  _window_2d(window=2),
  _window_2d(window=3, shift=1, relative=False),
  _window_2d(window=2, shift=1, hidden_logit=-3.0),
  _strided_2d(stride=2),
  _recurrent("retention"),
  _recurrent("lightning", depth=0.5),
  _recurrent("gated_linear", rank=3, temperature=4.0),
  _recurrent("hgrn2"),
  _recurrent("hgrn2", lower_bound=0.5),
  _recurrent("mamba2"),
  _recurrent(
    "mamba2", projection_bias=True, step_factor=1.5, min_step=0.03, max_step=0.2
  ),
  _recurrent("mamba3"),
  _elementwise("mamba", state_size=5, rank=3),
  _elementwise("mamba", state_size=3, norm_epsilon=0.01),
  _elementwise("rg_lru"),
  _recurrent("mlstm"),
  _recurrent("mlstm", gate_soft_cap=2.0, epsilon=0.1),
  _recurrent("delta"),
  _recurrent("gated_delta", max_rate=2.0),
  _recurrent("kimi_delta", rank=3),
  _recurrent("kimi_delta", rank=3, lower_bound=-5.0),
  _recurrent("comba", max_rate=2.0),
  _recurrent("gated_delta_2", rank=3),
  _recurrent("delta_product"),
  _recurrent("precond_delta"),
  _recurrent("momentum_delta"),
  _recurrent("rwkv6", rank=3),
  _recurrent("rwkv7", rank=3),
  _recurrent("mesa"),
  # float32 needs a condition number of 6, and 25 iterations reach the solution.
  _recurrent("gka", ridge_ratio=0.2, num_iterations=25),
  _recurrent("gsa", num_slots=5),
  _recurrent("ttt_linear", minibatch_size=4),
  _recurrent("titans", minibatch_size=4),
  _recurrent("titans", minibatch_size=1, max_rate=0.5),
  _recurrent("log_linear", num_levels=10),
  _differential(start=0.6),
  _latent(),
  _latent(rank=5, shared_dim=3),
  _moba(block_size=3, top_k=2),
  _indexed_moba(
    **{"block_size": 2, "top_k": 3, "local_blocks": 2},
    **{"num_index_heads": 2, "index_dim": 8, "index_norm_epsilon": 1e-3},
  ),
  _nsa(compress_size=4, stride=2, block_size=2, num_blocks=4, window=3),
  _stick_breaking(attend_current=True),
  _stick_breaking(attend_current=False),
  _path(rank=3),
  _path(rank=3, forget=True),
  _dsa(top_k=4, num_index_heads=2, index_dim=8),
  _dsa(
    **{"top_k": 4, "num_index_heads": 3, "index_dim": 6},
    **{"index_key_norm": True, "index_rotary_dim": 4},
  ),
  _compressed(
    **{"window": 3, "stride": 2, "top_k": 3},
    **{"num_index_heads": 3, "index_dim": 6, "rotary_dim": 4},
  ),
  _compressed(window=3, stride=4),
  _compressed(window=3, stride=0),
)
"""One line per mechanism and choice of hyperparameters."""

# For tests that do not depend on hyperparameters.
ONE_EACH = tuple({m.name: m for m in reversed(MECHANISMS)}.values())
