"""Numbers in the prose of `attention/` and its documents are the code's."""

import ast
import inspect
import math
import pathlib
import re

import attention
from attention import ATTENTIONS, features, plug
from attention.performer import _RELU_EPSILON
from docs import draw_mechanisms

_ROOT = pathlib.Path(__file__).parent.parent.parent
_PAGE = (_ROOT / "docs" / "mechanisms.md").read_text()
_DEFAULTS = {
  name: plug.example(make).sizes for name, make in ATTENTIONS.items()
}


def _only(pattern, text):
  """The one number that a pattern finds in a text, wherever lines end."""
  (found,) = re.findall(pattern, " ".join((text or "").split()))
  return float(found)


def test_normaliser_of_nothing():
  pattern = r"normaliser is under (\S+?),? (?:gets|counts)"
  text = attention.linear_attention.__doc__
  assert _only(pattern, text) == features._NOTHING
  exponent = _only(r"normaliser is below 10⁻(\S+) gets", _in_digits(_PAGE))
  assert math.isclose(10**-exponent, features._NOTHING)


def _in_digits(text):
  """The text with ordinary digits in place of superscripts."""
  return text.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))


def test_normaliser_of_rows_out_of_range():
  assert _only(r"n_t < (\S+) up", features.__doc__) == features._LOST


def test_epsilon_of_relu_features():
  text = attention.performer_attention.__doc__
  epsilon = _only(r"x̃/√M, 0\) \+ ([\d.]+),", text)
  assert epsilon == _RELU_EPSILON


def test_default_window_is_that_of_the_paper():
  keys = _only(r"the paper's (\d+) keys", attention.sliding_window.__doc__)
  assert _default(attention.sliding_window, "window") == keys / 2


def _default(function, option):
  return inspect.signature(function).parameters[option].default


def test_common_size_in_benchmarks():
  size = _only(r"at a common size: (\d+) keys", plug.Sizes.__doc__)
  timed = {name: s.timed(16_384) for name, s in _DEFAULTS.items()}
  # Its window is the side of a square of keys.
  assert timed.pop("window_2d")["window"] ** 2 == size
  for option in ("window", "num_features", "rank"):
    assert {x[option] for x in timed.values() if option in x} == {size}


def test_tokens_of_the_pictures():
  length = draw_mechanisms._LENGTH
  assert _only(r"Queries and keys are (\d+) tokens", _PAGE) == length


_SIZES = re.compile(r"\b(?:32|64|128|256|512|1024|2048|4096)\b|\bC = \d")
_QUOTED = {"the paper's 512 keys", "at a common size: 256 keys"}
"""Of a paper, and tested above."""


def _docstrings(path):
  """Every string of a file that is a statement of its own."""
  for node in ast.walk(ast.parse(path.read_text())):
    match node:
      case ast.Expr(value=ast.Constant(value=str(text))):
        yield " ".join(text.split())


def _sizes(text):
  """The numbers in prose that look like a size of a block."""
  for quoted in _QUOTED:
    text = text.replace(quoted, "")
  # Dtypes and code that is shown have numbers of their own.
  text = re.sub(r"`[^`]*`|\w*(?:float|int)\d+|\w+=\S+|\w+\(.*?\)", "", text)
  return _SIZES.findall(text)


def test_no_docstring_writes_the_size_of_a_block():
  wrong = {
    f"{path.relative_to(_ROOT)}: {size}"
    for path in (_ROOT / "attention").rglob("*.py")
    for text in _docstrings(path)
    for size in _sizes(text)
  }
  assert not wrong, "name the place of the value instead, or test the number"


def test_docstrings_with_such_a_size_are_found():
  assert _sizes("Tiles of C = 64 queries, 128 from W = 257 on.")
  assert not _sizes("`[B, 128]` float32, as in f(x, window=64).")
