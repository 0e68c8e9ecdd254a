"""Sliding-window attention with global tokens (Beltagy et al., 2020).

Without dilation and global tokens, it is one call of `attention.softmax.tiles.attend`
with a window in its `Visible`. With them, and for sequence shards,
`attention.softmax.windows` merges several calls. The cache is a ring buffer.
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
from attention.dense import attend_to_cache
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
from attention.softmax.visible import EVERY_PAIR, FARTHEST, Visible


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
  """Each query attends to a window of neighbouring keys and to global tokens.

    out = sliding_window_attention(q, k, v, window=256, is_causal=True)

    out[t] = softmax over s in A(t) of (scale · query[t] · key[s]), times value
    A(t) = {s = t + i·dilation : -left ≤ i ≤ right}  ∪  {s global}

  It is one softmax over the union, so a global key inside the window counts once. A
  global query attends to all keys. `mask`, `is_causal` and the segments restrict
  the pairs further. A query that sees no key outputs zeros and has zero gradients.
  Masked keys never affect the output, even if they are NaN.

  Args:
    query: `[B, T, N, H]`.
    value: `[B, S, K, V]`.
    key: `[B, S, K, H]`; key s and query s are at the same position.
    window: w for |i| ≤ w, or (left, right), as `local_window_size` in jax.nn.
    dilation: the distance between neighbouring keys of the window, one int, or N ints,
      one per query head. `log_forget`, `score_mod` and `mask_mod` require a dilation of
      1 and no `global_indices`.
    mask: key mask, broadcastable to `[B, 1, 1, S]`.
    relative_bias: `[N, 2L+1]`; entry L + i belongs to the key at distance
      i·dilation, so with L = w each key of the window has its own entry.
    relative_keys: `[2L+1, H]` or `[N, 2L+1, H]`, with entries in the same order.
    relative_queries: `[2L+1, H]` or `[N, 2L+1, H]`, with entries in the same order.
    global_indices: `[B, G]`, the positions of the global tokens; requires T = S.
      Indices outside [0, T), such as -1, are ignored, and repeated ones count once.
    global_qkv: separate (query, key, value) for the attention of global queries to all
      keys. Other queries see global keys through `key` and `value`.
    block_size: C, the number of queries in a tile. Only 'xla' supports it. None means
      one of `attention.platform.backend.WINDOW_ROWS`.
    implementation: None, 'xla', 'cudnn' or 'tokamax'. cuDNN supports only a window to
      the left, without a mask. cuDNN and tokamax require T = S, and do not support
      segments, tables, dropout, dilation or global tokens.
    axis_name: mesh axis inside `jax.shard_map`, for a query and key of one sequence.
      Global indices refer to the whole sequence. Dropout is not supported.
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
    ValueError: `implementation` does not support the call.

  Cost, with W = left + right + 1 and tiles of C queries: time
  T·(W+C+G)·N·(H+V), and G·S·N·(H+V) for the global queries. Memory in addition
  to the arrays: B·N·C·(W+C+G) float32 for each tile that is computed at the same time,
  and B·N·G·S float32. No array is T×S, forward or backward. Devices exchange the left +
  right positions of keys and values that the window covers, and the queries, keys,
  values and results of G global tokens. Each dilation costs one pass over its heads. On
  a TPU, 'tokamax' needs the window as a mask of T·S bool.

  Differs from the paper in that any length is allowed, windows may be one-sided, and
  segments and causality also apply to global tokens.

  Papers: Longformer, the long-document transformer, arXiv:2004.05150. Sinks: gpt-oss,
  arXiv:2508.10925. Soft caps: Gemma 2, arXiv:2408.00118. Forget gates: Forgetting
  transformer, arXiv:2503.02130. Mods: Flex attention, arXiv:2412.05496.
  """
  left, right = _int_tuple("window", window, least=0, count=2)
  dilations = _int_tuple("dilation", dilation, least=1, count=query.shape[2])
  for mask in visible.masks:
    checks.key_mask(mask, query, key)  # Raises unless it is a key mask.
  if global_indices is not None or global_qkv is not None:
    windows.check_globals(global_indices, global_qkv, query, key, value, logits)
  is_plain = global_indices is None and max(dilations) == 1
  if not is_plain:
    _check_plain_window(
      log_forget=logits.log_forget,
      score_mod=logits.score_mod,
      mask_mod=visible.mods or None,
      visible=visible.bands or visible.positions,
    )
  if logits.bias is not None or visible.block_mask is not None:
    name = "visible" if logits.bias is None else "logits"
    raise ValueError(
      f"{name}: expected no bias and no block mask; a window does not support "
      "them, but flash_attention does"
    )
  if axis_name is not None:
    rate = dropout_rate or None
    sharding.check_shards(query, key, visible, logits, dropout_rate=rate)
    if key.shape[1] != query.shape[1]:
      raise ValueError(
        f"key: expected the positions of the queries, {query.shape[1]} on a device, "
        f"got {key.shape[1]}; sharded windows require self-attention"
      )
  longest = max(query.shape[1], key.shape[1])
  if visible.positions is not None:
    longest = FARTHEST  # Distances may exceed both lengths.
  sides = Visible(left=min(left, longest), right=min(right, longest))
  out = kernels.kernel_output(
    implementation,
    query,
    key,
    value,
    visible & sides,
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
  if is_plain and axis_name is None:
    out, lse = attend(query, key, value, visible & sides, logits, **options)
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


def _check_plain_window(**options: Any) -> None:
  """Raises ValueError for options that only a plain window supports."""
  for name, option in options.items():
    if option is not None:
      raise ValueError(
        f"{name}: expected None with global_indices or a dilation; only a plain "
        "window supports it"
      )


def _int_tuple(
  name: str, value: int | Sequence[int], *, least: int, count: int | None = None
) -> tuple[int, ...]:
  """Converts `value` to a tuple of `count` ints, of which it may give one for all.

  Raises:
    ValueError: there are other than `count` ints, or one is below `least`.
  """
  is_sequence = isinstance(value, Sequence)
  numbers = tuple(value) if is_sequence else (value,) * (count or 1)
  if not numbers or any(
    not isinstance(x, int | np.integer) or isinstance(x, bool) or x < least
    for x in numbers
  ):
    raise ValueError(
      f"{name}: expected ints of at least {least}, got {value!r}"
    )
  if count is not None and len(numbers) != count:
    expected = f"one int or one for each of the {count} query heads"
    if name == "window":
      expected = "one int or a pair (left, right)"
    raise ValueError(f"{name}: expected {expected}, got {value!r}")
  return tuple(map(int, numbers))


class SlidingWindowCache(DenseCache):
  """The last S = min(left · the largest dilation + 1, max_length) keys and values.

  Position p is at index p mod S.
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
    window: w, or (left, right). The default covers the paper's 512 keys on both sides
      together.
    dilation: one int, or one per query head.
    block_size: the number of queries in a tile; None means the platform's choice.
    implementation: as in `sliding_window_attention`.
    sinks: as in `dense`.
    logits_soft_cap: as in `dense`.
    forget: as in `dense`, for windows without dilation.

  Returns:
    An `Attention` that decodes with a `SlidingWindowCache`. Its only variables are
    those of sinks and forget gates.

  Raises:
    ValueError: an argument is out of range; by `init`, the window covers the longest
      sequence.
  """
  left, right = _int_tuple("window", window, least=0, count=2)
  dilations = _int_tuple("dilation", dilation, least=1)
  own = own_logits.OwnLogits(sinks, logits_soft_cap, forget)
  if forget and max(dilations) > 1:
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
    if max(left, right) * min(dilations) >= dims.max_length:
      raise ValueError(
        f"window: {window} with dilation {dilation} covers all "
        f"{dims.max_length} positions, which is dense attention; choose a smaller "
        "one or use dense"
      )
    return own.init(key, dims)

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables
    size = min(left * max(dilations) + 1, max_length)
    return SlidingWindowCache(
      *init_dense(batch, size, dims, dtype, forgets=forget)
    )

  def decode(variables, cache, query, key, value, *, log_forget=None, **call):
    if max(dilations) > 1:
      mods = {name: call.get(name) for name in ("score_mod", "mask_mod")}
      _check_plain_window(log_forget=log_forget, **mods)
    rows = jnp.arange(cache.key.shape[1])
    # The age of the new position is 0; rows whose age is above `index` are unset.
    age = (cache.index[:, None] - rows[None]) % rows.size
    keys = layout.write(cache.key, key, age == 0)
    values = layout.write(cache.value, value, age == 0)
    forget_bias = next_forget_bias(cache.forget_bias, log_forget, age == 0)
    num_heads = query.shape[2]
    per_head = _int_tuple("dilation", dilation, least=1, count=num_heads)
    # The ring has the positions that the window covers, or all positions.
    spacing = jnp.array([min(x, rows.size) for x in per_head])
    steps, remainder = jnp.divmod(age[:, None], spacing[None, :, None])
    is_set = (age <= cache.index[:, None])[:, None]
    out = attend_to_cache(
      query,
      keys,
      values,
      mask=is_set & (remainder == 0) & (steps <= left),
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
  if max(dilations) > 1:
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
