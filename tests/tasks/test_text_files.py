"""A text in many kinds of files is the text of one plain file."""

import csv
import gzip
import json

import chex
import numpy as np
import pyarrow
from pyarrow import parquet
import pytest

from settings import cache
import tasks
from tasks import files, tokenizer
from tasks.text import source, stored
from tests.tasks.text_cases import TEXT, make

ROWS = TEXT.removesuffix("\n").split("\n")
KINDS = ("decoder", "encoder", "encoder_decoder")


def write(folder, name, rows=ROWS, column="text"):
  """A file of rows, as its name says, which other programs' libraries write."""
  path = folder / name
  table = {"number": range(len(rows)), column: rows}
  columns = [*table.values()]
  name = name.lower()
  if ".jsonl" in name:
    lines = (
      dict(zip(table, row, strict=True)) for row in zip(*columns, strict=True)
    )
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if ".gz" in name else content)
  elif ".csv" in name:
    with path.open("w", newline="", encoding="utf-8") as file:
      csv.writer(file).writerows([[*table], *zip(*columns, strict=True)])
  elif ".parquet" in name:
    table = {k: [*values] for k, values in table.items()}
    parquet.write_table(pyarrow.table(table), path, row_group_size=7)
  else:
    path.write_text("\n".join(rows), encoding="utf-8")
  return path


def same(found, wanted):
  """The same batches, trained and held out."""
  both = (
    [task.train_batch(3), *task.eval_batches("validation")]
    for task in (found, wanted)
  )
  for one, other in zip(*both, strict=True):
    chex.assert_trees_all_equal(one, other, strict=True)
  assert found.baselines == wanted.baselines
  sums = {"loss": (3.0, 2.0)}
  assert found.summarize(sums) == wanted.summarize(sums)


@pytest.fixture
def plain(tmp_path):
  (tmp_path / "plain").write_text(TEXT, encoding="utf-8")
  return tmp_path / "plain"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  ("name", "column"),
  [
    *[("a.jsonl", "text"), ("a.jsonl.gz", "body"), ("a.JSONL", "text")],
    *[("a.Jsonl.GZ", "body"), ("a.csv", "body"), ("a.CSV", "text")],
    *[("a.parquet", "text"), ("a.Parquet", "body")],
  ],
)
def test_a_column_is_the_text_of_its_rows(plain, tmp_path, kind, name, column):
  path = write(tmp_path, name, column=column)
  leaf = {} if column == "text" else {"column": column}
  same(make(path, kind, **leaf), make(plain, kind))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_line_ends_within_a_row_are_those_of_a_plain_file(tmp_path, name):
  rows = ['one\r\ntwo, "three"', "\r\n", "", "four\n", "x" * 140_000, "é"]
  text = "".join(row + "\n" for row in rows).replace("\r\n", "\n")
  path = write(tmp_path, name, rows=rows)
  assert "".join(source.text_blocks([path], "")) == text


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("a.jsonl", '\n{"text": "one"}\n \n\n{"text": "two"}'),
    *(
      ("a.csv", f"{before}number,text\n1,one\n\n2,two\n")
      for before in ("\n", "\n\r\n\n", "\ufeff", "\ufeff\n")
    ),
  ],
)
def test_empty_lines_are_no_rows_and_may_be_before_a_header(
  tmp_path, name, content
):
  (tmp_path / name).write_bytes(content.encode())
  assert "".join(source.text_blocks([tmp_path / name], "")) == "one\ntwo\n"


def test_files_come_in_the_order_of_a_list_or_of_their_names(plain, tmp_path):
  thirds = ROWS[:50], ROWS[50:90], ROWS[90:]
  names = "1.txt", "2.jsonl", "3.parquet"
  parts = [write(tmp_path, *x) for x in zip(names, thirds, strict=True)]
  with pytest.raises(tasks.DataError, match=r"1\.txt is plain text,"):
    make(",".join(map(str, parts)), "decoder", column="text")
  wanted = make(plain, "decoder")
  same(make(", ".join(map(str, parts)), "decoder"), wanted)
  with files.record_digests() as notes:
    same(make(tmp_path / "[123].*", "decoder"), wanted)
  assert [*files.name_digests(notes)] == [
    f"{tmp_path.name}/{name}" for name in names
  ]
  # What has a comma in its name is one file.
  one = tmp_path / "a,b.txt"
  one.write_bytes(plain.read_bytes())
  same(make(one, "decoder"), wanted)


def test_a_file_that_two_patterns_name_is_read_once(plain, tmp_path):
  """Twice, the second time would hold out what the first one trains."""
  (tmp_path / "1.txt").write_bytes(plain.read_bytes())
  (tmp_path / "link.txt").symlink_to(tmp_path / "1.txt")
  (tmp_path / "2.txt").write_text("xyz" * 99)
  names = "2.txt", "*.txt", "sub/../1.txt", "[1l]*.txt"
  (tmp_path / "sub").mkdir()
  found = source.find(",".join(str(tmp_path / name) for name in names))
  assert [file.name for file in found] == ["2.txt", "1.txt"]
  same(
    make(f"{plain}, {plain}, {tmp_path}/plai?", "decoder"),
    make(plain, "decoder"),
  )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  "made",
  [{}, {"vocabulary": "bytes"}, {"vocabulary": "subwords", "vocab_size": 380}],
)
def test_a_text_that_does_not_fit_has_the_same_ids(
  plain, tmp_path, monkeypatch, kind, made
):
  monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
  monkeypatch.setattr(tokenizer, "_PART", 500)
  wanted = make(plain, kind, **made)
  monkeypatch.setattr(stored, "_IN_MEMORY", 100)
  monkeypatch.setattr(files, "_BLOCK", 200)
  found = make(plain, kind, **made)
  assert isinstance(found._train, np.memmap)
  same(found, wanted)
  assert found.decode(found._train) == wanted.decode(wanted._train)
  # Once for a text and a vocabulary.
  blocks = []
  monkeypatch.setattr(source, "text_blocks", lambda *x: blocks.append(x) or ())
  same(make(plain, kind, **made), wanted)
  assert not blocks


def test_ids_in_the_cache_are_those_of_their_settings(tmp_path, monkeypatch):
  """One after another in one cache, each as if it were alone in memory."""
  rows = zip(ROWS, reversed(ROWS), strict=True)
  lines = (json.dumps({"text": a, "body": b}) + "\n" for a, b in rows)
  text = "".join(lines)
  names = ("a.jsonl", "a.txt")  # The same bytes.
  for name in names:
    (tmp_path / name).write_text(text)
  vocabularies = []
  for number, words in enumerate((TEXT, TEXT[::-1])):
    trained = tokenizer.train_tokenizer(words, 300)
    file = tmp_path / f"{number}/tokenizer.json"
    file.parent.mkdir()
    file.write_bytes(trained.content())
    vocabularies.append(str(file))
  subwords = {"vocabulary": "subwords"}
  cases = [
    *(("a.jsonl", "decoder", x) for x in ({}, {"column": "body"})),
    *(
      ("a.jsonl", "decoder", {"vocabulary": "bytes"}),
      ("a.txt", "decoder", {}),
    ),
    *(("a.jsonl", kind, {}) for kind in ("encoder", "encoder_decoder")),
    *(
      ("a.jsonl", "decoder", {**subwords, "vocab_size": x}) for x in (300, 310)
    ),
    *(("a.jsonl", "decoder", {"tokenizer": x}) for x in vocabularies),
  ]

  def ids(name, kind, options):
    task = make(tmp_path / name, kind, **options)
    return task.decode(task._train), [*task._train], task.target_vocab_size

  wanted = [ids(*case) for case in cases]
  assert len({str(x) for x in wanted}) == len(cases)
  monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
  monkeypatch.setattr(stored, "_IN_MEMORY", 100)
  for case, expected in zip(cases, wanted, strict=True):
    assert ids(*case) == expected, case


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  ("name", "dtype"), [("a.npy", "int64"), ("a.bin", "u2")]
)
def test_ids_that_are_there_are_those_of_a_tokenizer(
  plain, tmp_path, kind, name, dtype
):
  wanted = make(plain, kind, vocabulary="bytes")
  wanted.save(tmp_path / "run")
  ids = np.concatenate([wanted._train, wanted.tokens("validation")]).astype(
    dtype
  )
  save = np.save if ".npy" in name else lambda path, x: x.tofile(path)
  save(tmp_path / name, ids)
  # Where 90 % of the ids end is not where 90 % of the characters do.
  cut = int(0.9 * len(ids))
  found = make(tmp_path / name, kind, tokenizer=str(tmp_path / "run"))
  assert (len(found._train), found._train.dtype) == (cut, dtype)
  batch = found.train_batch(0)
  assert batch["targets"].dtype == np.int32
  assert found.decode(found._train) == wanted.decode(ids[:cut])
  assert min(found.baselines.values()) > 0
  parts = [tmp_path / f"{i}-{name}" for i in range(2)]
  for path, part in zip(parts, (ids[:70], ids[70:]), strict=True):
    save(path, part)
  joined = make(f"{parts[0]},{parts[1]}", kind, tokenizer=str(tmp_path / "run"))
  same(joined, found)


@pytest.mark.parametrize(
  ("name", "dtype", "size"),
  [
    *(("a.npy", x, 120) for x in ("i1", "u1", ">u2", "i4", ">u4", "i8", "u8")),
    ("a.NPY", "u4", 70_000),
    ("a.bin", "<u2", 65_536),
    ("a.BIN", "<u4", 65_537),
    ("a.bin", "<u4", 128_256),
  ],
)
def test_ids_are_as_wide_as_they_were_written(tmp_path, name, dtype, size):
  ids = (np.arange(400) * 7919 % size).astype(dtype)
  ids[5] = size - 1
  save = np.save if ".n" in name.lower() else lambda file, x: x.tofile(file)
  with (tmp_path / name).open("wb") as file:
    save(file, ids)
  leaves = {"vocabulary": "ids", "vocab_size": size}
  task = make(tmp_path / name, "decoder", **leaves)
  np.testing.assert_array_equal(task._train, ids[:360])
  np.testing.assert_array_equal(task.tokens("validation"), ids[360:])
  # Beside ids of another type, which no type but a float has all values of.
  np.save(tmp_path / "b.npy", np.arange(100, dtype=np.uint64))
  joined = make(f"{tmp_path / name},{tmp_path / 'b.npy'}", "decoder", **leaves)
  assert np.issubdtype(joined._train.dtype, np.integer)
  np.testing.assert_array_equal(
    [*joined._train, *joined.tokens("validation")], [*ids, *range(100)]
  )


@pytest.mark.parametrize(
  ("dtype", "size", "options", "message"),
  [
    ("<u4", 5000, {}, "of 16 bits.*: every second one is 0.* of 32 bits"),
    ("<i8", 5000, {}, "of 16 bits.*: every second one is 0.* of 64 bits; .*64"),
    ("<u8", 70_000, {}, "of 32 bits.*: every second one is 0.* of 64 bits"),
    ("<u2", 5000, {"vocab_size": 70_000}, "0 to 69999, .* of uint32"),
    ("<u2", 5000, {"vocab_size": 4999}, "0 to 4998, .* got 0 to 4999"),
    ("<u2", 9, {"tail": 1}, "of 16 bits.*: .* multiple .*; save them as .npy"),
    ("<u4", 70_000, {"tail": 2}, "of 32 bits.*: .* multiple .*; save them"),
  ],
)
def test_ids_of_another_width_are_refused(
  tmp_path, dtype, size, options, message
):
  ids = (np.arange(400) * 7919 % size).astype(dtype)
  ids[7] = size - 1
  content = ids.tobytes() + b"\0" * options.get("tail", 0)
  (tmp_path / "a.bin").write_bytes(content)
  leaves = {"vocabulary": "ids", "vocab_size": options.get("vocab_size", size)}
  with pytest.raises(tasks.DataError, match=message) as info:
    make(tmp_path / "a.bin", "decoder", **leaves)
  assert "\n" not in str(info.value)


def test_the_same_bytes_are_other_ids_where_the_vocabulary_is_larger(tmp_path):
  parts = [tmp_path / f"{i}.bin" for i in range(2)]
  for path in parts:
    (np.arange(400) % 2 + np.arange(400) // 2).astype("<u2").tofile(path)
  path = ",".join(map(str, parts))
  narrow, wide = (
    make(path, "decoder", vocabulary="ids", vocab_size=x) for x in (300, 2**25)
  )
  assert (len(narrow._train), len(wide._train)) == (720, 360)
  np.testing.assert_array_equal(
    wide._train[:200], [i + (i + 1) * 2**16 for i in range(200)]
  )


@pytest.mark.parametrize("sizes", [(60, 70_000), (70_000, 60)])
def test_joined_ids_do_not_depend_on_an_earlier_vocabulary(tmp_path, sizes):
  """The cache has ids of 16 bits for one size, and of 32 for the other."""
  ids = np.arange(300) * 7 % 60
  for i, name in enumerate("ab"):
    np.save(tmp_path / f"{name}.npy", ids[150 * i : 150 * (i + 1)])
  for size in sizes:
    task = make(
      str(tmp_path / "*.npy"), "decoder", vocabulary="ids", vocab_size=size
    )
    parts = task._train, task.tokens("validation")
    np.testing.assert_array_equal(np.concatenate(parts), ids)


def test_ids_without_a_tokenizer_stand_for_themselves(tmp_path):
  ids = np.arange(400, dtype=np.uint16) % 30
  np.save(tmp_path / "a.npy", ids)
  task = make(tmp_path / "a.npy", "decoder", vocabulary="ids", vocab_size=30)
  batch = task.train_batch(0)
  np.testing.assert_array_equal(batch["targets"], (batch["inputs"] + 1) % 30)
  assert task.target_vocab_size == 33
  assert task.decode(task.encode("7 29 0")) == "7 29 0"
  assert task.decode([7, task.eos_id, 8]) == "7"
  assert "bits_per_character" not in task.summarize({"loss": (1.0, 1.0)})
  with pytest.raises(ValueError, match="ids from 0 to 29, separated"):
    task.encode("30")
  task.save(tmp_path / "run")
  again = make(
    "-", "decoder", vocabulary="ids", workdir=tmp_path / "run", restore=True
  )
  assert again.labels([3, again.eos_id]) == ["3", "<eos>"]


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("a.jsonl", {"column": "b"}, "line 1: expected task.column among"),
    ("a.csv", {"column": "b"}, "a.csv: expected task.column among number"),
    ("a.parquet", {"column": "b"}, "a.parquet: expected task.column among"),
    ("a.parquet", {"column": "number"}, "row 1: expected text in 'number'"),
    ("a.jsonl", {"vocabulary": "ids"}, "a.jsonl has text; expected"),
    ("a.npy", {}, "a.npy has ids, .* or 'ids' with task.vocab_size, got 'char"),
    ("a.npy", {"vocabulary": "ids", "vocab_size": 9}, "ids from 0 to 8,"),
    ("a.npy", {"vocabulary": "ids", "column": "b"}, "task.column: .* got 'b'"),
    ("f.npy", {"vocabulary": "ids"}, "integers along one axis, got float64"),
    ("odd.bin", {"vocabulary": "ids"}, "odd.bin: .*multiple"),
    ("bad.jsonl", {}, "bad.jsonl, line 2: not JSON"),
    ("null.jsonl", {}, "null.jsonl, line 2: expected task.column among no na"),
    ("none.jsonl", {}, "none.jsonl, row 2: expected text in 'text' .* None"),
    ("list.jsonl", {}, "list.jsonl, line 1: expected task.column among no na"),
    ("deep.jsonl", {}, "deep.jsonl, line 2: not JSON .*recursion"),
    ("wide.csv", {}, "wide.csv: expected task.column among number, xxxx"),
    ("half.jsonl", {}, r"half.jsonl, row 1: .*surrogates"),
    ("bad.parquet", {}, "bad.parquet: .*Parquet"),
    ("bad.csv", {}, "bad.csv: .*(columns|UTF8|UTF-8)"),
    ("*.nothing", {}, "no file matches"),
    ("ids.bin.gz", {}, "ids.bin.gz: ids are memory-mapped; unpack the file"),
    (
      "a.npy,a.csv",
      {},
      "expected only files of text or only files of ids, got both",
    ),
  ],
)
def test_a_fault_is_one_line(tmp_path, name, options, message):
  for one in ("a.jsonl", "a.csv", "a.parquet"):
    write(tmp_path, one)
  np.save(tmp_path / "a.npy", np.arange(5, 10))
  np.save(tmp_path / "f.npy", np.ones(9))
  (tmp_path / "odd.bin").write_bytes(b"abc")
  # Small ids are valid UTF-8.
  packed = gzip.compress(np.arange(99, dtype="<u2").tobytes())
  (tmp_path / "ids.bin.gz").write_bytes(packed)
  (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"')
  (tmp_path / "null.jsonl").write_text('{"text": "a"}\nnull\n')
  (tmp_path / "none.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
  (tmp_path / "list.jsonl").write_text('["text"]\n')
  deep = '{"a":' * 200_000
  (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n' + deep + "\n")
  (tmp_path / "wide.csv").write_text(f"number,{'x' * 140_000}\n1,2\n")
  (tmp_path / "half.jsonl").write_text('{"text": "a \\ud800"}\n')
  (tmp_path / "bad.parquet").write_bytes(b"PAR1 and more PAR0")
  (tmp_path / "bad.csv").write_bytes(b"text,b\n1,2\n1,2,3\n")
  path = ",".join(str(tmp_path / one) for one in name.split(","))
  with pytest.raises(tasks.DataError, match=message) as info:
    make(path, "decoder", **options)
  assert "\n" not in str(info.value)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
  path = write(tmp_path, "a.parquet")
  monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
  with pytest.raises(tasks.DataError, match=r"a\.parquet: .*pip install"):
    make(path, "decoder")
