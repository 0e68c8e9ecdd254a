"""What may stop a run, told in one line."""


class ConfigError(ValueError):
  """A fault in what the user asked for, told in one line."""


class RunError(Exception):
  """A run that had begun cannot go on; its checkpoints are intact."""


def one_line(error: BaseException) -> str:
  """The message of any exception, on one line, never empty."""
  # str() of a KeyError is the repr of its key.
  text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
  return " ".join(text.split()) or type(error).__name__
