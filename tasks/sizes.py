"""Sizes of data that no machine can hold, refused before anything is made."""

from collections.abc import Mapping

from settings.memory import check_fits

# Least of what making a batch took at its peak: 17 (text) to 32 (recall).
_TOKEN_BYTES = 16
# Text of a few letters, and its place in a list; 145 with the table of its id.
_SYMBOL_BYTES = 64
_LOGIT_BYTES = 4  # A whole batch is evaluated at once.


def check_sizes(
  batch_size: int,
  *,
  lengths: Mapping[str, int],
  symbols: Mapping[str, int] | None = None,
  examples: Mapping[str, int] | None = None,
) -> None:
  """Raises ValueError where the data of a task would not fit into memory.

  A set of examples is never held as a whole, but one that does not fit would
  not be gone through in a lifetime either.

  Args:
    batch_size: rows of a batch.
    lengths: leaf of the task -> tokens of a row of which it decides the length.
    symbols: leaf -> symbols of the vocabulary.
    examples: leaf -> examples of a set that is gone through as a whole.

  Raises:
    ValueError: the message starts with the leaf.
  """
  for leaf, length in lengths.items():
    check_fits(
      f"task.{leaf}",
      f"batch_size={batch_size} rows of {length:,} tokens",
      batch_size * length * _TOKEN_BYTES,
    )
  decides, longest = max(lengths.items(), key=lambda item: item[1])
  for leaf, count in (symbols or {}).items():
    check_fits(f"task.{leaf}", f"{count:,} symbols", count * _SYMBOL_BYTES)
    check_fits(
      f"task.{leaf}",
      f"logits over {count:,} symbols for batch_size={batch_size} rows of "
      f"{longest:,} tokens (task.{decides})",
      batch_size * longest * count * _LOGIT_BYTES,
      on_devices=True,
    )
  for leaf, count in (examples or {}).items():
    check_fits(
      f"task.{leaf}",
      f"{count:,} examples of {longest:,} tokens (task.{decides})",
      count * longest * _TOKEN_BYTES,
    )
