"""A mechanism in some layers of a model, by one program for all choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS
import models
from models.attention_config import AttentionConfig
from models.published import load
from projects.swap import substitution
from tests.models import tiny
from tests.models.published.test_equality import FOLDERS

PERFORMER = AttentionConfig("performer", {"num_features": 16})
WINDOW_LINEAR = AttentionConfig("window_linear", {"window": 4})
NYSTROM = AttentionConfig("nystrom", {"num_landmarks": 4})
GATED_DELTA = AttentionConfig("gated_delta")
FLASH = AttentionConfig("flash")
FORGETTING = AttentionConfig("dense", {"forget": True})


def batch_of(case, rows=2, length=12):
  rng = np.random.default_rng(1)
  ids = rng.integers(5, 60, (rows, length)).astype(np.int32)
  if case.startswith("bert"):
    mask = np.arange(length) < np.array([[length], [length - 3]])
    return {"source": ids, "source_mask": mask}
  if case == "t5":
    mask = np.ones((rows, length), bool)
    return {"source": ids, "source_mask": mask, "inputs": ids[:, :7]}
  return {"inputs": ids}


def places_of(model):
  config = model.config
  return [
    f"{slot.removesuffix('_attention')}_{i}/self_attention"
    for slot in config.attentions
    if slot != "cross_attention"
    for i in range(len(config.layers(slot)))
  ]


def chosen(mechanisms, swapped):
  return {place: np.array(place in swapped) for place in mechanisms}


logits = jax.jit(substitution.logits, static_argnums=(0, 3))
squares_of = jax.jit(substitution.squares, static_argnums=(0, 4))


@pytest.mark.parametrize(
  ("case", "config"),
  [
    pytest.param("gpt2", PERFORMER, marks=pytest.mark.thorough),
    # Grouped heads, rotary positions.
    pytest.param("llama", WINDOW_LINEAR, marks=pytest.mark.thorough),
    # A key mask.
    pytest.param("bert_masked", NYSTROM, marks=pytest.mark.thorough),
    ("t5", FLASH),  # Two stacks, relative positions, unscaled logits.
    # Gates that read what queries are made of.
    ("gpt2", GATED_DELTA),
    # Gates of the model's own, heads of each layer, values of another width.
    pytest.param("qwen3_next", FLASH, marks=pytest.mark.thorough),
    pytest.param("qwen3_next", GATED_DELTA, marks=pytest.mark.thorough),
    pytest.param("mamba2", FLASH, marks=pytest.mark.thorough),
    pytest.param("mamba2", GATED_DELTA, marks=pytest.mark.thorough),
    ("mamba2", FORGETTING),
  ],
)
def test_any_choice_of_layers_is_the_model_that_has_them(case, config):
  p = models.load_pretrained(FOLDERS[case])
  swapped = models.load_pretrained(FOLDERS[case], attention=config)
  batch, places = batch_of(case), places_of(p.model)
  mechanisms = substitution.drawn(swapped.variables, places)
  record = config.build()

  def run(swapped):
    choice = chosen(mechanisms, swapped)
    return logits(p.model, p.variables, batch, record, mechanisms, choice)

  none = run(())
  np.testing.assert_allclose(
    none, tiny.forward(p.model, p.variables, batch), atol=5e-5
  )
  everywhere = run(places)
  np.testing.assert_allclose(
    everywhere,
    tiny.forward(swapped.model, swapped.variables, batch),
    atol=2e-4,
  )
  if (case, config) != ("t5", FLASH):  # Which is equal to its own.
    assert np.abs(everywhere - none).max() > 0.01
  # The first layer alone.
  opened = load.open_folder(FOLDERS[case])
  own = load.with_attention(opened.described, None, "float32")
  slot = next(iter(own.config.attentions))
  layers = (config, *own.config.layers(slot)[1:])
  model = load.make_model(load.with_layers(own, {slot: layers}))
  variables = substitution.filled(
    load.read_variables(opened, model), {places[0]: mechanisms[places[0]]}
  )
  np.testing.assert_allclose(
    run(places[:1]), tiny.forward(model, variables, batch), atol=2e-4
  )


@pytest.mark.parametrize("case", ["qwen3_next", "mamba2"])
def test_one_call_of_a_mechanism_has_its_own_gates_alone(case):
  """The outputs of every layer, next to calls that are written out."""
  p = models.load_pretrained(FOLDERS[case])
  batch, places = batch_of(case), places_of(p.model)
  swapped = models.load_pretrained(FOLDERS[case], attention="kimi_delta")
  mechanisms = substitution.drawn(swapped.variables, places)
  record = AttentionConfig("kimi_delta").build()

  @jax.jit
  def by_hand(variables, mechanisms):
    sums = {}

    def replacement(
      place, own, out_of, query, key, value, inputs, gates, **call
    ):
      # What the model's own has read is what `own` is called with, and no more.
      assert bool(gates) == (own.gates is not None)
      out = out_of(query, key, value, gates=gates, **call)
      made = record.gates(mechanisms[place], inputs)
      other = record.apply(mechanisms[place], query, key, value, **call, **made)
      sums[place] = jnp.stack(
        [jnp.square(other - out).sum(), jnp.square(out).sum()]
      )
      return out

    models.replace_attention(p.model, variables, batch, replacement)
    return sums

  wanted = by_hand(p.variables, mechanisms)
  valid = {"decoder": np.ones(batch["inputs"].shape, bool)}
  found = squares_of(p.model, p.variables, batch, valid, record, mechanisms)
  assert set(found) == set(wanted) == set(places)
  for place in places:
    np.testing.assert_allclose(found[place], wanted[place], rtol=1e-5)


def test_an_observer_sees_the_gates_of_the_model():
  p = models.load_pretrained(FOLDERS["mamba2"])
  seen = []
  jax.eval_shape(
    lambda variables: models.observe_attention(
      p.model,
      variables,
      batch_of("mamba2"),
      lambda *arrays, **call: seen.append(call),
    ),
    p.variables,
  )
  assert len(seen) == 3
  assert all({"log_decay", "beta"} <= set(call) for call in seen)


@pytest.mark.parametrize(
  ("own", "other", "message"),
  [
    ("lsh", "flash", "the model has no keys of its own, only queries"),
    ("latent", "flash", "the model has no values of its own, only queries"),
    ("latent", "lsh", "the model has no values of its own, only queries"),
  ],
)
def test_a_model_without_keys_has_none_for_another_mechanism(
  own, other, message
):
  p = models.load_pretrained(FOLDERS["gpt2"], attention=own)
  other = AttentionConfig(other)
  nothing = {place: {} for place in places_of(p.model)}
  choice = chosen(nothing, ())
  with pytest.raises(ValueError, match=message):
    logits(
      p.model, p.variables, batch_of("gpt2"), other.build(), nothing, choice
    )


def squares(p, batch, config, valid=None):
  places = places_of(p.model)
  swapped = models.load_pretrained(
    FOLDERS["gpt2" if p.family == "gpt2" else "bert_masked"],
    attention=config,
  )
  mechanisms = substitution.drawn(swapped.variables, places)
  valid = valid or {
    side: np.ones(batch[name].shape, bool)
    for side, name in (("decoder", "inputs"), ("encoder", "source"))
    if name in batch
  }
  found = squares_of(
    p.model, p.variables, batch, valid, config.build(), mechanisms
  )
  return np.array([found[place] for place in places])


def test_the_error_is_that_of_the_outputs_on_the_same_inputs():
  p = models.load_pretrained(FOLDERS["gpt2"])
  batch = batch_of("gpt2")
  assert squares(p, batch, AttentionConfig("dense"))[:, 0].max() == 0
  exact = squares(p, batch, FLASH)
  assert (exact[:, 0] < 1e-10 * exact[:, 1]).all()
  # A window over everything is exact too; a short one is not.
  wide = squares(p, batch, AttentionConfig("sliding_window", {"window": 11}))
  assert (wide[:, 0] < 1e-10 * wide[:, 1]).all()
  short = squares(p, batch, AttentionConfig("sliding_window", {"window": 2}))
  assert (short[:, 0] > 1e-3 * short[:, 1]).all()

  # By hand, from what the attention of the first layer is called with.
  @jax.jit
  def by_hand(variables):
    found = []
    models.observe_attention(
      p.model,
      variables,
      batch,
      lambda *seen, **call: found.append((seen, call)),
    )
    (_, query, key, value, out), call = found[0]
    other = ATTENTIONS["linear"]().apply({}, query, key, value, **call)
    return jnp.square(other - out).sum(), jnp.square(out).sum()

  linear = squares(p, batch, AttentionConfig("linear"))
  np.testing.assert_allclose(linear[0], by_hand(p.variables), rtol=1e-5)


def test_more_features_approximate_better():
  p = models.load_pretrained(FOLDERS["gpt2"])
  batch = batch_of("gpt2", rows=4)
  few, many = (
    squares(p, batch, AttentionConfig("performer", {"num_features": m}))
    for m in (8, 2048)
  )
  assert many[:, 0].sum() < 0.4 * few[:, 0].sum()


def test_padding_is_not_counted():
  p = models.load_pretrained(FOLDERS["bert_masked"])
  batch = batch_of("bert_masked")
  valid = substitution.valid_positions(batch, 0)
  np.testing.assert_array_equal(valid["encoder"], batch["source_mask"])
  counted = squares(p, batch, NYSTROM, valid)
  other = batch | {"source": batch["source"] + ~batch["source_mask"] * 3}
  np.testing.assert_allclose(
    squares(p, other, NYSTROM, valid), counted, rtol=1e-4
  )
  assert (counted < squares(p, batch, NYSTROM)).all()


def test_variables_are_taken_out_and_put_back():
  swapped = models.load_pretrained(FOLDERS["gpt2"], attention=WINDOW_LINEAR)
  places = places_of(swapped.model)
  mechanisms = substitution.drawn(swapped.variables, places)
  assert set(mechanisms) == set(places)
  shapes = jax.tree.map(np.shape, mechanisms[places[0]])
  assert jax.tree.leaves(shapes)
  twice = jax.tree.map(lambda x: 2 * x, mechanisms)
  filled = substitution.filled(swapped.variables, twice)
  assert jax.tree.structure(filled) == jax.tree.structure(
    dict(swapped.variables)
  )
  jax.tree.map(
    np.testing.assert_array_equal, substitution.drawn(filled, places), twice
  )
  # A model that has none of them is left as it is.
  p = models.load_pretrained(FOLDERS["gpt2"])
  same = substitution.filled(p.variables, twice)
  jax.tree.map(np.testing.assert_array_equal, same, dict(p.variables))


def test_a_mechanism_with_keys_of_its_own_cannot_be_put_there():
  p = models.load_pretrained(FOLDERS["gpt2"])
  latent = AttentionConfig("latent").build()
  place = places_of(p.model)[0]
  with pytest.raises(ValueError, match="makes keys and values of its own"):
    logits(
      p.model,
      p.variables,
      batch_of("gpt2"),
      latent,
      {place: {}},
      {place: np.array(False)},
    )
