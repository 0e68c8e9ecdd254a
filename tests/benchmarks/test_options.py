"""What an option costs: the calls that are timed, and the table."""

import subprocess
import sys

import jax
import pytest

from attention import ATTENTIONS
from benchmarks import option_calls
from benchmarks.programs import DENSE, FORWARD, TRAINING, make
from tests import commands
from tests.attention.forms import kinds_first

LENGTH = 64
TIMED = [name for name in ATTENTIONS if name != DENSE]


@pytest.mark.parametrize("name", kinds_first(TIMED))
def test_every_option_is_what_it_is_named(name):
  """Traced only: shapes of results, and of gradients to what has one."""
  supports = make(name, LENGTH).supports
  chosen = option_calls.options(name, LENGTH)
  assert next(iter(chosen)) == "plain"
  for feature, label in (
    ("segments", "four segments"),
    ("cross", "T = 3S/4"),
    ("relative", "bias by distance"),
    ("global", "16 global tokens"),
  ):
    assert (label in chosen) == (feature in supports)
  for program in option_calls.programs(name, LENGTH):
    label = program.mechanism.removeprefix(f"{name}: ")
    option = chosen[label]
    keys = option.keys or LENGTH
    queries = option.queries or keys
    result = jax.eval_shape(program.function, *program.arguments)
    out = result if program.part == FORWARD else result[0]
    assert out.shape == (1, queries, 8, 64)
    if program.part == TRAINING:
      (_, _, d_value), trained = result[1]
      assert d_value.shape == (1, keys, option.kv_heads or 8, 64)
      assert trained.keys() == option.trained.keys()


def test_the_window_is_timed_dilated_where_it_fits():
  assert "dilation 2" not in option_calls.options("sliding_window", LENGTH)
  option = option_calls.options("sliding_window", 2048)["dilation 2"]
  assert make("sliding_window", 2048, **option.own) is not None


def test_the_table_marks_what_costs_too_much():
  def rows(option, *seconds):
    return [
      {
        "mechanism": f"lsh: {option}",
        "part": part,
        "seconds": x,
        "temp_bytes": 2**21,
      }
      for part, x in zip((FORWARD, TRAINING), seconds, strict=True)
    ]

  table = option_calls.markdown(
    [
      *rows("plain", 0.5, 2.0),
      *rows("key mask", 0.6, 2.7),
      *rows("K = 2", 0.65, None),
    ]
  ).splitlines()
  assert table[2:] == [
    "| `lsh` | plain | 500 ms |  | 2e+03 ms |  | 2.0 / 2.0 |",
    "| `lsh` | key mask | 1.20 |  | 1.35 | **over** | 2.0 / 2.0 |",
    "| `lsh` | K = 2 | 1.30 |  | not run |  | 2.0 / 2.0 |",
  ]


@pytest.mark.parametrize(
  ("module", "expected"),
  [
    ("options --attention=nope", "--attention: expected some of flash"),
    ("step_share --config=configs/nope.py", "--config: no such file"),
  ],
)
def test_a_fault_is_one_line(module, expected):
  result = subprocess.run(
    [sys.executable, "-m", *f"benchmarks.{module}".split()],
    capture_output=True,
    text=True,
    check=False,
    cwd=commands.ROOT,
  )
  assert result.returncode == 2
  assert result.stderr.strip().startswith(expected), result.stderr
