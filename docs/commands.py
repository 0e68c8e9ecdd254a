"""Prints the help of every command, as the site shows it.

Usage: `python -m docs.commands`.
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
  """Returns one section per command."""
  return "\n".join(
    f"## `python {x}`\n\n```text\n{_help(x)}```\n" for x in COMMANDS
  )


def _help(command: str) -> str:
  arguments = [sys.executable, *command.split(), "--help"]
  run = subprocess.run(arguments, capture_output=True, text=True, check=True)
  return run.stdout.replace("--helpfull shows the libraries' flags too.\n", "")


if __name__ == "__main__":
  print(page(), end="")
