"""Sets config fields with random names and values."""

import string

from settings.errors import ConfigError
from tests import commands
from tests.training.test_faults import CONFIGS, LEAVES, changed, refusal
from tests.verification.campaign.faults import fault, one_line, require

_WITHOUT_FILES = (
  "copy",
  "duplicate",
  "recall",
  "induction",
  "selective_copy",
  "needle",
)
"""Configs whose task can be created without files."""

_PATHS = ["os:getcwd", "os:name", "builtins:max", "nowhere:name"]
_LETTERS = [*string.printable, "ü", "𝔸", "\0", "\u202e", "{}", "%s", "$(id)"]


def random_value(rng, depth=0):
  """Draws a value of any type."""
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
    return {
      random_value(rng, 2): random_value(rng, depth + 1) for _ in range(2)
    }
  return [random_value(rng, depth + 1) for _ in range(rng.integers(0, 4))]


@fault(
  "a config field with a wrong value or name", 2000, "one line, or harmless"
)
def set_field(rng, folder):
  del folder
  name, field = LEAVES[rng.integers(len(LEAVES))]
  if rng.random() < 0.2:
    letters = list(field)
    letters[rng.integers(len(letters))] = str(rng.choice(list("abc.é_")))
    field = "".join(letters)
  value = random_value(rng)
  try:
    config = changed(name, field, value)
  except (KeyError, TypeError, ConfigError):  # No field can have this name.
    return ""
  try:
    line = refusal(config, create=name in _WITHOUT_FILES)
  except Exception as error:
    raise AssertionError(f"{name}: {field} = {value!r}: {error!r}") from error
  require(
    not line or line.isprintable(), f"{name}: {field} = {value!r}: {line!r}"
  )
  return "" if line else "accepted"


@fault("a flag with a wrong value or name", 100, "one line, exit code 2")
def set_flag(rng, folder):
  fields = [field for name, field in LEAVES if name == "copy" and "." in field]
  field = str(rng.choice(fields))
  section, _, last = field.rpartition(".")
  value = CONFIGS["copy"][section.split(".")[0]]
  for part in field.split(".")[1:]:
    value = value.get(part) if isinstance(value, dict) else None
  wrong = f"--config.{field}=ü[;"
  if rng.random() < 0.5 or isinstance(value, str):
    wrong = f"--config.{section}.x{last}=1"
  code, out, error = commands.run(
    "train.py", *commands.TINY, wrong, f"--workdir={folder / 'run'}"
  )
  require(not out, wrong, out)
  line = one_line(code, error, [2])
  require(last in line or section.rpartition(".")[2] in line, wrong, line)
  require(not (folder / "run").exists(), wrong, "a folder was created")
  return ""
