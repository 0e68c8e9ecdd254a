"""Prints a table of what each mechanism supports.

`python -m docs.capabilities` prints the table of docs/library.md in Markdown.
A test compares the two.
"""

from collections.abc import Mapping

from attention.mechanism import ATTENTIONS, Attention, example

COLUMNS = {
  "causal": {"causal"},
  "T≠S": {"cross"},
  "stepwise": {"rowwise"},
  "mask": {"mask"},
  "any": {"full_mask"},
  "packed": {"segments"},
  "v heads": {"value_heads"},
  "bias": {"bias"},
  "rel.": {"relative"},
  "logits": {"sinks", "logits_soft_cap", "log_forget", "mods"},
  "drop": {"dropout"},
  "decode": {"decode"},
  "global": {"global"},
  "q=k": {"shared_qk"},
  "kv": {"own_keys"},
  "shards": {"sequence"},
}
"""Column heading -> the capabilities that a ✓ in it requires."""


def capability_table(
  mechanisms: Mapping[str, Attention] | None = None,
) -> str:
  """Returns a Markdown table with one column per capability.

  Mechanisms with equal capabilities share a row.

  Args:
    mechanisms: name -> mechanism. The default is every entry of `ATTENTIONS`
      with its default hyperparameters.

  Returns:
    ✓ where `supports` names the capability, – where a call that needs it
    raises ValueError, 'only' where a call without it does.
  """
  if mechanisms is None:
    mechanisms = {name: example(make) for name, make in ATTENTIONS.items()}
  names_by_marks: dict[tuple[str, ...], list[str]] = {}
  for name, mechanism in mechanisms.items():
    marks = [
      "✓" if names <= mechanism.supports else "–" for names in COLUMNS.values()
    ]
    if mechanism.causal_only:
      marks[0] = "only"
    names_by_marks.setdefault(tuple(marks), []).append(f"`{name}`")
  rows = [["name", *COLUMNS], ["---", *[":-:"] * len(COLUMNS)]]
  rows += [
    [", ".join(names), *marks] for marks, names in names_by_marks.items()
  ]
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
  print(capability_table(), end="")
