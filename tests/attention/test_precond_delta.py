"""Preconditioned DeltaNet without its preconditioner."""

from attention import delta_rule_attention, precond_delta_attention
from attention.testing import assert_close
from tests.attention import state_cases as cases


def test_a_squash_of_1_is_the_gated_delta_rule():
  arrays = cases.precond_delta_arrays(70)
  qkv = [arrays[name] for name in ("query", "key", "value")]
  gates = {name: arrays[name] for name in ("beta", "log_decay")}
  expected = delta_rule_attention(*qkv, **gates)
  del arrays["initial_state"]
  found = precond_delta_attention(**arrays, squash=1.0)
  assert_close(found, expected, 1e-6)
