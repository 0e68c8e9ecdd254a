"""Every kind of vocabulary: texts come back, files are found, labels can be read."""

import itertools

import numpy as np
import pytest

from tasks import vocabularies
from tasks.characters import Bytes, Characters, Ids
from tasks.special_tokens import NAMES, OWN, OWN_ENCODER
from tasks.tokenizer import train_tokenizer

EXTRA = (*OWN_ENCODER, "<extra_id_0>")
SPECIAL = {*OWN, *EXTRA, *itertools.chain(*NAMES.values())}
TEXTS = [
  "… ½ ＡＢ９ e\u0301 é ﬁ ² Å",
  "".join(sorted(SPECIAL)),
  f"a {' '.join(sorted(SPECIAL))} <unk> <extra_id_1> ⁇ ##s ▁ Ġ Ċ b",
  "  two  spaces\tand\u00a0a\u3000tab \r\n\n\r ends\n ",
  "\ufeffx\u200by\x00\x85\u2028\ufffd 🙂👩\u200d👩 العربية 日本語",
]
KINDS = {
  "characters": lambda: Characters(sorted({*"".join(TEXTS)}), EXTRA),
  "bytes": lambda: Bytes(EXTRA),
  "subwords": lambda: train_tokenizer("".join(TEXTS) * 9, 320, EXTRA),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_comes_back(kind, text):
  """What reads like a special token is text, and no normalizer changes any."""
  vocabulary = KINDS[kind]()
  ids = vocabulary.encode_text(text)
  assert ids.dtype == np.int32
  assert np.isin(ids, vocabulary.ordinary).all()
  assert not {*ids.tolist()} & vocabulary.special.ids
  assert vocabulary.decode(ids) == text
  # Before an end, and between what is no text.
  special = vocabulary.special
  framed = [special.bos, special.pad, *ids, special.eos, ids[0], special.eos]
  assert vocabulary.decode(framed) == text
  # From a file, as from where it was made.
  again = type(vocabulary).read(vocabulary.content(), EXTRA, "file")
  np.testing.assert_array_equal(again.encode_text(text), ids)
  assert again.size == vocabulary.size


def test_a_file_has_characters_in_any_order():
  """Such as one to which a user has added some at the end; ids are places in it."""
  found = Characters.read('["z", "a", "é", "Z"]'.encode(), (), "mine.json")
  np.testing.assert_array_equal(found.encode_text("aZzé"), [4, 6, 3, 5])
  assert found.encode("aZzé") == [4, 6, 3, 5]
  assert found.decode([4, 6, 3, 5]) == "aZzé"
  with pytest.raises(ValueError, match=r"mine\.json has a character twice"):
    Characters.read(b'["z", "a", "z"]', (), "mine.json")


@pytest.mark.parametrize(
  ("kind", "content", "message"),
  [
    *((Ids, x, "is not a number of ids") for x in (b"[]", b'"a"', b"{", b"")),
    *(
      (Characters, x, "is not a list of characters")
      for x in (b'{"a": 1}', b'["ab"]', b'[""]', b"[1]", b'"ab"')
    ),
    (Characters, b"[", "is not JSON"),
  ],
)
def test_a_file_of_something_else_is_told(kind, content, message):
  with pytest.raises(ValueError, match=f"^task.tokenizer: mine.json {message}"):
    kind.read(content, (), "mine.json")


def test_ids_are_numbers_below_their_count():
  vocabulary = Ids(40)
  assert vocabulary.encode(" 39  0\n") == [39, 0]
  for word in ("40", "x", "-1", "1.0"):
    told = f"^expected ids from 0 to 39, separated by spaces, got '{word}'$"
    with pytest.raises(ValueError, match=told):
      vocabulary.encode(f"3 {word}")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_character_is_that_of_one_id(kind, text):
  vocabulary = KINDS[kind]()
  ids, characters = vocabulary.align(text)
  np.testing.assert_array_equal(ids, vocabulary.encode_text(text))
  assert characters.sum() == len(text)
  assert characters.min() >= 0
  # Wherever no character is cut, a prefix decodes to so many.
  for stop in range(len(ids)):
    prefix = vocabulary.decode(ids[:stop])
    if "\ufffd" not in prefix:
      assert len(prefix) == characters[:stop].sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXTRA)
def test_a_user_types_special_tokens_by_their_names(kind, name):
  vocabulary = KINDS[kind]()
  before, token, after = (
    vocabulary.encode(part) for part in ("so", name, "on")
  )
  assert len(token) == 1
  assert token[0] not in vocabulary.ordinary
  assert vocabulary.encode(f"so{name}on") == [*before, *token, *after]
  assert vocabulary.labels(token) == [name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  ("character", "label"), [("\n", "⏎"), (" ", "␣"), ("\t", "⇥"), ("a", "a")]
)
def test_labels_show_what_cannot_be_seen(kind, character, label):
  vocabulary = KINDS[kind]()
  assert vocabulary.labels(vocabulary.encode_text(character)) == [label]


@pytest.mark.parametrize("is_run", [False, True])
@pytest.mark.parametrize(
  ("make", "name"),
  [
    (KINDS["characters"], "characters.json"),
    (KINDS["bytes"], "bytes.json"),
    (KINDS["subwords"], "tokenizer.json"),
    (lambda: Ids(40, EXTRA), "ids.json"),
  ],
)
def test_a_vocabulary_is_found_in_a_folder_and_in_that_of_a_run(
  tmp_path, make, name, is_run
):
  vocabulary = make()
  folder = tmp_path / "vocabulary" if is_run else tmp_path
  folder.mkdir(exist_ok=True)
  assert vocabularies.find(tmp_path) is None
  (folder / name).write_bytes(vocabulary.content())
  assert vocabularies.find(tmp_path) == folder / name
  found = vocabularies.open_file(str(tmp_path), EXTRA)
  assert type(found) is type(vocabulary)
  assert found.labels(range(found.size)) == vocabulary.labels(range(found.size))
