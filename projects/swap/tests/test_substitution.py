"""A mechanism in some layers of a model, by one program for all choices."""

import chex
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.attention_config import AttentionConfig
from projects.swap import substitution
from projects.swap.tests import swap_cases
from tests.models import tiny
from tests.models.published.test_equality import (
  compared,
  compute,
  expected,
  loaded,
)

DENSE, FLASH = AttentionConfig("dense"), AttentionConfig("flash")
NYSTROM = AttentionConfig("nystrom", {"num_landmarks": 2})
FORGETTING = AttentionConfig("dense", {"forget": True})
DECODER = {"kind": "decoder", "position": "none"}


def make(attention, **choices):
  """A model of two layers, with a mechanism in all of them or one in each."""
  kind = choices.get("kind", "decoder")
  slots = {
    "encoder_decoder": ("encoder_attention", "decoder_attention"),
    "encoder": ("encoder_attention",),
    "decoder": ("decoder_attention",),
  }[kind]
  chosen = dict.fromkeys(slots, attention)
  model = tiny.create(**{"num_layers": 2, **DECODER, **choices, **chosen})
  places = [
    f"{slot.removesuffix('_attention')}_{i}/self_attention"
    for slot in slots
    for i in range(2)
  ]
  return model, tiny.initialized(model), places


def with_mechanisms(template, own, mechanisms):
  """Variables of a model: a mechanism's at its places, else the own ones."""
  flat, around = (
    traverse_util.flatten_dict(dict(x), sep="/", keep_empty_nodes=True)
    for x in (template, own)
  )
  flat |= {path: x for path, x in around.items() if path in flat}
  return substitution.insert(
    traverse_util.unflatten_dict(flat, sep="/"), mechanisms
  )


logits = jax.jit(substitution.logits, static_argnums=(0, 3))
squares_of = jax.jit(substitution.squares, static_argnums=(0, 4))


@pytest.mark.parametrize(
  ("own", "other", "choices"),
  [
    # Gates of the mechanism's own, grouped heads, rotary positions.
    (DENSE, FORGETTING, {"position": "rotary", "num_kv_heads": 1}),
    # Gates of the model's own, and variables of the same names.
    (AttentionConfig("mamba2"), AttentionConfig("gated_delta"), {}),
    # A key mask.
    (DENSE, NYSTROM, {"kind": "encoder"}),
    # Two stacks, relative positions.
    (DENSE, FLASH, {"kind": "encoder_decoder", "position": "t5"}),
  ],
  ids=lambda x: getattr(x, "name", ""),
)
def test_any_choice_of_layers_is_the_model_that_has_them(own, other, choices):
  model, variables, places = make(own, **choices)
  _, drawn, _ = make(other, **choices)
  batch = tiny.batch()
  mechanisms = substitution.extract(drawn, places)

  def run(*swapped):
    choice = {place: np.array(place in swapped) for place in mechanisms}
    return logits(model, variables, batch, other.build(), mechanisms, choice)

  np.testing.assert_allclose(
    run(), tiny.forward(model, variables, batch), atol=5e-5
  )
  # Everywhere, and in the last layer of each stack alone.
  last = [place for place in places if "_1" in place]
  for attention, swapped in ((other, places), ((own, other), last)):
    whole, template, _ = make(attention, **choices)
    put = {place: mechanisms[place] for place in swapped}
    put_in = with_mechanisms(template, variables, put)
    expected = tiny.forward(whole, put_in, batch)
    np.testing.assert_allclose(run(*swapped), expected, atol=2e-4)
    if other != FLASH:  # Which is equal to its own.
      assert np.abs(expected - run()).max() > 0.01


def squares(model, variables, places, other, batch=None, valid=None):
  """`[places, 2]` of `substitution.squares`, all that is drawn included."""
  batch = batch or tiny.batch()
  _, drawn, _ = make(other, kind=model.config.kind)
  valid = valid or {
    "decoder": np.ones(batch["inputs"].shape, bool),
    "encoder": np.ones(batch["source"].shape, bool),
  }
  mechanisms = substitution.extract(drawn, places)
  found = squares_of(model, variables, batch, valid, other.build(), mechanisms)
  assert set(found) == set(places)
  return np.array([found[place] for place in places]), mechanisms


def test_the_error_is_that_of_the_outputs_on_the_same_inputs():
  made = make(AttentionConfig("dense"))
  same, _ = squares(*made, AttentionConfig("dense"))
  assert same[:, 0].max() == 0
  # A window over everything is exact; a short one is not.
  exact, inexact = (
    squares(*made, AttentionConfig("sliding_window", {"window": window}))[0]
    for window in (8, 2)
  )
  assert (exact[:, 0] < 1e-10 * exact[:, 1]).all()
  assert (inexact[:, 0] > 1e-3 * inexact[:, 1]).all()


def test_one_call_of_a_mechanism_has_its_own_gates_alone():
  """The outputs of every layer, next to calls that are written out."""
  made = make((AttentionConfig("mamba2"), AttentionConfig("dense")))
  model, variables, places = made
  other = AttentionConfig("gated_linear")
  found, mechanisms = squares(*made, other)
  record = other.build()

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
      swapped = record.apply(
        mechanisms[place], query, key, value, **call, **made
      )
      sums[place] = jnp.stack(
        [jnp.square(swapped - out).sum(), jnp.square(out).sum()]
      )
      return out

    models.replace_attention(model, variables, tiny.batch(), replacement)
    return sums

  wanted = by_hand(variables, mechanisms)
  np.testing.assert_allclose(
    found, [wanted[place] for place in places], rtol=1e-5
  )
  # An observer sees the gates of the model.
  seen = []
  jax.eval_shape(
    lambda variables: models.observe_attention(
      model, variables, tiny.batch(), lambda *_, **call: seen.append(call)
    ),
    variables,
  )
  assert [{"log_decay", "beta"} <= set(call) for call in seen] == [True, False]


@pytest.mark.parametrize(
  ("own", "other", "message"),
  [
    ("lsh", "flash", "the model has no keys of its own, only queries"),
    ("latent", "flash", "the model's mechanism computes its own values"),
    ("latent", "lsh", "the model's mechanism computes its own values,"),
    ("dense", "latent", "computes its own keys and values"),
  ],
)
def test_what_has_no_keys_or_reads_none_is_refused(own, other, message):
  model = tiny.create("decoder", decoder_attention=AttentionConfig(own))
  nothing = {"decoder_0/self_attention": {}}
  choice = {"decoder_0/self_attention": np.array(False)}

  def run():
    variables = models.initialize(model, jax.random.key(0), tiny.batch())
    record = AttentionConfig(other).build()
    return substitution.logits(
      model, variables, tiny.batch(), record, nothing, choice
    )

  with pytest.raises(ValueError, match=message):
    jax.eval_shape(run)


def test_what_reads_no_keys_serves_a_model_that_has_none():
  lsh = AttentionConfig("lsh", {"chunk_size": 4})
  model = tiny.create("decoder", decoder_attention=lsh)
  places = ["decoder_0/self_attention"]

  def run():
    variables = models.initialize(model, jax.random.key(0), tiny.batch())
    mechanisms = substitution.extract(variables, places)
    swapped = dict.fromkeys(places, np.array(True))
    return substitution.logits(
      model, variables, tiny.batch(), lsh.build(), mechanisms, swapped
    )

  assert jax.eval_shape(run).shape == (3, 8, tiny.VOCAB_SIZE)


def test_padding_is_not_counted():
  made = make(AttentionConfig("dense"), kind="encoder")
  linear = AttentionConfig("linear")
  batch = tiny.batch()
  batch = {**batch, "source_mask": batch["source"] != 0}
  valid = substitution.valid_positions({"source": batch["source"]}, 0)
  np.testing.assert_array_equal(valid["encoder"], batch["source_mask"])
  counted, _ = squares(*made, linear, batch, valid)
  other = batch | {"source": batch["source"] + ~batch["source_mask"] * 3}
  hidden, _ = squares(*made, linear, other, valid)
  np.testing.assert_allclose(hidden, counted, rtol=1e-4)
  assert (counted < squares(*made, linear, batch)[0]).all()


def test_variables_are_taken_out_and_put_back():
  _, variables, places = make(AttentionConfig("window_linear", {"window": 4}))
  mechanisms = substitution.extract(variables, places)
  assert set(mechanisms) == set(places)
  assert all(jax.tree.leaves(own) for own in mechanisms.values())
  twice = jax.tree.map(lambda x: 2 * x, mechanisms)
  filled = substitution.insert(variables, twice)
  assert jax.tree.structure(filled) == jax.tree.structure(dict(variables))
  chex.assert_trees_all_equal(substitution.extract(filled, places), twice)
  # A model that has none of them is left as it is.
  _, without, _ = make(AttentionConfig("dense"))
  same = substitution.insert(without, twice)
  chex.assert_trees_all_equal(same, dict(without))


def test_a_model_with_latent_attention_has_keys_for_other_mechanisms(tmp_path):
  """It is the same function with projected keys and values."""
  _, found = swap_cases.read("deepseek_v3", tmp_path)
  mechanisms = found.description.config.layers("decoder_attention")
  assert {one.name for one in mechanisms} == {"dense"}
  inputs, outputs = expected("deepseek_v3")
  p = loaded("deepseek_v3")._replace(
    model=found.model, variables=found.variables
  )
  assert compared(inputs, compute(p, inputs), outputs["float32"]) < 2e-5
