"""The three sources of sentence pairs behind one interface: a `Corpus`."""

from collections.abc import Callable, Iterator, Mapping
import hashlib
import itertools
import pathlib
from typing import TYPE_CHECKING, NamedTuple

from tasks import cache, numbers
from tasks.base import DataError
from tasks.files import AlignedFiles, typed_path

if TYPE_CHECKING:
  from tasks.translation import TranslationConfig

_CHUNK = 1000

Chunk = tuple[list[str], list[str]]
"""Sources and targets."""


class Corpus(NamedTuple):
  """Prepared sentence pairs.

  Attributes:
    splits: 'train', 'validation' and any that begins with 'test' → what reads
      its pairs in the corpus's order.
    digest: names the content.
  """

  splits: Mapping[str, Callable[[], Iterator[tuple[str, str]]]]
  digest: str

  def read(self, split: str) -> Iterator[Chunk]:
    """Yields (sources, targets) by the thousand."""
    pairs = self.splits[split]()
    while chunk := list(itertools.islice(pairs, _CHUNK)):
      sources, targets = zip(*chunk, strict=True)
      yield list(sources), list(targets)

  def training_text(self) -> Iterator[str]:
    """Yields every training sentence, of both languages."""
    for sources, targets in self.read("train"):
      yield from sources
      yield from targets


def open_corpus(config: "TranslationConfig") -> Corpus:
  """Prepares what a config names, or finds it prepared.

  Raises:
    DataError: in one line, what is wrong with the data.
  """
  match config.source:
    case "numbers":
      return _numbers(config)
    case "files":
      return _files(typed_path(config.path), config)
    case _:
      return _named(config)


def _numbers(config: "TranslationConfig") -> Corpus:
  """Number words, kept as files: to spell 20,000 numbers takes seconds."""
  import num2words

  languages = config.source_language, config.target_language
  numbers.check_languages(*languages)
  sizes = config.max_number, config.num_train, config.num_validation
  # The rule that draws and spells them counts too: raise it when it changes.
  version = f"1 num2words {getattr(num2words, '__version__', '')}"
  digest = hashlib.sha256(repr((languages, sizes, version)).encode())
  name = f"number-words-{'-'.join(languages)}-{digest.hexdigest()[:16]}"

  def write(scratch: pathlib.Path) -> pathlib.Path:
    folder = scratch / name
    folder.mkdir()
    chosen = numbers.choose_numbers(*sizes)
    for split, pairs in numbers.number_pairs(*languages, chosen).items():
      for language, words in zip(
        languages, zip(*pairs, strict=True), strict=True
      ):
        (folder / f"{split}.{language}").write_text("\n".join(words), "utf-8")
    return folder

  folder = cache.prepare(cache.folder("datasets") / name, write)
  return _files(folder, config)._replace(digest=digest.hexdigest())


def _files(folder: pathlib.Path, config: "TranslationConfig") -> Corpus:
  files = AlignedFiles(folder, config.source_language, config.target_language)

  def reader(split: str) -> Callable[[], Iterator[tuple[str, str]]]:
    return lambda: iter(files.read(split))

  return Corpus(
    {split: reader(split) for split in files.splits}, files.digest()
  )


def _named(config: "TranslationConfig") -> Corpus:
  from tasks import catalog

  languages = config.source_language, config.target_language
  leaves = "source_language", "target_language"
  builder = catalog.prepare_named(
    config.dataset,
    config.path,
    list(zip(leaves, languages, strict=True)),
    instead="task.source=numbers or files",
  )
  info = builder.info
  # Raises where there is no training split.
  catalog.held_out_split(builder, config.dataset)
  names = {name: name for name in info.splits}
  if "validation" not in names:
    # Sets such as opus have one split; its last hundredth is held out.
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
