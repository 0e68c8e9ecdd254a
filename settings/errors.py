"""Errors that stop a run, each with a one-line message."""

_MAX_CHARACTERS = 1000

_CONTROL = {
  code: f"\\x{code:02x}"
  for code in (*range(0x20), *range(0x7F, 0xA0))
  if chr(code) not in "\n\t"
}
"""Escapes of the control characters C0, DEL and C1, except for line feeds and tabs."""


def escape(text: str) -> str:
  """Escapes control characters, so that a terminal shows them."""
  return text.translate(_CONTROL)


class ConfigError(ValueError):
  """A mistake in the user's input, described in one line."""

  def __init__(self, message: str):
    # It may contain user input with line breaks.
    super().__init__(_shorten(message))


class DataError(ValueError):
  """A mistake in the data that a user provided, described in one line."""


class RunError(Exception):
  """A run cannot continue; its checkpoints are intact."""


def one_line(error: BaseException) -> str:
  """Returns the message of an exception on one line; it is never empty."""
  # str() of a KeyError is the repr of its key.
  text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
  return _shorten(text) or type(error).__name__


def _shorten(text: str) -> str:
  """Joins the lines of a text, and removes the middle of a long text."""
  line = escape(" ".join(text.split()))
  if len(line) <= _MAX_CHARACTERS:
    return line
  half = _MAX_CHARACTERS // 2
  return f"{line[:half]} … {line[-half:]}"
