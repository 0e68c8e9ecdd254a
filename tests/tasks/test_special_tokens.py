"""Special tokens of other people's vocabularies: every name, order and fallback."""

import itertools

import pytest

from settings.errors import DataError
from tasks.special_tokens import NAMES, SpecialTokens, sentinel

# Role -> names, as the published tokenizers have them.
TABLE = {
  "pad": ["<pad>", "[PAD]", "<|endoftext|>", "</s>"],
  "bos": ["<bos>", "<s>", "<|begin_of_text|>", "<|endoftext|>", "[CLS]"],
  "eos": ["<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[SEP]"],
  "cls": ["<cls>", "[CLS]", "<s>"],
  "sep": ["<sep>", "[SEP]", "</s>"],
  "mask": ["<mask>", "[MASK]"],
}
PAIRS = [(role, name) for role, names in TABLE.items() for name in names]


def test_the_table_is_whole():
  assert {role: list(names) for role, names in NAMES.items()} == TABLE


# An id of 0 is an id, where a truth value would take it for none.
@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize(("role", "name"), PAIRS)
def test_every_name_is_that_of_its_role(role, name, place):
  special = SpecialTokens.find({name: place, "word": 3})
  assert getattr(special, role) == place
  assert special.need(role, "file", "objective") == place
  others = {other for other, names in TABLE.items() if name in names}
  if "eos" in others:
    others.add("pad")
  if others & {"pad", "eos"}:
    others.add("bos")
  for other in TABLE:
    assert getattr(special, other) == (place if other in others else None)


@pytest.mark.parametrize(
  ("role", "first", "second"),
  [
    (role, *pair)
    for role, names in TABLE.items()
    for pair in itertools.combinations(names, 2)
  ],
)
def test_of_two_names_the_first_counts(role, first, second):
  special = SpecialTokens.find({second: 5, first: 9})
  assert getattr(special, role) == 9


def test_what_stands_in_for_a_token_that_is_not_there():
  """The end pads (GPT-2), and padding begins (T5); id 0 is one in both."""
  for ids, pad, bos, eos in (
    ({"<pad>": 0, "</s>": 4}, 0, 0, 4),
    ({"[PAD]": 0, "[SEP]": 4, "[CLS]": 2}, 0, 2, 4),
    ({"[SEP]": 0}, 0, 0, 0),
    ({"<s>": 0, "<eos>": 5}, 5, 0, 5),
  ):
    special = SpecialTokens.find(ids)
    assert (special.pad, special.bos, special.eos) == (pad, bos, eos), ids


@pytest.mark.parametrize("role", TABLE)
def test_what_is_missing_is_told(role):
  special = SpecialTokens.find({"word": 0})
  names = " or ".join(TABLE[role])
  with pytest.raises(DataError) as info:
    special.need(role, "FILE", "guessing")
  assert str(info.value) == (
    f"task.tokenizer: FILE has no token {names}, which guessing needs"
  )


def test_sentinels_are_counted_up_to_the_first_gap():
  ids = {sentinel(n): 50 - n for n in (0, 1, 2, 4)}
  special = SpecialTokens.find(ids)
  assert special.sentinels == (50, 49, 48)
  assert special.need_sentinels(2, "FILE", "T5") == (50, 49)
  assert special.need_sentinels(3, "FILE", "T5") == (50, 49, 48)
  with pytest.raises(DataError, match=r"has 3 of the tokens .*0> to .*_3>"):
    special.need_sentinels(4, "FILE", "T5")


def test_an_encoder_reads_both_around_a_text_or_none():
  both = SpecialTokens.find({"<cls>": 0, "<sep>": 6})
  assert both.encoder_tokens == ([0], [6])
  assert SpecialTokens.find({"<cls>": 3}).encoder_tokens == ([], [])
  assert SpecialTokens.find({"<sep>": 3}).encoder_tokens == ([], [])


def test_all_ids_are_those_of_roles_and_sentinels():
  names = ["<pad>", "<bos>", "<eos>", "<cls>", "<sep>", "<mask>", sentinel(0)]
  ids = {name: 2 * i for i, name in enumerate(names)} | {"word": 1}
  assert SpecialTokens.find(ids).ids == {0, 2, 4, 6, 8, 10, 12}
  assert SpecialTokens.find({"word": 0}).ids == set()
