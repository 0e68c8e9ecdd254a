"""Every mechanism keeps the contract, `attention.testing`."""

import subprocess
import sys

import pytest

from attention.testing import CHECKS
from tests.attention.forms import DERIVED, KINDS, OWN
from tests.attention.mechanisms import MECHANISMS, ONE_EACH


def test_the_table_covers_every_mechanism():
  assert {mechanism.name for mechanism in MECHANISMS} == set(OWN)


def test_every_cache_is_filled_by_one_call():
  """A prompt of P positions costs no loop of P steps."""
  decoders = [x for x in MECHANISMS if "decode" in x.record.supports]
  assert len(decoders) > 40
  assert not [str(x) for x in decoders if x.record.prefill is None]


_OF_A_KIND = (*KINDS, "kimi_delta", "latent")
_OF_A_BLOCK = (*_OF_A_KIND, "flash", "bigbird", "nsa", "path", "mesa")
_SOME = {
  "eager_equals_jit": ("dense", "performer"),
  "sharded_batch": _OF_A_KIND,
  "vmap_of_scanned_checkpoints": _OF_A_KIND,
  "forward_mode": _OF_A_BLOCK,
  "value_and_gradient[one_position]": _OF_A_BLOCK,
  "sequence_shards": ("dense",),
}
"""Laws of JAX's transformations and of one position, and the mechanisms of each kind
of code that meet them."""


def _marks(mechanism, check):
  """Of each code, one setting meets every law, and others a law of values."""
  is_causal = mechanism.directions[-1]
  case = "causal" if is_causal else "options"
  kept = (f"value_and_gradient[{case}]", "decoding_equals_the_causal_call")
  is_first = mechanism in ONE_EACH and mechanism.name not in DERIVED
  # A long causal call has what another long one has, and what crosses its blocks.
  is_covered = is_causal and check.name == "value_and_gradient[long]"
  is_covered |= mechanism.name not in _SOME.get(check.name, OWN)
  is_thorough = (not is_first and check.name not in kept) or is_covered
  return [pytest.mark.thorough] * is_thorough


@pytest.mark.parametrize(
  ("mechanism", "check"),
  [
    pytest.param(
      mechanism,
      check,
      id=f"{mechanism}-{check}",
      marks=_marks(mechanism, check),
    )
    for mechanism in MECHANISMS
    for check in CHECKS
    if check.applies(mechanism)
    and (check.every_setting or mechanism in ONE_EACH)
  ],
)
def test_contract(mechanism, check):
  check(mechanism)


def test_annotated_shapes_are_those_of_the_calls():
  run = [sys.executable, "-m", "tests.attention.annotations"]
  done = subprocess.run(run, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  assert int(done.stdout) > 2 * len(ONE_EACH)
