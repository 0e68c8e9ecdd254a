"""Short convolutions, norms and gates of attention modules, and overrides of layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, dense
import models
from models import nested
from models.depthwise import depthwise
from models.multi_head_attention import MultiHeadAttention
from models.short_convolution import ShortConvolution
from tests.models import tiny
from tests.refusals import assert_refused

LENGTH, VOCAB = 20, 11
AROUND = {"short_convolution": True, "output_norm": "rms"}
AROUND["output_gate"] = "silu"
OPTIONS = {"sliding_window": {"window": 4}}
WIDE = models.AroundConfig(
  **{"num_heads": 6, "num_kv_heads": 6, "num_qk_heads": 3, "head_dim": 5},
  **{"value_dim": 3, "position": "none", **AROUND},
)
"""In the way of Qwen3-Next, of no size that its model has."""


def create(attention, **choices):
  """A decoder; `attention` is a name, or one a layer."""
  names = (attention,) if isinstance(attention, str) else attention
  config = nested.make(
    models.ModelConfig,
    kind="decoder",
    num_layers=len(names),
    features=16,
    decoder_attention=tuple(
      models.AttentionConfig(name, OPTIONS.get(name, {})) for name in names
    ),
    **{"num_heads": 2, "position": "none", "mlp_features": 24, **choices},
  )
  sizes = {"target_vocab_size": VOCAB, "max_target_length": LENGTH}
  model = tiny.of_config(config, **sizes)
  ids = np.random.default_rng(0).integers(1, VOCAB, (3, LENGTH))
  return model, tiny.variables_of(model, {"inputs": ids}), ids


DIFFERENT = {
  "decoder_around": (WIDE, WIDE, models.AroundConfig()),
  "position": "rotary",
  "rotary_fraction": 0.5,
  "rotary_scaling": models.RotaryScaling("linear", {"factor": 0.5}),
  "num_kv_heads": 1,
  "query_key_norm": "rms_from_one",
  "output_gate": "sigmoid",
}


GATED = {"query_key_norm": "rms", "output_gate": "sigmoid_head"}
JOINT = {"short_convolution_bias": True, "output_norm": "rms_joint"}
READ = [
  (("retention", "dense"), {**AROUND, "output_norm": "group"}),
  ("latent", {**AROUND, "output_gate": "sigmoid"}),
  (
    ("sliding_window", "dense"),
    {
      **{"query_rank": 5, "latent_rank": 6, "shared_key_dim": 2},
      **{"position": "rotary", "value_dim": 3, "attention_bias": True},
    },
  ),
  ("mamba3", {**GATED, "num_qk_heads": 1, "exclusive": True}),
  (
    "mamba2",
    {**AROUND, **JOINT, "num_qk_heads": 1, "value_dim": 5, "mlp_features": 0},
  ),
  ("sliding_window", {"query_key_norm": "l2"}),
  ("dense", {"query_key_norm": "rms_joint", "norm": "output"}),
  (("gated_delta", "gated_delta", "dense"), DIFFERENT),
  *(
    pytest.param(attention, AROUND, marks=pytest.mark.thorough)
    for attention in (
      ("delta_product", "rwkv7", "comba", "gated_delta_2"),
      ("gated_delta", "gated_linear", "delta", "flash", "kimi_delta"),
    )
  ),
]


@pytest.mark.parametrize(
  ("attention", "choices"), READ, ids=lambda x: str(x)[:40]
)
def test_reading_and_decoding_are_the_whole_call(attention, choices):
  """After prompts of several lengths, position by position."""
  model, variables, ids = create(attention, **choices)
  expected = tiny.forward(model, variables, {"inputs": ids})
  lengths = np.array([5, 8, 2])

  @jax.jit
  def read(variables, prompts, lengths):
    _, state = model.apply(
      variables, None, 3, LENGTH, method="start", mutable=["cache", "memory"]
    )
    return model.apply(
      {**variables, **state},
      prompts,
      lengths,
      method="prefill",
      mutable=["cache"],
    )

  @jax.jit
  def decode(variables, state, ids):
    return model.apply(
      {**variables, **state}, ids, method="decode", mutable=["cache"]
    )

  logits, state = read(variables, ids[:, :8], lengths)
  for more in range(5):
    at = lengths + more
    for row in range(3):
      # Processors sum in other orders.
      np.testing.assert_allclose(
        logits[row], expected[row, at[row] - 1], atol=1e-5
      )
    logits, state = decode(variables, state, ids[np.arange(3), at])


@pytest.mark.parametrize(
  "attention",
  [
    "mamba2",
    pytest.param(
      ("retention", "gated_linear", "delta", "gated_delta", "kimi_delta"),
      marks=pytest.mark.thorough,
    ),
  ],
)
def test_everything_is_trained_and_nothing_looks_ahead(attention):
  model, variables, ids = create(attention, **AROUND)

  def loss(params):
    out = models.forward(
      model, {**variables, "params": params}, {"inputs": ids}
    )
    return jnp.mean(jnp.square(out[:, 9]))

  gradient = jax.jit(jax.grad(loss))(variables["params"])
  for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
    assert np.isfinite(leaf).all(), path
    assert leaf.any(), path
  later = np.array(ids)
  later[:, 10:] = 1
  before, after = (
    tiny.forward(model, variables, {"inputs": x}) for x in (ids, later)
  )
  np.testing.assert_array_equal(before[:, :10], after[:, :10])


def test_padding_before_a_sequence_changes_nothing():
  """Not through the short convolutions either, which read positions before."""
  choices = {**AROUND, "short_convolution_bias": True, "attention_bias": True}
  model, variables, ids = create(("mamba2", "dense"), **choices)
  rng = np.random.default_rng(1)
  variables = jax.tree.map(
    lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), variables
  )
  mask = np.arange(LENGTH)[None, :] >= np.array([[0], [1], [7]])
  got = tiny.forward(model, variables, {"inputs": ids, "inputs_mask": mask})
  alone = {"inputs": ids[2:, 7:]}
  expected = tiny.forward(model, variables, alone)[0]
  np.testing.assert_allclose(got[2, 7:], expected, atol=1e-5)


def test_a_short_convolution_is_its_sum():
  module = ShortConvolution(5, "float32", "float32")
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 9, 5)).astype(np.float32)
  ids = np.array([[0] * 4 + [1] * 5, [0] * 9])
  kernel = rng.normal(size=(4, 5)).astype(np.float32)
  variables = {"params": {"kernel": kernel}}
  expected = np.zeros(x.shape)
  for b, t, w in np.ndindex(2, 9, 4):
    if t >= w and ids[b, t] == ids[b, t - w]:
      expected[b, t] += kernel[w] * x[b, t - w]
  expected /= 1 + np.exp(-expected)
  out = jax.jit(module.apply)(variables, x, segment_ids=ids)
  np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize(
  ("shape", "taps"),
  [((2, 7, 3), (3,)), ((2, 3, 3), (7,)), ((2, 5, 4, 3), (3, 5))],
)
def test_a_depthwise_convolution_is_its_sum(shape, taps):
  rng = np.random.default_rng(1)
  x = rng.standard_normal(shape)
  kernel = rng.standard_normal((*taps, shape[-1]))
  sides = [(n // 2, n // 2) for n in taps]
  padded = np.pad(x, [(0, 0), *sides, (0, 0)])
  expected = np.zeros(shape)
  for at in np.ndindex(*taps):
    moved = tuple(slice(i, i + n) for i, n in zip(at, shape[1:-1], strict=True))
    expected += kernel[at] * padded[(slice(None), *moved)]
  got = jax.jit(depthwise)(x.astype(np.float32), kernel.astype(np.float32))
  np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
  ("norm", "gate", "exclusive"),
  [("rms", "sigmoid", False), ("group", "sigmoid_head", True)],
)
def test_norms_and_gates_are_their_formulas(norm, gate, exclusive):
  """The module written out, from the result of its mechanism."""
  dims = Dims(num_heads=2, num_kv_heads=2, head_dim=4, max_length=6)
  choices = {"output_norm": norm, "output_gate": gate, "exclusive": exclusive}
  options = {"features": 8, "dtype": "float32"}
  module = MultiHeadAttention(
    dense(), dims, config=models.SlotConfig(**choices), **options
  )
  x = np.random.default_rng(0).normal(size=(1, 6, 8)).astype(np.float32)
  params = jax.jit(module.init)(jax.random.key(0), x)["params"]
  names = jax.tree.map(np.asarray, params)
  names["out_norm"] = {
    name: value + 0.3 for name, value in names["out_norm"].items()
  }
  got = jax.jit(module.apply)({"params": names}, x)
  query, key, value = (
    (x @ names[name]["kernel"]).reshape(1, 6, 2, 4)
    for name in ("query", "key", "value")
  )
  weights = np.exp(np.einsum("btnh,bsnh->bnts", query, key) / 2)
  weights /= weights.sum(-1, keepdims=True)
  out = np.einsum("bnts,bsnh->btnh", weights, value)
  if exclusive:
    own = value / np.linalg.norm(value, axis=-1, keepdims=True)
    out = out - np.sum(out * own, axis=-1, keepdims=True) * own
    assert np.abs(np.sum(out * value, axis=-1)).max() < 1e-5
  if norm == "group":
    out = out - out.mean(-1, keepdims=True)
  out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6)
  out = out * names["out_norm"]["scale"]
  if norm == "group":
    out = out + names["out_norm"]["bias"]
  gates = 1 / (1 + np.exp(-x @ names["gate"]["kernel"]))
  out = out * gates.reshape(1, 6, 2, -1)
  expected = out.reshape(1, 6, 8) @ names["out"]["kernel"]
  np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("gate", ["sigmoid", "sigmoid_first"])
def test_gates_of_low_rank_are_their_formulas(gate):
  """σ(x W₁ W₂) of Kimi Linear, and σ(x W₁) W₂ of RWKV-7, which may be negative."""
  dims = Dims(num_heads=2, num_kv_heads=2, head_dim=4, max_length=6)
  config = models.SlotConfig(output_gate=gate, output_gate_rank=3)
  options = {"features": 8, "dtype": "float32"}
  module = MultiHeadAttention(dense(), dims, config=config, **options)
  x = np.random.default_rng(0).normal(size=(1, 6, 8)).astype(np.float32)
  params = module.init(jax.random.key(0), x)["params"]
  kernels = jax.tree.map(np.asarray, params)
  down, up = (kernels.pop(name)["kernel"] for name in ("gate_down", "gate"))
  assert (down.shape, up.shape) == ((8, 3), (3, 8))
  open_module = MultiHeadAttention(
    dense(), dims, config=models.SlotConfig(), **options
  )
  open_out = kernels.pop("out")["kernel"]
  kernels["out"] = {"kernel": np.eye(8, dtype=np.float32)}
  ungated = open_module.apply({"params": kernels}, x)

  def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))

  first = gate == "sigmoid_first"
  gates = sigmoid(x @ down) @ up if first else sigmoid(x @ down @ up)
  assert (gates.min() < 0.0) == first
  found = module.apply({"params": params}, x)
  expected = (ungated * gates) @ open_out
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_layer_without_a_gate_has_no_rank():
  gate = {"output_gate": "sigmoid", "output_gate_rank": 3}
  around = models.AroundConfig(), models.AroundConfig(output_gate="none")
  names = ("gated_delta", "flash")
  _, variables, _ = create(names, decoder_around=around, **gate)
  has_gate = [
    "gate_down" in variables["params"][f"decoder_{i}"]["self_attention"]
    for i in range(2)
  ]
  assert has_gate == [True, False]


def test_a_rank_without_its_gate_is_refused():
  assert_refused(
    models.SlotConfig,
    {"output_gate_rank": 3},
    ("output_gate_rank", {"output_gate": "sigmoid_first"}),
  )


def test_layers_take_overrides_in_turn():
  """Other mechanisms keep the overrides of layers."""
  overrides = WIDE, models.AroundConfig()
  model, variables, _ = create(
    ("gated_delta", "flash", "flash", "flash"), decoder_around=overrides
  )

  def widths(variables):
    modules = [
      variables["params"][f"decoder_{i}"]["self_attention"] for i in range(4)
    ]
    return [
      {name: module[name]["kernel"].shape for name in ("query", "value", "out")}
      for module in modules
    ]

  wide = {"query": (16, 15), "value": (16, 18), "out": (18, 16)}
  own = {"query": (16, 16), "value": (16, 16), "out": (16, 16)}
  assert widths(variables) == [wide, own, wide, own]
  flash = models.AttentionConfig("flash")
  config = dataclasses.replace(model.config, decoder_attention=flash)
  _, swapped, _ = create(["flash"] * 4, decoder_around=overrides)
  assert config.decoder_around == overrides
  assert widths(swapped) == widths(variables)
  assert models.slots(config) == "flash"
  assert models.slots(model.config) == "gated_delta + flash + flash + flash"


def test_choices_of_a_decoder_that_cannot_be():
  narrow = (models.AroundConfig(head_dim=7),)
  assert_refused(
    create,
    # Its values are its own.
    {"exclusive": True, "attention": "latent"},
    # Not at the head dimension of another layer, which is 8.
    (
      "decoder_attention",
      {"attention": "differential", "decoder_around": narrow},
    ),
    {"encoder_around": (models.AroundConfig(),), "attention": "flash"},
  )


def test_choices_of_an_encoder_that_nothing_reads():
  config = {"features": 8, "num_heads": 2, "mlp_features": 8, "head": "hidden"}
  convolved = models.AroundConfig(short_convolution=True)
  assert_refused(
    lambda **choices: nested.make(
      models.ModelConfig, kind="encoder", num_layers=3, **config | choices
    ),
    *({"encoder_around": ()}, {"short_convolution": True}),
    ("encoder_around[0].short_convolution", {"encoder_around": (convolved,)}),
    {"input_norm": False, "norm": "post"},
    *({"mean_pooling": True}, {"head_transform": True}),
    {"transform_bias": False},
    {"transform_activation": "rlu", "head": "class", "head_transform": True},
  )
