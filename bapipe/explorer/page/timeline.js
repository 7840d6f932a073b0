// The timeline of a step: a row for each device, to scale, with its critical path and transfers.
"use strict";
explorer.PHASES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

explorer.Timeline = class {
  constructor(root, axis) {
    const { make } = explorer;
    this.axis = axis;
    this.canvas = make("canvas", { className: "chart", role: "img" });
    this.path = make("input", { type: "checkbox", checked: true, onchange: () => this.draw() });
    this.sent = make("input", { type: "checkbox", checked: true, onchange: () => this.draw() });
    this.keys = make("div", { className: "tools" });
    this.shares = make("p", {});
    const button = (text, label, action) => make("button", { type: "button", onclick: action, ariaLabel: label }, text);
    root.append(
      make("h2", {}, "One step"),
      make("div", { className: "tools" },
        button("−", "zoom out", () => axis.zoom(1.6)), button("+", "zoom in", () => axis.zoom(1 / 1.6)), button("whole step", "show the whole step", () => axis.show(0, axis.step)),
        make("label", { className: "inline" }, this.path, "critical path (K)"), make("label", { className: "inline" }, this.sent, "transfers")),
      this.keys, this.canvas, this.shares,
    );
    axis.attach(this.canvas);
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key.toLowerCase() === "k") this.path.click();
    });
    this.canvas.addEventListener("pointermove", (event) => explorer.tip(event, this.describe(event)));
    this.canvas.addEventListener("pointerleave", (event) => explorer.tip(event, ""));
  }
  update(answer) {
    const { timeline } = answer;
    this.answer = answer;
    this.rows = []; // a row for each lane of each device that has a stage
    timeline.spans.forEach((spans, rank) => {
      if (!spans.start.length) return;
      if (timeline.lanes[rank] < 2) this.rows.push({ rank, lane: 0, spans });
      else [true, false].forEach((forward, lane) => {
        const kept = [...spans.phase].map((phase, i) => ((phase === "F") === forward ? i : -1)).filter((i) => i >= 0);
        const pick = (column) => kept.map((i) => column[i]);
        this.rows.push({ rank, lane, spans: { stage: pick(spans.stage), microbatch: pick(spans.microbatch), start: pick(spans.start), end: pick(spans.end), phase: pick(spans.phase).join("") } });
      });
    });
    this.rowOf = new Map();
    this.rows.forEach((row, index) => this.rowOf.has(row.rank) || this.rowOf.set(row.rank, index));
    this.firstStage = this.rows.map((row) => row.spans.stage.reduce((a, b) => Math.min(a, b), Infinity));
    const phases = new Set(this.rows.flatMap((row) => [...new Set(row.spans.phase)]));
    this.keys.replaceChildren(
      ...Object.keys(explorer.PHASES).filter((p) => phases.has(p)).map((p) => explorer.key(p, explorer.PHASES[p])),
      ...(timeline.updates.start.length ? [explorer.key("update", "update")] : []),
      ...(timeline.syncs.start.length ? [explorer.key("sync", "all-reduce")] : []),
      explorer.key("path", "critical path"));
    const { path } = answer;
    if (path) {
      this.shares.textContent = `Critical path: ${path.shares.map(([name, share]) => `${name} ${Math.round(100 * share)}%`).join(", ")}.`;
    }
    this.canvas.setAttribute("aria-label", `Timeline of ${this.rows.length} devices over ${explorer.ms(answer.step)}. ${this.shares.textContent}`);
    this.draw();
  }
  get rowHeight() {
    return Math.min(28, Math.max(9, Math.floor(560 / Math.max(this.rows.length, 1))));
  }
  draw() {
    if (!this.answer) return;
    const { axis, rows, rowHeight } = this, width = this.canvas.parentElement.clientWidth, height = rows.length * rowHeight;
    const context = explorer.context(this.canvas, width, height + 20), x = (time) => axis.x(time, width);
    const colours = Object.fromEntries([..."FBIW", "update", "sync", "path", "transfer", "text"].map((name) => [name, explorer.colour(name)]));
    context.save();
    context.beginPath();
    context.rect(explorer.MARGIN, 0, width, height);
    context.clip();
    this.drawTransfers(context, x, colours);
    rows.forEach((row, index) => this.drawRow(context, row, index, x, width, colours));
    this.drawRest(context, x, colours);
    context.restore();
    const shown = rowHeight >= 12 ? 1 : Math.ceil(12 / rowHeight);
    context.fillStyle = colours.text;
    rows.forEach((row, index) => {
      if (index % shown === 0 && !row.lane) context.fillText(explorer.crop(context, this.answer.ranks[row.rank].device, explorer.MARGIN - 8), 0, (index + 0.5) * rowHeight);
    });
    axis.ticks(context, width, height + 2);
  }
  drawRow(context, row, index, x, width, colours) {
    const { spans } = row, { rowHeight, axis } = this, top = index * rowHeight, thick = rowHeight - (rowHeight > 12 ? 3 : 1);
    let drawn = -1;
    for (let i = explorer.firstEndingAfter(spans.end, axis.from); i < spans.start.length && spans.start[i] < axis.to; i++) {
      const left = Math.max(x(spans.start[i]), explorer.MARGIN), right = Math.min(x(spans.end[i]), width);
      if (right - drawn < 0.4) continue; // too short to be seen beside the one before
      drawn = right;
      const later = spans.stage[i] !== this.firstStage[index];
      context.globalAlpha = later ? 0.62 : 1;
      context.fillStyle = colours[spans.phase[i]];
      const gap = right - left > 3 ? 0.6 : 0;
      context.fillRect(left, top, Math.max(right - left - gap, 0.4), thick);
      context.globalAlpha = 1;
      const text = rowHeight >= 12 && right - left > 9 ? `${spans.phase[i]}${spans.microbatch[i]}` : "";
      if (text && context.measureText(text).width < right - left - 2) {
        context.fillStyle = "FI".includes(spans.phase[i]) ? "#111" : later ? colours.text : "#fff";
        context.fillText(text, left + 2, top + thick / 2 + 0.5);
      }
    }
  }
  isVisible(column, i) {
    return column.end[i] >= this.axis.from && column.start[i] <= this.axis.to;
  }
  // A line for each transfer, from its sender to its receiver; too many of them would hide the step.
  drawTransfers(context, x, colours) {
    const { transfers } = this.answer.timeline, middle = (rank) => (this.rowOf.get(rank) + 0.5) * this.rowHeight;
    const seen = this.sent.checked ? transfers.start.map((_, i) => i).filter((i) => this.isVisible(transfers, i)) : [];
    if (seen.length > 1500) return;
    context.strokeStyle = colours.transfer;
    context.beginPath();
    for (const i of seen) {
      context.moveTo(x(transfers.start[i]), middle(transfers.source[i]));
      context.lineTo(x(transfers.end[i]), middle(transfers.target[i]));
    }
    context.stroke();
  }
  // Updates, all-reduces and the critical path, on top of the actions.
  drawRest(context, x, colours) {
    const { timeline, path } = this.answer, { rowHeight } = this;
    const { updates, syncs } = timeline, visible = (column, i) => this.isVisible(column, i);
    const thick = rowHeight - (rowHeight > 12 ? 3 : 1);
    context.fillStyle = colours.update;
    updates.start.forEach((start, i) => visible(updates, i) && context.fillRect(x(start), this.rowOf.get(updates.rank[i]) * rowHeight, Math.max(x(updates.end[i]) - x(start), 0.5), thick));
    context.fillStyle = colours.sync;
    const devices = this.stageRanks || [];
    syncs.start.forEach((start, i) => visible(syncs, i) && (devices[syncs.stage[i]] || []).forEach((rank) => this.rowOf.has(rank) && context.fillRect(x(start), this.rowOf.get(rank) * rowHeight + thick - 3, Math.max(x(syncs.end[i]) - x(start), 0.5), 3)));
    if (this.path.checked && path) {
      context.fillStyle = colours.path;
      for (const [rank, start, end] of path.events) if (this.rowOf.has(rank)) context.fillRect(x(start), this.rowOf.get(rank) * rowHeight + thick - 1, Math.max(x(end) - x(start), 1), 2.5);
    }
  }
  describe(event) {
    const row = this.rows && this.rows[Math.floor(event.offsetY / this.rowHeight)];
    if (!row || event.offsetX < explorer.MARGIN) return row ? this.answer.ranks[row.rank].device : "";
    const time = this.axis.time(event.offsetX, this.canvas.clientWidth), { spans } = row, { ms } = explorer;
    const i = explorer.firstEndingAfter(spans.end, time), name = this.answer.ranks[row.rank].device;
    if (i < spans.start.length && spans.start[i] <= time) {
      return `${spans.stage[i]}${spans.phase[i]}${spans.microbatch[i]} on ${name}\n${explorer.PHASES[spans.phase[i]]} of micro-batch ${spans.microbatch[i]}, stage ${spans.stage[i]}\n${ms(spans.start[i])} to ${ms(spans.end[i])}: ${ms(spans.end[i] - spans.start[i])}`;
    }
    const { updates } = this.answer.timeline;
    const update = updates.start.findIndex((start, u) => updates.rank[u] === row.rank && start <= time && time <= updates.end[u]);
    if (update >= 0) return `update of stage ${updates.stage[update]} on ${name}: ${ms(updates.end[update] - updates.start[update])}`;
    const from = i ? spans.end[i - 1] : 0, to = i < spans.start.length ? spans.start[i] : this.answer.step;
    if (i === spans.start.length) return `${name} has run its actions`;
    const { transfers } = this.answer.timeline;
    const waited = transfers.end.findIndex((end, t) => end === to && transfers.target[t] === row.rank && transfers.start[t] < to);
    const cause = waited >= 0 ? `, waits for the transfer of micro-batch ${transfers.microbatch[waited]} from ${this.answer.ranks[transfers.source[waited]].device}` : "";
    return `${name} is idle for ${ms(to - from)}${cause}`;
  }
};

// The index of the first action that ends after a time.
explorer.firstEndingAfter = (ends, time) => {
  let low = 0, high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
};
