"""The contract finds mistakes, and `check_mechanism` says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Attention,
  attention_weights,
  definitions,
  dense,
  dense_attention,
)
from attention.mechanism import no_variables
from attention.testing import CHECKS, Mechanism, check_mechanism


def definition(variables, *qkv, **call):
  return definitions.dense_attention(*qkv, **call)


def changed(**call_or_fields):
  """Dense attention with some of its functions replaced."""
  return lambda: dense()._replace(**call_or_fields)


def applying(change):
  """Dense attention with `change(call)` made to the options of every call."""

  def apply(variables, query, key, value, **call):
    call = change(call)
    return dense().apply(variables, query, key, value, **call)

  return changed(apply=apply)


def leaks(variables, query, key, value, *, is_causal=False, **call):
  """Causal by a mask of its own, which is one key too wide."""
  if is_causal:
    shape = (1, 1, query.shape[1], key.shape[1])
    mask = jnp.tri(*shape[2:], k=1, dtype=bool).reshape(shape)
    call["mask"] = mask if call.get("mask") is None else call["mask"] & mask
  return dense_attention(query, key, value, **call)


def without_empty_rows(variables, query, key, value, **call):
  out = dense_attention(query, key, value, **call)
  seen = jnp.any(call["mask"], axis=(1, 2, 3), keepdims=True)
  return jnp.where(seen, out, jnp.nan)


def by_weights(variables, query, key, value, **call):
  """A weight of zero times a value that is NaN."""
  weights = attention_weights(dense_attention, query, key, **call)
  value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
  return jnp.einsum("bnts,bsnv->btnv", weights, value)


def over_the_batch(variables, query, key, value, **call):
  out = dense_attention(query, key, value, **call)
  return out + 1e-6 * jnp.max(jnp.abs(query))


def late(variables, cache, *qkv, **tables):
  """Counts one position too many at the first step."""
  index = jnp.where(cache.index == 0, 1, cache.index)
  return dense().decode(variables, cache._replace(index=index), *qkv, **tables)


def without_scale(variables, cache, *qkv, scale=None, **call):
  return dense().decode(variables, cache, *qkv, **call)


def in_half_precision(variables, query, key, value, **call):
  query = query.astype(jnp.bfloat16).astype(query.dtype)
  return dense_attention(query, key, value, **call)


def stopped(variables, query, key, value, **call):
  return dense_attention(query, jax.lax.stop_gradient(key), value, **call)


def in_float16(variables, query, key, value, **call):
  """Its logits overflow in the dtype of the inputs."""
  keys = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
  logits = jnp.einsum("btnh,bsnh->bnts", query, keys)
  return dense_attention(query, key, value, **call) + 0 * jnp.max(logits)


def same_for_all_heads(
  variables, query, key, value, *, dropout_rate=0.0, dropout_rng=None, **call
):
  weights = attention_weights(dense_attention, query, key, **call)
  if dropout_rate:
    shape = len(query), 1, *weights.shape[2:]
    keep = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, shape)
    weights *= keep / (1 - dropout_rate)
  value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
  return jnp.einsum("bnts,bsnv->btnv", weights, value)


def with_gradient_of(change):
  """Results of the call, with the gradient of `change(call)`."""

  def apply(variables, *qkv, **call):
    out = jax.lax.stop_gradient(dense_attention(*qkv, **call))
    other = dense_attention(*qkv, **change(call))
    return out + (other - jax.lax.stop_gradient(other))

  return changed(apply=apply)


def at_least_one(variables, cache, query, key, value, lengths=None):
  if lengths is not None:
    lengths = jnp.maximum(lengths, 1)
  return dense().prefill(variables, cache, query, key, value, lengths)


def into_float32(*args):
  cache = dense().prefill(*args)
  return jax.tree.map(
    lambda x: (
      x.astype(jnp.promote_types(x.dtype, jnp.float32))
      if jnp.issubdtype(x.dtype, jnp.floating)
      else x
    ),
    cache,
  )


def scaled_by_values(variables, query, key, value, *, scale=None, **call):
  scale = value.shape[-1] ** -0.5 if scale is None else scale
  return dense_attention(query, key, value, scale=scale, **call)


def masked_as_the_first_example(call):
  mask = call.get("mask")
  is_of_all_heads = mask is not None and mask.shape[1] == 1 < mask.shape[2]
  return call | ({"mask": mask[:1]} if is_of_all_heads else {})


HIDDEN = "nan at masked positions changes the result"
MISTAKES = {
  "mask": (
    applying(lambda call: call | {"mask": None}),
    ("hidden_positions_may_hold_anything", HIDDEN),
    ("attention_matrix", "a pair that the call masks has a weight"),
  ),
  "a weight of zero times NaN": (
    changed(apply=by_weights),
    ("hidden_positions_may_hold_anything", HIDDEN),
    ("hidden_from_every_query", HIDDEN),
  ),
  "causal": (
    changed(apply=leaks),
    ("future_changes_nothing", "position 12 of 13 moves earlier results"),
    ("future_has_no_gradient", "at positions after 5"),
  ),
  "scale": (
    applying(lambda call: call | {"scale": None}),
    ("value_and_gradient[causal_options]", "is off by"),
  ),
  "segments": (
    applying(
      lambda call: (
        call | dict.fromkeys(["query_segment_ids", "key_segment_ids"])
      )
    ),
    ("lone_segment_gives_zeros", "gives no zeros"),
  ),
  "empty rows": (
    changed(apply=without_empty_rows),
    ("empty_rows_give_zeros", "gives NaN, expected zeros"),
  ),
  "batch": (
    changed(apply=over_the_batch),
    ("examples_are_apart", "example 0 changes when others"),
  ),
  "decode": (
    changed(decode=late),
    # The last step is beyond the cache.
    ("decoding_equals_the_causal_call", "is not finite"),
  ),
  "scale of decode": (
    changed(decode=without_scale),
    ("decoding_equals_the_causal_call", "with scale, .* is off by"),
  ),
  "dropout": (
    applying(lambda call: call | {"dropout_rate": 0.0}),
    ("dropout", "another dropout_rng drops the same weights"),
  ),
  "half of the dropout": (
    applying(
      lambda call: call | {"dropout_rate": call.get("dropout_rate", 0.0) / 4}
    ),
    ("dropout", "expected"),
  ),
  "mods": (
    applying(lambda call: call | {"score_mod": None}),
    ("mods", "is off by"),
  ),
  "sequence": (
    applying(lambda call: call | {"axis_name": None}),
    ("sequence_shards", "is off by"),
  ),
  "one mask for all": (
    applying(
      lambda call: call | ({"mask": None} if len(call["mask"]) == 1 else {})
    ),
    ("value_and_gradient[causal_cross]", "is off by"),
  ),
  "mask of all heads": (
    applying(masked_as_the_first_example),
    ("hidden_from_every_query", "with a mask of all heads, .* is off by"),
  ),
  "bias of one example": (
    applying(
      lambda call: call | ({"bias": call["bias"][:1]} if "bias" in call else {})
    ),
    ("value_and_gradient[causal_options]", "is off by"),
  ),
  "default scale": (
    changed(apply=scaled_by_values),
    ("value_and_gradient[plain]", "is off by"),
  ),
  "float16": (
    changed(apply=in_float16),
    ("float16", "no finite result"),
  ),
  "gradient of mods": (
    with_gradient_of(lambda call: call | {"score_mod": None}),
    ("mods", "gradient of"),
  ),
  "dropout of heads": (
    changed(apply=same_for_all_heads),
    ("dropout", "two heads drop the same weights"),
  ),
  "gradient of dropout": (
    with_gradient_of(lambda call: call | {"dropout_rate": 0.0}),
    ("dropout", "the gradient of the values"),
  ),
  "dropout at a rate of 0": (
    applying(
      lambda call: (
        call | ({"dropout_rate": 0.4} if "dropout_rng" in call else {})
      )
    ),
    ("dropout", "the weights for dropout_rate=0.0"),
  ),
  "empty prompt": (
    changed(prefill=at_least_one),
    ("decoding_from_a_prompt", "is off by|is not finite"),
  ),
  "dtype of the cache": (
    changed(prefill=into_float32),
    ("decoding_from_a_prompt", "shapes and dtypes of the cache"),
  ),
  "digits": (
    changed(apply=in_half_precision),
    ("value_and_gradient[causal]", "may be 1e-05"),
  ),
  "gradient": (
    changed(apply=stopped),
    ("value_and_gradient[causal]", r"gradient of \['arrays'\]\['key'\]"),
  ),
  "refusal": (
    changed(supports=dense().supports - {"bias"}),
    ("refuses[bias]", "a call with bias is accepted"),
  ),
  "names": (
    changed(supports=dense().supports | {"maks"}),
    ("record", "unknown names: maks"),
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
  """By laws that dense attention keeps: the contract is run for it as well."""
  factory, *found = MISTAKES[mistake]
  wrong = Mechanism(factory, definition)
  for name, message in found:
    (check,) = (check for check in CHECKS if check.name == name)
    with pytest.raises(AssertionError, match=message):
      check(wrong)


def only_causal(query, key, value, *, is_causal=False):
  return dense_attention(query, key, value, is_causal=is_causal)


def careless() -> Attention:
  """No checks, no scale, a sum of ranks 4 and 1, and options that vanish."""

  def apply(variables, query, key, value, **call):
    del call
    return only_causal(query + jnp.zeros(8), key, value)

  return Attention(no_variables, apply, None, None, frozenset({"causal"}))


def test_the_report_lists_each_failure_with_what_to_do():
  with pytest.raises(AssertionError) as error:
    check_mechanism(careless, definition)
  report = str(error.value)
  assert report.startswith("careless fails ")
  first, *paragraphs = report.split("\n\n")
  assert first.endswith("checks of the contract.")
  named = [name for x in paragraphs for name in x.split("\n")[0].split(", ")]
  assert first.split()[2] == str(len(named))
  assert "value_and_gradient[causal]" in named
  assert "jax_numpy_rank_promotion" in report
  assert "test_testing.py:" in report
  for paragraph in paragraphs:
    assert "\n  found: " in paragraph
    assert "\n  contract: " in paragraph


def test_a_definition_in_float32_is_refused():
  check = next(check for check in CHECKS if check.name.startswith("value"))

  def in_float32(variables, *qkv, **call):
    return np.float32(definition(variables, *qkv, **call))

  with pytest.raises(AssertionError, match="definition: expected a float64"):
    check(Mechanism(dense, in_float32))


def test_hyperparameters_without_a_default_have_to_be_given():
  def wide(width) -> Attention:
    return dense()

  with pytest.raises(ValueError, match=r"options: expected values for width"):
    check_mechanism(wide, definition)
