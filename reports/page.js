"use strict";

// A header sorts its table: upwards, then downwards. What has no value is last.
for (const table of document.querySelectorAll("table")) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    if (!header.dataset.sort) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    header.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const up = header.getAttribute("aria-sort") !== "ascending";
      for (const other of headers) {
        if (other.dataset.sort) other.setAttribute("aria-sort", "none");
      }
      header.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(a, b, column, header.dataset.sort, up ? 1 : -1));
      table.tBodies[0].append(...rows);
    });
  });
}

function compare(a, b, column, kind, sign) {
  const [x, y] = [a, b].map((row) => row.cells[column]?.dataset.value);
  if (x === undefined || y === undefined) {
    return (x === undefined) - (y === undefined);
  }
  if (kind === "number") return sign * (Number(x) - Number(y));
  return sign * x.localeCompare(y, "en", { numeric: true });
}

// A command that opens at the edge of a table is brought into it.
document.addEventListener(
  "toggle",
  (event) => {
    const code = event.target.open && event.target.querySelector("td code");
    if (code) code.scrollIntoView({ block: "nearest", inline: "nearest" });
  },
  true,
);

// The choice stays where the browser lets a file keep something.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
try {
  const kept = localStorage.getItem("theme");
  if (kept) root.dataset.theme = kept;
} catch {}
document.getElementById("theme").addEventListener("click", () => {
  const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("theme", root.dataset.theme);
  } catch {}
});
