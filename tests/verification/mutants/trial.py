"""A copy of the working tree, and its tests."""

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
  """A copy of the working tree, tracked files and others that are not ignored."""
  command = ["git", "ls-files", "-coz", "--exclude-standard"]
  listed = subprocess.check_output(command, cwd=ROOT, text=True)
  tree = folder / "tree"
  for name in listed.split("\0"):
    if (ROOT / name).is_file():
      (tree / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, tree / name)
  data = ROOT.parent / "shared"  # Some tests read what is there.
  if data.exists():
    (folder / "shared").symlink_to(data.resolve())
  return tree


def run(
  tree: pathlib.Path, arguments: Sequence[str], limit: float
) -> tuple[int | None, str]:
  """Exit code and output of pytest.

  Beyond the limit the code is None, and the output says whether one test took more
  than half of it ('hung') or all of them together ('unfinished').
  """
  command = [sys.executable, "-m", "pytest", "-q", "-m", "not thorough"]
  environment = os.environ | {
    "PYTHONDONTWRITEBYTECODE": "1",  # Nor is a stale file read.
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
