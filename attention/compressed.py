"""Compressed attention: a sliding window, and one key and value for every m positions.

In DeepSeek-V4's heavily compressed attention (HCA), queries see all of these entries.
In its compressed sparse attention (CSA), they see those that an indexer selects.
"""

from functools import partial
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.dense import dense_attention
from attention.flash import flash_attention
from attention.mechanism import Attention, Hyperparameters, accepted_options
from attention.platform import backend
from attention.platform.blocks import chunk_map
from attention.recurrent.gates import check_gates, kernel, project
from attention.sliding_window import sliding_window_attention
from attention.softmax import entries as pooling
from attention.softmax import indexer
from attention.softmax.block_selection import cumulative_counts
from attention.softmax.entries import norm, rotate
from attention.softmax.rows import Output, merge, with_sinks

_INSTEAD = "an entry pools several positions; give a key mask"


@attention_function
def compressed_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  window: int,
  entries: Float[Array, "B M K H"],
  entry_values: Float[Array, "B M K V"] | None = None,
  stride: int,
  index_query: Float[Array, "B T I D"] | None = None,
  index_key: Float[Array, "B M D"] | None = None,
  index_weight: Float[Array, "B T I"] | None = None,
  top_k: int | None = None,
  sinks: Float[Array, "... N"] | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
  return_lse: bool = False,
) -> Output:
  """Each query attends to a sliding window of keys and to compressed past entries.

    out = compressed_attention(q, k, v, window=128, entries=c, stride=128)

    out[t] = softmax over both of (scale · q_t · k_s, scale · q_t · c_i), times (v_s, u_i)
    t − window < s ≤ t        i ∈ A(t) ⊂ {i : (i + 1)·m ≤ t + 1}

  with m = `stride`: entry i is visible from the last of its m positions on. A(t) has
  all of these entries (HCA), or, with the index arrays, the `top_k` with the largest

    I[t, i] = Σ_j index_weight[t, j] · relu(index_query[t, j] · index_key[i])     (CSA)

  Of entries with equal scores, the earlier ones are selected.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    window: the number of uncompressed keys that a query sees, including its own.
    entries: c, the keys of the entries, as from `compressed_entries`; M ≤ T // m.
    entry_values: u; None means `entries`, as in DeepSeek-V4, where H = V.
    stride: m.
    index_query: the queries of I index heads.
    index_key: the index keys of the entries, pooled in the same way.
    index_weight: the weight of each index head.
    top_k: the largest number of entries that a query sees, with an indexer.
    sinks: `[N]`, one more logit per head, which takes weight but has no value; or
      `[B, T, N]`, one per query and head.
    mask: key mask, `[B, 1, 1, T]`; entries pool unmasked positions only.
    is_causal: must be True, because an entry depends on all of its positions.
    block_size: C, the number of queries that are scored at a time; None means the
      platform's choice.
    scale: factor of the logits; None means 1/√H.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    As in `flash_attention`. No gradient flows to the index arrays.

  Raises:
    ValueError: the mask varies along queries, `is_causal` is False, there are more
      entries than T // m, or an index array is missing.

  Cost: time T·N·(H+V)·(window + M), and T·M·(I·D + 70) for a selection; memory as in
  `flash_attention`, and B·C·M·(I+1) for C queries at a time.

  The caller applies rotary positions, to entry i with position i·m. DeepSeek-V4 also
  rotates the last features of `out` back, because its values are rotated.

  Papers: DeepSeek-V4, sections 2.3.1 and 2.3.2, as in transformers 5.24.0; the indexer
  is that of DeepSeek-V3.2, arXiv:2512.02556.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; entries are visible to later queries"
    )
  length, count = query.shape[1], entries.shape[1]
  if count > length // stride:
    raise ValueError(
      f"entries: expected at most {length // stride}, one for every {stride} of "
      f"{length} positions, got {count}"
    )
  index = index_query, index_key, index_weight, top_k
  if len({x is None for x in index}) > 1:
    raise ValueError(
      "index_query: expected all or none of index_query, index_key, "
      "index_weight and top_k, got some"
    )
  keep = checks.key_mask(mask, query, key, _INSTEAD)
  window_result: Any = sliding_window_attention(
    query,
    key,
    value,
    window=(window - 1, 0),
    mask=mask,
    scale=scale,
    block_size=block_size,
    return_lse=True,
  )
  num_visible = cumulative_counts(keep, query.shape[:2]) // stride
  out, lse = window_result
  if count:
    kv = entries, entries if entry_values is None else entry_values
    entry_result = _attend_to_entries(
      query, kv, num_visible, index, scale, block_size
    )
    out, lse = merge(window_result, entry_result)
  if sinks is not None:
    out, lse = with_sinks(out, lse, sinks)
  return (out, lse) if return_lse else out


def _attend_to_entries(query, kv, num_visible, index, scale, block_size):
  """(out, lse) over the first `num_visible [B, T]` entries."""
  *index_arrays, top_k = index
  count, index_heads = kv[0].shape[1], 0
  rows = indexer.Rows(None, None, None, query, num_visible)
  if top_k is not None:
    index_query, index_key, index_weight = jax.lax.stop_gradient(index_arrays)
    index_heads = index_query.shape[2]
    rows = rows._replace(index=index_query, weight=index_weight)

  def attend(rows):
    visible = jnp.arange(count)[None, None] < rows.place[..., None]
    if top_k is not None:
      keys = indexer.Keys(index_key, None, None)
      scores = indexer.index_scores(rows, keys, is_causal=False)
      visible = indexer.select(jnp.where(visible, scores, -jnp.inf), top_k)
    return flash_attention(
      rows.query, *kv, mask=visible[:, None], scale=scale, return_lse=True
    )

  if block_size is None:
    row_bytes = 4 * query.shape[0] * count * (index_heads + 1)
    block_size = backend.rows_per_tile(row_bytes, query.shape[1])
  return chunk_map(attend, block_size, rows)


_OWN_OPTIONS = "window", "stride", "entries", "entry_values", "top_k", "sinks"


@attention_factory
def compressed(
  window: int = 128,
  stride: checks.FromZero = 128,
  top_k: int | None = None,
  num_index_heads: int = 4,
  index_dim: int = 32,
  query_rank: int | None = None,
  rotary_dim: int | None = None,
) -> Attention:
  """DeepSeek-V4's attention: `compressed_attention` whose keys are also its values.

    k_t = v_t = norm(x_t · W)        q_t = norm(q_t), for each head without a scale
    c_i = u_i = norm(`compressed_entries` of x · W_c, by gates x · W_g and a bias b)
    out_t = R_−t (`compressed_attention` of R_t q_t, R_t k_t and R_im c_i, with sinks)

  R_t rotates the last P features of a head by position t, in a model with rotary
  positions. All heads share k and c. With `top_k` it is CSA: entries have two series,
  and an indexer with its own entries selects them. Without `top_k` it is HCA.

  Args:
    window: W, the number of keys that a query sees, including its own.
    stride: m; 0 means a window alone, as in the first layers of DeepSeek-V4.
    top_k: the number of entries that an indexer selects; None means all.
    num_index_heads: I.
    index_dim: D, of which the last P features are rotated.
    query_rank: the model's `query_rank`, the width of the third argument of `gates`,
      from which it computes index queries; None computes them from x.
    rotary_dim: P, even; None means the paper's H / 8, rounded down to an even number,
      and at least 2.

  Returns:
    A causal `Attention` that computes its own keys and values ('own_keys'), of width H,
    and decodes with a `CompressedCache`. If a call has values, they replace its own,
    and the value of an entry is their mean, with the entry's weights averaged over
    features. Its parameters are `kv_kernel [F, H]`, `kv_scale [H]` and `sinks [N]`;
    with entries `entry_kernel` and `entry_gate_kernel` `[F, A, H]`,
    `entry_bias [m, A, H]` and `entry_scale [H]`; and the same of width D for an
    indexer, with `index_query_kernel [F, I, D]` and `index_weight_kernel [F, I]`. Only
    `loss` trains the indexer: the mean of `dsa_indexer_loss` over entries.

  Raises:
    ValueError: an argument is not a positive int, `rotary_dim` is odd, or options of an
      indexer are given without entries or `top_k`; by `init`, P is above H or D.

  Cost: as in `compressed_attention`. The cache has W·H + T/m·(H + D) numbers, and those
  of A·m positions.
  """
  if not stride and top_k is not None:
    raise ValueError(f"top_k: expected None with stride 0, got {top_k}")
  if top_k is None:
    indexer.check_defaults(
      "top_k",
      num_index_heads=(num_index_heads, 4),
      index_dim=(index_dim, 32),
      query_rank=(query_rank, None),
    )
  if rotary_dim is not None and rotary_dim % 2:
    raise ValueError(f"rotary_dim: expected an even number, got {rotary_dim}")
  series, step = 1 if top_k is None else 2, stride or 1
  pooled_names, index_names = [], []
  if stride:
    pooled_names = ["entry_rows", "entry_gates", "rotation"]
  if top_k is not None:
    pooled_names += ["index_rows", "index_gates"]
    index_names = ["index_query", "index_weight"]

  def rotary_width(head_dim):
    return rotary_dim or 2 * max(1, head_dim // 16)

  def init(key, dims):
    checks.check_features("compressed", dims.features)
    width, head_dim = rotary_width(dims.head_dim), dims.head_dim
    limit = head_dim if top_k is None else min(head_dim, index_dim)
    if width > limit:
      raise ValueError(
        f"rotary_dim: expected at most the {limit} features of a head, got {width}"
      )
    keys = jax.random.split(key, 5)
    params = {
      "kv_kernel": kernel(keys[0], dims.features, head_dim),
      "kv_scale": jnp.ones(head_dim),
      "sinks": jnp.zeros(dims.num_heads),
    }
    shape = dims.features, step, series
    if stride:
      params |= pooling.init(keys[1], "entry", *shape, head_dim)
    if top_k is not None:
      source, heads = query_rank or dims.features, num_index_heads
      params |= pooling.init(keys[2], "index", *shape, index_dim)
      params["index_query_kernel"] = kernel(keys[3], source, heads, index_dim)
      params["index_weight_kernel"] = kernel(keys[4], dims.features, heads)
    return {"params": params}

  def gates(variables, inputs, query_inputs=None):
    p, dtype = variables["params"], inputs.dtype
    kv = norm(project(inputs, p["kv_kernel"]), p["kv_scale"]).astype(dtype)
    width = rotary_width(kv.shape[2])
    fixed, rotary = jnp.split(kv, [kv.shape[2] - width], axis=2)
    # The model rotates these vectors (1, 0) to (cos, sin) of each position.
    unit = jnp.repeat(jnp.array([1.0, 0.0]), width // 2)[None, None, None]
    unit = jnp.broadcast_to(unit, (*inputs.shape[:2], 1, width))
    arrays = {"latent": fixed, "shared_key": rotary, "rotation": unit}
    if stride:
      arrays["entry_rows"] = project(inputs, p["entry_kernel"]).astype(dtype)
      arrays["entry_gates"] = project(inputs, p["entry_gate_kernel"])
    if top_k is not None:
      source = inputs if query_inputs is None else query_inputs
      x, source = jax.lax.stop_gradient((inputs, source))
      arrays["index_rows"] = project(x, p["index_kernel"])
      arrays["index_gates"] = project(x, p["index_gate_kernel"])
      arrays["index_query"] = project(source, p["index_query_kernel"])
      weight = project(x, p["index_weight_kernel"])
      arrays["index_weight"] = weight / math.sqrt(num_index_heads * index_dim)
    return arrays

  def make_entries(params, arrays, keep=None):
    """Entries `[B, M, H]` and their index keys, which are None without an indexer."""
    pool = partial(pooling.pool, params, arrays, keep=keep)
    entries = pool("entry").astype(arrays["entry_rows"].dtype)
    return entries, None if top_k is None else pool("index")

  def split_call(query, key, call):
    """Splits a call into gates, keys, key mask and other options."""
    _check_none("key", key)
    names = "latent", "shared_key", "rotation", *pooled_names, *index_names
    check_gates("compressed", call, *names)
    arrays = {name: call[name] for name in names}
    # Positions have no gradient.
    arrays["rotation"] = jax.lax.stop_gradient(arrays["rotation"])
    kv = jnp.concatenate([arrays["latent"], arrays["shared_key"]], axis=2)
    options = {name: x for name, x in call.items() if name not in names}
    if top_k is not None:
      rotation = arrays["rotation"]
      arrays["index_query"] = rotate(arrays["index_query"], rotation)
    kv = kv[:, :, None]
    keep = checks.key_mask(options.get("mask"), query, kv, _INSTEAD)
    return indexer.zero_masked(arrays, keep), kv, keep, options

  def apply(variables, query, key, value, **call) -> Any:
    p = variables["params"]
    arrays, kv, keep, call = split_call(query, key, call)
    call = {"is_causal": False, **call}
    call = accepted_options(
      "compressed", compressed_attention, call, own=_OWN_OPTIONS
    )
    if kv.shape[1] != query.shape[1]:
      raise ValueError(
        "query: expected query and key of one sequence, got lengths "
        f"{query.shape[1]} and {kv.shape[1]}; for cross-attention use dense"
      )
    return_lse = call.pop("return_lse", False)
    values = kv if value is None else value
    num_heads, selection = values.shape[2], {}
    entries, entry_values = kv[:, :0], values[:, :0]
    if stride:
      entries, index_key = make_entries(p, arrays, keep)
      entries = entry_values = entries[:, :, None]
      if value is not None:
        weights = arrays["entry_gates"], p["entry_bias"]
        entry_values = pooling.mean_values(value, *weights, keep)
      if top_k is not None:
        selection = {name: arrays[name] for name in index_names}
        selection |= {"index_key": index_key, "top_k": top_k}
    result: Any = compressed_attention(
      norm(query),
      jnp.repeat(kv, num_heads, axis=2),
      values,
      window=window,
      entries=jnp.repeat(entries, num_heads, axis=2),
      entry_values=entry_values,
      stride=step,
      sinks=p["sinks"],
      return_lse=True,
      **selection,
      **call,
    )
    out, lse = result
    if value is None:
      out = rotate(out, arrays["rotation"], -1.0)
    return (out, lse) if return_lse else out

  def loss(variables, query, key, *, scale=None, **call):
    arrays, _, keep, call = split_call(query, key, call)
    accepted_options("compressed", compressed_attention, call)
    entries, index_key = make_entries(variables["params"], arrays, keep)
    if not entries.shape[1]:
      return jnp.zeros(())
    queries = arrays["index_query"], arrays["index_weight"], None, norm(query)
    num_visible = cumulative_counts(keep, query.shape[:2]) // step
    rows = indexer.Rows(*queries, num_visible - 1)
    keys = indexer.Keys(index_key, None, None)
    losses = indexer.row_losses(
      rows, keys, entries[:, :, None], top_k=top_k, scale=scale
    )
    return indexer.mean_loss(losses, keep)

  def init_cache(variables, batch, max_length, dims, dtype):
    widths = dims.features, query_rank or dims.features
    inputs = (jax.ShapeDtypeStruct((batch, 1, x), dtype) for x in widths)
    arrays = jax.eval_shape(gates, variables, *inputs)
    count = -(-max_length // step) if stride else 0
    index_key = jnp.zeros((batch, count, index_dim), jnp.float32)
    return pooling.CompressedCache(
      jnp.zeros((batch, count, dims.head_dim), dtype),
      None if top_k is None else index_key,
      jnp.zeros((batch, min(window, max_length), dims.head_dim), dtype),
      {
        name: jnp.zeros((batch, series * step, *x.shape[2:]), x.dtype)
        for name, x in arrays.items()
        if name in pooled_names
      },
      jnp.zeros((batch,), jnp.int32),
    )

  def decode(variables, cache, query, key, value, *, scale=None, **call):
    _check_none("value", value)
    arrays, kv, _, call = split_call(query, key, call)
    accepted_options("compressed", compressed_attention, call, own=_OWN_OPTIONS)
    visible = jnp.arange(cache.window.shape[1])[None] <= cache.index[:, None]
    rows = {name: arrays[name] for name in pooled_names}
    pool_entries = partial(make_entries, variables["params"])
    cache = pooling.append(cache, kv[:, :, 0], rows, pool_entries)
    keys = cache.window
    if stride:
      entry_numbers = jnp.arange(cache.entries.shape[1])[None]
      selected = entry_numbers < cache.index[:, None] // step
      if top_k is not None:
        index_rows = indexer.Rows(*map(arrays.get, index_names), ids=None)
        index_keys = indexer.Keys(cache.index_key, selected, None)
        scores = indexer.index_scores(index_rows, index_keys, is_causal=False)
        selected = indexer.select(scores, top_k)[:, 0]
      visible = jnp.concatenate([visible, selected], axis=1)
      keys = jnp.concatenate([keys, cache.entries], axis=1)
    out: Any = dense_attention(
      norm(query),
      keys[:, :, None],
      keys[:, :, None],
      mask=visible[:, None, None],
      sinks=variables["params"]["sinks"],
      scale=scale,
    )
    return rotate(out, arrays["rotation"], -1.0), cache

  def prefill(variables, cache, query, key, value, lengths, **call):
    _check_none("value", value)
    arrays, kv, *_ = split_call(query, key, call)
    rows = {name: arrays[name] for name in pooled_names}
    pool_entries = partial(make_entries, variables["params"])
    return pooling.prefill(cache, kv[:, :, 0], rows, lengths, pool_entries)

  return Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    supports=frozenset({"causal", "mask", "decode", "own_keys"}),
    causal_only=True,
    gates=gates,
    loss=None if top_k is None else loss,
    reads_query_inputs=query_rank is not None,
    sizes=Hyperparameters(
      short={"window": 8, "stride": 4, "top_k": 4, "index_dim": 8},
      long={"stride": 4, "top_k": 64},
      timed=lambda length: {"stride": 4, "top_k": min(128, length // 4)},
    ),
  )


def _check_none(name, x):
  """Raises ValueError for a key or value, which the mechanism computes itself."""
  if x is not None:
    raise ValueError(
      f"{name}: compressed attention computes it from the inputs of the layer; "
      f"expected None, got shape {x.shape}"
    )
