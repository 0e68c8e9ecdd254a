"""Sliding-window attention with global tokens (Beltagy et al., 2020).

Without dilation and global tokens, the softmax is one call of
`attention.softmax.tiles.attend` with a window in its `Visible`. With them, and for
sequence shards, `attention.softmax.windows` merges several calls. To decode, a ring
buffer holds the last keys.
"""

from collections.abc import Sequence
import dataclasses
from functools import partial
from typing import Any, Literal, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.dense import attend_to_slots
from attention.mechanism import Attention, Hyperparameters
from attention.platform import layout
from attention.softmax import kernels, own_logits, sharding, windows
from attention.softmax.cache import DenseCache, prompt_rows, ring
from attention.softmax.cache import init_cache as init_dense
from attention.softmax.forget_gates import next_forget_bias, prompt_forget_bias
from attention.softmax.kernels import Implementation
from attention.softmax.logits import PLAIN, Logits, WindowOptions
from attention.softmax.rows import Output, with_sinks
from attention.softmax.tiles import attend
from attention.softmax.visible import EVERY_PAIR, Visible


@attention_function
def sliding_window_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  window: int | Sequence[int],
  dilation: int | Sequence[int] = 1,
  global_indices: Int[Array, "B G"] | None = None,
  global_qkv: tuple[
    Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]
  ]
  | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | None = None,
  implementation: Implementation | None = None,
  axis_name: str | None = None,
  visible: Visible = EVERY_PAIR,
  logits: Logits = PLAIN,
  return_lse: bool = False,
  **pairs: Unpack[WindowOptions],
) -> Output:
  """Each query attends to the keys in a window around it and to global tokens.

    out = sliding_window_attention(q, k, v, window=256, is_causal=True)

    out[t] = softmax over s in A(t) of (scale · query[t] · key[s]), times value
    A(t) = {s = t + i·dilation : -left ≤ i ≤ right}  ∪  {s global}

  It is one softmax over the union: a global key inside the window counts once.
  A global query t attends to all keys. `mask`, `is_causal` and the segments restrict
  the pairs further. A query that sees no key outputs zeros and has zero gradients.
  Masked keys never affect the output, even if they are NaN.

  Args:
    query: `[B, T, N, H]`.
    value: `[B, S, K, V]`.
    key: `[B, S, K, H]`; key s and query s are at the same position.
    window: w for |i| ≤ w, or (left, right); as `local_window_size` in jax.nn.
    dilation: the distance between neighbouring keys of the window; one int, or N ints,
      one per query head. `log_forget`, `score_mod` and `mask_mod` need a dilation of 1
      and no `global_indices`.
    mask: key mask, broadcastable to `[B, 1, 1, S]`.
    relative_bias: `[N, 2L+1]`; entry L + i belongs to the key at distance
      i·dilation, so L = w has one for each key of the window.
    relative_keys: `[2L+1, H]` or `[N, 2L+1, H]`, with entries in the same order.
    relative_queries: likewise.
    global_indices: `[B, G]`, the positions that are global; needs T = S. An
      index outside [0, T), such as -1, names no token, and an index that occurs
      twice counts once.
    global_qkv: separate (query, key, value) for the attention of global queries to all
      keys. Other queries see global keys through `key` and `value`.
    block_size: C, the number of queries in a tile. Only 'xla' takes it. None is
      one of `attention.platform.backend.WINDOW_ROWS`.
    implementation: None, 'xla', 'cudnn' or 'tokamax'. cuDNN takes only a window to the
      left, without a mask. cuDNN and tokamax need T = S, and support no segments,
      tables, dropout, dilation or global tokens.
    axis_name: mesh axis inside `jax.shard_map`, for a query and key of one sequence.
      Global indices count in the whole sequence; shards do not support dropout.
    is_causal: query t sees only keys s ≤ t.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    scale: factor of the logits; None means 1/√H.
    sinks: `[N]`, one more logit per head, which has no value.
    logits_soft_cap: c; logits become c · tanh(x / c), before masks and biases.
    log_forget: `[B, T, N]`, logarithms of forget gates, at most 0.
    score_mod: `(score, b, n, t, s) -> score`, as in FlexAttention.
    mask_mod: `(b, n, t, s) -> bool`, True = attend, in addition to `mask`.
    dropout_rate: fraction of the attention weights that are set to zero.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.
    visible: the visible pairs, in addition to the other masking options.
    logits: the options for logits as one value, in place of the keywords.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    As in `flash_attention`: `[B, T, N, V]`, with `return_lse` also `[B, T, N]`.

  Raises:
    ValueError: `implementation` cannot serve the call.

  Cost, with W = left + right + 1 and tiles of C queries: time
  T·(W+C+G)·N·(H+V), and G·S·N·(H+V) for the global queries. Memory in addition
  to the arrays: B·N·C·(W+C+G) float32 for each tile that is computed at the
  same time, and B·N·G·S float32. No array is T×S, forward or backward. Shards exchange
  the left + right positions of keys and values that the window reaches, and the
  queries, keys, values and results of G global tokens. Each dilation costs one pass
  over its heads. On a TPU, 'tokamax' reads the window from a mask of T·S bool.

  Differs from the paper in that any length is allowed, windows may be one-sided, and
  segments and causality also apply to global tokens.

  Papers: Longformer, the long-document transformer, arXiv:2004.05150. Sinks: gpt-oss,
  arXiv:2508.10925. Soft caps: Gemma 2, arXiv:2408.00118. Forget gates: Forgetting
  transformer, arXiv:2503.02130. Mods: Flex attention, arXiv:2412.05496.
  """
  left, right = _integers("window", window, 0, 2)
  dilations = _integers("dilation", dilation, 1, query.shape[2])
  for mask in visible.masks:
    checks.key_mask(mask, query, key)  # Raises for other masks.
  if global_indices is not None or global_qkv is not None:
    windows.check_globals(global_indices, global_qkv, query, key, value, logits)
  has_gaps = global_indices is not None or max(dilations) > 1
  if has_gaps:
    _check_neighbours(
      log_forget=logits.log_forget,
      score_mod=logits.score_mod,
      mask_mod=visible.mods or None,
      visible=visible.bands or visible.positions,
    )
  if logits.bias is not None or visible.block_mask is not None:
    name = "visible" if logits.bias is None else "logits"
    raise ValueError(
      f"{name}: expected no bias and no block mask in a window; flash_attention "
      "takes them"
    )
  if axis_name is not None:
    dropped = dropout_rate or None
    sharding.check_shards(query, key, visible, logits, dropout_rate=dropped)
    if key.shape[1] != query.shape[1]:
      raise ValueError(
        f"key: expected the positions of the queries, {query.shape[1]} on a device, "
        f"got {key.shape[1]}; a window over a sequence in shards is of one sequence"
      )
  longest = max(query.shape[1], key.shape[1])
  near = visible & Visible(left=min(left, longest), right=min(right, longest))
  out = kernels.kernel_output(
    implementation,
    query,
    key,
    value,
    near,
    logits,
    dilation=None if max(dilations) == 1 else dilation,
    global_indices=global_indices,
    dropout_rate=dropout_rate or None,
    block_size=block_size,
    axis_name=axis_name,
    return_lse=return_lse or None,
  )
  if out is not None:
    return out
  options = {
    "block": (block_size, None),
    "dropout_rate": dropout_rate,
    "dropout_rng": dropout_rng if dropout_rate > 0.0 else None,
  }
  if not has_gaps and axis_name is None:
    out, lse = attend(query, key, value, near, logits, **options)
  else:
    out, lse = windows.attend_to_union(
      query,
      key,
      value,
      visible,
      dataclasses.replace(logits, sinks=None),
      global_indices=global_indices,
      global_qkv=global_qkv,
      sides=(left, right),
      dilations=dilations,
      axis_name=axis_name,
      **options,
    )
    if logits.sinks is not None:
      out, lse = with_sinks(out, lse, logits.sinks)
  return (out, lse) if return_lse else out


def _check_neighbours(**options: Any) -> None:
  """Raises ValueError for options that dilation and global tokens exclude."""
  for name, option in options.items():
    if option is not None:
      raise ValueError(
        f"{name}: expected None with global_indices or a dilation; only a plain "
        "window supports it"
      )


def _integers(
  name: str, value: int | Sequence[int], low: int, count: int | None = None
) -> tuple[int, ...]:
  """`value` as a tuple of `count` ints, any number if None; one int is repeated.

  Raises:
    ValueError: the number of ints differs, or one is below `low`.
  """
  is_one = not isinstance(value, Sequence)
  numbers = (value,) * (count or 1) if is_one else tuple(value)
  if not numbers or any(
    not isinstance(x, int | np.integer) or isinstance(x, bool) or x < low
    for x in numbers
  ):
    raise ValueError(f"{name}: expected ints of at least {low}, got {value!r}")
  if count is not None and len(numbers) != count:
    many = f"one for each of the {count} query heads"
    many = "a pair (left, right)" if name == "window" else many
    raise ValueError(f"{name}: expected one int or {many}, got {value!r}")
  return tuple(map(int, numbers))


class SlidingWindowCache(DenseCache):
  """The last S = min(left · the largest dilation + 1, max_length) keys and values.

  Position p is in slot p mod S.
  """

  __slots__ = ()
  grows = False


@attention_factory
def sliding_window(
  window: int | Sequence[int] = 256,
  dilation: int | Sequence[int] = 1,
  block_size: int | None = None,
  implementation: Implementation | None = None,
  sinks: bool | Literal["inputs"] = False,
  logits_soft_cap: float | None = None,
  forget: bool = False,
) -> Attention:
  """The mechanism of `sliding_window_attention`.

  Args:
    window: w, or (left, right). By default both sides together have the paper's
      512 keys.
    dilation: one int, or one per query head.
    block_size: the number of queries in a tile; None means the platform's choice.
    implementation: 'xla', 'cudnn', 'tokamax', or None to choose.
    sinks: as in `dense`.
    logits_soft_cap: likewise.
    forget: likewise; for windows without dilation.

  Returns:
    An `Attention` that decodes with a `SlidingWindowCache`. Its only variables are
    those of sinks and forget gates.

  Raises:
    ValueError: an argument is out of range; by `init`, the window covers even the
      longest sequence.
  """
  left, right = _integers("window", window, 0, 2)
  spacings = _integers("dilation", dilation, 1)
  own = own_logits.OwnLogits(sinks, logits_soft_cap, forget)
  if forget and max(spacings) > 1:
    raise ValueError(
      f"forget: expected False with dilation {dilation}; only windows without "
      "dilation support it"
    )
  function = partial(
    sliding_window_attention,
    window=window,
    dilation=dilation,
    block_size=block_size,
    implementation=implementation,
  )

  def init(key, dims):
    if max(left, right) * min(spacings) >= dims.max_length:
      raise ValueError(
        f"window: {window} with dilation {dilation} reaches over all "
        f"{dims.max_length} positions, which is dense attention; choose less "
        "or use dense"
      )
    return own.init(key, dims)

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    size = min(left * max(spacings) + 1, max_length)
    return SlidingWindowCache(
      *init_dense(batch, size, dims, dtype, forgets=forget)
    )

  def decode(variables, cache, query, key, value, *, log_forget=None, **call):
    if max(spacings) > 1:
      mods = {name: call.get(name) for name in ("score_mod", "mask_mod")}
      _check_neighbours(log_forget=log_forget, **mods)
    slots = jnp.arange(cache.key.shape[1])
    # The new position is in the slot of age 0; larger ages than `index` are empty slots.
    age = (cache.index[:, None] - slots[None]) % slots.size
    keys = layout.write(cache.key, key, age == 0)
    values = layout.write(cache.value, value, age == 0)
    forget_bias = next_forget_bias(cache.forget_bias, log_forget, age == 0)
    dilations = _integers("dilation", dilation, 1, query.shape[2])
    # The ring holds as many positions as the window reaches, or all positions.
    spacing = jnp.array([min(x, slots.size) for x in dilations])
    steps, rest = jnp.divmod(age[:, None], spacing[None, :, None])
    is_set = (age <= cache.index[:, None])[:, None]
    out = attend_to_slots(
      query,
      keys,
      values,
      seen=is_set & (rest == 0) & (steps <= left),
      distance=-steps,
      positions=(cache.index, cache.index[:, None] - age),
      forget_bias=forget_bias,
      **{**own.options(variables), **call},
    )
    return out, SlidingWindowCache(keys, values, cache.index + 1, forget_bias)

  def prefill(
    variables,
    cache,
    query,
    key,
    value,
    lengths,
    *,
    scale=None,
    log_forget=None,
    sinks=None,
  ):
    del variables, query, scale, sinks
    forget_bias = cache.forget_bias
    if log_forget is not None:
      forget_bias = ring(
        forget_bias,
        prompt_forget_bias(prompt_rows(log_forget, lengths)),
        lengths,
      )
    return SlidingWindowCache(
      ring(cache.key, key, lengths),
      ring(cache.value, value, lengths),
      lengths,
      forget_bias,
    )

  plain = {"causal", "cross", "mask", "segments", "relative", "dropout"}
  supports = own.supports(plain | {"decode", "global", "sequence"})
  if max(spacings) > 1:
    supports -= {"log_forget", "mods"}
  return Attention(
    init=init,
    apply=own.make_apply("sliding_window", function),
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    supports=supports,
    approximates="dense",
    cost="linear",
    causal_only=forget,
    gates=own.gates,
    sizes=Hyperparameters(
      short={"window": 8},
      long={"window": 64},
      timed=lambda length: {"window": min(256, length // 2)},
    ),
  )
