"""Functions and definitions give what other people's programs give.

The vectors are in this folder, with the scripts that made them.
"""

import re

import jax
import numpy as np
import pytest

import attention
from docs import agreement as page
from tests.verification.peers import agreement, vectors

CASES = list(vectors.read())


def parameters(cases):
  """Cases as parameters of a test."""
  return [pytest.param(case, id=repr(case)) for case in cases]


def assert_close(found, expected, share):
  away = agreement.differences(found, expected)
  assert max(away.values()) < share, away


@pytest.mark.parametrize("case", parameters(CASES))
def test_functions_have_the_results_and_gradients_of_peers(case):
  results, gradients = agreement.results_and_gradients(case)
  assert_close(results, case.result, 2e-5)
  assert_close(gradients, case.gradient, 1e-4)


@pytest.mark.parametrize("case", parameters(x for x in CASES if x.definition))
def test_definitions_have_the_results_of_peers(case):
  found = agreement.definition_results(case)
  expected = {name: x for name, x in case.result.items() if name in found}
  assert_close(found, expected, 2e-5)


@pytest.mark.parametrize(
  "case", parameters(x for x in CASES if "initial_state" in x.given)
)
def test_a_call_goes_on_from_a_state(case):
  """13 positions, and the others from the state that these leave."""
  static = {"return_state", "num_segments", "ridge_ratio", "num_iterations"}
  function = jax.jit(
    getattr(attention, case.function),
    static_argnames=[*static & case.options.keys()],
  )
  state, outs = case.given["initial_state"], []
  for begin, end in ((0, 13), (13, case.given["query"].shape[1])):
    given = {
      name: x
      if name in ("regularizer", "log_rate", "bonus")
      else x[:, begin:end]
      for name, x in (case.given | case.fixed).items()
    }
    given["initial_state"] = state
    out, state = function(**given, **case.options)
    outs.append(out)
  found = {"out": np.concatenate(outs, axis=1), "state": state}
  assert_close(found, case.result, 2e-5)


def test_cases_have_names_of_their_own():
  names = [case.name for case in CASES]
  assert len(set(names)) == len(names)


def test_the_page_has_a_row_for_each_mechanism_and_peer():
  """What is measured is compared above."""
  text = page.PAGE.read_text("utf-8")
  assert page.page_rows(text) == [
    page.unmeasured_cells(row) for row in page.rows()
  ]


def test_mechanisms_without_a_witness_are_marked():
  """In the opening table of docs/mechanisms.md, as *definition only*."""
  witnessed = {case.mechanism for case in CASES}
  # Folders and layers of transformers: tests/models/published/deepseek_v4 and
  # tests/attention/compressed.npz.
  witnessed.add("compressed")
  mechanisms = page.PAGE.with_name("mechanisms.md").read_text("utf-8")
  marked = re.findall(r"^\| \[`(\w+)`\].*\*definition only\*", mechanisms, re.M)
  assert set(marked) == set(attention.ATTENTIONS) - witnessed
