"""Copies the working tree and runs its tests."""

from collections.abc import Sequence
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests.verification.mutants.mutant import ROOT

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)


def copy(folder: pathlib.Path) -> pathlib.Path:
  """Copies the files of the working tree that git does not ignore."""
  command = ["git", "ls-files", "-coz", "--exclude-standard"]
  names = subprocess.check_output(command, cwd=ROOT, text=True)
  tree = folder / "tree"
  for name in names.split("\0"):
    if (ROOT / name).is_file():
      (tree / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, tree / name)
  data = ROOT.parent / "shared"  # Some tests read this folder.
  if data.exists():
    (folder / "shared").symlink_to(data.resolve())
  return tree


def run(
  tree: pathlib.Path, arguments: Sequence[str], limit: float
) -> tuple[int | None, str]:
  """Returns the exit code and the output of pytest.

  After the time limit the code is None. The output is 'hung' if a single test took
  more than half of the limit, else 'unfinished'.
  """
  command = [sys.executable, "-m", "pytest", "-q", "-m", "not thorough"]
  environment = os.environ | {
    "PYTHONDONTWRITEBYTECODE": "1",  # Stale bytecode would hide a fault.
    "PYTHONPATH": str(tree),
  }
  with tempfile.TemporaryFile("w+") as output:
    process = subprocess.Popen(
      [*command, *arguments],
      cwd=tree,
      env=environment,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      code = process.wait(limit)
    except subprocess.TimeoutExpired:
      silent = time.time() - os.fstat(output.fileno()).st_mtime
      return None, "hung" if silent > limit / 2 else "unfinished"
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    output.seek(0)
    return code, output.read()
