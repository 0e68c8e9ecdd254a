"""The three attention choices of a model, from the name of one mechanism."""

from collections.abc import Iterable, Mapping
import difflib
from typing import Any

from attention import ATTENTIONS
from models.config import NEEDS

OPTIONS = {
  "sliding_window": {"window": 8},
  "bigbird": {"block_size": 2, "num_random": 1},
  "performer": {"num_features": 128},
  "linformer": {"rank": 16},
  "lsh": {"chunk_size": 8},
  "nystrom": {"num_landmarks": 8},
}
"""Options for the short sequences of these configs; others take defaults."""

LONG = {
  "sliding_window": {"window": 64},
  "linformer": {"rank": 64},
}
"""Options for the hundreds or thousands of tokens of configs/paper/."""


def one(
  name: str,
  *,
  options: Mapping[str, Mapping[str, Any]] = OPTIONS,
  also: Iterable[str] = (),
) -> dict[str, Any]:
  """A mechanism with its options, for a model with a single choice.

  Args:
    name: key of `attention.ATTENTIONS`.
    options: mechanism -> options; what is not there takes its defaults.
    also: names that the config knows beside those.

  Returns:
    A dictionary of the name and the options.

  Raises:
    ValueError: an unknown name.
  """
  if name not in ATTENTIONS:
    known = [*ATTENTIONS, *also]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
      f"attention: expected one of {', '.join(known)}, got {name!r}{hint}"
    )
  return {"name": name, **options.get(name, {})}


def choose(name: str, *, also: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
  """Uses a mechanism wherever it can work, and dense where it cannot.

  Args:
    name: key of `attention.ATTENTIONS`.
    also: names that the config knows beside those.

  Returns:
    'encoder_attention', 'decoder_attention' and 'cross_attention', each a
    dictionary of the name and its options.

  Raises:
    ValueError: an unknown name.
  """
  chosen = one(name, also=also)
  supports = ATTENTIONS[name](**OPTIONS.get(name, {})).supports
  # A config evaluates by generating, so its decoder decodes as well.
  extra = {"decoder_attention": {"decode"}}
  return {
    slot: dict(chosen)
    if needs.keys() | extra.get(slot, set()) <= supports
    else {"name": "dense"}
    for slot, needs in NEEDS.items()
  }
