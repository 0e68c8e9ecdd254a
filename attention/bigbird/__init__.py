"""BigBird: a window, global blocks and random blocks.

`attention` is the public function and draws the random blocks; `blocks` says
what a tile sees.
"""

from attention.bigbird.attention import (
  bigbird,
  bigbird_attention,
  bigbird_random_blocks,
)

__all__ = ["bigbird", "bigbird_attention", "bigbird_random_blocks"]
