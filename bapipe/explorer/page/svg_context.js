// Pictures as files: what is drawn on a canvas, with its legend, written down as SVG, or its pixels as PNG.
"use strict";
// The part of CanvasRenderingContext2D that the pictures use.
explorer.SvgContext = class {
  constructor(width, height) {
    this.root = this.element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "system-ui, sans-serif", "font-size": 11 });
    this.root.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    this.group = this.root;
    this.groups = [];
    this.path = [];
    Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", globalAlpha: 1, lineWidth: 1, textAlign: "left", dash: [] });
    this.measure = document.createElement("canvas").getContext("2d");
    this.measure.font = "11px system-ui, sans-serif";
  }
  element(tag, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, typeof value === "number" ? Math.round(value * 100) / 100 : value);
    return made;
  }
  add(tag, attributes) {
    const made = this.element(tag, this.globalAlpha === 1 ? attributes : { ...attributes, opacity: this.globalAlpha });
    this.group.append(made);
    return made;
  }
  stripes(name, colour, direction) {
    if (!this.root.querySelector(`pattern[id="${name}"]`)) {
      const pattern = this.element("pattern", { id: name, width: 6, height: 6, patternUnits: "userSpaceOnUse" });
      pattern.append(this.element("rect", { width: 6, height: 6, fill: colour }));
      pattern.append(this.element("path", { d: direction > 0 ? "M0 6L6 0" : "M0 0L6 6", stroke: explorer.colour("stripe") }));
      this.root.prepend(pattern);
    }
    return `url(#${name})`;
  }
  save() {
    this.groups.push(this.group);
  }
  restore() {
    this.group = this.groups.pop();
  }
  translate(x, y) {
    this.group = this.add("g", { transform: `translate(${x} ${y})` });
  }
  clip() {
    const id = `clip${this.root.querySelectorAll("clipPath").length}`, shape = this.element("clipPath", { id });
    shape.append(this.element("path", { d: this.path.join("") }));
    this.group.append(shape);
    const group = this.add("g", { "clip-path": `url(#${id})` });
    this.group = group;
  }
  beginPath() {
    this.path = [];
  }
  rect(x, y, width, height) {
    this.path.push(`M${x} ${y}h${width}v${height}h${-width}z`);
  }
  moveTo(x, y) {
    this.path.push(`M${x.toFixed(1)} ${y.toFixed(1)}`);
  }
  lineTo(x, y) {
    this.path.push(`L${x.toFixed(1)} ${y.toFixed(1)}`);
  }
  arc(x, y, radius) {
    this.path.push(`M${x - radius} ${y}a${radius} ${radius} 0 1 0 ${2 * radius} 0a${radius} ${radius} 0 1 0 ${-2 * radius} 0z`);
  }
  setLineDash(dash) {
    this.dash = dash;
  }
  stroke() {
    this.add("path", { d: this.path.join(""), fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-dasharray": this.dash.join(" ") });
  }
  fill() {
    this.add("path", { d: this.path.join(""), fill: this.fillStyle });
  }
  fillRect(x, y, width, height) {
    if (width > 0 && height > 0) this.add("rect", { x, y, width, height, fill: this.fillStyle });
  }
  measureText(text) {
    return this.measure.measureText(text);
  }
  fillText(text, x, y) {
    this.add("text", { x, y, fill: this.fillStyle, "dominant-baseline": "central", "text-anchor": { center: "middle", right: "end" }[this.textAlign] || "start" }).textContent = text;
  }
  toString() {
    return new XMLSerializer().serializeToString(this.root);
  }
};

explorer.save = (name, content, type = "application/octet-stream") => {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  explorer.make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
};

// What the colours of a saved picture mean, in rows below it.
explorer.LEGEND_ROW = 18;
explorer.legendPlaces = (legend, width) => {
  const measure = document.createElement("canvas").getContext("2d"), places = [];
  measure.font = "11px system-ui, sans-serif";
  let x = 4, row = 0;
  for (const [name, text] of legend) {
    const needs = 34 + measure.measureText(text).width;
    if (x > 4 && x + needs > width) [x, row] = [4, row + 1];
    places.push({ name, text, x, y: (row + 0.5) * explorer.LEGEND_ROW });
    x += needs;
  }
  return { places, height: legend.length ? (row + 1) * explorer.LEGEND_ROW + 4 : 0 };
};

// Draws a view in the context that `made(width, height)` returns, on the colour of the page and above its legend, and
// returns that context.
explorer.drawnWithLegend = (view, made) => {
  let context = null;
  view.canvas.saves = (width, height) => {
    const { places, height: below } = explorer.legendPlaces(view.legend, width);
    context = made(width, height + below);
    context.fillStyle = explorer.colour("page");
    context.fillRect(0, 0, width, height + below);
    for (const { name, text, x, y } of places) {
      context.fillStyle = explorer.fill(context, name);
      context.fillRect(x, height + y - 4, 14, 9);
      context.fillStyle = explorer.colour("text");
      context.fillText(text, x + 19, height + y);
    }
    return context;
  };
  view.draw();
  view.canvas.saves = null;
  return context;
};

// Buttons that save the picture of a view: it has a canvas, draws it with `draw`, and has a `legend`, which are colours
// with what they mean.
explorer.savePictures = (view, name) => {
  const { make } = explorer;
  const png = () => explorer.drawnWithLegend(view, (width, height) => explorer.scaled(make("canvas"), width, height)).canvas.toBlob((blob) => explorer.save(`${name}.png`, blob));
  const svg = () => explorer.save(`${name}.svg`, explorer.drawnWithLegend(view, (width, height) => new explorer.SvgContext(width, height)).toString(), "image/svg+xml");
  return make("span", { className: "saves" },
    make("button", { type: "button", className: "quiet", onclick: png, ariaLabel: `save the picture of the ${name} as PNG` }, "PNG"),
    make("button", { type: "button", className: "quiet", onclick: svg, ariaLabel: `save the picture of the ${name} as SVG` }, "SVG"));
};
