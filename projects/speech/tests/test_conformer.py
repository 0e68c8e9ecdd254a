"""The Conformer against the formulas of its paper, and against its padding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS
from attention.testing import assert_close
import models
from projects.speech import features as speech_features
from projects.speech.config import ConformerConfig, ExtractorConfig
from tests.models import tiny
from tests.refusals import assert_refused

BANDS, FRAMES, VOCAB_SIZE = 5, 48, 6


def config(**changes):
  sizes = {"num_layers": 1, "num_heads": 2, "features": 16, "mlp_features": 24}
  return ConformerConfig(**{**sizes, "kernel_size": 5, **changes})


def create(frames=FRAMES, **changes):
  return tiny.of_config(
    config(**changes),
    target_vocab_size=VOCAB_SIZE,
    max_target_length=8,
    input_shapes={"frames": (frames, BANDS)},
  )


def batch(lengths=(41, 17, 1, 0), frames=FRAMES, seed=0):
  rng = np.random.default_rng(seed)
  heard = rng.standard_normal((len(lengths), frames, BANDS), np.float32)
  mask = np.arange(frames)[None] < np.array(lengths)[:, None]
  return {"frames": np.where(mask[..., None], heard, 0), "source_mask": mask}


forward_and_state = jax.jit(models.forward_and_state, static_argnums=0)


def drawn(model, seed=0):
  """Wide variables: no bias 0, no statistic 0 or 1."""
  shapes = jax.eval_shape(
    lambda: models.initialize(model, jax.random.key(0), batch())
  )
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    noise = rng.standard_normal(leaf.shape).astype(leaf.dtype)
    if name.endswith(("['scale']", "['var']")):
      return np.exp(0.3 * noise)
    if leaf.ndim < 2 or "_bias" in name:
      return 0.5 * noise
    return 1.5 * noise / leaf.shape[0] ** 0.5

  return jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.mark.parametrize(
  "frames",
  [7, *(pytest.param(x, marks=pytest.mark.thorough) for x in (1, 2, 3, 4))],
)
def test_subsampling_is_two_strided_convolutions(frames):
  """As XLA's own convolution with stride 2, and a projection."""
  module = speech_features.Subsampling(config())
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, frames, BANDS)).astype(np.float32)
  variables = jax.jit(lambda key: module.init(key, x, None))(jax.random.key(0))
  got, mask = jax.jit(lambda v: module.apply(v, x, None))(variables)
  assert mask is None
  assert got.shape[1] == speech_features.num_positions(frames)

  @jax.jit
  def by_convolutions(params):
    y = x
    for i in range(2):
      one = params[f"convolution_{i}"]
      kernel = one["kernel"].reshape(3, y.shape[-1], -1)
      y = jax.lax.conv_general_dilated(
        y, kernel, (2,), [(1, 1)], dimension_numbers=("NTC", "TIO", "NTC")
      )
      y = jax.nn.relu(y + one["bias"][None, None])
    last = params["projection"]
    return y @ last["kernel"] + last["bias"][None, None]

  expected = by_convolutions(variables["params"])
  np.testing.assert_allclose(got, expected, atol=1e-5)


# Padding.


@pytest.mark.parametrize("position", ["transformer_xl", "rotary_inputs"])
def test_what_padding_holds_changes_nothing(position):
  """No logit, no gradient, no running statistic; not even by NaN."""
  model = create(position=position)
  variables = drawn(model)
  quiet = batch()
  there = quiet["source_mask"][..., None]
  loud = quiet | {"frames": np.where(there, quiet["frames"], np.nan)}
  kept = quiet["source_mask"][:, ::4]

  @jax.jit
  def outcome(inputs):
    def objective(params):
      logits, stats = models.forward_and_state(
        model, {**variables, "params": params}, inputs, dropout_rng=None
      )
      return jnp.sum(jnp.where(kept[..., None], logits, 0) ** 2), stats

    gradient, stats = jax.grad(objective, has_aux=True)(variables["params"])
    logits = models.forward(model, variables, inputs)
    return gradient, stats, jnp.where(kept[..., None], logits, 0)

  first, second = outcome(quiet), outcome(loud)
  for leaf in jax.tree.leaves(first):
    assert np.isfinite(leaf).all()
  chex.assert_trees_all_equal(first, second)


def test_the_last_kernels_of_sub_layers_begin_smaller():
  """By 1/√(four times the number of layers)."""
  model = create(num_layers=2, features=64, mlp_features=96)
  params = tiny.initialize(model, jax.random.key(0), batch())["params"]
  for i in range(2):
    layer = params[f"encoder_{i}"]
    for part, fan_in in (
      *(("first_mlp", 96), ("last_mlp", 96)),
      *(("self_attention", 64), ("convolution", 64)),
    ):
      std = np.std(layer[part]["out"]["kernel"])
      assert std == pytest.approx((fan_in * 8) ** -0.5, rel=0.04), part


def test_where_dropout_is():
  """Of the front's output, and of each of a layer's four sub-layers."""
  model = create(dropout_rate=0.5)
  found = tiny.dropouts(model, drawn(model), batch())
  assert found == {"": 1, "encoder_0": 4}


def test_how_much_padding_there_is_changes_nothing():
  model = create(frames=80)
  variables = drawn(model)
  short, long = batch((41, 17, 1)), batch((41, 17, 1), frames=80)
  long["frames"][:, :FRAMES] = short["frames"]
  (first, first_stats), (second, second_stats) = (
    forward_and_state(model, variables, x, dropout_rng=None)
    for x in (short, long)
  )
  kept = short["source_mask"][:, ::4]
  assert_close(second[:, : FRAMES // 4][kept], first[kept], 1e-5)
  jax.tree.map(lambda x, y: assert_close(x, y, 1e-5), second_stats, first_stats)


# Mechanisms and refusals.


@pytest.mark.parametrize(
  "name", ["performer", pytest.param("dense", marks=pytest.mark.thorough)]
)
def test_every_mechanism_that_can_serve(name):
  """With tables by distance, and without any."""
  model = create(
    position="transformer_xl" if name == "dense" else "rotary",
    encoder_attention=tiny.attention(name),
  )
  inputs = batch((41, 17))
  variables = tiny.variables_of(model, inputs)
  for leaf in jax.tree.leaves(tiny.gradients(model, variables, inputs)):
    assert np.isfinite(leaf).all()
  if name == "dense":
    maps = tiny.attention_maps(model, variables, inputs)
    assert {n: x.shape for n, x in maps.items()} == {
      "encoder_0/self_attention": (2, 2, 12, 12)
    }


def test_mechanisms_without_tables_by_distance_are_refused():
  needs = ("bidirectional", "mask", "relative")
  others = set(ATTENTIONS) - set(tiny.names(*needs))
  assert {"performer", "linformer", "lsh"} <= others
  for name in others:
    with pytest.raises(ValueError, match=r"^encoder_attention: .* cannot"):
      config(encoder_attention=tiny.attention(name))


def test_configs_that_cannot_be():
  assert_refused(
    config,
    *({"kernel_size": 4}, {"position": "shaw"}, {"features": 15}),
    *({"features": 18, "num_heads": 4}, {"position": "rotary", "features": 6}),
    *({"num_layers": 0}, {"activation": "mish"}, {"encoder_attention": ()}),
    {"encoder_attention": models.AttentionConfig("window_linear")},
  )
  sizes = {"features": (4, 4), "kernel_sizes": (3, 3), "strides": (2, 2)}
  assert_refused(
    lambda **changes: ExtractorConfig(**sizes | changes),
    *({"strides": (2,)}, {"features": ()}),
    ("kernel_sizes[1]", {"kernel_sizes": (3, 0)}),
    {"norm": "batch"},
  )


def test_tasks_that_do_not_fit():
  sizes = {f"{x}_vocab_size": 5 for x in ("source", "target")}
  sizes |= {f"max_{x}_length": 9 for x in ("source", "target")}
  with pytest.raises(ValueError, match=r"^kind: 'conformer' reads log-mel"):
    models.create(config(), **sizes)
  extractor = ExtractorConfig(features=(4,), kernel_sizes=(3,), strides=(2,))
  with pytest.raises(ValueError, match=r"^extractor: it reads samples"):
    models.create(
      config(extractor=extractor), **sizes, input_shapes={"frames": (8, 5)}
    )
  wide = models.AttentionConfig("sliding_window", {"window": 20})
  with pytest.raises(ValueError, match=r"^encoder_attention: window: 20"):
    create(encoder_attention=wide)
  model = create()
  inputs = batch((41,))
  variables = drawn(model)
  long = {name: np.repeat(x, 2, axis=1) for name, x in inputs.items()}
  with pytest.raises(ValueError, match=r"^frames: 96 positions are more"):
    tiny.forward(model, variables, long)


def test_every_fourth_frame_has_a_position():
  """200 frames are 50 positions, of which a window sees at most 49 others."""
  sizes = {f"{x}_vocab_size": 5 for x in ("source", "target")}
  sizes |= {f"max_{x}_length": 9 for x in ("source", "target")}
  sizes |= {"input_shapes": {"frames": (200, BANDS)}}

  def create_window(window):
    window = models.AttentionConfig("sliding_window", {"window": window})
    return models.create(config(encoder_attention=window), **sizes)

  assert create_window(49).max_length == 50
  with pytest.raises(ValueError, match=r"^encoder_attention: window: 50"):
    create_window(50)


def test_bfloat16_is_close():
  model, half = create(), create(dtype="bfloat16")
  variables = drawn(model)
  inputs = batch((41, 17))
  out = tiny.forward(model, variables, inputs)
  got = tiny.forward(half, variables, inputs)
  assert got.dtype == jnp.float32
  kept = inputs["source_mask"][:, ::4]
  assert_close(got[kept], out[kept], 0.1)
