"""A mechanism is added by its record; the decorator of its factory enters it."""

import json
import subprocess
import sys

import pytest

from tests import commands

# In a process of its own, for what reads the registry when it is imported.
_SCRIPT = '''
import json
import types

from attention import dense
from attention import mechanism as mechanisms
from attention.decorators import attention_factory
from attention.mechanism import ATTENTIONS


@attention_factory
def banded(width: int, *, sharpness: float = 1.0):
  """Dense attention under another name; `width` has no default."""
  if width < 1:
    raise ValueError(f"width: expected at least 1, got {width}")
  return dense()._replace(
    init_cache=None,
    decode=None,
    supports=frozenset({"cross", "mask", "segments", "dropout"}),
    approximates="dense",
    cost="linear",
    sizes=mechanisms.Hyperparameters(
      short={"width": 4},
      long={"width": 32},
      timed=lambda length: {"width": min(256, length)},
    ),
  )


import jax

from docs.capabilities import capability_table
from benchmarks import bounds, programs
from comparison.measurement import approximation; from comparison.analysis import frame; from comparison import plan; from comparison.report import style
from configs import attentions, copy
from docs import draw_mechanisms
import models
from tests.comparison.plans import comparison
from tests.models import tiny
from training import experiment_config

found = {}
found["chosen"] = attentions.choose("banded")
found["long"] = attentions.one("banded", long=True)
config = experiment_config.parse(copy.get_config("banded"))
found["slots"] = models.slots(config.model)
found["capabilities"] = capability_table()

found["programs"] = [
  [program.part, list(jax.eval_shape(program.function, *program.arguments).shape)]
  for program in programs.programs(
    ["banded"], programs.Size(heads=2, head_dim=8), 32
  )
  if program.part == programs.FORWARD
]
rows = [
  {"mechanism": "banded", "causal": False, "part": programs.FORWARD,
   "length": length, "seconds": seconds, "temp_bytes": seconds}
  for length, seconds in ((bounds.LENGTH, 1), (bounds.LONGER, 16))
]
found["growth"] = bounds.growth_markdown(rows)

runs = plan.plan(comparison(attention="dense,banded"))
(run,) = [run for run in runs if run.attention == "banded"]
found["run"] = [run.obstacle, run.slots, run.arguments[0]]
found["order"] = [sorted(["z", "banded", "dense"], key=frame.rank),
                  list(style.styles(["banded", "z"])).index("banded")]
slot = models.AttentionConfig("banded", {"width": 4})
model = tiny.create("encoder", encoder_attention=slot)
found["error"] = approximation.error(model, tiny.initialized(model), tiny.batch())
found["picture"] = "banded" in draw_mechanisms.PICTURES
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def told():
  """What every part of the project makes of a mechanism it has not seen."""
  result = subprocess.run(
    [sys.executable, "-c", _SCRIPT],
    capture_output=True,
    text=True,
    check=False,
    cwd=commands.ROOT,
    env=commands.environment(),
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout.splitlines()[-1])


def test_configs_take_it_where_it_can_serve(told):
  banded = {"name": "banded", "width": 4}
  assert told["chosen"] == {
    "encoder_attention": banded,
    "decoder_attention": {"name": "dense"},
    "cross_attention": {"name": "dense"},
  }
  assert told["long"] == {"name": "banded", "width": 32}
  assert told["slots"] == "banded · dense · dense"


def test_tables_and_messages_name_it(told):
  row = (
    "| `banded` | – | ✓ | – | ✓ | – | ✓ | – | – | – | – | ✓ | – | – | – | – "
    "| – |"
  )
  assert row in told["capabilities"].splitlines()
  assert told["order"][0] == ["dense", "banded", "z"]


def test_benchmarks_and_comparisons_take_it(told):
  """They time it, hold it to its promise, plan it and measure its error."""
  assert told["programs"] == [["forward", [1, 32, 2, 8]]]
  assert "16.0 | 4.6 | **short**" in told["growth"]
  obstacle, slots, argument = told["run"]
  assert not obstacle
  assert slots == "banded · dense · dense"
  assert argument == "--config=configs/copy.py:banded"
  assert told["error"] == 0.0
  assert told["picture"]
