"""What holds for any mechanism, norm and position in the Transformer."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import embeddings, nested
from models.block import Block
from tests.attention.forms import KINDS
from tests.models import tiny
from tests.refusals import assert_refused

# The contract tests each mechanism; this file tests the models.
CAUSAL = [name for name in KINDS if name in tiny.names("causal")]


def _inputs():
  return {"inputs": tiny.batch()["inputs"]}


def test_a_row_of_padding_has_a_mean_that_is_no_nan():
  """The last batch of an evaluation has such rows; NaN times weight 0 is NaN."""
  model = tiny.create("encoder", head="class", mean_pooling=True)
  variables = tiny.initialized(model)
  source = np.array([[3, 1, 5, 0], [2, 6, 0, 0], [0, 0, 0, 0]])
  logits = tiny.forward(model, variables, {"source": source})
  assert np.isfinite(logits).all()
  for row, length in ((0, 3), (1, 2)):
    alone = {"source": source[row : row + 1, :length]}
    expected = tiny.forward(model, variables, alone)
    np.testing.assert_allclose(logits[row], expected[0], rtol=1e-5, atol=1e-6)
  gradients = tiny.gradients(model, variables, {"source": source})
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", CAUSAL)
def test_future_inputs_change_no_earlier_logits(name):
  model = tiny.create("decoder", decoder_attention=tiny.attention(name))
  variables, later = tiny.initialized(model), _inputs()
  later["inputs"][:, 5:] = 2
  before = tiny.forward(model, variables, _inputs())
  after = tiny.forward(model, variables, later)
  np.testing.assert_array_equal(before[:, :5], after[:, :5])
  assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3


@pytest.mark.parametrize(
  ("encoder", "cross"),
  [("dense", "dense"), ("linformer", "linformer"), ("lsh", "linear")],
)
def test_padding_of_the_source_changes_nothing(encoder, cross):
  """Even where the embedding of padding is NaN."""
  model = tiny.create(
    shared_vocabulary=False,
    encoder_attention=tiny.attention(encoder),
    cross_attention=tiny.attention(cross),
  )
  variables, batch = tiny.initialized(model), tiny.batch()
  padded = {**batch, "source": np.pad(batch["source"], ((0, 0), (0, 4)))}
  expected = tiny.forward(model, variables, batch)
  params = dict(variables["params"])
  embedding = np.array(params["source_embedding"]["embedding"])
  embedding[models.PAD_ID] = np.nan
  params["source_embedding"] = {"embedding": embedding}
  got = tiny.forward(model, {**variables, "params": params}, padded)
  np.testing.assert_allclose(got, expected, atol=1e-5)


def test_sinusoidal_is_vaswani():
  length, features = 50, 12
  expected = np.zeros((length, features))
  for p, i in np.ndindex(length, features // 2):
    angle = p / 10000.0 ** (2 * i / features)
    expected[p, 2 * i : 2 * i + 2] = np.sin(angle), np.cos(angle)
  got = embeddings.sinusoidal(jnp.arange(length)[None], features)
  assert got.shape == (1, length, features)
  np.testing.assert_allclose(got[0], expected, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_first_loss_and_first_steps(norm):
  """Loss starts near that of a uniform guess and falls at once."""
  model = tiny.create("decoder", norm=norm, features=32)
  batch = tiny.batch()
  variables = tiny.initialize(model, jax.random.key(0), batch)
  targets = jax.nn.one_hot(tiny.batch(1)["inputs"], tiny.VOCAB_SIZE)

  @jax.jit
  def step(params):
    def loss(params):
      logits = models.forward(model, {"params": params, "constants": {}}, batch)
      return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))

    value, gradient = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

  params, losses = variables["params"], []
  for _ in range(10):
    value, params = step(params)
    losses.append(float(value))
  assert abs(losses[0] - np.log(tiny.VOCAB_SIZE)) < 0.2
  assert losses[-1] < 0.9 * losses[0]
  # A final norm belongs to 'pre' only.
  assert ("decoder_norm" in params) == (norm == "pre")


def test_one_table_where_vocabulary_and_softmax_are_shared():
  def tables(model):
    params = tiny.initialized(model)["params"]
    return {name for name in params if name.endswith("embedding")}

  source, target = "source_embedding", "target_embedding"
  assert tables(tiny.create()) == {target}
  assert tables(tiny.create("encoder")) == {target}
  assert tables(tiny.create(shared_vocabulary=False)) == {source, target}
  untied = tiny.create(tie_embeddings=False)
  assert tables(untied) == {source, target, "output_embedding"}


def test_the_last_kernels_of_sub_layers_begin_smaller():
  """By 1/√(number of sub-layers of the stack), as in GPT-2; others by 1/√fan-in."""
  model = tiny.create(num_layers=2, features=64, mlp_features=96)
  params = tiny.initialize(model, jax.random.key(0), tiny.batch())["params"]
  for stack, parts in (("encoder", 2), ("decoder", 3)):
    for i in range(2):
      layer = params[f"{stack}_{i}"]
      attention, mlp = layer["self_attention"], layer["mlp"]
      for kernel, expected in (
        (attention["query"]["kernel"], 1 / 8),
        (attention["out"]["kernel"], 1 / 8 / np.sqrt(2 * parts)),
        (mlp["out"]["kernel"], 1 / np.sqrt(96 * 2 * parts)),
      ):
        assert np.std(kernel) == pytest.approx(expected, rel=0.04)


def test_parameters_are_those_of_the_paper():
  """Per layer 4F² + 2FM + M + F and two norms; the table once."""
  model = tiny.create("decoder")
  params = tiny.initialized(model)["params"]
  features, hidden = 16, 32
  layer = 4 * features**2 + 2 * features * hidden + hidden + features
  norms = (2 + 1) * 2 * features
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert count == layer + norms + tiny.VOCAB_SIZE * features


@pytest.mark.parametrize("name", CAUSAL)
def test_bfloat16_compute_with_float32_parameters(name):
  full = tiny.create("decoder", decoder_attention=tiny.attention(name))
  low = full.clone(config=dataclasses.replace(full.config, dtype="bfloat16"))
  variables, batch = tiny.initialized(full), _inputs()
  assert {leaf.dtype for leaf in jax.tree.leaves(variables["params"])} == {
    jnp.dtype("float32")
  }
  logits = tiny.forward(low, variables, batch)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(
    logits, tiny.forward(full, variables, batch), atol=0.1
  )


@pytest.mark.parametrize("gated", [False, True])
def test_every_layer_computes_in_bfloat16(gated):
  """All but the logits, whose softmax is taken in float32."""
  model = tiny.create(dtype="bfloat16", gated=gated)
  inputs, options = model.arguments(tiny.batch())

  def outputs(variables):
    capture = {"capture_intermediates": True, "mutable": ["intermediates"]}
    return model.apply(variables, *inputs, **options, **capture)[1]

  found = jax.eval_shape(outputs, tiny.initialized(model))["intermediates"]
  wide = {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, x in jax.tree_util.tree_leaves_with_path(found)
    if x.dtype != jnp.bfloat16
  }
  assert wide == {"__call__/0", "head/__call__/0"}
  assert "mlp" in found["decoder_0"]
  assert "mlp" in found["encoder_0"]


def test_where_dropout_is():
  """Of both sums of embeddings, and of each sub-layer's output (section 5.4)."""
  model = tiny.create(num_layers=2, dropout_rate=0.5)
  variables, batch = tiny.initialized(model), tiny.batch()
  assert tiny.dropouts(model, variables, batch) == {
    "": 2,
    **{"encoder_0": 2, "encoder_1": 2},
    **{"decoder_0": 3, "decoder_1": 3},
  }


def test_every_attention_drops_its_weights(monkeypatch):
  """At the rate of the config, with a key of its own."""
  build, rates, keys = models.AttentionConfig.build, [], []

  def recorded(config):
    attention = build(config)

    def apply(*arrays, **options):
      if "dropout_rng" in options:
        rates.append(options["dropout_rate"])
        keys.append(jax.random.key_data(options["dropout_rng"]))
      return attention.apply(*arrays, **options)

    return attention._replace(apply=apply)

  monkeypatch.setattr(models.AttentionConfig, "build", recorded)
  model = tiny.create(attention_dropout_rate=0.2)
  variables, batch = tiny.initialized(model), tiny.batch()

  @jax.jit
  def drawn(variables):
    models.forward(model, variables, batch, dropout_rng=jax.random.key(0))
    return keys

  assert len({tuple(map(int, key)) for key in drawn(variables)}) == 3
  assert rates == [0.2] * 3


@pytest.mark.parametrize("norm", ["pre", "post", "output", "sandwich"])
def test_dropout_is_of_what_a_sub_layer_adds(norm):
  """After the norm of an output, before the norm of a sum; what stays doubles."""
  sizes = {"num_layers": 1, "num_heads": 1, "features": 3, "mlp_features": 0}
  choices = {"dropout_rate": 0.5, "norm": norm, "position": "none"}
  config = nested.make(models.ModelConfig, kind="decoder", **sizes, **choices)
  block = Block(config, tiny.attention("dense"), 4, is_decoder=True)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 4, 3)).astype(np.float32)
  call = {"positions": np.arange(4)[None], "is_causal": True}
  shapes = jax.eval_shape(lambda: block.init(jax.random.key(0), x, **call))
  params = jax.tree.map(
    lambda leaf: rng.normal(1.0, 1.0, leaf.shape).astype(leaf.dtype), shapes
  )

  def normed(x, name):
    mean, std = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    scale, bias = (params["params"][name][key] for key in ("scale", "bias"))
    return (x - mean) / std * scale + bias

  dropping = {"deterministic": False, "rngs": {"dropout": jax.random.key(1)}}

  @jax.jit
  def attended_and_out(params, read):
    attend = {"method": lambda block, x: block.self_attention(x, **call)}
    attended = block.apply(params, read, **attend)
    return attended, block.apply(params, x, **call, **dropping)

  reads_norm = norm in ("pre", "sandwich")
  read = normed(x, "self_attention_norm") if reads_norm else x
  added, got = map(np.asarray, attended_and_out(params, read))
  if norm in ("output", "sandwich"):
    name = "out_norm" if norm == "sandwich" else "norm"
    added = normed(added, f"self_attention_{name}")
  # Each position is as one of the 8 choices of what is kept has it.
  kept = np.array([*itertools.product((0, 2), repeat=3)])[:, None, None]
  expected = x + kept * added
  if norm == "post":
    expected = normed(expected, "self_attention_norm")
  error = np.abs(expected - got).max(-1)
  assert error.min(0).max() < 1e-4
  assert len({*error.argmin(0).ravel()}) > 3


def test_attention_maps_are_named_and_normalised():
  model = tiny.create(num_layers=2, num_kv_heads=1)
  batch = tiny.batch()
  maps = tiny.attention_maps(model, tiny.initialized(model), batch)
  assert {name: matrix.shape for name, matrix in maps.items()} == {
    f"{block}_{layer}/{module}": (3, 2, *shape)
    for layer in range(2)
    for block, module, shape in (
      ("encoder", "self_attention", (6, 6)),
      ("decoder", "self_attention", (8, 8)),
      ("decoder", "cross_attention", (8, 6)),
    )
  }
  for name, matrix in maps.items():
    np.testing.assert_allclose(matrix.sum(-1), 1.0, atol=1e-5)
    if name.startswith("decoder") and name.endswith("self_attention"):
      np.testing.assert_array_equal(matrix, np.tril(matrix))
    else:
      padding = np.broadcast_to(
        (batch["source"] == 0)[:, None, None, :], matrix.shape
      )
      assert not np.asarray(matrix)[padding].any()


def test_lengths_beyond_the_model_raise():
  model = tiny.create()
  for lengths, message in (
    ({"source_length": 13}, r"source: 13 positions .* model's 12"),
    ({"length": 13}, "inputs: 13 positions"),
  ):
    with pytest.raises(ValueError, match=f"^{message}"):
      tiny.forward(model, tiny.initialized(model), tiny.batch(**lengths))


def test_a_batch_without_an_array_or_with_another_mask_is_refused():
  model, batch = tiny.create(), tiny.batch()
  ones = np.ones(batch["source"].shape, int)
  assert_refused(
    lambda **batch: model.arguments(batch), ("batch", {"source": ones})
  )
  assert_refused(
    lambda **more: models.forward(model, tiny.initialized(model), batch | more),
    *({"source_mask": x} for x in (ones, ones[:, :3] > 0)),
    {"inputs_mask": batch["inputs"]},
  )


@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_a_negative_id_is_nan_and_not_an_id_from_the_end(dtype):
  """At a masked position of a source, it is any other id."""
  model = tiny.create()
  variables, batch = tiny.initialized(model), tiny.batch()
  source, inputs = (np.array(batch[x], dtype) for x in ("source", "inputs"))
  source[0, -1], inputs[1, 3] = -100, -1
  mask = source > 0
  out = tiny.forward(
    model, variables, {"source": source, "inputs": inputs, "source_mask": mask}
  )
  assert np.isnan(out[1, 3:]).all()
  source[0, -1] = 0
  expected = tiny.forward(
    model, variables, {"source": source, "inputs": inputs}
  )
  np.testing.assert_array_equal(out[0], expected[0])


def test_models_of_equal_configs_share_compiled_functions():
  one, two = tiny.create(), tiny.create()
  assert one == two
  assert hash(one) == hash(two)
  assert one != tiny.create(norm="post")
