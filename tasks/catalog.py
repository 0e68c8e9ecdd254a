"""Datasets of the TFDS catalogue by name, such as ted_hrlr_translate.

`tfds.data_source` does the same, but it shows tracebacks of its builders, retries for
205 s without a network, and fails if two processes prepare a dataset at once. This
module imports TFDS (0.7 s), so import it late.
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


def prepare(
  name: str,
  folder: str,
  features: Sequence[tuple[str, str]],
  instead: str,
  field: str = "dataset",
) -> tfds.core.DatasetBuilder:
  """Finds a TFDS dataset, or downloads and prepares it.

  Args:
    name: name in the catalogue, such as 'ted_hrlr_translate/pt_to_en'.
    folder: a TFDS data folder with the prepared dataset; '' uses the cache.
    features: pairs of a config field and the feature that it needs.
    instead: an alternative that needs no network, for the message.
    field: the config field that has the name, for messages.

  Raises:
    DataError: the name is unknown, the dataset lacks a feature, there is no network,
      or TFDS fails; the message has one line.
  """
  builder = _find(name, folder or str(cache.folder("datasets")), field)
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
    builder = _find(name, str(scratch), field)
    downloads = cache.folder("datasets") / "downloads"
    try:
      with without_tensorflow(builder):
        builder.download_and_prepare(
          download_dir=str(downloads),
          # Google hosts prepared datasets as tfrecord, which needs TensorFlow.
          download_config=tfds.download.DownloadConfig(try_download_gcs=False),
        )
    except Exception as error:  # Builders raise many types of errors.
      raise DataError(
        f"task.{field}: cannot prepare {name}: {_line(error)}"
      ) from error
    return pathlib.Path(builder.data_dir)

  return tfds.builder_from_directory(cache.prepare(path, write))


def examples(
  builder: tfds.core.DatasetBuilder, split: str, **options: Any
) -> Iterator[dict[str, Any]]:
  """Yields the examples of a split in order.

  Reading a thousand examples at a time takes array_record 0.03 ms per example;
  reading them one by one takes 0.2 ms.

  Args:
    builder: builder of a prepared dataset.
    split: name of the split in TFDS.
    **options: options of `as_data_source`.
  """
  source: Any = builder.as_data_source(split=split, **options)
  for start in range(0, len(source), _CHUNK):
    stop = min(start + _CHUNK, len(source))
    yield from source.__getitems__(list(range(start, stop)))


def held_out_split(
  builder: tfds.core.DatasetBuilder, name: str, field: str = "dataset"
) -> str | None:
  """The name of the held-out split: validation, else test, else None.

  Raises:
    DataError: the dataset has no train split.
  """
  splits = builder.info.splits
  if "train" not in splits:
    raise DataError(
      f"task.{field}: {name} has no train split, only {', '.join(splits)}"
    )
  sizes = [(name, splits[name].num_bytes) for name in splits]
  files.note(builder.info.full_name, repr(sizes).encode())
  return next((x for x in ("validation", "test") if x in splits), None)


def _find(
  name: str, data_dir: str, field: str = "dataset"
) -> tfds.core.DatasetBuilder:
  # Only these imports register datasets such as wmt14_translate.
  import tensorflow_datasets.text
  import tensorflow_datasets.translate  # noqa: F401

  try:
    return tfds.builder(name, data_dir=data_dir, file_format="array_record")
  except tfds.core.DatasetNotFoundError:
    raise DataError(
      f"task.{field}: TFDS has no {name!r}; see "
      "https://www.tensorflow.org/datasets/catalog/overview"
    ) from None
  except Exception as error:  # As above; messages may have many lines.
    raise DataError(f"task.{field}: {name}: {_line(error)}") from error


def _check_features(
  name: str, available: Iterable[str], needed: Sequence[tuple[str, str]]
) -> None:
  available = sorted(available)
  for field, feature in needed:
    if feature not in available:
      raise DataError(
        f"task.{field}: {name} has {', '.join(available)}; expected one of them, "
        f"got {feature!r}"
      )


def _check_network(
  name: str, urls: Iterable[str], instead: str, timeout: float = 3
) -> None:
  """Raises DataError immediately where TFDS would retry for minutes.

  A response from any host or proxy is enough; TFDS reports later failures. Threads are
  needed because name resolution ignores timeouts.
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
