"""Files and output in a locale that is not UTF-8."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import commands

_BINARY_OR_OWN = {"os", "Image", "gzip"}
"""What has an `open` of bytes, or one that is no text file."""


def _sources():
  for path in sorted(commands.ROOT.rglob("*.py")):
    parts = path.relative_to(commands.ROOT).parts
    if "tests" not in parts and not any(x.startswith(".") for x in parts):
      yield path


def _lacks_encoding(call):
  """Whether a call opens a text file in the encoding of the locale."""
  function = call.func
  name = getattr(function, "attr", getattr(function, "id", ""))
  base = getattr(function, "value", None)
  owner = getattr(base, "attr", getattr(base, "id", ""))
  if "encoding" in {x.arg for x in call.keywords}:
    return False
  if name in ("read_text", "write_text"):
    return isinstance(function, ast.Attribute) and len(call.args) <= (
      name == "write_text"
    )
  if name not in ("open", "fdopen", "TemporaryFile", "NamedTemporaryFile"):
    return name == "TextIOWrapper" and len(call.args) < 2
  modes = [*call.args, *(x.value for x in call.keywords if x.arg == "mode")]
  texts = [x.value for x in modes if isinstance(x, ast.Constant)]
  has_bytes = any(isinstance(x, str) and "b" in x for x in texts)
  is_temporary = "Temporary" in name and not texts
  return not (has_bytes or is_temporary or owner in _BINARY_OR_OWN)


def test_every_text_file_is_opened_with_an_encoding():
  found = [
    f"{path.relative_to(commands.ROOT)}:{node.lineno}"
    for path in _sources()
    for node in ast.walk(ast.parse(path.read_text("utf-8")))
    if isinstance(node, ast.Call) and _lacks_encoding(node)
  ]
  assert not found


@pytest.mark.parametrize(
  ("code", "is_fault"),
  [
    ("open(path)", True),
    ("path.open('a')", True),
    ("path.read_text()", True),
    ("path.write_text(text)", True),
    ("io.TextIOWrapper(file)", True),
    ("tempfile.TemporaryFile('w+')", True),
    ("tempfile.TemporaryFile()", False),
    ("path.open('rb')", False),
    ("path.open(encoding='utf-8')", False),
    ("path.read_text('utf-8')", False),
    ("path.write_text(text, 'utf-8')", False),
    ("io.TextIOWrapper(file, 'utf-8-sig')", False),
    ("os.open(path, flags)", False),
  ],
)
def test_what_lacks_an_encoding(code, is_fault):
  assert _lacks_encoding(ast.parse(code).body[0].value) == is_fault


def test_a_run_in_a_locale_of_ascii(tmp_path):
  """What its text has is in its files, and a sign on standard output is replaced."""
  text = tmp_path / "input.txt"
  text.write_text("ä€ and Ω, é\n" * 40, "utf-8")
  task = {"path": str(text), "context": 8, "eval_batches": 1}
  leaves = {"task": task | {"vocabulary": "characters"}}
  leaves |= {"model": commands.SMALL | {"num_heads": 1}}
  leaves |= {"num_steps": 1, "eval_every": 1, "batch_size": 4}
  locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

  def run(script, *arguments, stdin=b""):
    return subprocess.run(
      [sys.executable, script, *arguments],
      cwd=commands.ROOT,
      env=commands.environment() | locale,
      input=stdin,
      capture_output=True,
    )

  workdir = f"--workdir={tmp_path / 'run'}"
  done = run(
    "train.py", "--config=configs/gpt.py", *commands.flags(leaves), workdir
  )
  assert (done.returncode, done.stderr) == (0, b"")
  assert b"dense" in done.stdout
  assert b" ? " in done.stdout  # The middle dot between sizes.
  assert done.stdout.isascii()
  samples = (tmp_path / "run" / "samples.txt").read_text("utf-8")
  assert "ä€ a" in samples
  assert "Ω" in samples
  done = run("generate.py", workdir, "--max_length=3", stdin="ä€\n".encode())
  assert (done.returncode, done.stderr) == (0, b"")
  assert done.stdout.endswith(b"\n")


def test_bytes_that_the_locale_does_not_know_are_told():
  """Python gives them as surrogates of what was typed."""
  path = os.fsdecode(b"--config.task.path=\xe4.txt")
  told = commands.run("train.py", "--config=configs/gpt.py", path)
  assert commands.fault(told).startswith(
    "config.task.path: expected a text in UTF-8"
  )


def test_the_config_of_a_run_is_utf8(tmp_path):
  from configs import copy
  from training import experiment_config, workdir

  mapping = copy.get_config().to_dict() | {"log": {"project": "Übung Ω"}}
  config = experiment_config.parse(mapping)
  workdir.write_config(pathlib.Path(tmp_path), config)
  content = (tmp_path / "config.json").read_bytes()
  assert json.loads(content.decode("utf-8"))["log"]["project"] == "Übung Ω"
