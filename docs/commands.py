"""The help of every command, for the page of the site.

`python -m docs.commands` prints it.
"""

import subprocess
import sys

COMMANDS = (
  "train.py",
  "compare.py",
  "generate.py",
  "swap.py",
  "-m training.commands.describe",
  "-m training.commands.draw_attention",
  "-m benchmarks.scaling",
)


def page() -> str:
  """A section a command."""
  return "\n".join(
    f"## `python {x}`\n\n```text\n{_help(x)}```\n" for x in COMMANDS
  )


def _help(command: str) -> str:
  line = [sys.executable, *command.split(), "--help"]
  shown = subprocess.run(line, capture_output=True, text=True, check=True)
  return shown.stdout.replace(
    "--helpfull shows the libraries' flags too.\n", ""
  )


if __name__ == "__main__":
  print(page(), end="")
