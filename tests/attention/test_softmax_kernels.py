"""Kernels of accelerators: which calls go to them, and what comes back.

There is none here. `emulate` puts XLA's `jax.nn.dot_product_attention` in their
place, with what the true ones refuse: read in jax 0.10, cudnn-frontend 1.9 to
1.14 and tokamax 0.0.12.
"""

import dataclasses
import functools
import importlib.util
import itertools
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import flash_attention, sliding_window_attention
from attention.platform import backend, programs
from attention.sliding_window import sliding_window
from attention.softmax.visible import window
from attention.testing import Case
from tests.attention.calls import assert_equal, pulled

FLASH = flash_attention
WINDOW = functools.partial(sliding_window_attention, window=(3, 0))


def emulate(monkeypatch, platform_name):
  """Makes the choice as on `platform_name`; returns the kernels' recorded options."""
  calls = []
  attend = jax.nn.dot_product_attention

  def cudnn(query, key, value, *, mask, bias, implementation, **options):
    assert implementation == "cudnn"
    pair = (query.shape[1], key.shape[1])
    # Its backward refuses odd lengths (H100, jax 0.11.2).
    assert not pair[0] % 2
    assert not pair[1] % 2
    for x in (mask, bias):
      if x is not None:
        assert x.shape[2:] == pair
        assert "local_window_size" not in options
    if "local_window_size" in options:
      assert options["is_causal"]
      assert options["local_window_size"][1] == 0
      assert pair[0] == pair[1]
    calls.append({"mask": mask, "bias": bias, **options})
    return attend(query, key, value, mask=mask, bias=bias, **options)

  def tokamax(query, key, value, *, mask, bias, **options):
    lengths = (query.shape[1], key.shape[1])
    if platform_name == "tpu":
      assert "local_window_size" not in options
      assert bias is None
      assert mask is None or mask.shape == (1, 1, *lengths)
      assert all(not length % 128 for length in lengths)
    if bias is not None or (mask is not None and mask.shape[2] > 1):
      # On a GPU, its backward refuses others (H100, tokamax 0.0.17).
      assert all(not length % 128 for length in lengths)
    if "local_window_size" in options:
      assert lengths[0] == lengths[1]
    calls.append({"mask": mask, "bias": bias, **options})
    return attend(query, key, value, mask=mask, bias=bias, **options)

  monkeypatch.setattr(jax, "default_backend", lambda: platform_name)
  monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  module = types.SimpleNamespace(dot_product_attention=tokamax)
  monkeypatch.setitem(sys.modules, "tokamax", module)
  return calls


def draw(case, dtype):
  qkv, options = case.draw()
  arrays = {
    name: x if isinstance(x, bool | float) else jnp.asarray(x)
    for name, x in options.items()
  }
  return [np.asarray(x).astype(dtype) for x in qkv], arrays


def traced(attend, *qkv):
  """Makes the choice and computes nothing; JAX keeps traces by function."""
  return jax.eval_shape(lambda *qkv: attend(*qkv), *qkv)


def equals_xla(function, implementation, qkv, tolerance):
  """Asserts equal outputs and gradients."""
  got, expected = (
    pulled(functools.partial(function, implementation=name), *qkv)
    for name in (implementation, "xla")
  )
  assert {x.dtype for x in jax.tree.leaves(got)} == {qkv[0].dtype}
  assert_equal(got, expected, tolerance)


@pytest.mark.parametrize(("length", "is_causal"), [(13, True), (16, False)])
def test_window_on_cudnn(monkeypatch, is_causal, length):
  calls = emulate(monkeypatch, "gpu")
  qkv, _ = draw(Case(length=length), "bfloat16")
  # Causal, the right side has no keys.
  attend = functools.partial(
    sliding_window_attention,
    window=(3, 2 if is_causal else 0),
    is_causal=is_causal,
  )
  equals_xla(attend, None, qkv, 2e-2)
  assert [call["local_window_size"] for call in calls] == [(3, 0)]


@pytest.mark.parametrize(
  ("names", "window"),
  [((), 10**12), (("mask", "scale"), (2, 4)), (("mask", "causal"), (2, 4))],
)
def test_window_on_tokamax(monkeypatch, names, window):
  calls = emulate(monkeypatch, "gpu")
  qkv, options = draw(Case(names, num_kv_heads=1), "bfloat16")
  attend = functools.partial(sliding_window_attention, window=window, **options)
  equals_xla(attend, "tokamax", qkv, 2e-2)
  sides = np.minimum(window, 13) * np.ones(2, int)
  sides[1] *= "causal" not in names
  assert [call["local_window_size"] for call in calls] == [tuple(sides)]
  assert "implementation" not in calls[0]


def one_mask(length):
  """A key mask for all examples: the first queries see nothing of a window."""
  return (jnp.arange(length) % 7 > 4)[None, None, None]


@pytest.mark.parametrize(
  ("length", "is_causal", "masked"), [(13, False, False), (128, True, True)]
)
def test_window_on_a_tpu(monkeypatch, masked, is_causal, length):
  calls = emulate(monkeypatch, "tpu")
  qkv, _ = draw(Case(length=length), "float32")
  attend = functools.partial(
    sliding_window_attention,
    window=(2, 1),
    is_causal=is_causal,
    mask=one_mask(length) if masked else None,
  )
  equals_xla(attend, "tokamax", qkv, 1e-5)
  # The kernel is asked for; None leaves a TPU to 'xla'.
  traced(attend, *qkv)
  assert len(calls) == 1


@pytest.mark.parametrize(
  ("source", "is_causal", "masked"),
  [(13, True, False), (5, True, False), (5, False, True), (128, True, True)],
)
def test_flash_on_a_tpu(monkeypatch, masked, is_causal, source):
  calls = emulate(monkeypatch, "tpu")
  qkv, _ = draw(Case(source_length=source), "float32")
  attend = functools.partial(
    FLASH, is_causal=is_causal, mask=one_mask(source) if masked else None
  )
  equals_xla(attend, "tokamax", qkv, 1e-5)
  assert len(calls) == 1
  # A mask over T×S would cost the kernel its own causal one.
  needed = masked or (source % 128 and (not is_causal or source < 13))
  assert (calls[0]["mask"] is not None) == bool(needed)
  traced(attend, *qkv)
  assert len(calls) == 1


@pytest.mark.parametrize(
  ("names", "length"),
  [
    (("mask",), 13),
    (("full_mask", "causal"), 16),
    (("bias",), 13),
    ((), 13),
    (("causal",), 13),
  ],
)
def test_flash_on_cudnn(monkeypatch, length, names):
  calls = emulate(monkeypatch, "gpu")
  qkv, options = draw(Case(names, length=length), "bfloat16")
  equals_xla(functools.partial(FLASH, **options), None, qkv, 2e-2)
  assert len(calls) == 1
  # Without a mask of its own a call gets none, which would be T×S.
  assert (calls[0]["mask"] is None) == (not {*names} - {"causal"})


@pytest.mark.parametrize("sides", [(None, 3), (3, None), (3, 0), (None, 0)])
def test_sides_of_a_visible_are_not_lost(monkeypatch, sides):
  calls = emulate(monkeypatch, "gpu")
  qkv, _ = draw(Case(), "bfloat16")
  attend = functools.partial(FLASH, visible=window(*sides))
  equals_xla(attend, None, qkv, 2e-2)
  assert len(calls) == (sides[1] == 0)  # cuDNN takes none to the right.


@pytest.mark.parametrize("attend", [FLASH, WINDOW])
def test_positions_of_a_visible_are_not_lost(monkeypatch, attend):
  """No kernel knows them: the first query may stand at position 4."""
  calls = emulate(monkeypatch, "gpu")
  qkv, _ = draw(Case(), "bfloat16")
  visible = dataclasses.replace(window(None, 0), query_start=4)
  attend = functools.partial(attend, visible=visible)
  equals_xla(attend, None, qkv, 2e-2)
  assert not calls
  with pytest.raises(ValueError, match=r"^implementation: .* take visible"):
    attend(*qkv, implementation="cudnn")


@pytest.mark.parametrize(
  ("implementation", "platform_name", "attend"),
  [
    ("cudnn", "gpu", FLASH),
    ("tokamax", "gpu", WINDOW),
    ("tokamax", "tpu", WINDOW),
    ("tokamax", "tpu", FLASH),
  ],
)
def test_masked_keys_are_not_read(
  monkeypatch, implementation, platform_name, attend
):
  emulate(monkeypatch, platform_name)
  qkv, _ = draw(Case(), "bfloat16")
  mask = one_mask(13)
  filled = [x.copy() for x in qkv]
  for x in filled[1:]:
    x[:, ~np.asarray(mask[0, 0, 0])] = np.nan
  attend = functools.partial(attend, mask=mask, implementation=implementation)
  attend = jax.jit(attend)
  np.testing.assert_array_equal(attend(*qkv), attend(*filled))


@pytest.mark.parametrize("window", [None, (2, 1)])
def test_a_query_that_sees_nothing_gets_zeros(monkeypatch, window):
  emulate(monkeypatch, "gpu")
  qkv, _ = draw(Case(), "bfloat16")
  seen = np.zeros((2, 1, 1, 13), bool)
  seen[0, ..., 6] = True
  attend = functools.partial(
    FLASH if window is None else sliding_window_attention,
    mask=jnp.asarray(seen),
    implementation="tokamax",
    **({"is_causal": True} if window is None else {"window": window}),
  )

  out, grads = pulled(attend, *qkv)
  rows = np.asarray(out, np.float32).any(axis=(2, 3))
  left, right = (7, 0) if window is None else window
  distance = 6 - np.arange(13)
  np.testing.assert_array_equal(
    rows[0], (distance >= -left) & (distance <= right)
  )
  for x in (out, *grads):
    assert np.isfinite(x.astype(np.float32)).all()
    assert not x[1].any()


def doubled(score, b, n, t, s):
  del b, n, t, s
  return 2 * score


def even(b, n, t, s):
  del b, n
  return (t + s) % 2 == 0


@pytest.mark.parametrize(
  ("implementation", "case", "options", "reason"),
  [
    (
      "cudnn",
      Case(),
      {"dtype": "float32"},
      "takes float16 and bfloat16, got float32",
    ),
    (
      "cudnn",
      Case(),
      {"window": (3, 1)},
      "takes windows to the left only, got (left, right) = (3, 1)",
    ),
    ("cudnn", Case(("mask",)), {}, "cannot take mask with a window"),
    (
      "cudnn",
      Case(value_dim=5),
      {},
      "needs values as wide as queries, got 5 and 8",
    ),
    (
      "cudnn",
      Case(head_dim=20, value_dim=20),
      {},
      "takes heads of a multiple of 8 features, at most 256, got 20",
    ),
    (
      "cudnn",
      Case(head_dim=264, value_dim=264),
      {},
      "takes heads of a multiple of 8 features, at most 256, got 264",
    ),
    (
      "cudnn",
      Case(source_length=17),
      {},
      "takes a window over one sequence only, got lengths 13 and 17",
    ),
    ("cudnn", Case(), {"dilation": 2}, "cannot take dilation"),
    ("cudnn", Case(), {"block_size": 8}, "cannot take block_size"),
    ("cudnn", Case(("global",)), {}, "cannot take global_indices"),
    ("cudnn", Case(("segments",)), {}, "cannot take query_segment_ids"),
    (
      "tokamax",
      Case(source_length=5),
      {},
      "takes a window over one sequence only, got lengths 13 and 5",
    ),
    ("tokamax", Case(("relative_bias",)), {}, "cannot take relative_bias"),
    ("tokamax", Case(("relative_keys",)), {}, "cannot take relative_keys"),
    (
      "tokamax",
      Case(("relative_queries_by_head",)),
      {},
      "cannot take relative_queries",
    ),
    ("tokamax", Case(), {"dropout_rate": 0.5}, "cannot take dropout_rate"),
    ("tokamax", Case(("sinks",)), {}, "cannot take sinks"),
    ("tokamax", Case(("logits_soft_cap",)), {}, "cannot take logits_soft_cap"),
    ("tokamax", Case(("causal", "log_forget")), {}, "cannot take log_forget"),
    ("tokamax", Case(), {"score_mod": doubled}, "cannot take score_mod"),
    ("tokamax", Case(), {"mask_mod": even}, "cannot take mask_mod"),
    ("tokamax", Case(), {"return_lse": True}, "cannot take return_lse"),
  ],
)
def test_what_a_kernel_cannot_serve(
  monkeypatch, implementation, case, options, reason
):
  calls = emulate(monkeypatch, "gpu")
  options = {"window": (3, 0), "dtype": "bfloat16", **options}
  if "dropout_rate" in options:
    options["dropout_rng"] = jax.random.key(0)
  qkv, call = draw(case, options.pop("dtype"))
  attend = functools.partial(sliding_window_attention, **options, **call)
  with pytest.raises(
    ValueError, match=re.escape(f"implementation: '{implementation}' {reason};")
  ):
    traced(functools.partial(attend, implementation=implementation), *qkv)
  calls.clear()
  # Who chooses has XLA instead; what only tokamax refuses, cuDNN may take.
  traced(attend, *qkv)
  assert (not calls) or implementation == "tokamax"


@pytest.mark.parametrize(
  ("attend", "names", "dtype", "reason"),
  [
    (FLASH, ("bias",), "bfloat16", "cannot take bias on a TPU"),
    (FLASH, (), "float16", "takes float32 and bfloat16 on a TPU, got float16"),
    (FLASH, ("full_mask",), "float32", "takes one mask for all examples and"),
    (WINDOW, ("mask",), "float32", "takes one mask for all examples and heads"),
    (WINDOW, ("segments",), "float32", "cannot take query_segment_ids"),
  ],
)
def test_what_a_tpu_cannot_serve(monkeypatch, attend, names, dtype, reason):
  calls = emulate(monkeypatch, "tpu")
  qkv, options = draw(Case(names), dtype)
  attend = functools.partial(attend, **options)
  with pytest.raises(ValueError, match=f"^implementation: 'tokamax' {reason}"):
    attend(*qkv, implementation="tokamax")
  with pytest.raises(ValueError, match=r"'cudnn' needs a GPU, got tpu"):
    attend(*qkv, implementation="cudnn")
  traced(attend, *qkv)
  assert not calls


@pytest.mark.parametrize("attend", [FLASH, WINDOW])
@pytest.mark.parametrize(
  ("platform_name", "target"), [("cpu", "gpu"), ("cpu", "tpu"), ("gpu", "cpu")]
)
def test_a_kernel_needs_the_device_here_and_there(
  monkeypatch, platform_name, target, attend
):
  """What is traced for another machine is the program of XLA."""
  calls = emulate(monkeypatch, platform_name)
  qkv, _ = draw(Case(), "bfloat16")
  with backend.tracing_for(target):
    traced(attend, *qkv)
    for implementation in ("cudnn", "tokamax"):
      with pytest.raises(ValueError, match=r"needs a GPU, got [ct]pu"):
        attend(*qkv, implementation=implementation)
  assert not calls


@pytest.mark.parametrize("attend", [FLASH, WINDOW])
def test_gpus_that_cudnn_does_not_serve(monkeypatch, attend):
  calls = emulate(monkeypatch, "gpu")
  qkv, _ = draw(Case(head_dim=192, value_dim=192), "bfloat16")

  for version, capability, served in (
    ("cuda 12.9", "10.0", True),
    ("cuda 12.9", "9.0", True),
    ("cuda 12.9", "8.6", False),
    ("cuda 12.9", "7.5", False),
    ("rocm 60400", "gfx942", False),
  ):
    device = types.SimpleNamespace(
      client=types.SimpleNamespace(platform_version=version),
      compute_capability=capability,
    )
    calls.clear()
    programs.clear_cache()
    with monkeypatch.context() as patch:
      patch.setattr(jax, "devices", itertools.repeat([device]).__next__)
      traced(attend, *qkv)
    assert len(calls) == served


def test_the_plug_passes_it_on(monkeypatch, unchecked):
  calls = emulate(monkeypatch, "gpu")
  qkv, _ = draw(Case(), "bfloat16")
  for options in ({}, {"implementation": "xla"}, {"block_size": 4}):
    apply = sliding_window(window=(3, 0), **options).apply
    traced(functools.partial(apply, {}, is_causal=True), *qkv)
    assert len(calls) == 1
  with pytest.raises(ValueError, match=r"^implementation: expected None or"):
    sliding_window(implementation="triton")
  with pytest.raises(ValueError, match=r"^block_size: expected an int of at"):
    sliding_window(block_size=0)
