// The timeline of a step: a row for each device, to scale, with its critical path and transfers.
"use strict";
explorer.PHASES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
explorer.COLUMN = 3; // pixels of a column that sums up actions which are too short to be drawn

explorer.Timeline = class {
  // `rowsChanged()` is called when the user chooses other rows.
  constructor(root, axis, { title = "One step", name = "timeline", small = false, rowsChanged = () => {} } = {}) {
    const { make } = explorer, redraw = () => this.draw();
    const choose = () => {
      if (!this.answer) return;
      this.update(this.answer);
      rowsChanged();
    };
    this.axis = axis;
    this.small = small;
    this.canvas = make("canvas", { className: "chart", role: "img" });
    this.path = make("input", { type: "checkbox", checked: true, onchange: redraw });
    this.sent = make("input", { type: "checkbox", checked: true, onchange: redraw });
    this.folds = make("input", { type: "checkbox", checked: true, onchange: choose });
    this.source = make("select", { ariaLabel: "which step is drawn", hidden: true, onchange: choose });
    this.foldLabel = make("label", { className: "inline" }, this.folds, "fold alike devices");
    this.keys = make("div", { className: "tools keys" });
    this.heading = make("h2", {}, title);
    this.shares = make("p", { className: "why" });
    this.note = make("p", { className: "why", hidden: true });
    const button = (text, label, action) => make("button", { type: "button", className: "quiet", onclick: action, ariaLabel: label }, text);
    const tools = make("div", { className: "tools" },
      button("−", "zoom out", () => axis.zoom(1.6)), button("+", "zoom in", () => axis.zoom(1 / 1.6)), button("whole step", "show the whole step", () => axis.show(0, axis.step)),
      this.source, make("label", { className: "inline", title: "key K" }, this.path, "critical path"), make("label", { className: "inline" }, this.sent, "transfers"), this.foldLabel, explorer.savePictures(this, name));
    root.append(this.heading, ...(small ? [] : [tools, this.keys]), this.canvas, ...(small ? [] : [this.shares, this.note, (this.actions = explorer.actionTable(this))]));
    axis.attach(this.canvas);
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key.toLowerCase() === "k") this.path.click();
    });
    this.canvas.addEventListener("pointermove", (event) => explorer.tip(event, this.describe(event)));
    this.canvas.addEventListener("pointerleave", (event) => explorer.tip(event, ""));
  }
  // Predicted, measured, or both on one axis.
  chooseSource(answer) {
    const measured = answer.measured || [];
    const options = [["", "predicted"], ...measured.map((one, i) => [String(i), one.title]), ...measured.map((one, i) => [`both${i}`, `predicted and ${one.title}`])];
    if (options.length !== this.source.options.length) {
      this.source.replaceChildren(...options.map(([value, text]) => explorer.make("option", { value }, text)));
      this.source.hidden = options.length < 2;
      if (measured.length) this.source.value = "both0";
    }
    const both = this.source.value.startsWith("both"), index = Number(this.source.value.replace("both", ""));
    this.measured = measured.length ? measured[this.source.value ? index : 0].timeline : null;
    return { both, timeline: this.source.value && !both ? this.measured : answer.timeline };
  }
  update(answer, stageRanks = this.stageRanks) {
    this.answer = answer;
    this.stageRanks = stageRanks;
    const { both, timeline } = this.chooseSource(answer);
    this.timeline = timeline;
    this.rows = explorer.rowsOf(timeline, stageRanks, this.folds.checked && !both);
    this.foldLabel.hidden = !stageRanks.some((group) => group.length > 1);
    if (both) {
      const split = new Map(explorer.rowsOf(this.measured, [], false).map((row) => [`${row.rank} ${row.lane}`, row.spans]));
      // A clock may let two actions of a device overlap by a little: they stay in one row if they were predicted to.
      const took = (row) => (timeline.lanes[row.rank] < 2 ? this.measured.spans[row.rank] : split.get(`${row.rank} ${row.lane}`) || row.spans);
      this.rows = this.rows.flatMap((row) => [row, { ...row, lane: row.lane + 2, isMeasured: true, spans: took(row) }]);
    }
    this.rowOf = new Map();
    this.measuredRowOf = new Map();
    this.rows.forEach((row, index) => {
      const of = row.isMeasured ? this.measuredRowOf : this.rowOf;
      row.ranks.forEach((rank) => of.has(rank) || of.set(rank, index));
    });
    this.firstStage = this.rows.map((row) => row.spans.stage.reduce((a, b) => Math.min(a, b), Infinity));
    this.hasSeveral = this.rows.map((row, index) => row.spans.stage.some((stage) => stage !== this.firstStage[index]));
    this.took = this.measured && new Map(explorer.differences(answer.timeline, this.measured).map((one) => [`${one.rank} ${one.name}`, one]));
    const phases = new Set(this.rows.flatMap((row) => [...new Set(row.spans.phase)]));
    const drawn = both ? [timeline, this.measured] : [timeline];
    this.legend = [
      ...Object.entries(explorer.PHASES).filter(([phase]) => phases.has(phase)),
      ...(drawn.some((one) => one.updates.start.length) ? [["update", "update"]] : []),
      ...(drawn.some((one) => one.syncs.start.length) ? [["sync", "all-reduce"]] : []),
      ...(timeline.transfers.start.length && !both ? [["transfer", "transfer"]] : []),
      ...(answer.path ? [["path", "critical path"]] : [])];
    this.keys.replaceChildren(...this.legend.map(([name, text]) => explorer.key(name, text)));
    this.shares.textContent = !answer.path ? "\u00a0" : `Critical path: ${answer.path.shares.filter(([, share]) => share >= 0.005).map(([name, share]) => `${name} ${Math.round(100 * share)}%`).join(", ")}.`;
    this.canvas.setAttribute("aria-label", `Timeline of ${answer.ranks.length} devices over ${explorer.ms(timeline.length)}. ${this.shares.textContent} Plus and minus zoom, the arrow keys move, 0 shows the whole step. The actions are in the table below.`);
    this.draw();
  }
  get rowHeight() {
    return Math.min(this.small ? 18 : 30, Math.max(this.small ? 4 : 9, Math.floor((this.small ? 200 : 560) / Math.max(this.rows.length, 1))));
  }
  draw() {
    if (!this.answer) return;
    const { axis, rows, rowHeight } = this, width = this.canvas.parentElement.clientWidth, height = rows.length * rowHeight;
    if (width <= explorer.MARGIN) return;
    const context = explorer.context(this.canvas, width, height + 20 + explorer.TOP), x = (time) => axis.x(time, width);
    const colours = { ...explorer.fills(context, ["F", "B", "I", "W", "update", "sync"]), ...Object.fromEntries(["path", "transfer", "text", "faint", "line"].map((name) => [name, explorer.colour(name)])) };
    context.save();
    context.translate(0, explorer.TOP);
    context.fillStyle = colours.line;
    rows.forEach((row, index) => index && !row.isMeasured && rowHeight > 12 && context.fillRect(0, index * rowHeight - 1, width, 0.5));
    context.save();
    context.beginPath();
    context.rect(explorer.MARGIN, 0, width, height);
    context.clip();
    this.isSummed = false;
    if (!rows.some((row) => row.isMeasured)) this.drawTransfers(context, x, colours);
    rows.forEach((row, index) => this.drawRow(context, row, index, x, width, colours));
    this.drawEnds(context, this.timeline, this.rowOf, x, colours);
    if (this.measuredRowOf.size) this.drawEnds(context, this.measured, this.measuredRowOf, x, colours);
    this.drawPath(context, x, colours);
    context.restore();
    const shown = rowHeight >= 11 ? 1 : Math.ceil(11 / rowHeight);
    rows.forEach((row, index) => {
      if (index % shown || row.lane === 1) return;
      context.fillStyle = row.isMeasured ? colours.faint : colours.text;
      context.fillText(explorer.crop(context, row.isMeasured ? "  measured" : explorer.rowLabel(row, this.answer), explorer.MARGIN - 8), 0, (index + 0.5) * rowHeight);
    });
    axis.ticks(context, width, height + 2);
    context.restore();
    if (this.actions) this.actions.drawn();
    this.note.textContent = this.isSummed ? "The actions are too short to be drawn one by one: a column shows the shares of its time in which the device computes. Zoom in to see them." : "";
    this.note.hidden = !this.isSummed;
  }
  drawRow(context, row, index, x, width, colours) {
    const { spans } = row, { rowHeight, axis, thickness: thick } = this, top = index * rowHeight;
    const first = explorer.firstEndingAfter(spans.end, axis.from), end = explorer.firstEndingAfter(spans.start, axis.to);
    if ((end - first) * 2.5 > width - explorer.MARGIN) return this.drawSums(context, row, first, end, top, thick, width, colours);
    for (let i = first; i < end; i++) {
      const left = Math.max(x(spans.start[i]), explorer.MARGIN), right = Math.min(x(spans.end[i]), width);
      const later = spans.stage[i] !== this.firstStage[index], phase = spans.phase[i];
      context.globalAlpha = later ? 0.62 : 1;
      context.fillStyle = colours[phase];
      const gap = right - left > 3 ? 0.8 : 0;
      context.fillRect(left, top, Math.max(right - left - gap, 0.4), thick);
      context.globalAlpha = 1;
      const text = rowHeight >= 12 && right - left > 9 ? `${this.hasSeveral[index] ? spans.stage[i] : ""}${phase}${spans.microbatch[i]}` : "";
      const shown = [text, text && String(spans.microbatch[i])].find((one) => one && context.measureText(one).width < right - left - 3);
      if (shown) {
        context.fillStyle = "FI".includes(phase) ? "#10161f" : "#fff";
        context.fillText(shown, left + 2, top + thick / 2 + 0.5);
      }
    }
  }
  // The share of each column's time that every phase takes, one on top of the other.
  drawSums(context, row, first, end, top, thick, width, colours) {
    const { spans } = row, { axis } = this, count = Math.ceil((width - explorer.MARGIN) / explorer.COLUMN), each = ((axis.to - axis.from) * explorer.COLUMN) / (width - explorer.MARGIN);
    const sums = Object.fromEntries(Object.keys(explorer.PHASES).map((phase) => [phase, new Float64Array(count)]));
    for (let i = first; i < end; i++) {
      const from = Math.max(spans.start[i], axis.from) - axis.from, to = Math.min(spans.end[i], axis.to) - axis.from;
      for (let column = Math.floor(from / each); column < count && column * each < to; column++) sums[spans.phase[i]][column] += Math.min(to, (column + 1) * each) - Math.max(from, column * each);
    }
    const bottom = top + thick, low = new Float64Array(count).fill(bottom), shapes = [];
    for (const phase of Object.keys(sums)) {
      if (!row.spans.phase.includes(phase)) continue;
      for (let column = 0; column < count; column++) low[column] -= (sums[phase][column] / each) * thick;
      shapes.push([colours[phase], low.slice()]);
    }
    // The upper ones first, down to the bottom of the row: one shape for each phase takes less time than its columns.
    for (const [colour, tops] of shapes.reverse()) {
      context.fillStyle = colour;
      context.beginPath();
      context.moveTo(explorer.MARGIN, bottom);
      tops.forEach((y, column) => {
        const left = explorer.MARGIN + column * explorer.COLUMN;
        context.lineTo(left, y);
        context.lineTo(left + explorer.COLUMN, y);
      });
      context.lineTo(explorer.MARGIN + count * explorer.COLUMN, bottom);
      context.fill();
    }
    this.isSummed = true;
  }
  isVisible(column, i) {
    return column.end[i] >= this.axis.from && column.start[i] <= this.axis.to;
  }
  // A line for each transfer, from its sender to its receiver; too many of them would hide the step.
  drawTransfers(context, x, colours) {
    const { transfers } = this.timeline, middle = (rank) => (this.rowOf.get(rank) + 0.5) * this.rowHeight;
    const seen = this.sent.checked && !this.small ? transfers.start.map((_, i) => i).filter((i) => this.isVisible(transfers, i)) : [];
    if (seen.length > 1500) return;
    context.strokeStyle = colours.transfer;
    context.beginPath();
    for (const i of seen) {
      if (!this.rowOf.has(transfers.source[i]) || !this.rowOf.has(transfers.target[i])) continue;
      context.moveTo(x(transfers.start[i]), middle(transfers.source[i]));
      context.lineTo(x(transfers.end[i]), middle(transfers.target[i]));
    }
    context.stroke();
  }
  get thickness() {
    return this.rowHeight - (this.rowHeight > 12 ? 3 : 1);
  }
  // Updates and all-reduces, on top of the actions: those of a timeline, in the rows of its ranks.
  drawEnds(context, { updates, syncs }, rowOf, x, colours) {
    const { rowHeight, thickness } = this, visible = (column, i) => this.isVisible(column, i);
    const isFirst = (rank) => rowOf.has(rank) && this.rows[rowOf.get(rank)].ranks[0] === rank;
    context.fillStyle = colours.update;
    updates.start.forEach((start, i) => isFirst(updates.rank[i]) && visible(updates, i) && context.fillRect(x(start), rowOf.get(updates.rank[i]) * rowHeight, Math.max(x(updates.end[i]) - x(start), 0.5), thickness));
    context.fillStyle = colours.sync;
    syncs.start.forEach((start, i) => visible(syncs, i) && (this.stageRanks[syncs.stage[i]] || []).forEach((rank) => isFirst(rank) && context.fillRect(x(start), rowOf.get(rank) * rowHeight + thickness - 4, Math.max(x(syncs.end[i]) - x(start), 0.5), 4)));
  }
  drawPath(context, x, colours) {
    const { rowHeight, thickness, answer } = this;
    if (!this.path.checked || !answer.path || this.timeline !== answer.timeline) return;
    context.fillStyle = colours.path;
    for (const [rank, start, end] of answer.path.events) if (this.rowOf.has(rank)) context.fillRect(x(start), this.rowOf.get(rank) * rowHeight + thickness - 1, Math.max(x(end) - x(start), 1), 2.5);
  }
  describe(event) {
    const row = this.rows && this.rows[Math.floor((event.offsetY - explorer.TOP) / this.rowHeight)];
    if (!row || event.offsetX < explorer.MARGIN) return row ? explorer.rowTitle(row, this.answer) : "";
    return explorer.describeMoment(this, row, this.axis.time(event.offsetX, this.canvas.clientWidth));
  }
};

// What a device does at a time, in words.
explorer.describeMoment = (view, row, time) => {
  const { ms } = explorer, { spans } = row, { answer } = view, timeline = row.isMeasured ? view.measured : view.timeline;
  const i = explorer.firstEndingAfter(spans.end, time), name = explorer.rowLabel(row, answer);
  if (i < spans.start.length && spans.start[i] <= time) {
    const action = `${spans.stage[i]}${spans.phase[i]}${spans.microbatch[i]}`, took = view.took && view.took.get(`${row.rank} ${action}`);
    const lines = [`${action} on ${name}`, `${explorer.PHASES[spans.phase[i]]} of micro-batch ${spans.microbatch[i]}, stage ${spans.stage[i]}`, `${ms(spans.start[i])} to ${ms(spans.end[i])}: ${ms(spans.end[i] - spans.start[i])}`];
    if (took) lines.push(`predicted ${ms(took.predicted)}, measured ${ms(took.measured)} (${(took.measured / Math.max(took.predicted, 1)).toFixed(2)} times as long), begins ${ms(Math.abs(took.began - took.start))} ${took.began < took.start ? "earlier" : "later"}`);
    return lines.join("\n");
  }
  const { updates, transfers } = timeline;
  const update = updates.start.findIndex((start, u) => updates.rank[u] === row.rank && start <= time && time <= updates.end[u]);
  if (update >= 0) return `update of stage ${updates.stage[update]} on ${name}: ${ms(updates.end[update] - updates.start[update])}`;
  if (i === spans.start.length) return `${name} has run its actions`;
  const from = i ? spans.end[i - 1] : 0, to = spans.start[i];
  const waited = transfers.end.findIndex((end, t) => end === to && transfers.target[t] === row.rank && transfers.start[t] < to);
  const cause = waited >= 0 ? `, waits for the transfer of micro-batch ${transfers.microbatch[waited]} from ${answer.ranks[transfers.source[waited]].device}` : "";
  return `${name} is idle for ${ms(to - from)}${cause}`;
};
