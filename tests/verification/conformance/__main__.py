"""Runs the laws on the attention functions of this and other libraries.

    VENV/bin/python -m tests.verification.conformance --names=jax_nn,jla_kda

Each function runs in its own process. Functions whose library is not installed keep
their records. `python -m docs.conformance` writes the page.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import tempfile

from tests.verification.conformance.adapters import FUNCTIONS

RECORDS = pathlib.Path(__file__).parent / "records"


def main() -> None:
  """Runs the laws on each function and writes its record."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.verification.conformance"
  )
  parser.add_argument("--names", default=",".join(FUNCTIONS))
  parser.add_argument("--lengths", default="13,131")
  flags = parser.parse_args()
  for name in flags.names.split(","):
    entry = FUNCTIONS[name]
    try:
      version = importlib.metadata.version(entry.distribution)
    except importlib.metadata.PackageNotFoundError:
      print(f"{name}: {entry.distribution} is not installed")
      continue
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "laws.json"
      command = [sys.executable, "-m", "attention.testing"]
      command += [f"{__package__}.adapters:{name}", f"--record={path}"]
      process = subprocess.run(
        [*command, f"--lengths={flags.lengths}"], capture_output=True, text=True
      )
      if process.returncode not in (0, 1):
        print(f"{name}: {process.stderr.strip().splitlines()[-1]}")
        continue
      laws = json.loads(path.read_text())
    record = {
      "label": entry.label,
      "library": f"{entry.distribution} {version}",
      "jax": importlib.metadata.version("jax"),
      "lengths": flags.lengths,
      "date": datetime.date.today().isoformat(),
      "laws": laws,
    }
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (RECORDS / f"{name}.json").write_text(text + "\n", "utf-8")
    broken = [x["law"] for x in laws if x["status"] == "broken"]
    print(f"{name}: broken: {', '.join(broken) or 'none'}", flush=True)


if __name__ == "__main__":
  main()
