/* Sort and filter tables, keep both in the address, show a mark's figures, write downloads. Written by hand: libraries
 * that do this are a hundred times as long, rebuild the page's rows, or do not serve the keyboard and the screen reader. */
"use strict";

const announced = document.getElementById("announced");

function key(row, column) {
  const text = row.cells[column].textContent.trim();
  const found = text.replaceAll(",", "").match(/^-?\d+(\.\d+)?(e[+-]?\d+)?(?=$|[\s%])/i);
  return { empty: text === "" || text === "-", number: found ? Number(found[0]) : null, text };
}

function compare(a, b, sign) {
  if (a.empty || b.empty) return a.empty - b.empty; // empty cells stay last in both directions
  if (a.number !== null && b.number !== null) return sign * (a.number - b.number);
  return sign * a.text.localeCompare(b.text, undefined, { numeric: true });
}

function sort(table, heading, ascending) {
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const keyed = [...table.tBodies[0].rows].map((row) => [key(row, heading.cellIndex), row]);
  keyed.sort(([a], [b]) => compare(a, b, ascending ? 1 : -1));
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

function filter(table, text) {
  const rows = [...table.tBodies[0].rows];
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const all = table.closest("section").querySelector(".every-column")?.checked ?? true;
  const isShown = (cell) => all || !cell.classList.contains("extra");
  for (const row of rows) {
    const text = [...row.cells].filter(isShown).map((cell) => cell.textContent).join(" ").toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
  announced.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
}

/* The address: #id&filter.TABLE=words&sort.TABLE=column, with - before a column that falls. */
function state() {
  const [id, ...rest] = location.hash.slice(1).split("&");
  return [decodeURIComponent(id), new URLSearchParams(rest.join("&"))];
}

function keep(name, value) {
  const [id, kept] = state();
  if (value) kept.set(name, value);
  else kept.delete(name);
  const text = kept.toString();
  history.replaceState(null, "", `#${encodeURIComponent(id)}${text ? `&${text}` : ""}`);
}

function restore() {
  const [id, kept] = state();
  for (const [name, value] of kept) {
    const table = document.getElementById(name.slice(name.indexOf(".") + 1));
    if (!table || !table.matches("table.sortable")) continue;
    if (name.startsWith("filter.")) {
      const input = document.querySelector(`input[data-filters="${CSS.escape(table.id)}"]`);
      if (!input) continue;
      input.value = value;
      filter(table, value);
    } else {
      const heading = [...table.tHead.rows[0].cells].find((each) => each.textContent === value.replace(/^-/, ""));
      if (heading) sort(table, heading, !value.startsWith("-"));
    }
    show(table);
  }
  const target = document.getElementById(id);
  document.querySelector(".target")?.classList.remove("target");
  if (target) {
    target.classList.add("target"); // :target is no element where the address has more than an id
    target.hidden = false;
    show(target);
    target.scrollIntoView();
  }
}

/* Open the details around an element. */
function show(element) {
  for (let each = element.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => {
      const ascending = heading.getAttribute("aria-sort") !== "ascending";
      sort(table, heading, ascending);
      keep(`sort.${table.id}`, `${ascending ? "" : "-"}${heading.textContent}`);
    });
    heading.replaceChildren(button);
  }
}

for (const input of document.querySelectorAll("input[data-filters]")) {
  const table = document.getElementById(input.dataset.filters);
  input.addEventListener("input", () => {
    filter(table, input.value);
    keep(`filter.${table.id}`, input.value.trim());
  });
}

/* Figures of a mark, under the pointer or the focus. In a plot the arrow keys go from mark to mark. */
const tip = document.getElementById("tip");

function showTip(mark) {
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip.replaceAll(" | ", "\n");
  const box = mark.getBoundingClientRect();
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const beside = box.right + width + 16 < innerWidth;
  const below = box.bottom + height + 8 < innerHeight ? box.bottom + 8 : box.top - height - 8;
  tip.style.top = `${Math.max(0, beside ? Math.min(box.top, innerHeight - height) : below)}px`;
  tip.style.left = `${beside ? box.right + 8 : Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
}

document.addEventListener("mouseover", (event) => showTip(event.target.closest("[data-tip]")));
document.addEventListener("focusin", (event) => showTip(event.target.closest("[data-tip]")));
document.addEventListener("focusout", () => {
  showTip(null);
  for (const each of document.querySelectorAll(".chosen")) each.classList.remove("chosen");
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") showTip(null);
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const marks = [...(event.target.matches(".scroll") ? event.target.querySelectorAll("svg [data-tip]") : [])];
  if (!step || !marks.length) return;
  event.preventDefault();
  const before = marks.findIndex((each) => each.classList.contains("chosen"));
  const next = marks[before < 0 ? 0 : (before + step + marks.length) % marks.length];
  if (before >= 0) marks[before].classList.remove("chosen");
  next.classList.add("chosen");
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
  showTip(next);
  announced.textContent = next.dataset.tip.replaceAll(" | ", ", ");
});

/* Downloads: the rows of the table beside the button, without cells that a spreadsheet would compute. */
for (const button of document.querySelectorAll("button.download")) {
  button.addEventListener("click", () => {
    const table = button.closest("details").querySelector("table");
    const quoted = (cell) => {
      const text = cell.textContent.trim();
      const inert = /^[=+\-@]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
      return /[",\n]/.test(inert) ? `"${inert.replaceAll('"', '""')}"` : inert;
    };
    const lines = [...table.rows].map((row) => [...row.cells].map(quoted).join(","));
    const link = document.createElement("a");
    link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(lines.join("\n") + "\n")}`;
    link.download = `${button.dataset.name}.csv`;
    link.click();
  });
}

for (const tool of document.querySelectorAll(".script")) tool.hidden = false;
if (matchMedia("(max-width: 70rem)").matches) document.querySelector(".contents details")?.removeAttribute("open");
/* A link within the page keeps the filters and sorts of the address. */
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  const kept = state()[1].toString();
  if (!link || !kept || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  location.hash = `${link.getAttribute("href")}&${kept}`;
});
addEventListener("hashchange", restore);
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});
if (location.hash) addEventListener("load", restore);
