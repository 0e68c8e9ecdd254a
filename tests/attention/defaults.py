"""Records the defaults of all public functions, so that tests notice changes.

python -m tests.attention.defaults > tests/attention/defaults.txt
"""

import inspect

import attention


def rows():
  """Returns one row per function, such as 'performer | num_features=256'."""
  for name in attention.__all__:
    function = getattr(attention, name)
    if inspect.isfunction(function):
      options = [
        f"{x.name}={getattr(x.default, '__name__', repr(x.default))}"
        for x in inspect.signature(function).parameters.values()
        if x.default is not x.empty
      ]
      if options:
        yield f"{name} | {', '.join(options)}"


if __name__ == "__main__":
  print(*rows(), sep="\n")
