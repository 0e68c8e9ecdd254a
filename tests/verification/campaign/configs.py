"""Leaves of configs with random names and values."""

import string

from settings.errors import ConfigError
from tests import commands
from tests.training.test_faults import CONFIGS, LEAVES, changed, refusal
from tests.verification.campaign.faults import fault, one_line, require

_DRAWN = (
  "copy",
  "duplicate",
  "recall",
  "induction",
  "selective_copy",
  "needle",
)
"""Configs whose task reads no file, so that it can be made."""

_PATHS = ["os:getcwd", "os:name", "builtins:max", "nowhere:name"]
_LETTERS = [*string.printable, "ü", "𝔸", "\0", "\u202e", "{}", "%s", "$(id)"]


def anything(rng, depth=0):
  """A value that nobody meant."""
  kind = rng.integers(9 if depth < 2 else 6)
  if kind == 0:
    return rng.choice([None, True, False, object])
  if kind == 1:
    return int(rng.choice([-1, 0, 1, 3, 10])) ** int(rng.integers(1, 40))
  if kind == 2:
    return float(rng.choice([float("nan"), float("inf"), -1.5, 1e-300, 1e300]))
  if kind in (3, 4):
    return "".join(rng.choice(_LETTERS, rng.integers(0, 30)))
  if kind == 5:
    return str(rng.choice(["dense", "adam", "rotary", "none", "1", *_PATHS]))
  if kind == 6:
    return {anything(rng, 2): anything(rng, depth + 1) for _ in range(2)}
  return [anything(rng, depth + 1) for _ in range(rng.integers(0, 4))]


@fault("a config leaf of a wrong value or name", 2000, "one line, or harmless")
def leaf(rng, folder):
  del folder
  name, leaf = LEAVES[rng.integers(len(LEAVES))]
  if rng.random() < 0.2:
    letters = list(leaf)
    letters[rng.integers(len(letters))] = str(rng.choice(list("abc.é_")))
    leaf = "".join(letters)
  value = anything(rng)
  try:
    config = changed(name, leaf, value)
  except (KeyError, TypeError, ConfigError):  # No leaf can have such a name.
    return ""
  try:
    line = refusal(config, create=name in _DRAWN)
  except Exception as error:
    raise AssertionError(f"{name}: {leaf} = {value!r}: {error!r}") from error
  require(
    not line or line.isprintable(), f"{name}: {leaf} = {value!r}: {line!r}"
  )
  return "" if line else "taken"


@fault("a command line of a wrong value or name", 100, "one line, exit code 2")
def flag(rng, folder):
  leaves = [leaf for name, leaf in LEAVES if name == "copy" and "." in leaf]
  leaf = str(rng.choice(leaves))
  section, _, last = leaf.rpartition(".")
  now = CONFIGS["copy"][section.split(".")[0]]
  for part in leaf.split(".")[1:]:
    now = now.get(part) if isinstance(now, dict) else None
  wrong = f"--config.{leaf}=ü[;"
  if rng.random() < 0.5 or isinstance(now, str):
    wrong = f"--config.{section}.x{last}=1"
  code, out, error = commands.run(
    "train.py", *commands.TINY, wrong, f"--workdir={folder / 'run'}"
  )
  require(not out, wrong, out)
  line = one_line(code, error, [2])
  require(last in line or section.rpartition(".")[2] in line, wrong, line)
  require(not (folder / "run").exists(), wrong, "a folder was made")
  return ""
