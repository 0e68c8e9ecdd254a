"""Perceiver IO: equal to its paper, with any mechanism, at any length."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import models
from projects.perceiver.config import PerceiverConfig
from projects.perceiver.pixels import fourier_features
from projects.perceiver.tests import perceiver_paper as paper
from tests.models import tiny
from tests.refusals import assert_refused

VOCAB, LENGTH, SHAPE, CLASSES = 11, 13, (3, 5, 2), 4
WIDTHS = {
  **{"num_latents": 5, "num_layers": 1, "num_heads": 2, "features": 8},
  **{"mlp_features": 12, "input_features": 6, "input_heads": 3},
  **{"input_value_features": 9},
}
CONFIG = PerceiverConfig(
  **{**WIDTHS, "num_blocks": 2, "query_features": 10, "value_features": 4},
  **{"input_mlp_features": 7, "output_heads": 2},
  **{"output_query_features": 14, "output_residual": False},
)
OF_IMAGES = PerceiverConfig(
  **WIDTHS, fourier_bands=3, head="class", input_residual=False
)


def create(config=CONFIG, **sizes):
  if config.fourier_bands is not None:
    of_task = {"target_vocab_size": CLASSES, "input_shapes": {"image": SHAPE}}
    return tiny.of_config(config, **(of_task | sizes))
  of_task = {"source_vocab_size": VOCAB, "target_vocab_size": VOCAB}
  of_task |= {"max_source_length": LENGTH, "max_target_length": LENGTH}
  return models.create(
    config, **{**of_task, "shared_vocabulary": True, **sizes}
  )


def drawn(model, scale=0.3, dtype=np.float32):
  """Variables with no zero and no one among them."""
  rng = np.random.default_rng(0)
  key = jax.random.key(0)
  shapes = jax.eval_shape(
    lambda: models.initialize(model, key, model.example())
  )

  def draw(leaf):
    return np.asarray(scale * rng.standard_normal(leaf.shape) + 0.1, dtype)

  return jax.tree.map(draw, shapes)


def some_ids(length=LENGTH):
  """Rows of different lengths, one with nothing at all; and what is there."""
  ids = np.random.default_rng(1).integers(1, VOCAB, (4, length))
  lengths = np.array([length, max(length - 4, 1), 1, 0])
  present = np.arange(length) < lengths[:, None]
  return {"source": (ids * present).astype(np.int32), "source_mask": present}


def test_images_are_read_pixel_by_pixel():
  """As in the paper, of another size than the one that it was made for."""
  config = dataclasses.replace(
    OF_IMAGES, dtype="float64", param_dtype="float64"
  )
  batch = {"image": np.random.default_rng(3).standard_normal((2, 7, 2, 2))}
  with jax.enable_x64(True):
    model = create(config)
    params = drawn(model, dtype=np.float64)["params"]
    logits = tiny.forward(model, {"params": params}, batch)
  assert (logits.dtype, logits.shape) == (np.float64, (2, 1, CLASSES))
  wanted = [paper.of_image(config, params, image) for image in batch["image"]]
  np.testing.assert_allclose(logits, wanted, rtol=1e-10, atol=1e-10)


def test_padding_changes_nothing_and_its_place_is_told():
  model = create()
  variables, batch = drawn(model), some_ids(9)
  before = tiny.forward(model, variables, batch)
  longer = {name: np.pad(x, ((0, 0), (0, 4))) for name, x in batch.items()}
  strange = longer["source"].copy()
  strange[:, -1] = 3
  # Without a mask, what is padding has the id of padding.
  for same in (longer, {**longer, "source": strange}, longer["source"]):
    same = same if isinstance(same, dict) else {"source": same}
    np.testing.assert_allclose(
      before, tiny.forward(model, variables, same), atol=1e-5
    )
  after = tiny.forward(model, variables, {"source": strange})
  assert np.abs(before - after).min(axis=(1, 2)).max() > 0


def test_gradients_are_finite():
  """With huge logits, and where a row has nothing to read."""
  model = create()
  variables, batch = drawn(model, 100.0), some_ids()

  def loss(params):
    logits = models.forward(model, {"params": params}, batch)
    return jax.nn.log_softmax(logits)[..., 0].sum()

  for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(variables["params"])):
    assert np.isfinite(leaf).all()


def test_bfloat16():
  model = create()
  variables, batch = drawn(model), some_ids()
  half = create(dataclasses.replace(CONFIG, dtype="bfloat16"))
  found = tiny.forward(half, variables, batch)
  wanted = tiny.forward(model, variables, batch)
  assert found.dtype == np.float32
  assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()


def test_as_many_outputs_as_a_batch_has_targets():
  model = create()
  variables, batch = drawn(model), some_ids()
  every = tiny.forward(model, variables, batch)
  batch["targets"] = np.zeros((4, 7), np.int32)
  some = tiny.forward(model, variables, batch)
  np.testing.assert_allclose(some, every[:, :7], atol=1e-6)
  for longer, message in (
    ({**batch, "targets": np.zeros((4, LENGTH + 1), np.int32)}, "targets: 14"),
    ({"source": np.ones((1, LENGTH + 1), np.int32)}, "source: 14 positions"),
  ):
    with pytest.raises(ValueError, match=f"^{message}"):
      tiny.forward(model, variables, longer)


def test_blocks_share_their_weights():
  """The same layers are passed as often as there are blocks."""
  for count in (1, 3):
    sizes = {"num_blocks": count, "num_layers": 2}
    model = create(dataclasses.replace(CONFIG, **sizes))
    seen = tiny.calls(model, drawn(model), some_ids())
    assert [place for place, *_ in seen] == [
      "encoder/cross_attention",
      *["encoder_0/self_attention", "encoder_1/self_attention"] * count,
      "decoder/cross_attention",
    ]
  # Heads, and widths of queries and values, are those of each attention.
  shapes = [tuple(x.shape for x in call[2:5]) for call in seen]
  assert shapes[0] == ((4, 5, 3, 2), (4, 13, 3, 2), (4, 13, 3, 3))
  assert shapes[1] == ((4, 5, 2, 5), (4, 5, 2, 5), (4, 5, 2, 2))
  assert shapes[-1] == ((4, 13, 2, 7), (4, 5, 2, 7), (4, 5, 2, 3))


def test_maps_of_every_attention():
  model = create()
  variables, batch = drawn(model), some_ids()
  maps = tiny.attention_maps(model, variables, batch)
  assert {name: x.shape for name, x in maps.items()} == {
    "encoder/cross_attention": (4, 3, 5, 13),
    "encoder_0/self_attention": (4, 2, 5, 5),
    "decoder/cross_attention": (4, 2, 13, 5),
  }
  read = np.asarray(maps["encoder/cross_attention"])
  there = batch["source_mask"]
  assert not (read * ~there[:, None, None]).any()
  sums = np.broadcast_to(there.any(1)[:, None, None], read.shape[:3])
  np.testing.assert_allclose(read.sum(-1), sums, atol=1e-5)
  once = create(dataclasses.replace(CONFIG, num_blocks=1))
  first = tiny.attention_maps(once, variables, batch)
  # Of layers that are passed twice, what they attend to the second time.
  name = "encoder_0/self_attention"
  assert np.abs(maps[name] - first[name]).max() > 1e-3


@pytest.mark.parametrize(
  ("slot", "name"),
  [
    ("cross", "linformer"),
    pytest.param("encoder", "performer", marks=pytest.mark.thorough),
  ],
)
def test_other_mechanisms_serve(slot, name):
  """Every parameter has a finite gradient, and most are not zero."""
  changes = {f"{slot}_attention": tiny.attention(name)}
  if slot == "encoder":  # Values as wide as queries.
    changes |= {"query_features": None, "value_features": None}
  model = create(dataclasses.replace(CONFIG, **changes))
  batch = some_ids(12)
  variables = tiny.variables_of(model, batch)
  slopes = jax.tree.leaves(tiny.gradients(model, variables, batch))
  assert all(np.isfinite(leaf).all() for leaf in slopes)
  moved = sum(bool(np.abs(leaf).max() > 0) for leaf in slopes)
  assert moved > 0.9 * len(slopes)


def test_the_two_cross_attentions_are_two_choices():
  linear, flash = tiny.attention("linear"), tiny.attention("flash")
  config = dataclasses.replace(CONFIG, cross_attention=(linear, flash))
  model = create(config)
  assert models.slots(config) == "dense · linear + flash"
  records = {x[0]: x[1] for x in tiny.calls(model, drawn(model), some_ids())}
  assert records["encoder/cross_attention"] == linear.build()
  assert records["decoder/cross_attention"] == flash.build()


def initial(**changes):
  model = create(dataclasses.replace(CONFIG, **changes))
  return models.initialize(model, jax.random.key(0), model.example())["params"]


def test_initial_values():
  """Sines of positions and queries have a deviation of 0.02, as have latents."""
  params = initial(num_latents=400, input_features=24)
  np.testing.assert_allclose(params["latents"].std(), 0.02, rtol=0.05)
  for name in ("positions", "queries"):
    vectors = np.asarray(params[name])
    np.testing.assert_allclose(np.square(vectors).mean(), 0.02**2, rtol=1e-5)
    first, second = np.unique(vectors[0].round(6))  # sin 0 and cos 0
    assert (first, second) == pytest.approx((0, 0.02 * 2**0.5), abs=1e-6)
  # An output of every pass is added: eight have half the deviation of two.
  two, eight = initial(num_blocks=2), initial(num_blocks=8)
  for part in ("self_attention", "mlp"):
    pairs = zip(
      *(jax.tree.leaves(x["encoder_0"][part]) for x in (two, eight)),
      strict=True,
    )
    changed = [(a, b) for a, b in pairs if (a != b).any()]
    assert len(changed) == 1
    np.testing.assert_allclose(changed[0][0], 2 * changed[0][1], rtol=1e-5)
  # 1 / √(2 · depth) of what keeps a variance of 1: a half of it for two passes.
  kernel = np.asarray(changed[0][0])
  np.testing.assert_allclose(kernel.std() * len(kernel) ** 0.5, 0.5, rtol=0.2)
  np.testing.assert_array_equal(
    *(jax.tree.leaves(x["encoder"]["mlp"])[-1] for x in (two, eight))
  )


def test_where_dropout_is():
  """Of each sub-layer's output, in every pass through the layers."""
  model = create(dataclasses.replace(CONFIG, dropout_rate=0.5))
  among = CONFIG.num_blocks * 2
  layers = {f"encoder_{i}": among for i in range(CONFIG.num_layers)}
  found = tiny.dropouts(model, drawn(model), some_ids())
  assert found == {"encoder": 2, **layers, "decoder": 2}


def test_fourier_features():
  found = fourier_features((3, 5), 4)
  np.testing.assert_allclose(found, paper.places(3, 5, 4), atol=1e-12)
  # An axis of one pixel has one place.
  assert fourier_features((1, 2), 2).shape == (2, 10)


def test_configs_that_cannot_be():
  assert_refused(
    functools.partial(dataclasses.replace, CONFIG),
    *({"kind": "encoder"}, {"head": "hidden"}, {"num_latents": 0}),
    *({"output_mlp_features": 0}, {"dropout_rate": 1.0}),
    ("query_features", {"num_heads": 3}),
    {"value_features": 5},
    ("input_query_features", {"input_heads": 4}),
    ("output_query_features", {"output_heads": 4}),
    {"output_features": 8},
    ("head", {"fourier_bands": 3}),
    *({"activation": "mish"}, {"cross_attention": ()}),
    {"cross_attention": (tiny.attention("dense"),) * 3},
    {"cross_attention": tiny.attention("nystrom")},
    {"encoder_attention": tiny.attention("window_linear")},
  )


LOW = (models.AttentionConfig("linformer", {"rank": 6}),) * 2


def test_sizes_that_do_not_fit():
  assert_refused(
    create,
    *({"max_source_length": None}, {"source_vocab_size": 0}),
    {"max_target_length": None},
  )
  for config, sizes, message in (
    (CONFIG, {"input_shapes": {"image": SHAPE}}, "fourier_bands: expected the"),
    (OF_IMAGES, {"input_shapes": {}}, "fourier_bands: expected None for"),
    (CONFIG, {"shared_vocabulary": False}, "head: 'tokens' predicts the ids"),
    (CONFIG, {"target_vocab_size": 5}, "head: 'tokens' predicts the ids"),
    # A rank above the latents.
    (dataclasses.replace(CONFIG, cross_attention=LOW), {}, "cross_attention: "),
  ):
    with pytest.raises(ValueError, match=f"^{message}"):
      create(config, **sizes)


def test_classes_of_a_text():
  config = dataclasses.replace(CONFIG, head="class", output_query_features=None)
  model = create(config, target_vocab_size=CLASSES, shared_vocabulary=False)
  batch = {**some_ids(), "targets": np.zeros((4, 1), np.int32)}
  variables = drawn(model)
  logits = jax.eval_shape(lambda: models.forward(model, variables, batch))
  assert logits.shape == (4, 1, CLASSES)


def test_calls_that_are_refused():
  model, call = create(), {"max_length": 2, "bos_id": 1, "eos_id": 2}
  source = some_ids()["source"]
  with pytest.raises(ValueError, match="kind 'perceiver' cannot generate"):
    models.generate(model, drawn(model), source=source, **call)
  model = create(OF_IMAGES)
  with pytest.raises(ValueError, match=r"^image: expected \[B, H, W, 2\]"):
    tiny.forward(model, drawn(model), {"image": np.zeros((1, 3, 5, 1))})
