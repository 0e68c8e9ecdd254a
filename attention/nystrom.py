"""Nyström attention: softmax attention through L landmarks (Xiong et al., 2021)."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.mechanism import Attention, Hyperparameters
from attention.platform import backend
from attention.platform.blocks import pad, split_blocks
from attention.softmax import sharding
from attention.softmax.logits import Logits
from attention.softmax.rows import masked_softmax
from attention.softmax.tiles import attend
from attention.softmax.visible import Visible, key_mask


@attention_function
def nystrom_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  num_landmarks: int,
  pinv_iterations: int = 6,
  shared_start: bool = False,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
  """Approximates softmax attention through L landmarks: F · A⁺ · (B V).

    out = nystrom_attention(q, k, v, num_landmarks=64)

    F = softmax(scale · Q K̃ᵀ)     [T, L]
    A = softmax(scale · Q̃ K̃ᵀ)     [L, L]
    B = softmax(scale · Q̃ Kᵀ)     [L, S]

  Q̃ and K̃ are means of queries and keys over L runs of nearly equal length of the
  n unmasked tokens: the token of rank r belongs to run floor(r·L/n).
  A⁺, the pseudo-inverse, is computed by a fixed number of steps of

    Z₀ = Aᵀ / (‖A‖₁ ‖A‖∞),    Z ← ¼ Z (13 I - A Z (15 I - A Z (7 I - A Z)))

  which converges for every A, since Z₀ is in the row space of A and ‖I - A Z₀‖ < 1
  there. A landmark without tokens (n < L) has a row and a column of zeros in A and
  in every Z, so it has no effect. With a landmark for every token, F = A = B and
  A A⁺ A = A, which is dense attention.

  Landmarks, softmax and pseudo-inverse are float32 for inputs of any dtype. Padding
  never affects the output of an example. A query at a masked position still attends to
  the landmarks. An example without tokens outputs zeros. With grouped heads, every
  query head has its own A.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    num_landmarks: L; with T or more, the result is that of dense attention, up to the
      convergence of the iteration.
    pinv_iterations: the number of steps of the iteration.
    shared_start: whether to divide all initial matrices by the largest norm in the
      batch, as in the paper's code, instead of each by its own. Published weights
      expect it. Examples then affect each other unless the iteration has converged.
    mask: key mask, `[B, 1, 1, S]`.
    is_causal: must be False, because every landmark mixes positions.
    block_size: C, the number of positions in a tile; None means the platform's choice.
    axis_name: mesh axis inside `jax.shard_map`. Means and B V are summed over the
      devices, which exchange L rows per head three times, independent of the length.
    scale: factor of the logits; None means 1/√H.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. The rows of the effective matrix
    sum to 1 only if the iteration has converged, and weights may be negative.

  Raises:
    ValueError: query and key have different lengths, the mask varies along
      queries, or the call is causal.

  Cost, with M = min(L, T): time T·M·N·(H+V) + pinv_iterations·N·M³; memory in
  addition to the arrays B·N·M·(C+M) for tiles of C positions, in the backward pass
  five M×M matrices for each iteration and head, and B·T·M numbers if runs have
  different lengths. No array is T×S.

  Differs from the paper in masks, in that L need not divide T, and in that each initial
  matrix is divided by its own norms unless `shared_start`.

  Paper: Nyströmformer: a Nyström-based algorithm for approximating
  self-attention, sections 3.2 and 3.3, arXiv:2102.03902.
  """
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True; every landmark is a mean over "
      "earlier and later positions; use performer, dense or sliding_window "
      "attention"
    )
  length = query.shape[1]
  if key.shape[1] != length:
    raise ValueError(
      f"key: expected the length of query, {length}, got {key.shape[1]}, as "
      "one mask applies to both; for cross-attention use dense, performer or "
      "linformer"
    )
  keep = checks.key_mask(
    mask,
    query,
    key,
    instead="landmarks are the same for all queries; use dense attention for "
    "such a mask",
  )
  scale = checks.softmax_scale(scale, query.shape[-1])
  tokens = jnp.ones((query.shape[0], length), bool) if keep is None else keep
  # The run of a token depends on its rank among the tokens of all devices.
  rank = jnp.cumsum(tokens, axis=1) - 1
  total = jnp.sum(tokens, axis=1, keepdims=True)
  devices = 1
  if axis_name is not None:
    devices = jax.lax.axis_size(axis_name)
    totals = jax.lax.all_gather(total, axis_name)
    is_before = jnp.arange(devices) < jax.lax.axis_index(axis_name)
    rank += jnp.sum(jnp.where(is_before[:, None, None], totals, 0), axis=0)
    total = jnp.sum(totals, axis=0)
  count = min(num_landmarks, length * devices)
  runs = rank * count // jnp.maximum(total, 1)
  # `one_hot` gives zeros for −1.
  members = jax.nn.one_hot(
    jnp.where(tokens, runs, -1), count, dtype=jnp.float32
  )
  sizes = _psum(jnp.sum(members, axis=1), axis_name)
  has_tokens = pairs = None
  if keep is not None:
    has_tokens = sizes > 0
    pairs = has_tokens[:, None, :, None] & has_tokens[:, None, None]

  def means(x):
    """Means over the tokens of each run, in float32; zeros for an empty run."""
    if keep is None and axis_name is None and length % count == 0:
      x = x.reshape(x.shape[0], count, -1, *x.shape[2:])
      return jnp.mean(x, axis=2, dtype=jnp.float32)
    x = jnp.where(tokens[..., None, None], x, 0).astype(jnp.float32)
    flat = x.reshape(*x.shape[:2], -1)
    sums = jnp.einsum("BTL,BTF->BLF", members, flat, precision=_EXACT)
    sums = _psum(sums, axis_name) / jnp.maximum(sizes, 1)[..., None]
    return sums.reshape(x.shape[0], count, *x.shape[2:])

  queries, keys = scale * means(query), means(key)
  keys = jnp.repeat(keys, query.shape[2] // key.shape[2], axis=2)
  # The matrix A; a landmark without tokens has a row and a column of zeros.
  matrix = jnp.einsum("BLNH,BMNH->BNLM", queries, keys, precision=_EXACT)
  matrix = masked_softmax(matrix, pairs)
  inverse = _pseudo_inverse(matrix, pinv_iterations, shared_start)

  # B V: the landmarks are the queries.
  values, lse = attend(
    queries,
    key.astype(jnp.float32),
    value.astype(jnp.float32),
    Visible() if keep is None else key_mask(keep),
    Logits(scale=1.0),
    block=(block_size, block_size),
  )
  if axis_name is not None:
    values, _ = sharding.merge_over_devices(axis_name, values, lse)
  values = jnp.einsum("BNLM,BMNV->BLNV", inverse, values, precision=_EXACT)
  # F (A⁺ B V): the landmarks are the keys.
  out, _ = attend(
    query.astype(jnp.float32),
    scale * keys,
    values,
    Visible() if has_tokens is None else key_mask(has_tokens),
    Logits(scale=1.0),
    block=(block_size, count),
  )
  return out.astype(query.dtype)


_EXACT = jax.lax.Precision.HIGHEST
"""The inversion of small singular values magnifies rounding errors."""


def _psum(x: Array, axis_name: str | None) -> Array:
  """The sum over the devices of `axis_name`; None means one device."""
  return x if axis_name is None else jax.lax.psum(x, axis_name)


def _pseudo_inverse(
  matrix: Float[Array, "B N L L"], iterations: int, shared_start: bool = False
) -> Float[Array, "B N L L"]:
  """The pseudo-inverse of stochastic matrices, by the paper's iteration.

  A singular value σ ≪ 1 of A starts as σ/‖A‖₁ in Z and grows by 13/4 in each
  step until it reaches 1/σ. If σ is 0, float32's rounding error grows in the same
  way and becomes visible in singular matrices after about ten steps.

  Args:
    matrix: `[B, N, L, L]`; each row sums to 1, or is zeros.
    iterations: the number of steps, each of four products.
    shared_start: whether to divide all initial matrices by the largest ‖A‖₁.

  Returns:
    Z `[B, N, L, L]`, which converges to the pseudo-inverse with order three.
  """
  dot = partial(jnp.matmul, precision=_EXACT)
  eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None, None]

  def step(z, _):
    az = dot(matrix, z)
    inner = 15.0 * eye - dot(az, 7.0 * eye - az)
    return 0.25 * dot(z, 13.0 * eye - dot(az, inner)), None

  # ‖A‖∞, the largest sum of a row, is 1.
  norm = jnp.max(jnp.sum(matrix, axis=-2), axis=-1)[..., None, None]
  if shared_start:
    norm = jnp.max(norm, keepdims=True)
  first = jnp.swapaxes(matrix, -1, -2) / jnp.where(norm > 0.0, norm, 1.0)
  return jax.lax.scan(step, first, length=iterations)[0]


def _convolve(
  value: Float[Array, "B T K V"],
  kernel: Float[Array, "R N"],
  mask: Bool[Array, "B 1 1 T"] | None,
  axis_name: str | None,
) -> Float[Array, "B T N V"]:
  """Σ_j kernel[j, n] · value[t + j − (R−1)/2, k(n)], zeros outside the sequence.

  A block of C positions is the product of a band matrix of the kernel and C + R − 1
  values.
  """
  if mask is not None:
    value = jnp.where(mask[:, 0, 0, :, None, None], value, 0)
  batch, length, heads, features = value.shape
  taps, radius = len(kernel), len(kernel) // 2
  size = max(backend.DIAGONAL_ROWS, taps - 1)
  count = -(-length // size)
  value = sharding.exchange_halo(value, radius, radius, axis_name)
  value = pad(value, (count + 1) * size - value.shape[1])
  blocks = split_blocks(value.astype(jnp.float32), size)
  windows = [blocks[:, :-1], blocks[:, 1:, : taps - 1]]
  windows = jnp.concatenate(windows, axis=2)
  tap = jnp.arange(size + taps - 1)[None] - jnp.arange(size)[:, None]
  kernel = kernel.astype(jnp.float32).reshape(taps, heads, -1)
  band = kernel.at[tap].get(
    mode="fill", fill_value=0, wrap_negative_indices=False
  )
  out = jnp.einsum("CDKJ,BMDKV->BMCKJV", band, windows, precision=_EXACT)
  # On a mesh with explicit axis types, a reshape can merge only one pair of axes.
  out = out.reshape(batch, count, size, -1, features)
  return out.reshape(batch, count * size, -1, features)[:, :length]


@attention_factory
def nystrom(
  num_landmarks: int = 64,
  pinv_iterations: int = 6,
  conv_kernel_size: int | None = None,
  shared_start: bool = False,
) -> Attention:
  """The mechanism of `nystrom_attention`.

  Args:
    num_landmarks: L.
    pinv_iterations: the number of steps of the pseudo-inverse.
    conv_kernel_size: the odd size of a depth-wise convolution of the values along the
      sequence, which is added to the output, with one trained filter per query head, as
      in the paper's code (which uses 35 for long inputs). Masked values are zeros. None
      means no convolution.
    shared_start: as in `nystrom_attention`.

  Returns:
    An `Attention`; with a convolution its parameter is `conv_kernel
    [conv_kernel_size, N]`, drawn from N(0, 1/conv_kernel_size).
  """
  if conv_kernel_size is not None and conv_kernel_size % 2 == 0:
    raise ValueError(
      "conv_kernel_size: expected None or an odd number, so that the filter "
      f"has a centre, got {conv_kernel_size}"
    )

  def init(key, dims):
    if conv_kernel_size is None:
      return {}
    shape = (conv_kernel_size, dims.num_heads)
    kernel = jax.random.normal(key, shape) / conv_kernel_size**0.5
    return {"params": {"conv_kernel": kernel}}

  own = {
    "num_landmarks": num_landmarks,
    "pinv_iterations": pinv_iterations,
    "shared_start": shared_start,
  }

  attend_landmarks = make_apply("nystrom", nystrom_attention, lambda _: own)

  def apply(variables, query, key, value, **call):
    out = attend_landmarks(variables, query, key, value, **call)
    if conv_kernel_size is None:
      return out
    kernel = variables["params"]["conv_kernel"]
    options = call.get("mask"), call.get("axis_name")
    return out + _convolve(value, kernel, *options).astype(out.dtype)

  return Attention(
    init=init,
    apply=apply,
    init_cache=None,
    decode=None,
    supports=frozenset({"mask", "sequence"}),
    approximates="dense",
    cost="linear",
    sizes=Hyperparameters(short={"num_landmarks": 8}),
  )
