"""What `--help` shows, and how a program ends."""

import errno
import pathlib

from absl import flags
import pytest

from tests import commands
from training.commands import entry


@pytest.mark.parametrize(
  ("program", "flag", "has_defaults"),
  [
    ("train.py", "--workdir", False),
    ("compare.py", "--shard", True),
    ("generate.py", "--beam_size", True),
    ("training.commands.draw_attention", "--target", False),
    ("benchmarks.scaling", "--lengths", True),
  ],
)
def test_help_is_examples_and_own_flags(program, flag, has_defaults):
  run = commands.run if program.endswith(".py") else commands.run_module
  code, out, error = run(program, "--help")
  assert (code, error) == (0, "")
  description, shown = out.split("\nFlags:\n")
  assert sum(program in line for line in description.splitlines()) >= 3
  assert f"  {flag}\n" in shown
  assert ("(default" in shown) == has_defaults
  assert "--helpfull" in shown.splitlines()[-1]
  # None of absl's own.
  assert "verbosity" not in out


@pytest.mark.parametrize("word", ["--help", "-help", "--helpshort", "-?"])
def test_each_word_asks_for_help(word, capsys):
  with pytest.raises(SystemExit) as info:
    entry._parse(None, ["train.py", "--seed=1", word])
  assert info.value.code == 0
  assert "\nFlags:\n" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("invalid literal for int() with base 10: 'x'", "a valid integer"),
    ("could not convert string to float: 'x'", "a valid number"),
    ("Non-boolean argument to boolean flag", "a valid boolean"),
    ("cannot override it as a ConfigDict", "fields of the section, each with"),
  ],
)
def test_a_value_of_another_type_is_told(text, told):
  error = flags.IllegalFlagValueError(f"flag --config.seed=x: {text}")
  line = entry._cause(_raised(error))
  assert line.startswith(f"config.seed: expected {told}")
  assert line.endswith(", got 'x'")


@pytest.mark.parametrize("typed", ["none", "NULL"])
def test_another_spelling_of_none_is_told(typed):
  text = f"flag --config.seed={typed}: could not convert string to float: ''"
  line = entry._cause(_raised(flags.IllegalFlagValueError(text)))
  assert line.endswith(f", got '{typed}'; did you mean None?")


@pytest.mark.parametrize(
  ("program", "config", "platform"),
  [
    ("train.py", "configs/copy.py", "cuda"),
    ("compare.py", "configs/compare/copy.py", "nosuch"),
  ],
)
def test_a_device_that_is_not_there_is_one_line(
  program, config, platform, tmp_path
):
  if platform == "cuda" and pathlib.Path("/dev/nvidia0").exists():
    pytest.skip("this machine has one")
  code, _, error = commands.run(
    program,
    f"--config={config}",
    f"--workdir={tmp_path / 'run'}",
    variables={"JAX_PLATFORMS": platform},
  )
  assert code == 2
  assert error.startswith(
    f"JAX_PLATFORMS: expected a device that this machine has, got '{platform}'"
  )
  assert error.count("\n") == 1
  assert not (tmp_path / "run").exists()


def _raised(error, cause=None):
  """An error as it is caught, with its cause."""
  try:
    raise error from cause
  except Exception as caught:
    return caught


@pytest.mark.parametrize(
  ("error", "words"),
  [
    (OSError(errno.ENOSPC, "none", "run/x"), "No space left on device (run/x)"),
    (ValueError("UNKNOWN; os_error_code='28'"), "No space left on device"),
    (
      _raised(RuntimeError("save"), OSError(errno.EROFS, "no", "run/x")),
      "Read-only file system (run/x); allow",
    ),
    (OSError(errno.EFBIG, "", "x"), "File too large (x); make room"),
    (OSError(errno.EDQUOT, "", "x"), "Disk quota exceeded (x); make room"),
    (OSError(errno.EACCES, "", "x"), "Permission denied (x); allow this user"),
    (OSError(errno.EPERM, "", "x"), "Operation not permitted (x); allow this"),
    (MemoryError("9 GiB"), "lower config.batch_size"),
    (RuntimeError("RESOURCE_EXHAUSTED: 64 TiB"), "accumulate_steps"),
  ],
)
def test_no_room_is_one_line_with_a_remedy(error, words):
  line = entry._resource_error(_raised(ValueError("outer"), error))
  assert words in line
  assert "continues from the last checkpoint" in line
  assert "\n" not in line


def test_other_errors_keep_their_traceback():
  for error in (ValueError("shape"), FileNotFoundError(2, "no file", "x")):
    assert not entry._resource_error(_raised(KeyError("a"), error))


def test_threads_tell_all_but_want_of_room(tmp_path):
  (tmp_path / "program.py").write_text("""
import threading
from training.commands import entry
def main():
  def end(error):
    def body():
      raise error
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
  class Callback:
    def __del__(self):
      raise RuntimeError("Event loop is closed")
  Callback()
  end(OSError(28, "full"))
  end(ValueError("a fault of the thread"))
entry.run(main)
""")
  code, _, error = commands.run(tmp_path / "program.py")
  assert code == 0, error
  assert "full" not in error
  assert "closed" not in error
  assert "ValueError: a fault of the thread" in error
