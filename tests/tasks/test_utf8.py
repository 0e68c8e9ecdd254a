"""Bytes as a vocabulary: the ids of the published model, which no training decides."""

import pytest

from tasks import base
from tasks.characters import Bytes
from tasks.special_tokens import OWN_ENCODER, sentinel
from tests.tasks.text_cases import make


def test_ids_are_those_of_the_published_model():
  vocabulary = Bytes(OWN_ENCODER)
  special, text = vocabulary.special, "naïve 日本 🙂\t\r\n\0"
  ids = vocabulary.encode_text(text).tolist()
  assert ids == [value + 6 for value in text.encode("utf-8")]
  assert vocabulary.size == 262
  assert (special.pad, special.bos, special.eos) == (base.PAD, base.BOS, 2)
  assert (special.mask, special.cls, special.sep) == (3, 4, 5)
  assert vocabulary.encode("a<mask>ß") == [103, 3, 201, 165]
  assert vocabulary.decode([4, 103, 3, 2, 103]) == "<cls>a<mask>"
  # A decoder reads none that is typed.
  assert Bytes().encode("<mask>") == [byte + 6 for byte in b"<mask>"]


def test_others_come_after_the_bytes():
  vocabulary = Bytes([sentinel(0), sentinel(1)])
  assert vocabulary.size == 264
  assert vocabulary.special.sentinels == (262, 263)
  assert vocabulary.encode("a<extra_id_1>") == [103, 263]
  assert vocabulary.decode([103, 262]) == "a<extra_id_0>"
  assert 262 not in vocabulary.ordinary


def test_a_part_of_a_character_is_told():
  vocabulary = Bytes(OWN_ENCODER)
  ids = vocabulary.encode("ß a\n\x7f")
  labels = ["<mask>", r"\xc3", r"\x9f", "␣", "a", "⏎", r"\x7f"]
  assert vocabulary.labels([3, *ids]) == labels
  assert vocabulary.decode(ids[:1]) == "\ufffd"


def test_a_file_of_something_else(path, tmp_path):
  file = tmp_path / "bytes.json"
  file.write_text('["<pad>"]')
  with pytest.raises(base.DataError, match=r"^task\.tokenizer: .*<mask> <cls>"):
    make(path, "encoder", tokenizer=str(file))
