// Small charts: points of a Pareto front, and curves over one value. Each has a table with the same figures beside it.
"use strict";
explorer.ticksBetween = (low, high, most) => {
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map((k) => k * power).find((t) => t >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(value);
  return found;
};

// Bytes are written in MiB: round numbers of these.
explorer.ticksOf = (axis, low, high, most) => explorer.ticksBetween(low / (axis.unit || 1), high / (axis.unit || 1), most).map((value) => value * (axis.unit || 1));

explorer.Chart = class {
  // `choose(point)` is called when a point is clicked.
  constructor(name, choose) {
    this.canvas = explorer.make("canvas", { className: "chart plot", role: "img" });
    this.element = explorer.make("div", { className: "plotted" }, explorer.savePictures(this, name), this.canvas);
    this.canvas.addEventListener("pointermove", (event) => {
      const point = this.nearest(event);
      this.canvas.style.cursor = point && point.canBeChosen ? "pointer" : "";
      explorer.tip(event, point ? point.text : "");
    });
    this.canvas.addEventListener("pointerleave", (event) => explorer.tip(event, ""));
    this.canvas.addEventListener("click", (event) => {
      const point = this.nearest(event);
      if (point && point.canBeChosen) choose(point);
    });
    this.series = [];
  }
  // series: [{ points: [{ x, y, text, label, state, name, canBeChosen }], line, dash, colour, name }]; axes: { x: {name, words, unit, log}, y }
  update(series, axes, summary) {
    this.series = series;
    this.axes = axes;
    this.canvas.setAttribute("aria-label", `${summary} The points are in the table below.`);
    this.draw();
  }
  get legend() {
    return this.series.filter((one) => one.name).map((one) => [one.colour, one.name]);
  }
  get points() {
    return this.series.flatMap((one) => one.points);
  }
  place(width, height) {
    const { x, y } = this.axes, at = (axis, value) => (axis.log ? Math.log2(value) : value);
    const range = (name, axis) => {
      const values = this.points.map((point) => at(axis, point[name]));
      const low = axis.fromZero ? 0 : Math.min(...values), high = Math.max(...values), pad = (high - low || Math.abs(high) || 1) * 0.08;
      return [axis.fromZero ? 0 : low - pad, high + pad];
    };
    const [left, right] = range("x", x), [low, high] = range("y", y), box = { left: 62, top: 10, right: width - 14, bottom: height - 34 };
    return { box, left, right, low, high,
      px: (value) => box.left + ((at(x, value) - left) / (right - left)) * (box.right - box.left),
      py: (value) => box.bottom - ((at(y, value) - low) / (high - low)) * (box.bottom - box.top) };
  }
  draw() {
    const width = Math.min(this.element.clientWidth, 760), height = 240;
    if (!this.points.length || width < 120) return;
    const context = explorer.context(this.canvas, width, height), { box, left, right, low, high, px, py } = this.place(width, height), { colour } = explorer, { x, y } = this.axes;
    context.fillStyle = colour("line");
    const across = x.values || explorer.ticksOf(x, left, right, Math.max(2, (box.right - box.left) / 90)), up = explorer.ticksOf(y, low, high, 5);
    for (const value of up) context.fillRect(box.left, py(value), box.right - box.left, 0.6);
    context.fillStyle = colour("faint");
    context.textAlign = "right";
    for (const value of up) context.fillText(y.words(value), box.left - 6, py(value));
    context.textAlign = "center";
    let written = -Infinity;
    for (const value of across) {
      const text = x.words(value), half = context.measureText(text).width / 2, at = Math.min(px(value), width - half);
      context.fillRect(px(value), box.bottom, 1, 4);
      if (at - half > written + 6) context.fillText(text, at, box.bottom + 11);
      else continue;
      written = at + half;
    }
    context.fillText(x.name, (box.left + box.right) / 2, height - 7);
    context.textAlign = "left";
    for (const one of this.series) this.drawSeries(context, one, px, py, colour);
  }
  drawSeries(context, one, px, py, colour) {
    context.strokeStyle = context.fillStyle = colour(one.colour);
    if (one.line) {
      context.lineWidth = 1.6;
      context.setLineDash(one.dash || []);
      context.beginPath();
      one.points.forEach((point, i) => (i ? context.lineTo(px(point.x), py(point.y)) : context.moveTo(px(point.x), py(point.y))));
      context.stroke();
      context.setLineDash([]);
    }
    for (const point of one.points) {
      context.fillStyle = colour(one.colour);
      context.beginPath();
      context.arc(px(point.x), py(point.y), one.dash ? 2.5 : 4.5, 0, 2 * Math.PI);
      context.fill();
      if (!point.label) continue;
      context.fillStyle = colour("text");
      context.fillText(point.label, px(point.x) + 7, py(point.y) - 8);
    }
  }
  nearest(event) {
    if (!this.points.length) return null;
    const { px, py } = this.place(this.canvas.clientWidth, this.canvas.clientHeight);
    const far = (point) => Math.hypot(px(point.x) - event.offsetX, py(point.y) - event.offsetY);
    const best = this.points.reduce((a, b) => (far(b) < far(a) ? b : a));
    return far(best) < 18 ? best : null;
  }
};
