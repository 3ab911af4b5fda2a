"""The script of the page of a report: plots, and a table to sort, filter and fold."""

SCRIPT = r"""
"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const rows = report.contractions.map((one, number) => ({...one, number}));
const $ = (id) => document.getElementById(id);

function bitsOf(dtype) {
  const found = [...dtype.matchAll(/[a-z](\d+)/g)].map((one) => Number(one[1]));
  return found.length ? Math.max(...found) : 0;
}
function kind(dtype) {
  const bits = bitsOf(dtype);
  if (!bits) return "none";
  if (bits <= 8) return "narrow";
  return /float(16|32|64)/.test(dtype) ? "float" : "mid";
}
function bytes(n) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 1000 && i < 4) { n /= 1000; i += 1; }
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
}
function percent(x) { return `${(100 * x).toFixed(1)} %`; }
function add(parent, name, attributes = {}, text = "") {
  const one = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  one.textContent = text;
  parent.append(one);
  return one;
}
function draw(parent, name, attributes, text = "") {
  const one = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  if (text) one.textContent = text;
  parent.append(one);
  return one;
}

// Bars with their names above, so that long names fit into narrow pages.
function bars(svg, parts, largest) {
  svg.setAttribute("viewBox", `0 0 340 ${parts.length * 38}`);
  parts.forEach(([name, value, label, style], i) => {
    draw(svg, "text", {x: 0, y: i * 38 + 13}, name);
    draw(svg, "text", {x: 340, y: i * 38 + 13, "text-anchor": "end"}, label);
    const width = largest ? Math.max(1, 340 * value / largest) : 1;
    draw(svg, "rect", {x: 0, y: i * 38 + 18, width, height: 12, rx: 2, class: style});
  });
}
const shares = Object.entries(report.shares);
bars($("shares"), shares.map(([x, n]) => [x, n, percent(n), kind(x)]), 1);

function columnsOf(svg, parts, least, ticks) {
  const height = 130, width = 340;
  svg.setAttribute("viewBox", `0 0 ${width} ${height + 22}`);
  const most = Math.max(least, ...parts.map(([value]) => value));
  for (const tick of ticks.filter((x) => x <= most)) {
    const y = 5 + height - height * tick / most;
    draw(svg, "line", {x1: 22, x2: width, y1: y, y2: y, class: "axis"});
    draw(svg, "text", {x: 0, y: y + 4}, String(tick));
  }
  const step = (width - 24) / Math.max(parts.length, 1);
  parts.forEach(([value, style, title], i) => {
    const tall = Math.max(2, height * value / most);
    const bar = draw(svg, "rect", {
      x: 24 + i * step, y: 5 + height - tall, height: tall,
      width: Math.max(1, step * .85), class: style,
    });
    draw(bar, "title", {}, title);
  });
}
columnsOf($("bits"), rows.map((one) => {
  const title = `${one.path} (${one.role}): ${one.runs_in}`;
  return [bitsOf(one.runs_in), kind(one.runs_in), title];
}), 8, [8, 16, 32]);

if (report.memory) {
  const parts = ["arguments", "outputs", "temporary", "peak"];
  const largest = Math.max(...parts.map((x) => report.memory[x]));
  bars($("memory"), parts.map((x) => {
    return [x, report.memory[x], bytes(report.memory[x]), "mid"];
  }), largest);
} else {
  $("of-memory").remove();
}

if (report.errors.length) {
  columnsOf($("errors"), report.errors.map((x) => {
    return [Math.max(0, x.snr), "narrow", `${x.name}: ${x.snr.toFixed(1)} dB`];
  }), 20, [10, 20, 30, 40, 60, 80]);
} else {
  $("of-errors").remove();
}

// Before rounding as an area, after it as bars, and the grid as lines below.
function drawHistogram(one) {
  const figure = add($("histograms"), "figure");
  const caption = `${one.name}: before (grey) and after rounding, in scales`;
  add(figure, "figcaption", {}, caption);
  const height = 120, width = 340, count = one.before.length;
  const label = `histogram of ${one.name}`;
  const svg = draw(figure, "svg", {
    viewBox: `0 0 ${width} ${height + 30}`, role: "img", "aria-label": label,
  });
  const most = Math.max(...one.before, ...one.after), step = width / count;
  const drawn = [["none", one.before, 1], ["narrow", one.after, .5]];
  drawn.forEach(([style, bins, part]) => {
    bins.forEach((n, i) => {
      const tall = height * Math.sqrt(n / most), w = step * part;
      draw(svg, "rect", {
        x: i * step + (step - w) / 2, y: height - tall, width: w, height: tall,
        class: style,
      });
    });
  });
  one.grid.forEach((value) => {
    const x = width * (value - one.low) / (one.high - one.low);
    draw(svg, "line", {x1: x, x2: x, y1: height, y2: height + 8, class: "grid"});
  });
  draw(svg, "text", {x: 0, y: height + 24}, one.low.toPrecision(3));
  draw(svg, "text", {x: width, y: height + 24, "text-anchor": "end"},
    one.high.toPrecision(3));
}
report.histograms.forEach(drawHistogram);

const columns = [
  ["path", (x) => x.path || "(no name scope)"],
  ["runs in", (x) => x.runs_in],
  ["share", (x) => x.share],
  ["asked", (x) => x.asked],
  ["role", (x) => x.role],
  ["op", (x) => x.equation || x.op],
  ["lhs", (x) => x.lhs],
  ["rhs", (x) => x.rhs],
  ["notes", (x) => x.notes.join("; ")],
];
let order = null, direction = 1;
const closed = new Set();

function module(one) {
  const steps = one.path.split("/");
  return steps.length > 1 ? steps.slice(0, -1).join("/") : "(outermost)";
}
function shown() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = rows.filter((one) => {
    const text = columns.map(([, of]) => of(one)).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  if ($("float").checked) found = found.filter((x) => kind(x.runs_in) === "float");
  if (order !== null) {
    const of = columns[order][1];
    found.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      return direction * (typeof x === "number" ? x - y : x.localeCompare(y));
    });
  }
  return found;
}
function addRow(body, one) {
  const row = add(body, "tr", {class: "contraction"});
  columns.forEach(([name, of]) => {
    if (name === "runs in") {
      add(add(row, "td"), "span", {class: `tag ${kind(of(one))}`}, of(one));
    } else if (name === "share") {
      const text = one.macs === null ? "?" : percent(of(one));
      add(row, "td", {class: "number"}, text);
    } else {
      add(row, "td", {class: name}, of(one));
    }
  });
}
function render() {
  const body = $("contractions").tBodies[0], found = shown();
  body.replaceChildren();
  if (!$("fold").checked) {
    found.forEach((one) => addRow(body, one));
    return;
  }
  const modules = new Map();
  found.forEach((one) => {
    const name = module(one);
    modules.set(name, [...(modules.get(name) || []), one]);
  });
  for (const [name, inside] of modules) {
    const row = add(body, "tr", {class: "module"});
    const cell = add(row, "td", {colspan: columns.length});
    const share = inside.reduce((sum, one) => sum + one.share, 0);
    const isOpen = !closed.has(name);
    const text = `${isOpen ? "▾" : "▸"} ${name}: ${inside.length}, ${percent(share)}`;
    const button = add(cell, "button", {"aria-expanded": isOpen}, text);
    button.onclick = () => {
      if (isOpen) closed.add(name); else closed.delete(name);
      render();
    };
    if (isOpen) inside.forEach((one) => addRow(body, one));
  }
}
const head = add($("contractions").tHead, "tr");
columns.forEach(([name], i) => {
  const cell = add(head, "th", {scope: "col"});
  add(cell, "button", {}, name).onclick = () => {
    direction = order === i ? -direction : (name === "share" ? -1 : 1);
    order = i;
    [...head.cells].forEach((x) => x.removeAttribute("aria-sort"));
    cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    render();
  };
});
for (const id of ["filter", "float", "fold"]) $(id).oninput = render;
render();

function list(title, lines) {
  if (!lines.length) return;
  add($("more"), "h2", {}, title);
  const items = add($("more"), "ul");
  lines.forEach((line) => add(items, "li", {}, line));
}
const place = (one) => one.path ? ` in ${one.path}` : "";
list("Copies in memory", report.copies.map((x) => {
  const of = x.argument ? ` of ${x.argument}` : "";
  return `${x.kind}: ${x.type}${of}, ${bytes(x.bytes)}${place(x)}`;
}));
list("Exchanges between devices", report.collectives.map((x) => {
  return `${x.op} of ${x.dtype}, ${bytes(x.bytes)}, ${x.times} times${place(x)}`;
}));
list("Products of no contraction", report.others.map((x) => {
  return `${x.opcode} of ${x.lhs.dtype}: ${x.op_name || "unnamed"}`;
}));
"""
