"""What each mechanism can do, as a table read from `supports`.

`python -m docs.capabilities` prints the table of docs/library.md in Markdown,
and a test keeps the two equal.
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
"""Heading of a column -> the capabilities that it stands for, all of them."""


def capability_table(
  mechanisms: Mapping[str, Attention] | None = None,
) -> str:
  """A Markdown table of capabilities (columns), a row for mechanisms with equal ones.

  Args:
    mechanisms: name -> record; None is every entry of `ATTENTIONS` with its
      default hyperparameters.

  Returns:
    ✓ where `supports` names the capability, – where asking for it raises
    ValueError, 'only' where leaving it out does.
  """
  if mechanisms is None:
    mechanisms = {name: example(make) for name, make in ATTENTIONS.items()}
  alike: dict[tuple[str, ...], list[str]] = {}
  for name, record in mechanisms.items():
    marks = [
      "✓" if names <= record.supports else "–" for names in COLUMNS.values()
    ]
    if record.causal_only:
      marks[0] = "only"
    alike.setdefault(tuple(marks), []).append(f"`{name}`")
  rows = [["name", *COLUMNS], ["---", *[":-:"] * len(COLUMNS)]]
  rows += [[", ".join(names), *marks] for marks, names in alike.items()]
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
  print(capability_table(), end="")
