"""Three sources of sentence pairs with one interface, `Corpus`."""

from collections.abc import Callable, Iterator, Mapping
import hashlib
import itertools
import pathlib
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Interval
import num2words
from pydantic.dataclasses import dataclass

from settings import cache
from settings.errors import DataError
from settings.fields import STRICT, Count, check, check_unread
from tasks import numbers
from tasks.files import AlignedFiles, typed_path

_CHUNK = 1000

AUTOMATIC_SIZES = {"numbers": 128, "files": 4000, "tfds": 8000}
"""Default number of subwords for each source."""

_NUMBER_FIELDS = ("max_number", "num_train", "num_validation")

Chunk = tuple[list[str], list[str]]
"""Sources and targets."""


@dataclass(frozen=True, config=STRICT)
class TranslationConfig:
  """The source of sentence pairs, and the shapes of their batches.

  Attributes:
    source: 'numbers' needs no data; 'files' reads the folder `path`, with
      `train.en`, `train.de` and so on, plain or .gz; 'tfds' reads `dataset`.
    path: folder of 'files'; for 'tfds', a data folder with the prepared dataset.
    dataset: name in the TFDS catalogue.
    source_language: file ending, TFDS feature or num2words language.
    target_language: file ending, TFDS feature or num2words language.
    vocab_size: joint number of subwords; 0 means 128 for numbers, 4,000 for files
      and 8,000 for tfds. A small text may support fewer.
    max_length: tokens of a sentence with EOS. Longer training pairs are omitted and
      longer held-out sources are truncated; the log has both numbers.
    num_buckets: number of batch shapes; each costs one compilation.
    max_number: for 'numbers', the largest number, up to 9,999,999.
    num_train: for 'numbers', the number of training pairs.
    num_validation: for 'numbers', the number of held-out pairs.
  """

  source: Literal["numbers", "files", "tfds"] = "numbers"
  path: str = ""
  dataset: str = "ted_hrlr_translate/pt_to_en"
  source_language: str = "en"
  target_language: str = "de"
  vocab_size: int = 0
  max_length: Annotated[int, Ge(2)] = 128
  num_buckets: Count = 6
  max_number: Annotated[int, Interval(ge=999, le=9_999_999)] = 999_999
  num_train: Count = 20_000
  num_validation: Count = 1_000

  def __post_init__(self):
    unread = {
      "numbers": ("path", "dataset"),
      "files": ("dataset", *_NUMBER_FIELDS),
      "tfds": _NUMBER_FIELDS,
    }
    check_unread(self, unread[self.source], f"source={self.source!r}")
    needs_path = self.source == "files"
    check(
      self,
      "path",
      bool(self.path) or not needs_path,
      f"a folder with train.{self.source_language} and "
      f"train.{self.target_language}",
    )
    check(
      self,
      "dataset",
      bool(self.dataset) or self.source != "tfds",
      "a name of the TFDS catalogue",
    )
    check(self, "source_language", bool(self.source_language), "a name")
    check(
      self,
      "target_language",
      self.target_language not in ("", self.source_language),
      f"a language other than {self.source_language!r}",
    )
    check(
      self,
      "vocab_size",
      # SentencePiece counts in 32 bits.
      self.vocab_size == 0 or 5 <= self.vocab_size < 2**31,
      "5 to 2**31 - 1 subwords, or 0 for a size that suits the source",
    )


class Corpus(NamedTuple):
  """Prepared sentence pairs.

  Attributes:
    splits: maps 'train', 'validation' and each split whose name starts with 'test' to
      a function that reads its pairs in order.
    digest: hash of the content.
  """

  splits: Mapping[str, Callable[[], Iterator[tuple[str, str]]]]
  digest: str

  def read(self, split: str) -> Iterator[Chunk]:
    """Yields sources and targets, a thousand pairs at a time."""
    pairs = self.splits[split]()
    while chunk := list(itertools.islice(pairs, _CHUNK)):
      sources, targets = zip(*chunk, strict=True)
      yield list(sources), list(targets)

  def training_text(self) -> Iterator[str]:
    """Yields every training sentence of both languages."""
    for sources, targets in self.read("train"):
      yield from sources
      yield from targets


def open_corpus(config: TranslationConfig) -> Corpus:
  """Prepares the corpus of a config, or finds it in the cache.

  Raises:
    DataError: the data are invalid; the message has one line.
  """
  match config.source:
    case "numbers":
      return _numbers(config)
    case "files":
      return _files(typed_path(config.path), config)
    case _:
      return _from_catalogue(config)


def _numbers(config: TranslationConfig) -> Corpus:
  """Number words, cached as files, because spelling 20,000 numbers takes seconds."""
  languages = config.source_language, config.target_language
  numbers.check_languages(*languages)
  sizes = config.max_number, config.num_train, config.num_validation
  # Increment the first number if numbers are drawn or spelled in another way.
  version = f"1 num2words {getattr(num2words, '__version__', '')}"
  digest = hashlib.sha256(repr((languages, sizes, version)).encode())
  name = f"number-words-{'-'.join(languages)}-{digest.hexdigest()[:16]}"

  def write(scratch: pathlib.Path) -> pathlib.Path:
    folder = scratch / name
    folder.mkdir()
    drawn = numbers.choose_numbers(*sizes)
    for split, pairs in numbers.number_pairs(*languages, drawn).items():
      for language, words in zip(
        languages, zip(*pairs, strict=True), strict=True
      ):
        (folder / f"{split}.{language}").write_text("\n".join(words), "utf-8")
    return folder

  folder = cache.prepare(cache.folder("datasets") / name, write)
  return _files(folder, config)._replace(digest=digest.hexdigest())


def _files(folder: pathlib.Path, config: TranslationConfig) -> Corpus:
  files = AlignedFiles(folder, config.source_language, config.target_language)

  def reader(split: str) -> Callable[[], Iterator[tuple[str, str]]]:
    return lambda: iter(files.read(split))

  return Corpus(
    {split: reader(split) for split in files.splits}, files.digest()
  )


def _from_catalogue(config: TranslationConfig) -> Corpus:
  # Imported late: TFDS takes a second to import, and most runs do not need it.
  from tasks import catalog

  languages = config.source_language, config.target_language
  fields = "source_language", "target_language"
  builder = catalog.prepare(
    config.dataset,
    config.path,
    list(zip(fields, languages, strict=True)),
    instead="task.source=numbers or files",
  )
  info = builder.info
  # Raises if there is no training split.
  catalog.held_out_split(builder, config.dataset)
  names = {name: name for name in info.splits}
  if "validation" not in names:
    # Datasets such as opus have one split; its last hundredth is held out.
    names |= {"train": "train[:99%]", "validation": "train[99%:]"}
  for split in ("train", "validation"):
    if not info.splits[names[split]].num_examples:
      raise DataError(f"{info.full_name}: empty {split} split")
  content = [info.full_name, languages, sorted(names.items())]
  content += [(name, info.splits[name].num_bytes) for name in info.splits]

  def reader(split: str) -> Callable[[], Iterator[tuple[str, str]]]:
    def pairs() -> Iterator[tuple[str, str]]:
      for example in catalog.examples(builder, split):
        source, target = (example[language] for language in languages)
        yield _text(source), _text(target)

    return pairs

  digest = hashlib.sha256(repr(content).encode()).hexdigest()
  return Corpus({name: reader(split) for name, split in names.items()}, digest)


def _text(value: bytes | str) -> str:
  return value.decode() if isinstance(value, bytes) else value
