"""What each mechanism can do, as a table read from `supports`.

`python -m attention.capabilities` prints the table of docs/library.md in Markdown,
and a test keeps the two equal.
"""

from collections.abc import Mapping

from attention.plug import CAPABILITIES, Attention, example
from attention.registry import ATTENTIONS


def capability_table(
  mechanisms: Mapping[str, Attention] | None = None,
) -> str:
  """A Markdown table of mechanisms (rows) and capabilities (columns).

  Args:
    mechanisms: name -> record; None is every entry of `ATTENTIONS` with its
      default hyperparameters.

  Returns:
    ✓ where `supports` names the capability, – where asking for it raises
    ValueError, 'only' where leaving it out does.
  """
  if mechanisms is None:
    mechanisms = {name: example(make) for name, make in ATTENTIONS.items()}
  columns: dict[str, set[str]] = {}
  for capability, heading in CAPABILITIES.items():
    columns.setdefault(heading, set()).add(capability)
  rows = [["name", *columns]]
  rows.append(["---", *[":-:"] * len(columns)])
  for name, record in mechanisms.items():
    marks = [
      "✓" if names <= record.supports else "–" for names in columns.values()
    ]
    if record.causal_only:
      marks[0] = "only"
    rows.append([f"`{name}`", *marks])
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
  print(capability_table(), end="")
