"""A mechanism with options, as every program reads it."""

import pytest

from settings import typed


@pytest.mark.parametrize(
  ("text", "name", "options"),
  [
    ("delta", "delta", {}),
    ("sliding_window:window=8", "sliding_window", {"window": 8}),
    (
      "performer:num_features=64:kernel=relu",
      "performer",
      {"num_features": 64, "kernel": "relu"},
    ),
    ("sliding_window:window=(5, 0)", "sliding_window", {"window": (5, 0)}),
    # An import path has a colon of its own.
    ("my_module:cosine", "my_module:cosine", {}),
    (
      "my_package.module:cosine:scale=0.5:exact=true",
      "my_package.module:cosine",
      {"scale": 0.5, "exact": True},
    ),
  ],
)
def test_a_mechanism_and_its_options(text, name, options):
  assert typed.mechanism(text) == (name, options)
  # What is written for a command is read as the same.
  assert typed.mechanism(typed.format_mechanism(name, options)) == (
    name,
    options,
  )


@pytest.mark.parametrize("text", ["lsh:chunk_size=8:x", "window=8"])
def test_what_is_no_option(text):
  with pytest.raises(ValueError, match=r"^expected name:option=value:.*, got "):
    typed.mechanism(text)


def test_an_option_that_stands_twice():
  with pytest.raises(ValueError, match="expected window once, got 'a:window=8"):
    typed.mechanism("a:window=8:window=9")


def test_commas_inside_of_brackets_part_nothing():
  text = "sliding_window:window=(5, 0), my_module:cosine:scale=2,delta"
  assert typed.split(text) == [
    "sliding_window:window=(5, 0)",
    "my_module:cosine:scale=2",
    "delta",
  ]


@pytest.mark.parametrize("text", ["0,1", "(0,1)", "[0,1]", " ( 0, 1, ) "])
def test_a_list_may_have_brackets(text):
  assert typed.split(text) == ["0", "1"]


def test_brackets_of_one_entry_stay():
  assert typed.split("(1,2),(3)") == ["(1,2)", "(3)"]
  assert typed.split("a:window=(3,0)") == ["a:window=(3,0)"]
  assert typed.split("[(1,2),3]") == ["(1,2)", "3"]
  assert typed.split("(64,)") == ["64"]
  assert typed.split("[]") == typed.split("") == []


def test_a_text_that_python_cannot_parse_is_a_text():
  text = "-" * 100_000 + "1"
  assert typed.literal(text) == text
