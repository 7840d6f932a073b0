// Numbers with units, and elements whose texts are never read as HTML: names come from files of others.
"use strict";
const explorer = {};

// Numbers are rounded as in bapipe/units.py, so that the page has the digits that commands print.
explorer.fixed = (value, digits) => value.toFixed(digits).replace(/^-?\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));
explorer.digitsOf = (value) => Math.min(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))), 3);
explorer.number = (value) => {
  if (value === 0 || !isFinite(value)) return String(value);
  return explorer.fixed(value, explorer.digitsOf(value));
};
explorer.ms = (ns) => `${explorer.number(ns / 1e6)} ms`;

// A time that something takes at least: rounded down.
explorer.msDown = (ns) => {
  if (!ns) return "0 ms";
  const value = ns / 1e6, digits = explorer.digitsOf(value), near = Number(value.toFixed(digits));
  return `${explorer.fixed(near > value ? near - 10 ** -digits : near, digits)} ms`;
};
explorer.mib = (bytes) => (bytes >= 2 ** 40 ? `${explorer.number(bytes / 2 ** 30)} GiB` : `${explorer.number(bytes / 2 ** 20)} MiB`);
explorer.percent = (share, digits = 1) => `${explorer.fixed(100 * share, digits)}%`;

// Of what something is at most, such as a gap: rounded up, but for what rounding may have added to it.
explorer.percentUp = (share) => explorer.percent(Math.max(Math.ceil((share - 2 ** -52 * (1 + share)) * 1e4), share > 0 ? 1 : 0) / 1e4, 2);

explorer.counted = (value, what) => `${value} ${what}${value === 1 ? "" : "s"}`;
explorer.signed = (text, value) => (value > 0 ? `+${text}` : text);
explorer.percentChange = (share) => {
  const text = explorer.percent(share);
  return parseFloat(text) ? explorer.signed(text, share) : "+0.0%";
};

explorer.make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : explorer.plain(child))));
  return element;
};
// What nobody could see in a name, or what would change the direction of writing, as an escape.
explorer.plain = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (char) => (char === "\n" ? char : `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`));

// A row is { cells, now }; a cell is a text, or { cell, className, title }. Heads that end with > are of numbers.
explorer.tableCell = (tag, content, numeric) =>
  content && content.cell !== undefined ? explorer.make(tag, { className: `${numeric ? "n " : ""}${content.className || ""}`, title: content.title || "" }, ...[content.cell].flat())
    : explorer.make(tag, { className: numeric ? "n" : "" }, content);

// A name in a table: where it is too long its middle is left out, as names often differ at their ends only.
explorer.END = 14;
explorer.name = (text) => {
  const letters = [...explorer.plain(text)], split = letters.length - explorer.END;
  return split < 12 ? letters.join("") : explorer.make("span", { className: "long" }, explorer.make("span", {}, letters.slice(0, split).join("")), explorer.make("span", {}, letters.slice(split).join("")));
};
explorer.nameCell = (text) => ({ cell: explorer.name(text), title: text });
explorer.tableRow = (heads, { cells, now }) => explorer.make("tr", { className: now ? "now" : "" }, ...cells.map((c, i) => explorer.tableCell("td", c, heads[i].endsWith(">"))));
explorer.table = (title, heads, rows) => {
  const { make } = explorer;
  const head = make("tr", {}, ...heads.map((text) => {
    const th = explorer.tableCell("th", text.replace(/>$/, ""), text.endsWith(">"));
    th.scope = "col";
    return th;
  }));
  const body = rows.map((row) => explorer.tableRow(heads, row));
  const table = make("table", {}, make("caption", { className: "hidden" }, title), make("thead", {}, head), make("tbody", {}, ...body));
  return [make("h2", {}, title), make("div", { className: "table", tabIndex: 0, role: "region", ariaLabel: title }, table)];
};

// Changes what is in `root`; the control that has the focus keeps it, and its table where it was scrolled to.
explorer.change = (root, action) => {
  const controls = () => [...root.querySelectorAll("button, input, select, summary, [tabindex]")], scrolled = () => root.querySelector(".table");
  const held = root.contains(document.activeElement) ? controls().indexOf(document.activeElement) : -1, before = scrolled(), top = before ? before.scrollTop : 0;
  action();
  if (scrolled() && scrolled() !== before) scrolled().scrollTop = top;
  const after = held >= 0 && controls()[held];
  if (after && after !== document.activeElement) after.focus({ preventScroll: true });
};
explorer.replace = (root, ...children) => explorer.change(root, () => root.replaceChildren(...children));

// Shows a table whose rows are { key, make }: `make` returns the row, and `key` is all that it depends on. If a table of as
// many rows is there already, only those with another key are made: making and laying out all of them takes long.
explorer.updateTable = (root, title, heads, rows) => {
  const keys = rows.map((row) => row.key), shown = root.rowKeys || [], body = root.querySelector("tbody"), isSame = body && shown.length === keys.length && root.heads === heads.join();
  explorer.change(root, () => {
    if (!isSame) root.replaceChildren(...explorer.table(title, heads, rows.map((row) => row.make())));
    else keys.forEach((key, i) => key !== shown[i] && body.rows[i].replaceWith(explorer.tableRow(heads, rows[i].make())));
  });
  Object.assign(root, { rowKeys: keys, heads: heads.join() });
};

explorer.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Phases that are equally bright are told apart by stripes, too.
explorer.STRIPES = { I: 1, W: -1, workspace: 1, sync: -1 };
explorer.patterns = new Map();
explorer.fill = (context, name) => {
  const colour = explorer.colour(name), direction = explorer.STRIPES[name];
  if (!direction) return colour;
  if (context.stripes) return context.stripes(name, colour, direction);
  const key = `${name} ${colour}`;
  if (!explorer.patterns.has(key)) {
    const tile = explorer.make("canvas", { width: 6, height: 6 }), on = tile.getContext("2d");
    on.fillStyle = colour;
    on.fillRect(0, 0, 6, 6);
    on.strokeStyle = explorer.colour("stripe");
    on.lineWidth = 1.2;
    for (const x of [-6, 0, 6]) {
      on.moveTo(x, direction > 0 ? 6 : 0);
      on.lineTo(x + 6, direction > 0 ? 0 : 6);
    }
    on.stroke();
    explorer.patterns.set(key, context.createPattern(tile, "repeat"));
  }
  return explorer.patterns.get(key);
};
explorer.fills = (context, names) => Object.fromEntries(names.map((name) => [name, explorer.fill(context, name)]));
explorer.key = (name, text) => explorer.make("span", { className: "key" }, explorer.make("i", { className: `swatch${explorer.STRIPES[name] ? ` stripes${explorer.STRIPES[name]}` : ""}`, style: `background-color: var(--${name})` }), text);

explorer.tip = (event, text) => {
  const tip = document.getElementById("tooltip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = explorer.plain(text.length > 2000 ? `${text.slice(0, 2000)}…` : text);
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8))}px`;
};

// The context to draw a canvas in; while its picture is saved, that of the file.
explorer.context = (canvas, width, height) => (canvas.saves ? canvas.saves(width, height) : explorer.scaled(canvas, width, height));

// A canvas with as many pixels as the screen has; returns its context, scaled to CSS pixels.
explorer.scaled = (canvas, width, height) => {
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

explorer.crop = (context, name, width) => {
  const text = explorer.plain(name.length > 400 ? `${name.slice(0, 250)}…${name.slice(-150)}` : name);
  if (context.measureText(text).width <= width) return text;
  for (let kept = Math.min(text.length, Math.floor(width / 4)); kept > 2; kept--) {
    const half = Math.floor(kept / 2);
    const short = `${text.slice(0, half)}…${text.slice(text.length - (kept - half))}`;
    if (context.measureText(short).width <= width) return short;
  }
  return "";
};
