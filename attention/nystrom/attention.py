"""Nyström attention: softmax attention through L landmarks (Xiong 2021).

The n tokens that `mask` leaves are cut into L runs of nearly equal length: the
token of rank r among them belongs to landmark floor(r·L/n). With Q̃ and K̃ the
means of the queries and keys of each run,

  F = softmax(scale · Q K̃ᵀ)     [T, L]
  A = softmax(scale · Q̃ K̃ᵀ)     [L, L]
  B = softmax(scale · Q̃ Kᵀ)     [L, S]
  out = F · A⁺ · (B V)

where A⁺, the pseudo-inverse, is computed by a fixed number of steps of

  Z₀ = Aᵀ / (‖A‖₁ ‖A‖∞),    Z ← ¼ Z (13 I - A Z (15 I - A Z (7 I - A Z)))

which converges for every A, since Z₀ is in the row space of A and
‖I - A Z₀‖ < 1 there. Each A has its own two norms. A landmark without tokens
(n < L) has a row and a column of zeros in A, which stay zeros in every Z, so it
takes no part. With a landmark for every token, F = A = B and A A⁺ A = A, which
is dense attention.

The landmarks are in `means`, the iteration in `inverse`. B V is
`flash_attention` of L queries, and F (A⁺ B V) is `core.few_keys`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import arguments, plug
from attention import sharded as flash_parts
from attention.core import few_keys, halo
from attention.core.softmax import masked_softmax
from attention.flash import flash_attention
from attention.nystrom.convolution import convolve
from attention.nystrom.inverse import pseudo_inverse
from attention.nystrom.means import cut_into_runs, means


@arguments.attention_function(
  conv_kernel_size="the convolution has a trained filter, so it belongs to the "
  "mechanism, nystrom(conv_kernel_size=…)",
)
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
) -> Float[Array, "B T N V"]:
  """Queries meet keys through landmarks: F · A⁺ · (B V).

    F = softmax(scale · Q K̃ᵀ)
    A = softmax(scale · Q̃ K̃ᵀ)
    B = softmax(scale · Q̃ Kᵀ)

  The docstring of this module defines K̃, Q̃ and A⁺.

  Landmarks, softmax and pseudo-inverse are float32 for inputs of any dtype. The
  mask says which tokens exist, as queries and as keys. Landmarks average over
  these only, so a padded example gives the same result as without padding. A
  query at a masked position still gets its row of F, like a query from outside
  the sequence. An example without tokens gets zeros.

  With grouped heads, K̃ has means for every key head and Q̃ for every query
  head, so there is one matrix A for every query head.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, S = T, N a multiple of K; query head n reads key head
      n // (N/K).
    value: `[B, S, K, V]`.
    num_landmarks: L; from T on the result is that of dense attention, as far as
      the iteration has converged.
    pinv_iterations: steps of the iteration.
    shared_start: the iteration starts by the largest norm in the batch, as the
      paper's code does, instead of by that of each matrix. Published weights
      expect it; one example then changes another as long as the iteration has
      not converged.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: must be False, because every landmark mixes positions.
    scale: factor of the logits; None is 1/√H.
    block_size: C, positions of a tile; None is the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. Weights of the effective matrix sum
    to 1 in a row only as far as the iteration has converged, and may be
    negative.

  Raises:
    ValueError: arguments do not fit together, query and key are of different
      length, the mask varies along queries, or a causal call.

  Cost, with M = min(L, T): time T·M·N·(H+V) + pinv_iterations·N·M³; memory in
  addition to the arrays B·N·M·(C+M) for tiles of C positions, and in the
  backward five M×M matrices for each iteration and head. Nothing is T×S or T×M.

  Departs from its paper in masks and in any length, where the paper requires
  that L divides T. Both norms are those of each matrix unless
  `shared_start`. The paper's code takes the largest in the batch, so that one
  example changes another.

  Paper: Nyströmformer: a Nyström-based algorithm for approximating
  self-attention, sections 3.2 and 3.3, arXiv:2102.03902.
  """
  arguments.check_qkv(query, key, value)
  _check_counts(num_landmarks, pinv_iterations)
  arguments.check_flag("shared_start", shared_start)
  if block_size is not None:
    arguments.check_at_least("block_size", block_size, 1)
  return _attend(
    query,
    key,
    value,
    num_landmarks=num_landmarks,
    pinv_iterations=pinv_iterations,
    shared_start=shared_start,
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    block_size=block_size,
  )


def _attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  num_landmarks: int,
  pinv_iterations: int,
  shared_start: bool,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
  axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
  """`nystrom_attention`; with `axis_name` of a sequence in parts, one a device.

  Then the means are sums over the devices, and so is B V. What crosses is L rows
  a head three times, at any length.
  """
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True, as every landmark is a mean over "
      "positions on both sides; use performer attention, which is linear and "
      "causal, or dense or sliding_window attention"
    )
  length = query.shape[1]
  if key.shape[1] != length:
    raise ValueError(
      f"key: expected the length of query, {length}, got {key.shape[1]}, as "
      "one mask tells which tokens are averaged in both; use dense, performer "
      "or linformer attention across sequences"
    )
  keep = arguments.key_mask(
    mask,
    query,
    key,
    instead="landmarks are the same for all queries; use dense attention for "
    "such a mask",
  )
  scale = arguments.softmax_scale(scale, query.shape[-1])
  batch, _, num_heads, _ = query.shape
  devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
  count = min(num_landmarks, devices * length)
  tokens = cut_into_runs(keep, batch, length, count, axis_name)
  exists = None if keep is None else tokens.counts > 0
  queries = scale * means(query, tokens, axis_name)
  keys = means(key, tokens, axis_name)
  keys = jnp.repeat(keys, num_heads // keys.shape[1], axis=1)
  matrix = _between(queries, keys, exists)
  inverse = pseudo_inverse(matrix, pinv_iterations, shared_start)
  # B V: the landmarks are few queries, and need no blocks of their own.
  landmarks = jnp.swapaxes(queries, 1, 2)
  arrays = key.astype(jnp.float32), value.astype(jnp.float32)
  here = None if keep is None else keep[:, None, None, :]
  if axis_name is None:
    mixed = flash_attention(
      landmarks,
      *arrays,
      mask=here,
      scale=1.0,
      block_size=block_size,
      implementation="xla",
    )
  else:
    mixed = flash_parts.attention_of_few(
      landmarks, *arrays, axis_name=axis_name, mask=here, scale=1.0
    )
  mixed = jnp.einsum("BNLM,BMNV->BNLV", inverse, mixed, precision=_EXACT)
  hidden = None
  if exists is not None:
    hidden = jnp.where(exists, 0.0, jnp.finfo(jnp.float32).min / 2)
  out = few_keys.attend(
    query.astype(jnp.float32),
    scale * keys,
    mixed,
    hidden,
    block_size=block_size,
  )
  return out.astype(query.dtype)


_EXACT = jax.lax.Precision.HIGHEST
"""The inverse of small singular values would magnify rounding."""


def _between(
  queries: Float[Array, "B N L H"],
  keys: Float[Array, "B N L H"],
  exists: Bool[Array, "B L"] | None,
) -> Float[Array, "B N L L"]:
  """The matrix A; a landmark without tokens has a row and column of zeros."""
  logits = jnp.einsum("BNLH,BNMH->BNLM", queries, keys, precision=_EXACT)
  if exists is None:
    return jax.nn.softmax(logits)
  matrix = masked_softmax(logits, exists[:, None, None, :])
  return jnp.where(exists[:, None, :, None], matrix, 0.0)


def _check_counts(num_landmarks: int, pinv_iterations: int) -> None:
  for name, number in (
    ("num_landmarks", num_landmarks),
    ("pinv_iterations", pinv_iterations),
  ):
    arguments.check_at_least(name, number, 1)


def nystrom(
  num_landmarks: int = 64,
  pinv_iterations: int = 6,
  conv_kernel_size: int | None = None,
  shared_start: bool = False,
) -> plug.Attention:
  """The plug of `nystrom_attention`.

  Args:
    num_landmarks: L.
    pinv_iterations: steps of the pseudo-inverse.
    conv_kernel_size: an odd size. It adds a depth-wise convolution of the
      values along the sequence to the output, with one trained filter for each
      query head, as in the paper's code (which has 35 for long inputs). Masked
      values count as zeros. None adds nothing.
    shared_start: as in `nystrom_attention`.

  Returns:
    An `Attention`; with a convolution its variables are {'params':
    {'conv_kernel': `[conv_kernel_size, N]`}}, drawn from
    N(0, 1/conv_kernel_size).

  Raises:
    ValueError: a number is out of range; by `init`, matrices or a filter that
      take more than `arguments.MOST_BYTES`.
  """
  _check_counts(num_landmarks, pinv_iterations)
  arguments.check_flag("shared_start", shared_start)
  if conv_kernel_size is not None:
    arguments.check_at_least("conv_kernel_size", conv_kernel_size, 1)
    if conv_kernel_size % 2 == 0:
      raise ValueError(
        "conv_kernel_size: expected None or an odd number, so that the filter "
        f"has a middle, got {conv_kernel_size}"
      )

  def init(key, dims):
    landmarks = min(num_landmarks, dims.max_length)
    # The backward keeps five matrices for each step of the iteration.
    numbers = 5 * pinv_iterations * dims.num_heads * landmarks**2
    arguments.check_memory("pinv_iterations", pinv_iterations, numbers)
    if conv_kernel_size is None:
      return {}
    numbers = conv_kernel_size * dims.num_heads
    arguments.check_memory("conv_kernel_size", conv_kernel_size, numbers)
    shape = (conv_kernel_size, dims.num_heads)
    kernel = jax.random.normal(key, shape) / conv_kernel_size**0.5
    return {"params": {"conv_kernel": kernel}}

  options = {
    "num_landmarks": num_landmarks,
    "pinv_iterations": pinv_iterations,
    "shared_start": shared_start,
  }

  def convolved(variables, value, mask):
    if mask is not None:
      value = jnp.where(mask[:, 0, 0, :, None, None], value, 0)
    return convolve(value, variables["params"]["conv_kernel"])

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "nystrom", nystrom_attention, call, own=options
    )
    out = nystrom_attention(query, key, value, **options, **call)
    if conv_kernel_size is None:
      return out
    return out + convolved(variables, value, call.get("mask")).astype(out.dtype)

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    arguments.check_qkv(query, key, value)
    call = arguments.accepted_options(
      "nystrom", nystrom_attention, call, own=options
    )
    out = _attend(query, key, value, axis_name=axis_name, **options, **call)
    if conv_kernel_size is None:
      return out
    length, side = value.shape[1], conv_kernel_size // 2
    mask = call.get("mask")
    if mask is not None:
      keep = halo.reached(mask[:, 0, 0], side, side, axis_name)
      mask = keep[:, None, None]
    value = halo.reached(value, side, side, axis_name)
    more = convolved(variables, value, mask)[:, side : side + length]
    return out + more.astype(out.dtype)

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=None,
    decode=None,
    supports=frozenset({"mask", "sequence"}),
    approximates="dense",
    cost="linear",
    sizes=plug.Sizes(short={"num_landmarks": 8}),
    apply_sharded=apply_sharded,
  )
