"""Writes a page of the laws that attention functions keep, from records.

`python -m docs.conformance` writes docs/conformance.md in a second.
"""

from collections.abc import Iterable, Mapping
import json
import pathlib
from typing import Any

from attention.testing import FUNCTION_LAWS
from attention.testing.function import Outcome, magnitude
from tests.verification.conformance.adapters import FUNCTIONS

PAGE = pathlib.Path(__file__).with_suffix(".md")
_RECORDS = (
  PAGE.parent.parent / "tests" / "verification" / "conformance" / "records"
)

_TEXT = """---
html_theme.sidebar_secondary.remove: true
---

# Conformance

The laws below follow from the definition of attention and hold for every mechanism. `python -m attention.testing PACKAGE.MODULE:FUNCTION` runs those that apply to a function and prints a program that reproduces each broken law; see [how to test your own](howto/judge.md). This page shows public functions of JAX libraries, including this one, on a CPU, at T = {lengths}. A broken law is not always a fault: a library may define the case differently. If its documentation says so, the law is listed under *documented*, and the reproduction cites it.

Each row comes from a record in [tests/verification/conformance](../tests/verification/conformance). If a function needs gates, an adapter computes them from the keys. `python -m tests.verification.conformance` writes the records in an environment with the libraries, and `python -m docs.conformance` writes the page. The rows of recurrences, of `jax.nn`, of Linen's function and of three of our functions were measured twice, with the same result; the others once. Two functions are missing: on a CPU, tokamax's `kimi_delta_attention` accepts only multiples of 64 positions; deltanet-tpu 0.3.0 accepts only heads of 128, and its kernels, interpreted on a CPU, are too slow for the laws.

"""

_THREADS = (
  (
    "transformers 46773",
    "https://github.com/huggingface/transformers/pull/46773",
    "in a batch of one, padding on the left enters the convolution and the recurrence, because the mask is applied only to larger batches",
    "padding_of_one_example",
  ),
  (
    "transformers 47086",
    "https://github.com/huggingface/transformers/issues/47086",
    "a call that continues a state does not mask its padding",
    "content_of_masked_positions_after_a_state",
  ),
  (
    "fla 1263",
    "https://github.com/fla-org/flash-linear-attention/pull/1266",
    "values of padding are masked, but its keys stay in the denominator and in the cached sum of keys",
    "padding_on_the_left",
  ),
  (
    "fla 1272",
    "https://github.com/fla-org/flash-linear-attention/issues/1272",
    "a masked position still decays the state, by an amount that depends on its content",
    "content_of_masked_positions",
  ),
  (
    "fla 838",
    "https://github.com/fla-org/flash-linear-attention/issues/838",
    "a padding mask replaces the boundaries of packed examples",
    "packing_by_lengths",
  ),
  (
    "maxtext 4016",
    "https://github.com/AI-Hypercomputer/maxtext/pull/4016",
    "a call without segment ids attends to padding on the left",
    "padding_on_the_left",
  ),
  (
    "transformers 46588",
    "https://github.com/huggingface/transformers/pull/46588",
    "a short convolution crosses the boundary of packed examples",
    "packing",
  ),
)
"""Name and address of a thread, what it reports, and the law that it breaks."""


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the text of the page."""
  lengths = sorted({x["lengths"] for x in records.values()})
  return "".join(
    [
      _TEXT.format(lengths=" or ".join(lengths)),
      *_overview(records),
      *_leaks(records),
      *_laws(records),
      *_reproductions(records),
    ]
  )


def _overview(records: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
  yield "| function | library | kept | breaks | documented | does not apply |\n"
  yield "| --- | --- | --- | --- | --- | --- |\n"
  for name, record in records.items():
    laws = record["laws"]
    kept, none = (sum(x["status"] == y for x in laws) for y in ("kept", "none"))
    broken, documented = [], []
    for law in (x["law"] for x in laws if x["status"] == "broken"):
      is_documented = law in FUNCTIONS[name].documented
      (documented if is_documented else broken).append(
        f"[{law}](#{name}-{law})"
      )
    cells = [", ".join(x) or "–" for x in (broken, documented)]
    cells = [record["label"], record["library"], kept, *cells, none]
    yield f"| {' | '.join(map(str, cells))} |\n"
  dates = sorted({x["date"] for x in records.values()})
  jaxes = sorted({x["jax"] for x in records.values()})
  yield f"\nMeasured with JAX {', '.join(jaxes)}, {dates[0]} to {dates[-1]}.\n"


def _leaks(records: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
  yield "\n## Reported leaks\n\n"
  yield "Public threads report these leaks. Each breaks one of the laws.\n\n"
  yield "| thread | report | law | broken above by |\n"
  yield "| --- | --- | --- | --- |\n"
  for thread, address, text, law in _THREADS:
    outcomes = {
      record["label"]: x["status"]
      for record in records.values()
      for x in record["laws"]
      if x["law"] == law
    }
    broken = [x for x, status in outcomes.items() if status == "broken"]
    kept = list(outcomes.values()).count("kept")
    cell = ", ".join(broken) or f"none of {kept}"
    yield f"| [{thread}]({address}) | {text} | `{law}` | {cell} |\n"
  yield "\n"


def _laws(records: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
  yield "## The laws\n\n| law | statement | kept by | broken by |\n"
  yield "| --- | --- | --- | --- |\n"
  statuses = [
    (x["law"], x["status"])
    for record in records.values()
    for x in record["laws"]
  ]
  for law in FUNCTION_LAWS.values():
    kept, broken = (statuses.count((law.name, x)) for x in ("kept", "broken"))
    yield f"| `{law.name}` | {law.statement} | {kept} | {broken} |\n"


def _reproductions(records: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
  yield "\n## Reproductions\n\nEach program prints the largest difference of each array; nan means that NaN reached a result.\n"
  for name, record in records.items():
    broken = [x for x in record["laws"] if x["status"] == "broken"]
    if broken:
      yield f"\n### {record['library']}: {record['label']}\n"
    for x in broken:
      documented = FUNCTIONS[name].documented.get(x["law"])
      size = magnitude(Outcome(**x))
      yield f"\n({name}-{x['law']})=\n\n**{x['law']}** at T = {x['length']}: {size}."
      yield f" Documented: {documented}.\n" if documented else "\n"
      yield f"\n```text\n{x['reproduction']}\n```\n"


def read() -> dict[str, dict[str, Any]]:
  """Reads the records, in the order of the adapters."""
  return {
    name: json.loads((_RECORDS / f"{name}.json").read_text("utf-8"))
    for name in FUNCTIONS
    if (_RECORDS / f"{name}.json").exists()
  }


if __name__ == "__main__":
  PAGE.write_text(page(read()), "utf-8")
