"""The page of conformance is that of its records, which cover every function."""

import re

from attention.testing import FUNCTION_LAWS
from docs import conformance
from tests.verification.conformance.adapters import FUNCTIONS


def test_the_page_is_that_of_the_records():
  page = conformance.page(conformance.read())
  assert conformance.PAGE.read_text("utf-8") == page, (
    "docs/conformance.md: run `python -m docs.conformance`"
  )


def test_records_have_every_function_and_law():
  records = conformance.read()
  assert [*records] == [*FUNCTIONS]
  for name, record in records.items():
    assert [x["law"] for x in record["laws"]] == [*FUNCTION_LAWS], name
    assert record["label"] == FUNCTIONS[name].label


def test_each_broken_law_has_a_reproduction_on_the_page():
  records, page = conformance.read(), conformance.PAGE.read_text("utf-8")
  broken = {
    f"{name}-{x['law']}"
    for name, record in records.items()
    for x in record["laws"]
    if x["status"] == "broken"
  }
  assert broken == {*re.findall(r"^\((.*)\)=$", page, re.M)}
  assert broken == {*re.findall(r"\(#(\w+-\w+)\)", page)}
