"""Parses the mechanisms that a user types after the colon of a config.

These are a mechanism, 'sliding_window'; a mechanism with options,
'sliding_window:window=8'; or several that layers take in turn,
'sliding_window:window=8,delta'. Options that the user omits come from the mechanism's
`sizes`.
"""

from collections.abc import Iterable
import copy
from typing import Any

from attention import ATTENTIONS
from attention import mechanism as mechanisms
from attention.names import unknown_name
from models.attention_config import NEEDS, obstacle
from settings.typed import mechanism, split


def one(
  typed: str, *, long: bool = False, also: Iterable[str] = ()
) -> dict[str, Any]:
  """Returns a mechanism with its `sizes` and the typed options.

  Args:
    typed: a key of `attention.ATTENTIONS`, or 'package.module:factory', followed
      by options.
    long: whether sequences have hundreds or thousands of tokens, as in configs/paper/.
    also: other valid names.

  Returns:
    A dictionary with the name and the hyperparameters.

  Raises:
    ValueError: the mechanism is unknown.
  """
  name, options = mechanism(typed)
  if name not in ATTENTIONS and ":" not in name:
    known = [*ATTENTIONS, *also, "package.module:factory"]
    raise ValueError(f"attention: {unknown_name(name, known)}")
  try:
    sizes = mechanisms.example(name).sizes
  except ValueError as error:
    reason = str(error).removeprefix("name: ")
    raise ValueError(f"attention: {reason}") from None
  return {"name": name, **(sizes.long if long else sizes.short), **options}


def layers(
  typed: str, *, long: bool = False, also: Iterable[str] = ()
) -> dict[str, Any] | list[dict[str, Any]]:
  """Returns one mechanism or a list, for models with one kind of attention module.

  Args:
    typed: mechanisms separated by commas.
    long: as in `one`.
    also: as in `one`.

  Raises:
    ValueError: as in `one`.
  """
  mechanisms = [one(word, long=long, also=also) for word in split(typed)]
  return mechanisms[0] if len(mechanisms) == 1 else mechanisms


def choose(typed: str, *, also: Iterable[str] = ()) -> dict[str, Any]:
  """Returns the mechanisms of an encoder-decoder; unsupported ones become `dense`.

  Args:
    typed: as in `layers`.
    also: other valid names.

  Returns:
    'encoder_attention', 'decoder_attention' and 'cross_attention', each as from
    `layers`.

  Raises:
    ValueError: as in `one`.
  """
  configs = layers(typed, also=also)
  names = [
    x["name"] for x in (configs if isinstance(configs, list) else [configs])
  ]
  examples = [mechanisms.example(name) for name in names]
  # Each field has a copy, because an override of one must not change the others.
  return {
    field: {"name": "dense"}
    if any(obstacle(example, field) for example in examples)
    else copy.deepcopy(configs)
    for field in NEEDS
  }
