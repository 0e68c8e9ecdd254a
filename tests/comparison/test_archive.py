"""A comparison in one file: the same records, the same report, the same page."""

import collections
import json
import lzma
import pathlib
import re

import numpy as np
import pytest

from comparison import archive, records, status
from docs import results
from settings.errors import ConfigError

_ROOT = pathlib.Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "results.md"
_APPENDIX = _ROOT / "docs" / "results_appendix.md"
_SMALL = _ROOT / "docs" / "results" / "language_no_positions.jsonl.xz"


@pytest.fixture
def workdir(tmp_path):
  """A copy for each test, some of which change it."""
  folder = tmp_path / "comparison"
  archive.unpack(_SMALL, folder)
  return folder


def test_the_same_bytes_again_and_maps_stay_in_the_folder(workdir, tmp_path):
  path = tmp_path / "again.jsonl.xz"
  assert archive.pack(workdir, path) == 3
  assert path.read_bytes() == _SMALL.read_bytes()
  identity = next(iter(records.by_identity(workdir)))
  measured = records.read_one(workdir, identity)["measured"] | {"map": {"x": 1}}
  records.update(workdir, identity, measured=measured)
  archive.pack(workdir, path)
  assert path.read_bytes() == _SMALL.read_bytes()
  assert "map" in records.read_one(workdir, identity)["measured"]


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"no archive",
    _SMALL.read_bytes()[:-100],
    "[" * 1_200 + "]" * 1_200,
    '{"comparison": ' * 1_200 + "1" + "}" * 1_200,
    '{"comparison": 3}',
    '{"comparison": {}, "plan": [3]}',
    '{"comparison": {}, "scaling": 3}',
    '{"comparison": {}}\n{"run": "a"}',
    '{"comparison": {}}\n{"run": 3, "task": "copy", "status": "done"}',
    '{"comparison": {}}\n{"run": "a", "task": "copy"}',
    "",
    "[3]",
  ],
  ids=lambda content: str(content)[:20],
)
def test_what_is_no_comparison_is_refused_in_a_line(tmp_path, content):
  path, folder = tmp_path / "a.jsonl.xz", tmp_path / "out"
  is_text = isinstance(content, str)
  path.write_bytes(lzma.compress(content.encode()) if is_text else content)
  with pytest.raises(ConfigError, match=r"^--records: .*a.jsonl.xz: ") as info:
    archive.unpack(path, folder)
  assert "\n" not in str(info.value)
  assert not folder.exists()


@pytest.mark.parametrize(
  "name", ["../../out", "/tmp/out", "a/../../b", "..", ""]
)
def test_a_record_stays_in_its_folder(tmp_path, name):
  path, folder = tmp_path / "a.jsonl.xz", tmp_path / "in" / "comparison"
  record = {"run": name, "task": "copy", "status": "done"}
  lines = [{"comparison": {"num_steps": 3}}, record]
  text = "\n".join(map(json.dumps, lines))
  path.write_bytes(lzma.compress(text.encode()))
  archive.unpack(path, folder)
  written = [x for x in tmp_path.rglob("*") if x.is_file() and x != path]
  assert {x.parent for x in written} == {folder, folder / records.RECORDS}
  assert not pathlib.Path("/tmp/out.json").exists()


def test_what_ended_since_is_taken_and_all_else_stays(workdir, tmp_path):
  """Two packs of one comparison that goes on, into one folder."""
  identity, other = list(records.by_identity(workdir))[:2]
  plan = {"a run that waits": {"task": "text", "seed": 5}}
  records.store_plan(workdir, plan)
  records.write_references(workdir, {"text": {"ours": {"loss": 1.0}}})
  (workdir / records.SCALING).write_text('{"own": 1}\n')
  done = records.read_one(workdir, identity)
  records.update(workdir, identity, status=records.STOPPED, reason="stopped")
  records.update(workdir, other, reason="of Monday")
  archive.pack(workdir, tmp_path / "monday.jsonl.xz")
  archive.unpack(_SMALL, workdir)  # What had ended there, of other references.
  assert records.read_one(workdir, identity) == done
  assert records.read_one(workdir, other)["reason"] == "of Monday"
  assert records.read_references(workdir) == {"text": {"ours": {"loss": 1.0}}}
  archive.unpack(tmp_path / "monday.jsonl.xz", workdir)
  assert records.read_one(workdir, identity) == done
  archive.unpack(tmp_path / "monday.jsonl.xz", tmp_path / "new")
  assert records.planned_runs(tmp_path / "new") == plan
  assert status.missing(tmp_path / "new") == [
    "2 of 4 runs done; the results below may change."
  ]
  scaling = (tmp_path / "new" / records.SCALING).read_text()
  assert scaling == '{"own": 1}\n'


@pytest.mark.parametrize("name", [".", "folder", "nosuch/a.jsonl.xz"])
def test_a_file_that_cannot_be_written_is_named(workdir, tmp_path, name):
  (tmp_path / "folder").mkdir()
  path = pathlib.Path(name) if name == "." else tmp_path / name
  with pytest.raises(
    ConfigError, match=f"^--records: {re.escape(str(path))}: "
  ):
    archive.pack(workdir, path)
  assert not list(tmp_path.rglob("*.tmp"))


def test_a_table_of_the_page_is_that_of_the_records():
  text = _APPENDIX.read_text("utf-8")
  begin = text.index("<!-- lengths:")
  end = text.index("<!-- end -->", begin)
  table = text[begin : end + len("<!-- end -->")]
  assert results.regenerate(table, _APPENDIX.parent) == table, (
    f"{_APPENDIX.name}: run `python -m docs.results docs/{_APPENDIX.name}`"
  )


@pytest.mark.thorough
@pytest.mark.parametrize("page", [_PAGE, _APPENDIX], ids=["page", "appendix"])
def test_all_tables_of_a_page_are_those_of_the_records(page):
  text = page.read_text("utf-8")
  assert results.regenerate(text, page.parent) == text


def test_cells_by_other_code():
  """Counts, means and ranges of one table, straight from the lines of its file."""
  _, found = archive.read(_PAGE.parent / "results" / "parity.jsonl.xz")
  seeds = collections.defaultdict(list)
  for record in found.values():
    if record["status"] != records.DONE:
      continue
    counterpart = ", feed-forward as in dense" * (record["width"] == "dense")
    name = f"`{record['attention']}`{counterpart}"
    seeds[name].append(record["final"]["accuracy"])
  begin = "<!-- lengths: results/parity.jsonl.xz -->\n"
  table = _APPENDIX.read_text("utf-8").split(begin)[1].split("\n\n")[0]
  _, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
  assert {name for name, *_ in rows} - {"<!-- end -->"} == seeds.keys()
  for name, *_, mean, solved, spread in rows[: len(seeds)]:
    accuracies = [100 * x for x in seeds[name]]
    assert mean == f"{np.mean(accuracies):.1f} %", name
    assert solved == f"{sum(x >= 95 for x in accuracies)} of {len(accuracies)}"
    ends = []
    for x in (min(accuracies), max(accuracies)):
      # What whole numbers would round to the other side of 95 has a decimal.
      is_across = (round(x) >= 95) != (x >= 95)
      ends.append(f"{x:.1f}" if is_across else f"{x:.0f}")
    assert spread == f"{' to '.join(dict.fromkeys(ends))} %"


def test_the_board_by_other_code():
  """Whole sequences count where every prefix has an answer, and the best rate does."""
  text = _PAGE.read_text("utf-8")
  rows = text[text.index("<!-- board:") :].split("<!-- end -->")[0].splitlines()
  cells = [
    [cell.strip() for cell in row.strip("| ").split("|")] for row in rows
  ]
  header, board = cells[1], {row[0]: row for row in cells[3:]}

  def count(stem, name, split, metric):
    _, found = archive.read(_PAGE.parent / "results" / f"{stem}.jsonl.xz")
    values = [
      line[metric]
      for record in found.values()
      if record["attention"] == name
      and record["width"] != "dense"
      and not record.get("choosing")
      for line in record["history"]
      if line["split"] == split
    ]
    return f"{sum(x >= 0.95 for x in values)} of {len(values)}"

  for name in ("path", "rwkv7", "delta2", "delta_product", "comba"):
    for split, column in (
      ("test", "parity at 32"),
      ("length_256", "parity at 256"),
    ):
      expected = count("parity", name, split, "sequence_accuracy")
      assert board[f"`{name}`"][header.index(column)] == expected, (name, split)
  assert count("capacity", "gated_linear", "test", "accuracy") == "0 of 8"
  assert (
    count("recall_discarded", "gated_linear", "test", "accuracy") == "2 of 8"
  )
  place = header.index("recall")
  assert board["`gated_linear`"][place] == "2 of 8 <sup>h</sup>"
  assert board["`linear`"][place] == "5 of 8 <sup>e</sup>"


def test_a_picture_of_the_page(tmp_path):
  (tmp_path / "results").mkdir()
  (tmp_path / "results" / _SMALL.name).write_bytes(_SMALL.read_bytes())
  picture = f"results/{_SMALL.name.removesuffix('.jsonl.xz')}.seeds-text.png"
  (tmp_path / "page.md").write_text(f"![x]({picture})")
  results.draw(tmp_path / "page.md")
  assert 1_000 < (tmp_path / picture).stat().st_size < 200_000
