"""Small translation tasks."""

import functools

from tests.tasks import generated_cases

make = functools.partial(generated_cases.make, "translation", "encoder_decoder")


def files(folder, **fields):
  return {"source": "files", "path": str(folder), "vocab_size": 100, **fields}
