"""Files of JSON with a digest: a byte that flips makes them none."""

import json

import numpy as np

from training import claimed


def test_what_is_written_is_read(tmp_path):
  content = {"rate": 0.1, "rows": [1, None], "per_seed": {3: "a"}}
  claimed.replace(tmp_path / "a.json", content)
  expected = json.loads(json.dumps(content))
  assert claimed.parsed(tmp_path / "a.json") == expected


def test_another_byte_is_another_file(tmp_path):
  path = tmp_path / "a.json"
  content = {"accuracy": 0.125, "seed": 3, "status": "done"}
  claimed.replace(path, content)
  whole = path.read_bytes()
  for place in range(len(whole)):
    changed = bytearray(whole)
    changed[place] ^= 1 << int(np.random.default_rng(place).integers(8))
    path.write_bytes(changed)
    found = claimed.parsed(path)
    values = None if found is None else {k: found.get(k) for k in content}
    assert values in (None, content), place


def test_a_cut_file_is_none(tmp_path):
  path = tmp_path / "a.json"
  claimed.replace(path, {"accuracy": 0.125})
  whole = path.read_bytes()
  for length in range(len(whole) - 1):
    path.write_bytes(whole[:length])
    assert claimed.parsed(path) is None
