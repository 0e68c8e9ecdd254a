"""Rotary positions in `config.json` of transformers 4 and 5.

Version 5 writes `rope_parameters`, one set for all layers or one for each type of
layer; version 4 wrote `rope_theta` and `rope_scaling`. A file may have both if they
agree; `save_pretrained` writes both, so that either version can read it.
"""

from collections.abc import Mapping, Sequence
import reprlib
from typing import Any, NamedTuple

import numpy as np

from models.attention_module_config import AroundConfig, RotaryScaling
from models.published import family
from models.published.family import Layout


class Rotary(NamedTuple):
  """The keys by which files of a family describe rotary positions.

  Attributes:
    theta: keys of θ in files of version 4; all but the first are copies.
    default: θ of files without it; None if it is required.
    share: keys of the rotated fraction of each head in files of version 4.
    default_share: that fraction in files without the key; None if it is always 1.
    scaled: whether version 4's `rope_scaling` applies to these layers.
    type_key: key of the type in `rope_scaling`.
    ignored: keys that do not affect positions of text.
  """

  theta: tuple[str, ...] = ("rope_theta",)
  default: float | None = 10000.0
  share: tuple[str, ...] = ("partial_rotary_factor",)
  default_share: float | None = None
  scaled: bool = True
  type_key: str = "rope_type"
  ignored: tuple[str, ...] = ()


LayerTypes = Mapping[str | None, Rotary]
"""Type of layer -> its rotary positions; the type None means all layers."""

ALL: LayerTypes = {None: Rotary()}


def choices(
  hf_config: Mapping[str, Any], types: LayerTypes = ALL, kind: str | None = None
) -> dict[str, Any]:
  """Returns the config fields that a file chooses for the layers of a type.

  Args:
    hf_config: `config.json`.
    types: rotary positions of the family.
    kind: the type of layer.

  Raises:
    ValueError: values contradict each other, or are unknown.
  """
  options = _parameters(hf_config, types, kind)
  rope_type, theta = options.pop("rope_type"), options.pop("rope_theta")
  share = options.pop("partial_rotary_factor", 1.0)
  if types[kind].default_share is None and share != 1.0:
    raise ValueError(
      f"partial_rotary_factor: expected 1.0 in this family, got {share!r}"
    )
  for name in types[kind].ignored:
    options.pop(name, None)
  if rope_type == "dynamic":
    length = family.size(hf_config, "max_position_embeddings")
    options["max_position_embeddings"] = length
  try:
    scaling = RotaryScaling(rope_type, options)
  except ValueError as error:
    old = not hf_config.get("rope_parameters")
    key = "rope_scaling" if old else "rope_parameters"
    raise ValueError(f"{key}: {error}") from None
  return {
    "rotary_theta": family.number({"rope_theta": theta}, "rope_theta", 0.0),
    "rotary_fraction": share,
    # A layer type may have no scaling even if the model has one.
    "rotary_scaling": scaling if kind or rope_type != "default" else None,
  }


def check_unscaled(hf_config: Mapping[str, Any]) -> None:
  """Raises ValueError if the positions have a type other than 'default'."""
  for key in ("rope_parameters", "rope_scaling"):
    scaling = hf_config.get(key) or {}
    if isinstance(scaling, dict):  # Others raise an error in `choices`.
      kind = scaling.get("rope_type", scaling.get("type", "default"))
      if kind not in ("default", None):
        raise ValueError(
          f"{key}: expected rope_type 'default' in this family, got {kind!r}"
        )


def overrides(
  hf_config: Mapping[str, Any], types: LayerTypes, kinds: Sequence[str]
) -> tuple[AroundConfig, ...]:
  """Returns the overrides of layers whose types have separate positions."""
  by_type = {
    kind: AroundConfig(**choices(hf_config, types, kind)) for kind in types
  }
  return tuple(by_type[kind] for kind in kinds)


def both_versions(
  hf_config: Mapping[str, Any], types: LayerTypes
) -> dict[str, Any]:
  """Returns the positions in `hf_config` under the keys of both transformers versions."""
  sets: dict[Any, Any] = {}
  written: dict[str, Any] = {}
  for kind, rotary in types.items():
    sets[kind] = _parameters(hf_config, types, kind)
    old = dict(sets[kind])
    theta = old.pop("rope_theta")
    for name in rotary.theta:
      if written.setdefault(name, theta) != theta:
        del written[name]  # Version 4 has one θ for all types.
    share = old.pop("partial_rotary_factor", None)
    if share is not None:
      written |= dict.fromkeys(rotary.share, share)
    if rotary.scaled:
      scaling = None if old["rope_type"] == "default" else old
      old[rotary.type_key] = old.pop("rope_type")
      # Version 4 has one scaling for all these types; none is written if they differ.
      is_one = written.get("rope_scaling", scaling) == scaling
      written["rope_scaling"] = scaling if is_one else None
  return {**written, "rope_parameters": sets.get(None, sets)}


def _parameters(
  hf_config: Mapping[str, Any], types: LayerTypes, kind: str | None
) -> dict[str, Any]:
  """Returns the parameters as version 5 writes them, from the keys of either version."""
  rotary, new = types[kind], hf_config.get("rope_parameters") or {}
  if kind:
    if not isinstance(new, dict) or not set(new) <= set(types):
      raise ValueError(
        f"rope_parameters: expected parameters for each of {', '.join(map(str, types))}"
        f", got {reprlib.repr([*new])}"
      )
    new = new.get(kind)
  new = _normalize("rope_parameters", new)
  if kind and "truncate" in new:
    raise ValueError(
      "rope_parameters: transformers does not read the truncate of one type of "
      f"layers; expected none, got {new['truncate']}"
    )
  old = _normalize("rope_scaling", hf_config.get("rope_scaling"))
  old = old if rotary.scaled else {}
  if new and any(new.get(name) != value for name, value in old.items()):
    raise ValueError(
      f"rope_scaling: expected the values of rope_parameters {reprlib.repr(new)}, got "
      f"{reprlib.repr(old)}"
    )
  both = {"rope_type": "default", **old, **new}
  for name, keys, default in (
    ("rope_theta", rotary.theta, rotary.default),
    ("partial_rotary_factor", rotary.share, rotary.default_share),
  ):
    old_keys = [key for key in keys if key in hf_config]
    old_values = [hf_config[key] for key in old_keys]
    if old_values and keys[0] not in hf_config and name not in new:
      raise ValueError(f"{keys[0]}: missing; without it, {name} is not read")
    given = [x for x in (both.get(name), *old_values) if x is not None]
    if any(value != given[0] for value in given):
      named = zip(
        ("rope_parameters", *old_keys),
        (both.get(name), *old_values),
        strict=True,
      )
      twice = " and ".join(
        f"{x!r} ({key})" for key, x in named if x is not None
      )
      raise ValueError(f"{name}: the file has two different values, {twice}")
    if old_values and not given and default is not None:
      raise ValueError(f"{keys[0]}: expected a number, got null")
    if given or default is not None:
      both[name] = [*given, default][0]
  if "rope_theta" not in both:
    raise ValueError("rope_theta: missing")
  if both["rope_type"] in ("llama3", "yarn"):
    longest = family.size(hf_config, "max_position_embeddings")
    both.setdefault("original_max_position_embeddings", longest)
  else:
    both.pop("original_max_position_embeddings", None)  # Nothing reads it.
  return both


def _normalize(name: str, given: Any) -> dict[str, Any]:
  """Returns parameters without null values, with `rope_type` for the older `type`."""
  if not isinstance(given, dict | None):
    raise ValueError(
      f"{name}: expected named values or null, got {reprlib.repr(given)}"
    )
  if given and given.get("rope_theta", 1.0) is None:
    raise ValueError(f"{name}: rope_theta: expected a number, got null")
  if given and given.get("truncate", True) is None:
    # transformers treats null as false, and a missing key as true.
    raise ValueError(f"{name}: truncate: expected true or false, got null")
  named = {k: x for k, x in (given or {}).items() if x is not None}
  kinds = {str(named.pop(x)) for x in ("rope_type", "type") if x in named}
  if len(kinds) > 1:
    raise ValueError(f"{name}: expected one type, got {kinds}")
  return {"rope_type": [*kinds, "default"][0], **named} if given else {}


def adjacent_pairs(width: int, rotated: int, at_end: bool = True) -> Layout:
  """Returns the layout of a Linear whose rotated features are adjacent pairs in each head.

  Our pairs are `rotated` / 2 features apart. The layout fits weights and biases.

  Args:
    width: number of features of a head.
    rotated: number of rotated features.
    at_end: whether the rotated features are the last of a head, or the first.
  """
  order = np.arange(width)
  first = width - rotated if at_end else 0
  part = slice(first, first + rotated)
  order[part] = order[part].reshape(-1, 2).T.reshape(-1)

  def permute(x, order):
    heads = x.reshape(-1, width, *x.shape[1:])
    return heads[:, order].reshape(x.shape)

  return Layout(
    lambda x, n: [permute(x, order).T],
    lambda xs: permute(xs[0].T, np.argsort(order)),
  )
