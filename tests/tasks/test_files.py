"""Aligned files: names, encodings and every fault in one line."""

import gzip

import pytest

import tasks
from tasks import files
from tasks.files import AlignedFiles, read_lines, typed_path

LEAVES = "(task.path, task.source_language, task.target_language)"
NO_VALIDATION = (
  "DIR: no val.en[.gz] or valid.en[.gz] or validation.en[.gz] and val"
)


def write(folder, **files):
  """train_en="a\nb\n" writes train.en; bytes as they are; 'gz' packs."""
  folder.mkdir(exist_ok=True)
  for name, content in files.items():
    name = ".".join(name.rsplit("_", 1))
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
  return folder


@pytest.fixture
def folder(tmp_path):
  return write(
    tmp_path / "data",
    train_en="a\nb\nc\n",
    train_de="x\ny\nz\n",
    val_en="a\n",
    val_de="x\n",
  )


def read(folder):
  files = AlignedFiles(folder, "en", "de")
  return {split: files.read(split) for split in files.splits}


def fault(folder):
  with pytest.raises(tasks.DataError) as error:
    read(folder)
  assert "\n" not in str(error.value)
  assert str(folder) in str(error.value)
  return str(error.value).replace(str(folder), "DIR")


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_splits(folder, name):
  write(folder, test_2016_en="d\n", test_2016_de="w\n", notes_en="n\n")
  for language in ("en", "de"):
    (folder / f"val.{language}").rename(folder / f"{name}.{language}")
  assert read(folder) == {
    "train": [("a", "x"), ("b", "y"), ("c", "z")],
    "validation": [("a", "x")],
    "test_2016": [("d", "w")],
  }


def test_gzip_and_plain_can_be_mixed(folder):
  packed = gzip.compress((folder / "train.de").read_bytes())
  (folder / "train.de").unlink()
  (folder / "train.de.gz").write_bytes(packed)
  assert read(folder)["train"][2] == ("c", "z")


def test_test_set_without_translations_is_left_out(folder, caplog):
  write(folder, test_en="d\n")
  assert set(read(folder)) == {"train", "validation"}
  assert "test.en has no matching test.de" in caplog.text


def test_lines_end_with_newlines_only(tmp_path):
  file = tmp_path / "a.txt"
  file.write_bytes("a\u2028b\x0b\x85c\r\n\r\nd\u00a0".encode())
  assert read_lines(file) == ["a\u2028b\x0b\x85c", "", "d\u00a0"]


def test_the_digest_follows_the_content(folder):
  before = AlignedFiles(folder, "en", "de").digest()
  assert AlignedFiles(folder, "en", "de").digest() == before
  write(folder, val_de="X\n")
  assert AlignedFiles(folder, "en", "de").digest() != before


@pytest.mark.parametrize(
  ("gone", "written", "message"),
  [
    (["train.de"], {}, f"DIR: no train.de[.gz] {LEAVES}"),
    (
      ["train.de", "train.en"],
      {},
      f"DIR: no train.en[.gz] and train.de[.gz] {LEAVES}",
    ),
    (["val.de"], {}, f"DIR: no val.de[.gz] {LEAVES}"),
    (["val.de", "val.en"], {}, NO_VALIDATION),
    ([], {"train_de": "x\ny\n"}, "DIR/train.en has 3 lines"),
    ([], {"val_en": "", "val_de": ""}, "DIR/val.en: empty validation split"),
    ([], {"train_de": b"x\ny\n\xfc\n"}, "DIR/train.de, line 3: byte 0xfc"),
    *(
      (["train.de"], {"train.de_gz": x}, "DIR/train.de.gz: damaged gzip file (")
      for x in (gzip.compress(b"x\ny\nz\n")[:-9], b"plain text")
    ),
  ],
)
def test_faults_are_one_line(folder, gone, written, message, monkeypatch):
  # The third line is in the second block.
  monkeypatch.setattr(files, "_BLOCK", 3)
  for name in gone:
    (folder / name).unlink()
  write(folder, **written)
  assert fault(folder).startswith(message)


def test_a_missing_folder_and_the_home_of_nobody(tmp_path):
  assert fault(tmp_path / "no") == "DIR: no such folder (task.path)"
  with pytest.raises(
    tasks.DataError, match=r": a folder, expected a file \(ta"
  ):
    files.existing_file(str(tmp_path))
  with pytest.raises(tasks.DataError, match=r"^~nosuchuser/a: .*\(task\.path"):
    typed_path("~nosuchuser/a")
