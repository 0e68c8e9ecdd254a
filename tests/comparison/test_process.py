"""What is told of a process that has ended."""

import signal

import pytest

from comparison import process


def ended(script, *arguments, **options):
  return process.run(["-c", script], *arguments, **options)


@pytest.mark.parametrize(
  ("script", "code", "error"),
  [
    # The last line, whatever its bytes are.
    (r"sys.stderr.buffer.write(b'a\n\n caf\xe9  b \n\n')", 0, "caf� b"),
    ("print('out'); sys.exit('é')", 1, "é"),
    ("import json; sys.exit(json.load(sys.stdin)['code'])", 7, "no message"),
    ("os.kill(os.getpid(), 9)", -signal.SIGKILL, "no message"),
  ],
)
def test_a_process_ends_with_a_code_and_a_line(script, code, error):
  found = ended(f"import os, sys; {script}", {"code": 7})
  assert (found.code, found.error, found.stop) == (code, error, None)
  assert found.fault == (f"exit code {code}: {error}" if code else "")
  found.end_with_signal()  # None was sent.


def test_a_process_is_watched_and_ends_with_what_watches_it():
  calls = []

  def watch():
    calls.append(len(calls))
    if len(calls) == 3:
      raise ValueError("enough")

  with pytest.raises(ValueError, match="enough"):
    ended("import time; time.sleep(600)", watch=watch)
  assert calls == [0, 1, 2]


@pytest.mark.parametrize(
  ("sent", "raised", "code"),
  [
    (signal.SIGINT, KeyboardInterrupt, None),
    (signal.SIGTERM, SystemExit, 128 + signal.SIGTERM),
  ],
)
def test_a_signal_that_was_forwarded_ends_this_process_too(sent, raised, code):
  found = process.ProcessResult(0, "", {}, sent)
  with pytest.raises(raised) as error:
    found.end_with_signal()
  assert getattr(error.value, "code", None) == code


def test_packages_are_those_of_this_checkout(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("PYTHONPATH", raising=False)
  # Without site packages, where an installation could be found.
  assert process.run(["-S", "-c", "import settings"]).fault == ""
