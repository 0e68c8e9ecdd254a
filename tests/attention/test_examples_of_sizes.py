"""What mechanisms say of themselves for comparisons: the reference, and small sizes."""

from attention import ATTENTIONS
from attention.mechanism import example


def test_which_mechanisms_approximate_another():
  """Those that their papers measure against softmax attention; Reformer's shares keys."""
  found = {
    name: example(factory).approximates for name, factory in ATTENTIONS.items()
  }
  dense = [
    "dense",
    "flash",
    "sliding_window",
    "bigbird",
    "linear",
    "performer",
    "window_linear",
    "linformer",
    "nystrom",
    "window_2d",
    "strided_2d",
    "moba",
    "nsa",
    "dsa",
  ]
  expected = dict.fromkeys(ATTENTIONS) | dict.fromkeys(dense, "dense")
  assert found == expected | {"lsh": "shared_qk"}


def test_small_sizes_leave_out_keys():
  """At 16 positions, the sizes for short sequences make an approximation differ."""
  found = {
    name: {*example(factory).sizes.short}
    for name, factory in ATTENTIONS.items()
    if example(factory).sizes.short
  }
  assert found == {
    "sliding_window": {"window"},
    "bigbird": {"block_size", "num_random"},
    "performer": {"num_features"},
    "window_linear": {"window"},
    "linformer": {"rank"},
    "lsh": {"chunk_size"},
    "nystrom": {"num_landmarks"},
    "window_2d": {"window"},
    "strided_2d": {"stride"},
    "moba": {"block_size", "top_k"},
    "nsa": {"compress_size", "stride", "block_size", "num_blocks", "window"},
    "dsa": {"top_k", "num_index_heads", "index_dim"},
    "compressed": {"window", "stride", "top_k", "index_dim"},
  }
