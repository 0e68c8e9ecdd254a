"""Attention through a feature map: chooses the loop over all keys or s ≤ t."""

from jaxtyping import Array, Bool, Float

from attention.linear import bidirectional, causal
from attention.linear.features import FeatureMap, Operands


def attend(
  features: FeatureMap,
  operands: Operands,
  keep: Bool[Array, "B S"] | None,
  *,
  is_causal: bool,
  block_size: int | None,
) -> Float[Array, "B T N V"]:
  """Linear attention with the features of `features`.

  Args:
    features: the feature map.
    operands: query, key, value and the arrays of the feature map.
    keep: which keys count; None is all.
    is_causal: query t sees keys s ≤ t.
    block_size: positions of a step, or of a chunk of the causal form; None is
      the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of the query.

  Raises:
    ValueError: `block_size` is neither None nor a positive int.
  """
  is_size = isinstance(block_size, int) and not isinstance(block_size, bool)
  if block_size is not None and not (is_size and block_size > 0):
    raise ValueError(
      f"block_size: expected a positive int or None, got {block_size!r}"
    )
  if is_causal:
    return causal.attend(features, operands, keep, block_size)
  return bidirectional.attend(features, operands, keep, block_size)
