"""Reformer's duplication task, with LSH attention and a choice of hash rounds.

    python train.py --config=configs/reformer.py:4

`full`, `2` and `1` are the paper's other settings. On 2026-11-21, each of the four
models was evaluated with full attention and with 8, 4, 2 and 1 rounds;
benchmarks/reformer_duplication.md has the results next to the paper's numbers.

The paper has w of 511 symbols, one layer of width 256 with 4 heads, and 150,000 steps.
This config has the same depth, at a size for 2 CPU cores:
`--config.task.max_length=511 --config.task.min_length=511
--config.model.features=256 --config.num_steps=150000` is the paper's
setting. The paper's code draws new hashes in every step: `--config.redraw_every=1`.

Kitaev et al., Reformer, section 5 and table 2, arXiv:2001.04451.
"""

import ml_collections

from configs import duplicate

SYMBOLS = 31
CHUNK_SIZE = 8


def lsh(rounds: str) -> dict:
  """Returns LSH attention with `rounds` hash rounds; 'full' attends to every token.

  One bucket in one chunk is dense attention with a shared query and key.
  """
  if rounds == "full":
    return {
      "name": "lsh",
      "num_rounds": 1,
      "num_buckets": 1,
      "chunk_size": 2 * SYMBOLS + 2,
    }
  if not rounds.isdecimal():
    raise ValueError(f"rounds: expected a number or 'full', got {rounds!r}")
  return {
    "name": "lsh",
    "num_rounds": int(rounds),
    "chunk_size": CHUNK_SIZE,
  }


def get_config(rounds: str = "4") -> ml_collections.ConfigDict:
  """A one-layer decoder that has to find the earlier copy of each symbol."""
  config = duplicate.get_config("lsh")
  config.task.vocab_size = 127
  config.task.min_length = config.task.max_length = SYMBOLS
  config.model.num_layers = 1
  config.model.decoder_attention = lsh(rounds)
  config.num_steps = 2000
  config.batch_size = 32
  config.eval_every = config.checkpoint_every = 1000
  return config
