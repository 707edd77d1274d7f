"use strict";
const $ = (id) => document.getElementById(id);
const number = (value, digits = 0) => value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
const percent = (share) => share == null ? "–" : (100 * share).toFixed(1) + " %";
const ms = (seconds) => seconds == null ? "–" : seconds >= 10 ? number(seconds, 1) + " s" : number(seconds * 1000, seconds < 0.01 ? 2 : 0) + " ms";
const bytes = (count) => {
  let unit = 0;
  while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
  return number(count, unit ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
};
const age = (s) => s < 90 ? number(s) + " s" : s < 5400 ? number(s / 60) + " min" : number(s / 3600, 1) + " h";

function node(name, attributes = {}, ...children) {
  const isShape = ["svg", "rect", "path", "text", "line", "title", "circle"].includes(name);
  const made = isShape ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// lines: [{ color, points: [[x, y or null]] }]. Draws into the svg `id`; `label` says in words what is seen.
function chart(id, lines, { top, format, label, from = "", to = "" }) {
  const width = $(id).clientWidth || 480, height = 170, left = 58, bottom = 24;
  const xs = lines.flatMap((line) => line.points.map(([x]) => x));
  const low = Math.min(...xs), span = Math.max(...xs) - low || 1;
  const place = ([x, y]) => [left + (x - low) / span * (width - left - 6), 8 + (1 - y / top) * (height - bottom - 8)];
  const shapes = [0, 0.5, 1].flatMap((share) => {
    const y = place([low, share * top])[1];
    return [node("line", { x1: left, x2: width, y1: y, y2: y, stroke: "var(--line)" }),
      node("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, format(share * top))];
  });
  for (const { color, points, dash = "" } of lines) {
    let path = "", isDrawing = false;
    for (const point of points) {
      if (point[1] == null) { isDrawing = false; continue; }
      path += (isDrawing ? "L" : "M") + place(point).map((v) => v.toFixed(1)).join(" ") + (isDrawing ? "" : "h0.1");
      isDrawing = true;
    }
    // A point that has no neighbours would not be seen as a line.
    if (points.length < 50) shapes.push(...points.filter((point) => point[1] != null).map(place).map(
      ([cx, cy]) => node("circle", { cx, cy, r: 3, fill: color })));
    shapes.push(node("path", { d: path, fill: "none", stroke: color, "stroke-width": 2.5, "stroke-linecap": "round",
      "stroke-dasharray": dash }));
  }
  shapes.push(node("text", { x: left, y: height - 4 }, from), node("text", { x: width, y: height - 4, "text-anchor": "end" }, to));
  $(id).setAttribute("viewBox", `0 0 ${width} ${height}`);
  $(id).setAttribute("aria-label", label);
  $(id).replaceChildren(...shapes);
}

// rows: [[name, count]]
function bars(id, rows, empty) {
  const most = Math.max(...rows.map((row) => row[1]), 1);
  $(id).replaceChildren(...rows.map(([name, count]) => node("tr", {}, node("th", { scope: "row" }, name), node("td", {}, number(count)),
    node("td", { style: "width:50%" }, node("div", { class: "bar", "aria-hidden": "true" }, node("span", { style: `width:${100 * count / most}%` }))))));
  if (!rows.length) $(id).replaceChildren(node("tr", {}, node("td", {}, empty)));
}
