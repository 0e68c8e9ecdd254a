"""Programs of `jax.export` of whole models whose batch is a symbol."""

import jax
import jax.numpy as jnp
import pytest

from attention.testing import assert_close
import models
from tests.models import tiny

CASES = {
  "encoder_decoder": {},
  "decoder": {
    "short_convolution": True,
    "position": "rotary",
    "decoder_attention": tiny.attention("gated_delta"),
  },
  "encoder": {"encoder_attention": tiny.attention("sliding_window")},
}


@pytest.mark.parametrize("kind", CASES)
def test_a_model_is_exported_with_gradients(kind):
  model, batch = tiny.create(kind, **CASES[kind]), tiny.batch(batch_size=4)
  unread = {"encoder": "inputs", "decoder": "source"}.get(kind)
  batch.pop(unread, None)
  variables = tiny.variables_of(model, batch)

  def run(variables, batch):
    def loss(params):
      logits = models.forward(model, {**variables, "params": params}, batch)
      return jnp.square(logits).mean(axis=(1, 2)).sum(), logits

    return jax.grad(loss, has_aux=True)(variables["params"])

  (size,) = jax.export.symbolic_shape("b")
  symbolic = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch
  )
  exported = jax.export.export(jax.jit(run))(variables, symbolic)
  whole = exported.call(variables, batch)
  expected = jax.jit(run)(variables, batch)
  for x, y in zip(*map(jax.tree.leaves, (whole, expected)), strict=True):
    assert_close(x, y, 1e-5)
  _, logits = exported.call(variables, jax.tree.map(lambda x: x[:3], batch))
  assert_close(logits, expected[1][:3], 1e-5)
