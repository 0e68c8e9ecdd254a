"""Adds the files of another version of transformers, whose logits have to agree.

pip install torch==2.13.0 transformers==5.23.0
OMP_NUM_THREADS=1 python tests/models/published/make_versions.py [FAMILY …]

A family has a folder in `versions/`: the tensors, which all versions write alike,
`configs.json` with the `config.json` of each version and case, by `VERSION CASE`, and
`expected.npz` with the logits, on which versions have to agree. The installed version
reads the configs of the newest one there, and its own are added. For a new case, add a
config with keys away from their defaults, since a default hides a key that is not
read; version 4 cannot read those of version 5, and has to write them from the same
keys.
"""

import json
import pathlib
import shutil
import sys
import tempfile

from make_folders import logits, write_tensors
import numpy as np
from safetensors.torch import load_file
import torch
import transformers

HERE = pathlib.Path(__file__).parent / "versions"
VERSION = transformers.__version__
INPUTS = {
  "input_ids": np.random.default_rng(3).integers(5, 29, (2, 17)),
  "attention_mask": (np.arange(17) < np.array([[17], [11]])).astype(np.int64),
}


def add(case, config, kept, made):
  """Writes a case to an empty folder, as this version does; returns its config."""
  path = made / "config.json"
  path.write_text(json.dumps(config))
  if not kept.exists():
    write_tensors(made)
    shutil.copy(made / kept.name, kept)
  shutil.copy(kept, made)
  kind = getattr(transformers, config["architectures"][0])
  kind.from_pretrained(made, dtype="bfloat16").save_pretrained(made)
  before, after = load_file(kept), load_file(made / kept.name)
  if not all(torch.equal(before[x], after[x]) for x in before | after):
    raise ValueError(f"{case}: {VERSION} writes other tensors")
  return json.loads(path.read_text())


def make(folder):
  """Adds what this version writes to the folder of a family."""
  path, expected = folder / "configs.json", folder / "expected.npz"
  configs = json.loads(path.read_text())
  arrays = dict(np.load(expected)) if expected.exists() else {}
  newest = max({name.split(" ")[0] for name in configs})
  for name, config in [*configs.items()]:
    version, _, case = name.partition(" ")
    if version != newest:
      continue
    with tempfile.TemporaryDirectory() as made:
      made = pathlib.Path(made)
      kept = folder / "model.safetensors"
      configs[f"{VERSION} {case}"] = add(name, config, kept, made)
      out = logits(made, INPUTS, apart=())
    if (
      np.abs(out - arrays.setdefault(case, out)).max()
      > 1e-5 * np.abs(out).max()
    ):
      raise ValueError(f"{name}: {VERSION} computes other logits")
  lines = (
    f"{json.dumps(case)}: {json.dumps(config, sort_keys=True)}"
    for case, config in sorted(configs.items())
  )
  path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
  np.savez_compressed(expected, **(arrays | INPUTS))


if __name__ == "__main__":
  for name in sys.argv[1:] or sorted(path.name for path in HERE.iterdir()):
    make(HERE / name)
