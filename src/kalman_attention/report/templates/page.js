"use strict";

// Tables: a click or a key on a heading sorts by it. Numbers start with the largest, words with
// the first, and missing values stay at the end either way.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(table, heads, head, column));
  });
}

function sort(table, heads, head, column) {
  const numeric = head.classList.contains("number");
  const before = head.getAttribute("aria-sort");
  const first = numeric ? "descending" : "ascending";
  const second = numeric ? "ascending" : "descending";
  const order = before === first ? second : first;
  heads.forEach((each) => each.setAttribute("aria-sort", each === head ? order : "none"));
  const sign = order === "ascending" ? 1 : -1;
  const key = (row) => row.cells[column].dataset.key;
  const compare = (a, b) => (numeric ? a - b : a.localeCompare(b, "en", { numeric: true }));
  const rows = [...table.tBodies[0].rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a === "" || b === "") return (a === "") - (b === "");
    return sign * compare(a, b);
  });
  table.tBodies[0].append(...rows);
}

// Charts: the values nearest to the pointer, or to the position of the arrow keys.
for (const chart of document.querySelectorAll(".chart")) {
  for (const plot of chart.querySelectorAll(".plot")) watch(plot);
  for (const item of chart.querySelectorAll(".legend li")) {
    const chosen = (stroke) =>
      "name" in item.dataset
        ? stroke.dataset.name === item.dataset.name
        : stroke.dataset.variant === item.dataset.variant;
    item.addEventListener("pointerenter", () => choose(chart, chosen));
    item.addEventListener("pointerleave", () => choose(chart, null));
  }
}

function choose(chart, chosen) {
  chart.classList.toggle("choosing", chosen !== null);
  for (const stroke of chart.querySelectorAll(".plot .stroke")) {
    stroke.classList.toggle("chosen", chosen !== null && chosen(stroke));
  }
}

function watch(plot) {
  let strokes = null;
  let at = -1;
  const read = () => (strokes ??= [...plot.querySelectorAll(".stroke")].map(points));
  const leave = () => {
    at = -1;
    plot.querySelectorAll(".tip, .cursor").forEach((part) => part.remove());
  };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const left = (100 * (event.clientX - box.left)) / box.width;
    const top = (100 * (event.clientY - box.top)) / box.height;
    at = left;
    tell(plot, read(), left, top);
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const places = [...new Set(read().flatMap((stroke) => stroke.points.map((p) => p.left)))];
    places.sort((a, b) => a - b);
    const next =
      event.key === "ArrowRight"
        ? places.find((place) => place > at + 1e-6)
        : places.findLast((place) => place < at - 1e-6);
    if (next === undefined) return;
    at = next;
    tell(plot, read(), next, null);
  });
}

// Positions come from the drawn path, values from the data next to it.
function points(stroke) {
  const values = JSON.parse(stroke.dataset.points);
  const path = stroke.querySelector("path").getAttribute("d");
  const places = path.split(/[ML]/).filter(Boolean);
  return {
    stroke,
    points: places.map((place, i) => {
      const [left, top] = place.split(/[ h]/).map(Number);
      return { left, top, x: values[i][0], y: values[i][1] };
    }),
  };
}

const MOST = 14;
const shown = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

function tell(plot, strokes, left, top) {
  const near = strokes
    .map(({ stroke, points }) => {
      const point = points.reduce((a, b) =>
        Math.abs(b.left - left) < Math.abs(a.left - left) ? b : a,
      );
      return { stroke, point, away: Math.abs(point.left - left) };
    })
    .sort((a, b) => a.away - b.away);
  if (!near.length) return;
  const place = near[0].point.left;
  const rows = near.filter(({ point }) => Math.abs(point.left - place) < 1.5);
  const height = ({ point }) => Math.abs(point.top - (top ?? 0));
  const nearest = top === null ? null : rows.reduce((a, b) => (height(b) < height(a) ? b : a));
  rows.sort((a, b) => b.point.y - a.point.y);
  draw(plot, place, rows, nearest);
}

function draw(plot, place, rows, nearest) {
  plot.querySelectorAll(".tip, .cursor").forEach((part) => part.remove());
  const cursor = make("div", "cursor");
  cursor.style.left = `${place}%`;
  const tip = make("div", "tip");
  tip.setAttribute("role", "status");
  const label = plot.parentElement.querySelector(".foot").textContent;
  tip.append(make("b", "", `${shown(rows[0].point.x)} ${label}`));
  for (const row of rows.slice(0, MOST)) {
    const { name, variant } = row.stroke.dataset;
    const line = make("div", row === nearest ? "nearest" : "");
    const words = make("span", "", variant ? `${name}, ${variant}` : name);
    const dot = make("i");
    dot.style.background = getComputedStyle(row.stroke).stroke;
    words.prepend(dot);
    line.append(words, make("span", "", shown(row.point.y)));
    tip.append(line);
  }
  if (rows.length > MOST) tip.append(make("div", "", `and ${rows.length - MOST} more`));
  plot.append(cursor, tip);
  const box = plot.getBoundingClientRect();
  const wanted = (place / 100) * box.width;
  const room = document.documentElement.clientWidth - 8 - box.left;
  const right = wanted + 12 + tip.offsetWidth <= room;
  const beside = right ? wanted + 12 : wanted - 12 - tip.offsetWidth;
  tip.style.left = `${Math.max(8 - box.left, Math.min(beside, room - tip.offsetWidth))}px`;
}

function make(tag, kind = "", text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  return element;
}
