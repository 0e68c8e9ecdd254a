"""A comparison in one file: the same records, the same report, the same page."""

import pathlib

import pytest

from comparison import archive, records, results
from settings.errors import ConfigError

_ROOT = pathlib.Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "results.md"
_SMALL = _ROOT / "docs" / "results" / "recall.jsonl.xz"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp("archive") / "comparison"
  archive.unpack(_SMALL, folder)
  return folder


def test_the_same_bytes_again(workdir, tmp_path):
  assert archive.pack(workdir, tmp_path / "again.jsonl.xz") == 48
  assert (tmp_path / "again.jsonl.xz").read_bytes() == _SMALL.read_bytes()


def test_own_records_stay(workdir):
  identity = next(iter(records.by_identity(workdir)))
  records.update(workdir, identity, reason="of this folder")
  archive.unpack(_SMALL, workdir)
  assert records.of(workdir, identity)["reason"] == "of this folder"


@pytest.mark.parametrize(
  "content", [b"", b"no archive", _SMALL.read_bytes()[:-100]]
)
def test_a_damaged_file_is_named(content, tmp_path):
  path = tmp_path / "bad.jsonl.xz"
  path.write_bytes(content)
  with pytest.raises(ConfigError, match=r"--records: .*bad\.jsonl\.xz"):
    archive.unpack(path, tmp_path / "new")
  assert not (tmp_path / "new").exists()


def test_tables_of_the_page_are_those_of_the_records():
  assert results.remade(_PAGE) == _PAGE.read_text("utf-8"), (
    "docs/results.md: run `python -m comparison.results docs/results.md`"
  )


def test_cells_by_other_code(tmp_path):
  """Counts and ranges of one table, straight from the lines of the file."""
  page = tmp_path / "page.md"
  page.write_text(f"<!-- solved: {_SMALL} -->\n<!-- end -->\n")
  _, found = archive.read(_SMALL)
  by_row = {}
  for record in found.values():
    convolved = record["across"]["model.short_convolution"]
    by_row.setdefault((record["attention"], convolved), []).append(
      record["final"]["accuracy"]
    )
  rows = {}
  for line in results.remade(page).splitlines()[3:-1]:
    name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    rows[name.strip("`")] = cells
  for (name, convolved), accuracies in by_row.items():
    _, solved, spread = rows[name][3 * convolved : 3 * convolved + 3]
    assert solved == f"{sum(x >= 0.95 for x in accuracies)} of 3"
    ends = [f"{100 * f(accuracies):.0f}" for f in (min, max)]
    assert spread == f"{' to '.join(dict.fromkeys(ends))} %"


def test_a_picture_of_the_page(tmp_path):
  (tmp_path / "results").mkdir()
  (tmp_path / "results" / "recall.jsonl.xz").write_bytes(_SMALL.read_bytes())
  (tmp_path / "page.md").write_text("![x](results/recall.seeds-recall.png)")
  results.draw(tmp_path / "page.md")
  size = (tmp_path / "results" / "recall.seeds-recall.png").stat().st_size
  assert 5_000 < size < 200_000
