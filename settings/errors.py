"""Errors that stop a run, each with a one-line message."""

_MOST_CHARACTERS = 1000

_CONTROL = {
  code: f"\\x{code:02x}"
  for code in (*range(0x20), *range(0x7F, 0xA0))
  if chr(code) not in "\n\t"
}
"""C0, DEL and C1, but a line end and a tab, with which a text may steer a terminal."""


def escape(text: str) -> str:
  """Escapes the control characters of a text, so that a terminal shows them."""
  return text.translate(_CONTROL)


class ConfigError(ValueError):
  """A mistake in the user's input, described in one line."""

  def __init__(self, message: str):
    # What the user typed is in it, and may have lines of its own.
    super().__init__(_shorten(message))


class DataError(ValueError):
  """A mistake in the data that a user provided, described in one line."""


class RunError(Exception):
  """A run that had started cannot continue; its checkpoints are intact."""


def one_line(error: BaseException) -> str:
  """The message of any exception, on one line, never empty."""
  # str() of a KeyError is the repr of its key.
  text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
  return _shorten(text) or type(error).__name__


def _shorten(text: str) -> str:
  """Text on one line; a long text loses its middle."""
  line = escape(" ".join(text.split()))
  if len(line) <= _MOST_CHARACTERS:
    return line
  half = _MOST_CHARACTERS // 2
  return f"{line[:half]} … {line[-half:]}"
