"""Datasets of the TFDS catalogue by name, such as ted_hrlr_translate.

`tfds.data_source` does the same with tracebacks of its builders, retries for 205 s
where there is no network, and fails where two processes prepare a set at once. This
module imports TFDS (0.7 s), so it is imported where it is needed.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import os
import pathlib
import queue
import socket
import threading
from typing import Any
import urllib.parse

import tensorflow_datasets as tfds

from settings import cache
from settings.errors import DataError
from tasks import files
from tasks.tensorflow_free import without_tensorflow

_CHUNK = 1000


def prepare_named(
  name: str,
  folder: str,
  features: Sequence[tuple[str, str]],
  instead: str,
  leaf: str = "dataset",
) -> tfds.core.DatasetBuilder:
  """Finds a TFDS dataset, or downloads and prepares it.

  Args:
    name: as in the catalogue: 'ted_hrlr_translate/pt_to_en'.
    folder: a TFDS data folder that has it prepared; '' takes the cache.
    features: what the dataset must have, each with the config field that asks for it.
    instead: what works without a network, for the message.
    leaf: the config field that has the name, for messages.

  Raises:
    DataError: an unknown name, a set without these features, no network, or
      what TFDS reports, in one line.
  """
  builder = _find(name, folder or str(cache.folder("datasets")), leaf)
  _check_features(name, builder.info.features or {}, features)
  if folder:
    if not builder.is_prepared():
      raise DataError(
        f"{folder}: no prepared {builder.info.full_name} in array_record "
        "format; leave task.path empty to download it"
      )
    return builder
  key = "tfds-" + builder.info.full_name.replace("/", "-")
  path = cache.folder("datasets") / key
  if not path.exists():
    _check_network(name, builder.url_infos or (), instead)

  def write(scratch: pathlib.Path) -> pathlib.Path:
    fresh = _find(name, str(scratch), leaf)
    downloads = cache.folder("datasets") / "downloads"
    try:
      with without_tensorflow(fresh):
        fresh.download_and_prepare(
          download_dir=str(downloads),
          # What Google hosts ready-made is tfrecord, which needs TensorFlow.
          download_config=tfds.download.DownloadConfig(try_download_gcs=False),
        )
    except Exception as error:  # Builders of 30 authors raise what they like.
      raise DataError(
        f"task.{leaf}: cannot prepare {name}: {_line(error)}"
      ) from error
    return pathlib.Path(fresh.data_dir)

  return tfds.builder_from_directory(cache.prepare(path, write))


def examples(
  builder: tfds.core.DatasetBuilder, split: str, **options: Any
) -> Iterator[dict[str, Any]]:
  """The examples of a split in order.

  One by one, array_record takes 0.2 ms an example; a thousand together, 0.03 ms.

  Args:
    builder: of a set that is prepared.
    split: as TFDS names it.
    **options: of `as_data_source`.
  """
  source: Any = builder.as_data_source(split=split, **options)
  for start in range(0, len(source), _CHUNK):
    stop = min(start + _CHUNK, len(source))
    yield from source.__getitems__(list(range(start, stop)))


def held_out_split(
  builder: tfds.core.DatasetBuilder, name: str, leaf: str = "dataset"
) -> str | None:
  """The name of the held-out split: validation, else test, else None.

  Raises:
    DataError: there is no train split.
  """
  splits = builder.info.splits
  if "train" not in splits:
    raise DataError(
      f"task.{leaf}: {name} has no train split, only {', '.join(splits)}"
    )
  sizes = [(name, splits[name].num_bytes) for name in splits]
  files.note(builder.info.full_name, repr(sizes).encode())
  return next((x for x in ("validation", "test") if x in splits), None)


def _find(
  name: str, data_dir: str, leaf: str = "dataset"
) -> tfds.core.DatasetBuilder:
  # Sets such as wmt14_translate are registered by these imports only.
  import tensorflow_datasets.text
  import tensorflow_datasets.translate  # noqa: F401

  try:
    return tfds.builder(name, data_dir=data_dir, file_format="array_record")
  except tfds.core.DatasetNotFoundError:
    raise DataError(
      f"task.{leaf}: TFDS has no {name!r}; see "
      "https://www.tensorflow.org/datasets/catalog/overview"
    ) from None
  except Exception as error:  # As above: a message may fill the screen.
    raise DataError(f"task.{leaf}: {name}: {_line(error)}") from error


def _check_features(
  name: str, known: Iterable[str], needed: Sequence[tuple[str, str]]
) -> None:
  known = sorted(known)
  for field, feature in needed:
    if feature not in known:
      raise DataError(
        f"task.{field}: {name} has {', '.join(known)}, not {feature!r}"
      )


def _check_network(
  name: str, urls: Iterable[str], instead: str, timeout: float = 3
) -> None:
  """Raises DataError at once if TFDS would retry for minutes.

  Any answer of any host counts, a proxy's too; what TFDS then makes of it is
  reported by TFDS. Name look-up obeys no timeout, hence the threads.
  """
  proxy = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY")
  parsed = [urllib.parse.urlsplit(u) for u in ([proxy] if proxy else urls)]
  default_ports = {"http": 80, "ftp": 21}
  hosts = {
    (u.hostname, u.port or default_ports.get(u.scheme, 443))
    for u in parsed
    if u.hostname
  }
  if not hosts:
    return
  answers = queue.SimpleQueue()

  def attempt(host: tuple[str, int]) -> None:
    try:
      socket.create_connection(host, timeout).close()
      answers.put(True)
    except OSError:
      answers.put(False)

  for host in hosts:
    threading.Thread(target=attempt, args=(host,), daemon=True).start()
  with contextlib.suppress(queue.Empty):
    if any(answers.get(timeout=timeout) for _ in hosts):
      return
  raise DataError(
    f"{name} is not prepared in {cache.folder('datasets')} and its hosts "
    f"({', '.join(sorted(h for h, _ in hosts))}) do not answer: this machine "
    f"seems to be offline; use {instead}"
  )


def _line(error: BaseException) -> str:
  lines = str(error).strip().splitlines()
  return lines[0] if lines else type(error).__name__
