"""The three attention choices of a model, from the name of one mechanism."""

import difflib
from typing import Any

from attention import ATTENTIONS

OPTIONS = {
  "sliding_window": {"window": 8},
  "performer": {"num_features": 128},
  "linformer": {"rank": 16},
}
"""Options for the short sequences of these configs; others take defaults."""


def one(name: str) -> dict[str, Any]:
  """A mechanism with its options here, for a model with a single choice.

  Args:
    name: key of `attention.ATTENTIONS`.

  Returns:
    A dictionary of the name and the options.

  Raises:
    ValueError: an unknown name.
  """
  if name not in ATTENTIONS:
    known = ", ".join(ATTENTIONS)
    near = difflib.get_close_matches(name, ATTENTIONS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"attention: expected one of {known}, got {name!r}{hint}")
  return {"name": name, **OPTIONS.get(name, {})}


def choose(name: str) -> dict[str, dict[str, Any]]:
  """Uses a mechanism wherever it can work, and dense where it cannot.

  Args:
    name: key of `attention.ATTENTIONS`.

  Returns:
    'encoder_attention', 'decoder_attention' and 'cross_attention', each a
    dictionary of the name and its options.

  Raises:
    ValueError: an unknown name.
  """
  chosen = one(name)
  supports = ATTENTIONS[name](**OPTIONS.get(name, {})).supports
  needs = {
    "encoder_attention": {"mask"},
    "decoder_attention": {"causal", "decode"},
    "cross_attention": {"cross", "rowwise", "mask"},
  }
  return {
    slot: dict(chosen) if needed <= supports else {"name": "dense"}
    for slot, needed in needs.items()
  }
