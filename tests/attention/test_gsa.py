"""Gated slot attention with a slot for each position."""

import numpy as np

from attention import gsa_attention
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.state_cases import BATCH, DIM, HEADS, KV_HEADS


def test_a_slot_for_each_position_is_softmax_attention():
  """Position t writes slot t alone, so the slots are the keys and the values."""
  arrays, length = cases.gsa_arrays(12), 12
  qkv = [arrays[name] for name in ("query", "key", "value")]
  shape = BATCH, length, HEADS, length
  slots = np.broadcast_to(np.eye(length)[None, :, None], shape)
  found = gsa_attention(
    *qkv, log_decay=np.zeros(shape, "f"), slot_weights=np.float32(slots)
  )
  # Slots that are not written yet have the logit 0 and the value 0.
  key, value = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in qkv[1:])
  logits = np.einsum("bthd,bshd->bhts", qkv[0], key) / DIM**0.5
  weights = np.exp(np.where(np.tri(length), logits, 0.0))
  weights /= weights.sum(axis=-1, keepdims=True)
  expected = np.einsum("bhts,bshv->bthv", np.tril(weights), value)
  assert_close(found, expected, 1e-5)
