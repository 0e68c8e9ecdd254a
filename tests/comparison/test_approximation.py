"""The error against dense attention, on a model's own queries and keys."""

import jax.numpy as jnp
import pytest

from attention import ATTENTIONS
from attention import mechanism as mechanisms
from comparison.measurement import approximation
import models
from tests.models import tiny


def error(name, kind="encoder", **options):
  config = models.AttentionConfig(name, options)
  fields = {
    "encoder": ("encoder_attention",),
    "decoder": ("decoder_attention",),
  }[kind]
  model = tiny.create(kind, **dict.fromkeys(fields, config))
  batch = tiny.batch()
  return approximation.error(model, tiny.initialized(model), batch)


def test_what_is_exact_has_no_error():
  assert error("dense") == 0.0
  assert error("flash", "decoder") < 1e-5
  whole = {"num_rounds": 1, "num_buckets": 1, "chunk_size": tiny.MAX_LENGTH}
  assert error("lsh", **whole) < 1e-5


def test_what_leaves_out_or_estimates_has_one():
  narrow, wide = (error("sliding_window", window=w) for w in (1, 4))
  assert narrow > wide > 0.01
  few, many = (error("performer", num_features=m) for m in (4, 1024))
  assert few > 2 * many > 0.0
  assert error("lsh", num_rounds=1, chunk_size=2) > 0.01


def test_gates_are_no_part_of_what_is_approximated():
  few, all_keys = (error("dsa", "decoder", top_k=k) for k in (1, 64))
  assert few > 0.01 > 1e-5 > all_keys
  assert 0.01 < error("nsa", "decoder", window=1) < 10.0


def test_what_dense_attention_cannot_be_given_is_refused():
  exact = approximation.exact(ATTENTIONS["sliding_window"]())
  x = jnp.ones((1, 4, 1, 2))
  with pytest.raises(ValueError, match=r"^global_indices: dense_attention"):
    exact(x, x, x, global_indices=jnp.zeros((1, 1), int))


@pytest.mark.parametrize(
  "name",
  [
    name
    if name in ("additive", "delta")
    else pytest.param(name, marks=pytest.mark.thorough)
    for name, factory in ATTENTIONS.items()
    if mechanisms.example(factory).approximates is None
  ],
)
def test_scores_of_their_own_are_near_to_nothing(name):
  is_causal_only = ATTENTIONS[name]().causal_only
  assert error(name, "decoder" if is_causal_only else "encoder") is None


def test_dense_stand_ins_do_not_count():
  window = models.AttentionConfig("sliding_window", {"window": 1})
  mixed = tiny.create(encoder_attention=window)
  encoder = tiny.create("encoder", encoder_attention=window)
  variables = tiny.initialized(mixed)
  shared = {
    name: variables["params"][name]
    for name in tiny.initialized(encoder)["params"]
  }
  # Cross- and decoder attention are dense and would make it smaller.
  assert approximation.error(mixed, variables, tiny.batch()) == pytest.approx(
    approximation.error(encoder, {"params": shared}, tiny.batch()), rel=1e-5
  )
