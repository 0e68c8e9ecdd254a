"""Writes the rotary frequencies of transformers, one file per version.

pip install torch==2.13.0 transformers==5.23.0  # And again with 4.57.6.
python tests/attention/rotary/make_values.py
"""

import json
import pathlib

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
CASES = [
  # Features, theta, scaling, L, length of the sequence.
  (16, 700.0, {"rope_type": "linear", "factor": 2.5}, 40, 1),
  (16, 500000.0, LLAMA3, 8192, 1),
  (32, 300.0, LLAMA3 | {"factor": 3.0, "low_freq_factor": 0.5}, 96, 1),
  (12, 900.0, {"rope_type": "dynamic", "factor": 3.0}, 40, 17),
  (12, 900.0, {"rope_type": "dynamic", "factor": 3.0}, 40, 131),
  (32, 1000000.0, YARN, 32768, 1),
  (24, 200.0, YARN | {"beta_fast": 8.0, "beta_slow": 2.0}, 128, 1),
  (24, 200.0, YARN | {"truncate": False, "beta_fast": 9}, 300, 1),
  (24, 200.0, YARN | {"attention_factor": 0.7}, 64, 1),
  (
    24,
    200.0,
    YARN | {"factor": 40, "mscale": 0.9, "mscale_all_dim": 0.4},
    64,
    1,
  ),
  (8, 3.0, YARN | {"factor": 0.5}, 7, 1),
]


def values(features, theta, scaling, length, sequence):
  """Frequencies and factor of one case."""
  scaling = dict(scaling)
  if scaling["rope_type"] in ("llama3", "yarn"):
    scaling["original_max_position_embeddings"] = length
  own = {"rope_theta": theta, "rope_scaling": dict(scaling)}
  if transformers.__version__ >= "5":
    own = {"rope_parameters": {**scaling, "rope_theta": theta}}
  config = transformers.LlamaConfig(
    hidden_size=2 * features,
    num_attention_heads=2,
    max_position_embeddings=length,
    **own,
  )
  compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
  frequencies, factor = compute(config, torch.device("cpu"), seq_len=sequence)
  if scaling["rope_type"] == "dynamic":
    scaling["max_position_embeddings"] = length
  return {
    "arguments": [features, theta, scaling],
    "length": sequence,
    "frequencies": [float(f"{x:.8g}") for x in frequencies.tolist()],
    "factor": factor,
  }


if __name__ == "__main__":
  version = transformers.__version__
  path = pathlib.Path(__file__).parent / f"transformers_{version}.json"
  lines = ",\n".join(json.dumps(values(*case)) for case in CASES)
  path.write_text(f"[\n{lines}\n]\n")
