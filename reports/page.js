"use strict";

// What the page shows: which mechanisms in tables and pictures, and of the tables which
// columns, in which order. It stands in the address, which opens the same view for
// whoever gets it.
const tables = [...document.querySelectorAll("table")];
const drawn = [...document.querySelectorAll("[data-mechanism]")];
const view = new URLSearchParams(location.search);
const KINDS = { mechanisms: "hide", columns: "hide-column" };

// A header sorts its table: upwards, then downwards. What has no value is last.
tables.forEach((table, number) => {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    if (!header.dataset.sort) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    header.setAttribute("aria-sort", "none");
    const sort = (order) => {
      for (const other of headers) {
        if (other.dataset.sort) other.setAttribute("aria-sort", "none");
      }
      header.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(a, b, column, header.dataset.sort, sign));
      table.tBodies[0].append(...rows);
    };
    const name = `sort-${number}`;
    const [by, order] = (view.get(name) ?? "").split(" ");
    if (by === header.dataset.name) {
      sort(order === "descending" ? order : "ascending");
    }
    button.addEventListener("click", () => {
      const up = header.getAttribute("aria-sort") !== "ascending";
      const order = up ? "ascending" : "descending";
      sort(order);
      view.set(name, `${header.dataset.name} ${order}`);
      keep();
    });
  });
});

function compare(a, b, column, kind, sign) {
  const [x, y] = [a, b].map((row) => row.cells[column]?.dataset.value);
  if (x === undefined || y === undefined) {
    return (x === undefined) - (y === undefined);
  }
  if (kind === "number") return sign * (Number(x) - Number(y));
  return sign * x.localeCompare(y, "en", { numeric: true });
}

// Rows are those of a mechanism, columns have one name in all tables.
const label = (row) => row.querySelector("th")?.dataset.value;
const names = { mechanisms: new Map(), columns: new Map() };
for (const table of tables) {
  for (const header of [...table.tHead.rows[0].cells].slice(1)) {
    names.columns.set(header.dataset.name, header.textContent.trim());
  }
  for (const row of table.tBodies[0].rows) {
    if (label(row)) names.mechanisms.set(label(row), label(row));
  }
}

const boxes = [];
for (const [kind, parameter] of Object.entries(KINDS)) {
  for (const [name, title] of names[kind]) {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = !view.getAll(parameter).includes(name);
    box.addEventListener("change", () => {
      const others = view.getAll(parameter).filter((one) => one !== name);
      view.delete(parameter);
      if (!box.checked) others.push(name);
      for (const one of others) view.append(parameter, one);
      show();
      keep();
    });
    const line = document.createElement("label");
    line.append(box, ` ${title}`);
    document.getElementById(kind).append(line);
    boxes.push(box);
  }
}
document.getElementById("everything").addEventListener("click", () => {
  for (const parameter of Object.values(KINDS)) view.delete(parameter);
  for (const box of boxes) box.checked = true;
  show();
  keep();
  document.querySelector("#view summary").focus();
});
document.getElementById("view").hidden = tables.length === 0;
show();

function show() {
  const hidden = {};
  for (const [kind, parameter] of Object.entries(KINDS)) {
    hidden[kind] = new Set(view.getAll(parameter).filter((n) => names[kind].has(n)));
  }
  for (const table of tables) {
    const headers = [...table.tHead.rows[0].cells];
    for (const header of headers) {
      header.hidden = hidden.columns.has(header.dataset.name);
    }
    for (const row of table.tBodies[0].rows) {
      row.hidden = hidden.mechanisms.has(label(row));
      let column = 0;
      for (const cell of row.cells) {
        // A reason takes the place of several columns, of which some may be hidden.
        const span = Number(cell.dataset.span ?? cell.colSpan);
        if (span > 1) cell.dataset.span = span;
        const under = headers.slice(column, column + span);
        const left = under.filter((header) => !header.hidden).length;
        cell.hidden = left === 0;
        cell.colSpan = left || 1;
        column += span;
      }
    }
  }
  for (const element of drawn) {
    // Elements of an SVG have the attribute alone, not the property.
    element.toggleAttribute("hidden", hidden.mechanisms.has(element.dataset.mechanism));
  }
  for (const panels of document.querySelectorAll(".panels")) {
    panels.parentElement.hidden = [...panels.children].every((panel) => panel.hidden);
  }
  const where = { mechanisms: "tables and pictures", columns: "tables" };
  const told = Object.entries(hidden)
    .filter(([, some]) => some.size)
    .map(([kind, some]) => `${some.size} of ${names[kind].size} ${kind} in ${where[kind]}`);
  document.getElementById("shown").textContent = told.length
    ? `Left out: ${told.join(", ")}. The address of this page opens the same view.`
    : "";
  document.getElementById("everything").hidden = told.length === 0;
}

function keep() {
  const text = view.toString();
  try {
    history.replaceState(null, "", (text ? `?${text}` : location.pathname) + location.hash);
  } catch {} // Some browsers keep the address of a local file as it is.
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
