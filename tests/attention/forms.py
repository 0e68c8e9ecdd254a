"""The mechanisms of this project, small, full and, where they can, causal."""

from attention import ATTENTIONS

OWN = {
  name: factory
  for name, factory in ATTENTIONS.items()
  if factory.__module__.startswith("attention.")
}
"""Without mechanisms that a user has added to the registry."""

SIZES = {
  "sliding_window": {"window": 5},
  "bigbird": {"block_size": 8, "num_random": 1},
  "performer": {"num_features": 16},
  "linformer": {"rank": 8},
  "lsh": {"chunk_size": 8, "num_rounds": 2},
  "nystrom": {"num_landmarks": 8},
  "additive": {"width": 8},
}
FORMS = [
  (name, is_causal)
  for name, factory in OWN.items()
  for is_causal in (False, True)
  if not is_causal or "causal" in factory().supports
]
