"""A small text, its tasks, and tokenizer files of other projects."""

import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.tasks import generated_cases

WORDS = "now is the time for all good men to come to the aid of the party"
TEXT = "".join(
  f"{' '.join(WORDS.split()[i % 7 : i % 7 + 4 + i % 9])}, 'ä' and {i}€\n"
  for i in range(150)
)
HELD_OUT = TEXT[int(0.9 * len(TEXT)) :]


def make(path, kind, batch_size=4, **options):
  """Makes the task `text` for a file, with a short context."""
  options = {"path": str(path), "context": 16} | options
  return generated_cases.make("text", kind, batch_size=batch_size, **options)


def words_tokenizer(special, first=0):
  """Returns the content of a tokenizer.json that splits at spaces.

  Args:
    special: names of its special tokens; they come last.
    first: id of the first word; the ids below are missing.
  """
  names = ["[UNK]", *sorted({*TEXT.split()}), *special]
  ids = {name: first + i for i, name in enumerate(names)}
  tokenizer = tokenizers.Tokenizer(WordLevel(ids, unk_token="[UNK]"))
  tokenizer.pre_tokenizer = WhitespaceSplit()
  tokenizer.add_special_tokens([*special])
  tokenizer.enable_truncation(8)
  return tokenizer.to_str().encode()


BERT = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
GPT = ("<|endoftext|>",)
T5 = ("<pad>", "</s>", *(f"<extra_id_{i}>" for i in reversed(range(100))))
