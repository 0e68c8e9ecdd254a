"""A window, global blocks and random blocks (BigBird)."""

from attention.bigbird.attention import (
  bigbird,
  bigbird_attention,
  bigbird_random_blocks,
)

__all__ = ["bigbird", "bigbird_attention", "bigbird_random_blocks"]
