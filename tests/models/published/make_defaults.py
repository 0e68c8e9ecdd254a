"""Writes `defaults.json`: the defaults of transformers for missing keys.

pip install torch==2.13.0 transformers==5.24.0
python -P tests/models/published/make_defaults.py bert gpt2 t5 ...  # All of FAMILIES.

Defaults that are null, or that follow from other keys, are left out, except those
of rotary positions, and lists with an entry for each layer of `LAYERS`.
"""

import dataclasses
import json
import pathlib
import sys

from transformers import CONFIG_MAPPING, PreTrainedConfig

LAYERS = 7
OF_ALL = {field.name for field in dataclasses.fields(PreTrainedConfig)}


def defaults(name):
  """Returns key -> default of a family."""
  made = {}
  for field in dataclasses.fields(CONFIG_MAPPING[name]):
    if field.name in OF_ALL:
      continue
    if field.default is not dataclasses.MISSING:
      made[field.name] = field.default
    elif field.default_factory is not dataclasses.MISSING:
      made[field.name] = field.default_factory()
  depth = {"num_hidden_layers": LAYERS} if "num_hidden_layers" in made else {}
  filled = CONFIG_MAPPING[name](**depth).to_dict()
  if rotary := filled.get("rope_parameters"):
    made["rope_parameters"] = rotary
  per_layer = {
    key: value
    for key, value in filled.items()
    if isinstance(value, list) and len(value) == LAYERS and not made.get(key)
  }
  if per_layer:
    made["per_layer"] = per_layer
  return {key: value for key, value in made.items() if value is not None}


if __name__ == "__main__":
  lines = [
    f"{json.dumps(name)}: {json.dumps(defaults(name), sort_keys=True)}"
    for name in sorted(sys.argv[1:])
  ]
  path = pathlib.Path(__file__).parent / "defaults.json"
  path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
