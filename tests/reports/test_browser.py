"""The page in a real browser: it sorts, switches and fits, without an error."""

import csv
import html
import json
import re
import shutil
import subprocess

import pytest

from reports import page, plots, style, summary
from tests.reports import made_up

BROWSER = next(
  filter(
    None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
  ),
  None,
)
pytestmark = pytest.mark.skipif(
  BROWSER is None, reason="no chromium or google-chrome on PATH"
)

_FIRST = """<script>
window.faults = [];
addEventListener("error", (event) => faults.push(String(event.message)));
console.error = (...words) => faults.push(words.join(" "));
</script>"""

# Clicks every header that sorts, twice, and notes what the table looks like.
_LAST = """<script>
const report = { faults, tables: [], themes: [] };
const value = (row, i) => row.cells[i]?.dataset.value ?? null;
for (const table of document.querySelectorAll("table")) {
  const headers = [...table.tHead.rows[0].cells];
  const columns = headers.map((header) => header.dataset.name);
  const read = (i) => [...table.tBodies[0].rows].map((row) => value(row, i));
  const rows = [...table.tBodies[0].rows].map((row) =>
    Object.fromEntries(columns.map((name, i) => [name, value(row, i)])));
  const sorted = {};
  headers.forEach((header, i) => {
    const button = header.querySelector("button");
    if (!button) return;
    button.click();
    const up = [header.ariaSort, read(i)];
    button.click();
    sorted[header.dataset.name] = [header.dataset.sort, up, [header.ariaSort, read(i)]];
  });
  const marked = headers.filter((h) => h.ariaSort && h.ariaSort !== "none").length;
  report.tables.push({ columns, rows, sorted, marked });
}
const page = () => getComputedStyle(document.body).backgroundColor;
const line = () => getComputedStyle(document.querySelector("svg")).color;
for (let i = 0; i < 3; i++) {
  report.themes.push([page(), line()]);
  document.getElementById("theme").click();
}
document.querySelectorAll("details").forEach((one) => (one.open = true));
report.width = [innerWidth, document.documentElement.scrollWidth];
const told = document.createElement("pre");
told.id = "result";
told.textContent = JSON.stringify(report);
document.body.append(told);
</script>"""

# What is shown at the address that it was opened with, then after each of some clicks.
_VIEW = """<script>
const report = { faults, seen: [] };
function note() {
  const table = document.querySelector("table");
  const shown = (cells) => [...cells].filter((cell) => !cell.hidden);
  const rows = [...table.tBodies[0].rows].filter((row) => !row.hidden);
  const visible = (selector) => [...document.querySelectorAll(selector)]
    .filter((element) => element.getClientRects().length);
  report.seen.push({
    names: visible("svg text").map((text) => text.textContent),
    marks: visible("[data-mechanism]").map((mark) => mark.dataset.mechanism),
    shapes: visible("svg path, svg use").length,
    panels: visible(".panels > div").length,
    captions: visible("figcaption").length,
    width: [innerWidth, document.documentElement.scrollWidth],
    columns: shown(table.tHead.rows[0].cells).map((cell) => cell.dataset.name),
    rows: rows.map((row) => row.cells[0].dataset.value),
    widths: rows.map((row) =>
      shown(row.cells).reduce((sum, cell) => sum + cell.colSpan, 0)),
    told: document.getElementById("shown").textContent,
    address: location.search,
  });
}
const box = (kind, name) => [...document.querySelectorAll(`#${kind} label`)]
  .find((label) => label.textContent.trim() === name).querySelector("input");
note();
box("mechanisms", "dense").click();
box("columns", "loss").click();
note();
document.getElementById("everything").click();
note();
document.querySelector("table th[data-name=loss] button").click();
note();
const told = document.createElement("pre");
told.id = "result";
told.textContent = JSON.stringify(report);
document.body.append(told);
</script>"""

# A window has a minimal width, so the page stands in a frame as wide as a phone.
_PHONE = """<!doctype html><iframe src="harness.html{search}" style="width: 390px;
height: 800px; border: 0"></iframe><pre id="result"></pre><script>
addEventListener("load", () => {{
  const inside = document.querySelector("iframe").contentDocument;
  document.getElementById("result").textContent =
    inside.getElementById("result").textContent;
}});
</script>"""


def opened(folder, harness, script, search=""):
  """What a script at the end of the page notes, on a screen as wide as a phone's."""
  markup = (folder / "report.html").read_text("utf-8")
  markup = markup.replace("<head>", f"<head>{_FIRST}", 1)
  markup = markup.replace("</body>", f"{script}</body>")
  (harness / "harness.html").write_text(markup, "utf-8")
  (harness / "phone.html").write_text(_PHONE.format(search=search), "utf-8")
  command = [
    BROWSER,
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--allow-file-access-from-files",
    f"--user-data-dir={harness / 'profile'}",
    "--dump-dom",
    (harness / "phone.html").as_uri(),
  ]
  out = subprocess.run(
    command, capture_output=True, text=True, timeout=120, check=True
  ).stdout
  found = re.search(r'<pre id="result">(.*?)</pre>', out, re.S)
  return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def seen(folder, tmp_path_factory):
  """What the page looks like, and what the buttons of its tables do."""
  return opened(folder, tmp_path_factory.mktemp("browser"), _LAST)


@pytest.fixture(scope="module")
def views(folder, tmp_path_factory):
  """What is shown at an address, and after clicks."""
  search = "?hide=performer&hide-column=seeds&sort-0=attention+descending"
  found = opened(folder, tmp_path_factory.mktemp("browser"), _VIEW, search)
  assert found["faults"] == []
  return found["seen"]


def numbers(values):
  return [None if value is None else float(value) for value in values]


def test_nothing_fails(seen):
  assert seen["faults"] == []


def test_it_fits_a_phone(seen):
  width, content = seen["width"]
  assert width == 390
  assert content <= width


def test_columns_sort_both_ways_and_what_is_missing_is_last(seen):
  assert len(seen["tables"]) == 4
  num_missing = 0
  for table in seen["tables"]:
    assert table["marked"] == 1
    for kind, (up, rising), (down, falling) in table["sorted"].values():
      assert (up, down) == ("ascending", "descending")
      if kind == "number":
        rising, falling = numbers(rising), numbers(falling)
      there = [value for value in rising if value is not None]
      missing = [None] * (len(rising) - len(there))
      num_missing += len(missing)
      assert rising == sorted(there) + missing
      assert falling == sorted(there, reverse=True) + missing
  assert num_missing > 5


def test_the_numbers_are_those_of_results_csv(seen, folder):
  with (folder / "results.csv").open(newline="") as file:
    expected = list(csv.DictReader(file))
  *_, runs = seen["tables"]
  shown = [name for name in runs["columns"] if name != "command"]
  assert {"exact_match", "loss", "step_seconds"} <= set(shown)
  assert len(runs["rows"]) == len(expected)
  for row, of_file in zip(runs["rows"], expected, strict=True):
    for name in shown:
      told, text = row[name] or "", of_file[name]
      if name == "status" and of_file["reason"]:
        text += f": {of_file['reason']}"
      is_number = runs["sorted"][name][0] == "number" and text
      assert (float(told) == float(text)) if is_number else told == text


def test_a_summary_is_the_mean_of_the_chosen_runs(seen):
  quality = seen["tables"][0]
  dense = next(row for row in quality["rows"] if row["attention"] == "dense")
  assert float(dense["exact_match"]) == pytest.approx(0.96)
  assert float(dense["optimizer.learning_rate"]) == 0.003


def test_the_button_switches_between_dark_and_light(seen):
  first, second, third = seen["themes"]
  assert first == third
  assert first[0] != second[0]
  assert first[1] != second[1]


def test_the_address_says_what_is_shown_and_in_which_order(views):
  first = views[0]
  assert first["rows"] == ["linear", "dense"]
  assert "seeds" not in first["columns"]
  assert "exact_match" in first["columns"]
  assert first["told"].startswith(
    "Left out: 1 of 4 mechanisms in tables and pictures, 1 of "
  )
  assert first["told"].endswith(
    " columns in tables. The address of this page opens the same view."
  )


def test_boxes_hide_and_the_address_follows(views):
  first, chosen, everything, by_loss = views
  assert chosen["rows"] == ["linear"]
  assert set(first["columns"]) - set(chosen["columns"]) == {"loss"}
  assert chosen["address"] == (
    "?sort-0=attention+descending&hide=performer&hide=dense"
    "&hide-column=seeds&hide-column=loss"
  )
  assert len(everything["rows"]) == 3
  assert {"seeds", "loss"} <= set(everything["columns"])
  assert everything["told"] == ""
  assert everything["address"] == "?sort-0=attention+descending"
  assert by_loss["address"] == "?sort-0=loss+ascending"


def test_a_reason_takes_the_place_of_the_columns_that_are_shown(views):
  for view in views:
    assert set(view["widths"]) == {len(view["columns"])}


def test_pictures_lose_a_mechanism_and_get_it_back(views):
  first, chosen, everything, _ = views
  assert {"dense", "linear"} <= set(first["names"])
  assert set(first["marks"]) == {"dense", "linear"}
  assert set(chosen["marks"]) == {"linear"}
  assert "dense" not in chosen["names"]
  assert chosen["names"].count("linear") == first["names"].count("linear")
  # The maps of dense are panels, all else of it is within one.
  assert chosen["panels"] == first["panels"] - 1
  assert chosen["shapes"] < first["shapes"]
  for name in ("names", "marks", "shapes", "panels", "captions"):
    assert everything[name] == first[name]


def test_an_address_hides_in_pictures_as_well(folder, tmp_path):
  found = opened(folder, tmp_path, _VIEW, "?hide=linear&hide=dense")
  assert found["faults"] == []
  first, *_, last = found["seen"]
  assert first["marks"] == []
  assert not {"dense", "linear"} & set(first["names"])
  # Without its panels, the figure of the maps has nothing to say.
  assert first["captions"] == last["captions"] - 1
  for seen in found["seen"]:
    width, content = seen["width"]
    assert content <= width == 390


def test_a_mechanism_is_hidden_by_its_whole_label(tmp_path):
  label = "my_package.my.module:decay"
  found = [
    record | {"attention": label} if record["attention"] == "linear" else record
    for record in made_up.across()
  ]
  styles = style.styles(record["attention"] for record in found)
  drawn = plots.of_task(
    "recall", summary.summarize(found)["recall"], styles, {}
  )
  capacity = next(one for one in drawn if one.stem == "capacity-recall")
  markup = page.page(found, {}, {"recall": [capacity]}, [], styles)
  (tmp_path / "report.html").write_text(markup, "utf-8")
  address = "?hide=my_package.my.module%3Adecay"
  first, chosen, everything, _ = opened(tmp_path, tmp_path, _VIEW, address)[
    "seen"
  ]
  # Six rows are one mechanism, of which a picture shows the end of the name.
  assert set(first["marks"]) == {"dense"}
  assert "module:decay" not in first["names"]
  assert chosen["marks"] == []
  assert set(everything["marks"]) == {"dense", label}
  assert everything["names"].count("module:decay") == 2
