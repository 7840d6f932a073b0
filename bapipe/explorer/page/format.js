// Numbers with units, and elements whose texts are never read as HTML: names come from files of others.
"use strict";
const explorer = {};

explorer.number = (value) => {
  if (value === 0 || !isFinite(value)) return String(value);
  const digits = Math.min(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))), 3);
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};
explorer.ms = (ns) => `${explorer.number(ns / 1e6)} ms`;
explorer.mib = (bytes) => `${explorer.number(bytes / 2 ** 20)} MiB`;
explorer.percent = (share) => `${(100 * share).toFixed(1)}%`;

explorer.make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
};

explorer.table = (title, heads, rows) => {
  const { make } = explorer;
  const cell = (tag, content, numeric) =>
    content && content.cell ? make(tag, { className: `${numeric ? "n " : ""}${content.className || ""}`, title: content.title || "" }, ...[content.cell].flat())
      : make(tag, { className: numeric ? "n" : "" }, content);
  const numeric = heads.map((head) => head.endsWith(">"));
  const head = make("tr", {}, ...heads.map((text, i) => {
    const th = cell("th", text.replace(/>$/, ""), numeric[i]);
    th.scope = "col";
    return th;
  }));
  const body = rows.map(({ cells, now }) => make("tr", { className: now ? "now" : "" }, ...cells.map((c, i) => cell("td", c, numeric[i]))));
  return [make("h2", {}, title), make("div", { className: "table" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)))];
};

explorer.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

explorer.tip = (event, text) => {
  const tip = document.getElementById("tooltip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8))}px`;
};

// A canvas with as many pixels as the screen has; returns its context, scaled to CSS pixels.
explorer.context = (canvas, width, height) => {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
};

explorer.crop = (context, text, width) => {
  if (context.measureText(text).width <= width) return text;
  for (let kept = Math.min(text.length, Math.floor(width / 4)); kept > 2; kept--) {
    const half = Math.floor(kept / 2);
    const short = `${text.slice(0, half)}…${text.slice(text.length - (kept - half))}`;
    if (context.measureText(short).width <= width) return short;
  }
  return "";
};
