/* Sort and filter tables. Written by hand: libraries that do both are a hundred times as long, rebuild the page's rows,
 * or do not serve the keyboard and the screen reader. */
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

function sort(table, heading) {
  const ascending = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const keyed = [...table.tBodies[0].rows].map((row) => [key(row, heading.cellIndex), row]);
  keyed.sort(([a], [b]) => compare(a, b, ascending ? 1 : -1));
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sort(table, heading));
    heading.replaceChildren(button);
  }
}

/* Whether the cell's column is shown, even if its row is filtered out. */
function isShown(cell) {
  return !cell.classList.contains("extra") || cell.closest("section").querySelector(".every-column").checked;
}

for (const input of document.querySelectorAll("input[data-filters]")) {
  const rows = [...document.getElementById(input.dataset.filters).tBodies[0].rows];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = [...row.cells].filter(isShown).map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    announced.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  });
}

for (const tool of document.querySelectorAll(".script")) tool.hidden = false;
