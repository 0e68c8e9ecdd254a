"""Global tokens beside every other option of a window: results, lse and gradients."""

import numpy as np
import pytest

from attention import Visible, causal, definitions, sliding_window_attention
from attention.softmax.logits import Logits
from attention.softmax.visible import window
from tests.attention.calls import assert_defined, counted, lse_of

BATCH, LENGTH, HEADS, KV_HEADS, DIM, VALUE = 2, 21, 4, 2, 6, 5
INDICES = np.array([[3, -1, 16, 3], [20, 0, -1, 40]], np.int32)
IDS = np.random.default_rng(3).integers(3, size=(BATCH, LENGTH), dtype=np.int32)
IDS.sort(axis=1)
KEYS = np.random.default_rng(4).random((BATCH, 1, 1, LENGTH)) < 0.7
SINKS = np.array([-1.0, 0.5, 2.0, 0.1], np.float32)

pytestmark = pytest.mark.usefixtures("short_blocks")


def sides(left, right):
  """What a window of a `Visible` is to the definition."""

  def mask_mod(b, n, t, s):
    del b, n
    back, ahead = (LENGTH if x is None else x for x in (left, right))
    return (t - s <= back) & (s - t <= ahead)

  return mask_mod


def seen(visible, mask_mod):
  return {"visible": visible}, {"mask_mod": mask_mod}


PACKED = {"query_segment_ids": IDS, "key_segment_ids": IDS}
SAME = {
  "plain": {},
  "window": {"window": (2, 5)},
  "dilation": {"dilation": 3},
  "dilations": {"dilation": (1, 3, 3, 1)},
  "causal": {"is_causal": True},
  "mask": {"mask": KEYS},
  "segments": PACKED,
  "scale": {"scale": 0.8},
  "soft_cap": {"logits_soft_cap": 1.5},
  "sinks": {"sinks": SINKS},
  "all": {
    **{
      "sinks": SINKS,
      "dilation": (2, 1, 1, 2),
      "window": (3, 1),
      "mask": KEYS,
    },
    **{**PACKED, "logits_soft_cap": 1.5, "is_causal": True},
  },
}
"""Options that the function and its definition take alike."""

OTHERS = {
  "left": seen(window(4, None), sides(4, None)),
  "right": seen(window(None, 2), sides(None, 2)),
  "sides": seen(window(5, 1), sides(5, 1)),
  "causal_left": seen(causal() & window(6, 3), sides(6, 0)),
  "left_dilation": (
    {"visible": window(6, None), "dilation": 2},
    {"mask_mod": sides(6, None), "dilation": 2},
  ),
  "key_mask": seen(Visible(masks=(KEYS,)), lambda b, n, t, s: KEYS[b, 0, 0, s]),
  "logits": (
    {"logits": Logits(scale=0.3, soft_cap=2.0, sinks=SINKS)},
    {"scale": 0.3, "logits_soft_cap": 2.0, "sinks": SINKS},
  ),
}
"""Options of the function, and those of the definition that mean the same."""

CASES = {name: (call, call) for name, call in SAME.items()} | OTHERS


def drawn(has_own):
  """Query, key and value, and those of the global queries if these have their own."""
  rng = np.random.default_rng(0)
  shapes = (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE)
  found = [
    rng.normal(size=(BATCH, LENGTH, *shape)) for shape in shapes * (1 + has_own)
  ]
  return tuple(found)


def defined(options, *qkv):
  """Result and log-sum-exp of the definition."""
  options = {"window": 3, "global_indices": INDICES, **options}

  def run(qkv, **more):
    own = {"global_qkv": qkv[3:]} if qkv[3:] else {}
    return definitions.sliding_window_attention(
      *qkv[:3], **{**options, **own, **more}
    )

  ones = [np.ones_like(x) if i % 3 == 2 else x for i, x in enumerate(qkv)]
  share = run(tuple(ones), sinks=np.zeros(HEADS))[..., 0]
  return run(qkv), lse_of(share, options.get("sinks"))


# Every other case has projections of its own for global queries.
@pytest.mark.parametrize(
  ("name", "has_own"),
  [(name, i % 2 == 1) for i, name in enumerate(CASES)] + [("plain", True)],
)
def test_global_tokens_beside(name, has_own):
  given, meant = CASES[name]

  def run(qkv):
    own = {"global_qkv": qkv[3:]} if has_own else {}
    options = {"window": 3, "global_indices": INDICES, "return_lse": True}
    call = {**options, **given, **own}
    return counted(*sliding_window_attention(*qkv[:3], **call))

  def define(qkv):
    return counted(*defined(meant, *qkv))

  arrays = tuple(np.float32(x) for x in drawn(has_own))
  spoiled = arrays
  if "mask" in meant:
    hidden = ~KEYS[:, 0, 0, :, None, None]
    spoiled = tuple(
      x if i % 3 == 0 else np.where(hidden, np.nan, x)
      for i, x in enumerate(arrays)
    )
  assert_defined(run, define, arrays, spoiled=spoiled, tolerance=2e-5)
