"""What is told of a name that is not known: the one that was meant, or all."""

import pytest

from attention.names import suggestion, unknown_name
import models
from models.published.catalog import FAMILIES
import tasks

RATES = ["scale", "dropout_rate", "dropout_rng", "block_size"]


@pytest.mark.parametrize(
  ("got", "known", "name"),
  [
    ("perfomer", ["linear", "performer"], "performer"),
    # Case does not count.
    ("Performer", ["linear", "performer"], "performer"),
    ("adamW", ["adam", "adamw"], "adamw"),
    ("rmsNorm", ["layerNorm", "RMSNorm"], "RMSNorm"),
    # What begins with it comes first.
    ("dropout", RATES, "dropout_rate"),
    ("dropout_rn", RATES, "dropout_rng"),
    # A beginning, which is like nothing.
    ("temp", ["method", "temperature"], "temperature"),
    ("te", ["method", "temperature"], None),
    ("xyz", RATES, None),
  ],
)
def test_the_name_that_was_meant(got, known, name):
  assert suggestion(got, known) == (f"; did you mean {name!r}?" if name else "")
  all_of_them = f"expected one of {', '.join(known)}, got {got!r}"
  one = f"unknown {got!r}; did you mean {name!r}?"
  assert unknown_name(got, known) == (one if name else all_of_them)


@pytest.mark.parametrize(
  ("table", "name", "meant"),
  [
    (models.CONFIGS, "decodr", "decoder"),
    (tasks.TASKS, "cpy", "copy"),
    (FAMILIES, "lama", "llama"),
  ],
)
def test_a_table_says_what_was_meant(table, name, meant):
  with pytest.raises(KeyError, match=f"unknown '{name}'; .* '{meant}'"):
    table[name]
  assert name not in table
  assert table.get(name) is None


def test_a_config_says_what_was_meant():
  with pytest.raises(
    TypeError, match=r"^dropout: ModelConfig .*'dropout_rate'"
  ):
    models.ModelConfig(kind="decoder", dropout=0.1)
