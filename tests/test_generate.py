"""`generate.py`: lines in, lines out."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import types

import pytest

import generate as generate_py
from settings.errors import ConfigError, escape
from tests import commands

LINES = "1 2\n\n3\n0 0 0\n"


@pytest.fixture
def workdir():
  return commands.finished()[0]


def generate(*arguments, stdin=LINES):
  return commands.run("generate.py", *arguments, stdin=stdin)


@pytest.mark.parametrize(
  "options",
  [
    ["--method=beam", "--beam_size=2", "--length_penalty=0"],
    ["--method=sample", "--temperature=0.5", "--top_k=2", "--seed=3"],
  ],
)
def test_one_line_out_for_each_line_in(workdir, options):
  code, out, error = generate(f"--workdir={workdir}", *options)
  assert (code, error) == (0, "")
  lines = out.splitlines()
  assert len(lines) == 4
  assert lines[1] == ""
  for line in lines:
    assert set(line.split()) <= set("0123")


def test_order_is_kept_whatever_the_batch(workdir):
  lines = ["0 1 2", "3", "2 2", "1", ""] * 30
  typed = "\n".join([*lines, ""])
  code, out, error = generate(f"--workdir={workdir}", stdin=typed)
  assert (code, error) == (0, "")
  outputs = out.splitlines()
  assert len(outputs) == len(lines)
  assert outputs[:5] * 30 == outputs
  assert all(set(line.split()) <= set("0123") for line in outputs)
  _, alone, _ = generate(f"--workdir={workdir}", stdin=lines[0])
  assert alone.splitlines() == outputs[:1]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (["--max_length=99"], "max_length: the model allows 4 tokens"),
    (["--top_k=2"], "top_k"),
    (["--method=nosuch"], "method"),
    (["--temperature=nan", "--method=sample"], "temperature"),
    (["--export=x", "--seed=0"], "--seed: not supported with --export"),
    (["--seed=3"], "--seed: method 'greedy' draws nothing"),
  ],
)
def test_a_fault_is_one_line(workdir, options, message):
  found = generate(f"--workdir={workdir}", *options, stdin="1\n")
  assert message in commands.fault(found)
  assert found[1] == ""


def test_good_lines_have_outputs_beside_bad_ones(workdir):
  options = f"--workdir={workdir}", "--method=sample", "--temperature=9"
  code, out, error = generate(*options, stdin="0 1 2\n9\n1 2 3 0\n3\n")
  assert code == 2
  first, second = error.splitlines()
  assert first.startswith("line 2: expected symbols 0 to 3")
  assert second.startswith("line 3: expected 1 to 3 symbols")
  _, alone, _ = generate(*options, stdin="0 1 2\n\n\n3\n")
  assert out == alone
  assert out.strip()


def test_a_folder_without_a_run_or_a_checkpoint(workdir, tmp_path):
  commands.fault(generate(f"--workdir={tmp_path}"))
  (tmp_path / "config.json").write_text((workdir / "config.json").read_text())
  told = commands.fault(generate(f"--workdir={tmp_path}"))
  assert "no checkpoint" in told
  assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_run_calls_nothing_but_factories(workdir, tmp_path):
  """The user named a run, whose config may name a factory and nothing else."""
  content = json.loads((workdir / "config.json").read_text())
  touched = tmp_path / "touched"
  (tmp_path / "their_module.py").write_text(
    "from attention import Attention, dense\n\n\n"
    "def mine(command='') -> Attention:\n  return dense()\n\n\n"
    f"def plain(command=''):\n  open({str(touched)!r}, 'w')\n  return dense()\n"
  )
  run = tmp_path / "run"
  shutil.copytree(workdir, run)
  for name, message in (
    ("os:system", "'os' is a module of Python itself"),
    ("their_module:plain", "is not annotated `-> Attention`"),
  ):
    own = {"name": name, "command": f"touch {touched}"}
    content["model"]["encoder_attention"] = own
    content.pop("slots", None)
    (run / "config.json").write_text(json.dumps(content))
    found = commands.run("generate.py", f"--workdir={run}", cwd=tmp_path)
    assert message in commands.fault(found)
    # Weights beside it make it no run, whatever the command.
    (run / "model.safetensors").touch()
    for option in ((), (f"--export={tmp_path / 'out'}",)):
      arguments = ("generate.py", f"--workdir={run}", *option)
      told = commands.fault(commands.run(*arguments, cwd=tmp_path))
      assert re.match("workdir: .*architectures|--export: ", told)
    (run / "model.safetensors").unlink()
  assert not touched.exists()
  content["model"]["encoder_attention"] = {"name": "their_module:mine"}
  (run / "config.json").write_text(json.dumps(content))
  code, out, error = commands.run(
    "generate.py", f"--workdir={run}", cwd=tmp_path, stdin=LINES
  )
  assert (code, error, out.count("\n")) == (0, "", 4)


def test_a_terminal_is_not_steered(workdir, tmp_path, monkeypatch, capsys):
  """Signs that set a title or clear the screen are shown, and piped as they are."""
  signs = "a\tb\\n\x1b]0;title\x07\x7f\x9b2J\r\u00e9\u2028"
  shown = "a\tb\\n\\x1b]0;title\\x07\\x7f\\x9b2J\\x0d\u00e9\u2028"
  assert escape(signs) == shown
  assert str(ConfigError("unknown '\x1b[2J\n'")) == "unknown '\\x1b[2J '"
  script = tmp_path / "steered.py"
  script.write_text(
    "import io, os, sys\nimport generate\n"
    "from training.commands import entry; from training.inference import generation as inference\n"
    "class Terminal(io.TextIOWrapper):\n"
    "  isatty = lambda self: True\n"
    "if 'TERMINAL' in os.environ:\n"
    "  sys.stdout = Terminal(sys.stdout.buffer, 'utf-8')\n"
    f"inference.generate_lines = lambda *_, **__: [{signs!r}]\n"
    "entry.run(generate.main)\n"
  )
  here = {"PYTHONPATH": str(commands.ROOT)}
  for variables, expected in ((here, signs), (here | {"TERMINAL": "1"}, shown)):
    process = commands.Fork(
      [str(script), f"--workdir={workdir}"], stdin="1\n", variables=variables
    )
    assert process.communicate()[1] == ""
    assert process.stdout.read_bytes().decode() == expected + "\n"
  typed = iter(["1"])
  monkeypatch.setattr("builtins.input", lambda _: next(typed, None) or _end())
  generate_py._converse(types.SimpleNamespace(answer=lambda _: signs))
  assert capsys.readouterr().out == shown + "\n\n"


def _end():
  raise EOFError


def test_on_a_terminal_each_line_is_answered(workdir):
  """A line that cannot be read is told; the end of input ends."""
  ours, theirs = pty.openpty()
  process = subprocess.Popen(
    [sys.executable, "generate.py", f"--workdir={workdir}"],
    cwd=commands.ROOT,
    env=commands.environment(),
    stdin=theirs,
    stdout=theirs,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(theirs)
  shown = ""
  try:
    for typed in ("1 2\n", "9\n", "\n", "3\n", "\x04"):
      prompts = shown.count("> ")
      while shown.count("> ") == prompts:
        assert select.select([ours], [], [], 120)[0], shown
        shown += os.read(ours, 1000).decode()
      os.write(ours, typed.encode())
    error = process.communicate(timeout=60)[1]
  finally:
    process.kill()
    os.close(ours)
  assert process.returncode == 0
  assert re.fullmatch(r"line 1: expected symbols 0 to 3.*\n", error)
  _, out, _ = generate(f"--workdir={workdir}", stdin="1 2\n3\n")
  for line in out.splitlines():
    assert f"\n{line}\r\n" in shown
