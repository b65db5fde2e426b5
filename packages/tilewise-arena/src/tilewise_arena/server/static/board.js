// Sorting and filtering of a standings table, and a gentle reload while an entry waits. Pages work without it.
"use strict";

const value = (row, column, kind) => {
  const cell = row.cells[column];
  if (kind === "number") return parseFloat(cell.dataset.value);
  return cell.textContent.trim().toLowerCase();
};

const sortBy = (table, header) => {
  const column = header.cellIndex;
  const kind = header.dataset.sort;
  const now = header.getAttribute("aria-sort");
  const first = kind === "number" ? "descending" : "ascending";
  const other = first === "descending" ? "ascending" : "descending";
  const direction = now === first ? other : first;
  const sign = direction === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a, column, kind), value(b, column, kind)];
    return (x < y ? -1 : x > y ? 1 : 0) * sign;
  });
  body.append(...rows);
  for (const cell of header.parentNode.cells) cell.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", direction);
};

const filter = (id) => {
  const text = document.querySelector(`[data-filter="${id}"]`).value.trim().toLowerCase();
  const status = document.querySelector(`[data-filter-status="${id}"]`).value;
  let shown = 0;
  for (const row of document.getElementById(id).tBodies[0].rows) {
    const words = `${row.cells[1].textContent} ${row.cells[2].textContent}`.toLowerCase();
    row.hidden = !words.includes(text) || (status !== "" && row.dataset.status !== status);
    if (!row.hidden) shown += 1;
  }
  document.querySelector(`[data-count="${id}"]`).textContent = `${shown} ${shown === 1 ? "entry" : "entries"}`;
  document.querySelector(`[data-none="${id}"]`).hidden = shown > 0;
};

for (const table of document.querySelectorAll("table[data-sortable]")) {
  for (const header of table.querySelectorAll("th[data-sort]")) {
    header.querySelector("button").addEventListener("click", () => sortBy(table, header));
  }
}
for (const field of document.querySelectorAll("[data-filter]")) {
  if (!document.getElementById(field.dataset.filter)) continue;
  field.addEventListener("input", () => filter(field.dataset.filter));
  field.form.addEventListener("submit", (event) => event.preventDefault());
}
for (const field of document.querySelectorAll("[data-filter-status]")) {
  if (!document.getElementById(field.dataset.filterStatus)) continue;
  field.addEventListener("change", () => filter(field.dataset.filterStatus));
}
if (document.querySelector("[data-refresh]")) setTimeout(() => location.reload(), 4000);
