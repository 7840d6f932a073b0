// The memory of every device over the step, against its limit.
"use strict";
explorer.Memory = class {
  constructor(root, axis) {
    const { make } = explorer;
    this.legend = [["fixed", "parameters, gradients, optimizer, buffers"], ["stash", "stashes"], ["workspace", "workspace"], ["alarm", "limit"]];
    this.root = root;
    this.axis = axis;
    this.canvas = make("canvas", { className: "chart", role: "img" });
    root.append(
      make("h2", {}, "Memory over time"),
      make("div", { className: "tools" }, ...this.legend.map(([name, text]) => explorer.key(name, text)), explorer.savePictures(this, "memory")),
      this.canvas, (this.why = make("p", { className: "why" })),
    );
    axis.attach(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => explorer.tip(event, this.describe(event)));
    this.canvas.addEventListener("pointerleave", (event) => explorer.tip(event, ""));
  }
  // `rows` are those of the timeline: alike devices share one.
  update(answer, rows) {
    this.answer = answer;
    this.root.hidden = !answer.timeline.memory.length;
    this.rows = rows.filter((row) => row.lane === 0);
    const used = this.rows.flatMap((row) => row.ranks.map((rank) => answer.ranks[rank]));
    const short = used.filter((rank) => rank.peak > rank.limit).map((rank) => `${rank.device} lacks ${explorer.mib(rank.peak - rank.limit)}`);
    this.canvas.setAttribute("aria-label", `Memory of ${used.length} devices over the step. ${short.length ? `Over the limit: ${short.join(", ")}.` : "All fit."} The peaks are in the table of devices.`);
    this.draw();
  }
  get rowHeight() {
    return Math.min(56, Math.max(9, Math.floor(360 / Math.max(this.rows.length, 1))));
  }
  draw() {
    if (!this.answer || this.root.hidden || this.canvas.parentElement.clientWidth <= explorer.MARGIN) return;
    const { axis, rows, rowHeight, answer } = this, width = this.canvas.parentElement.clientWidth, height = rows.length * rowHeight;
    const context = explorer.context(this.canvas, width, height + 20 + explorer.TOP), colour = explorer.colour;
    context.save();
    context.translate(0, explorer.TOP);
    const most = Math.max(1, ...rows.map((row) => answer.ranks[row.rank].peak)), named = rowHeight >= 11 ? 1 : Math.ceil(11 / rowHeight);
    // A limit a little above the peaks is drawn, too; one far above would flatten the picture, and is a text.
    const top = Math.max(most, ...rows.map((row) => answer.ranks[row.rank].limit).filter((limit) => limit <= 1.6 * most));
    const colours = { fixed: colour("fixed"), stash: colour("stash"), workspace: explorer.fill(context, "workspace"), alarm: colour("alarm"), text: colour("text"), faint: colour("faint") };
    rows.forEach((row, index) => {
      const { rank } = row, gap = rowHeight > 20 ? 4 : 1, bottom = (index + 1) * rowHeight - gap, scale = (rowHeight - gap - 1) / top, { peak, limit } = answer.ranks[rank];
      context.save();
      context.beginPath();
      context.rect(explorer.MARGIN, 0, width, height);
      context.clip();
      this.drawRank(context, rank, bottom, scale, width, colours);
      context.restore();
      if (limit <= top) {
        context.fillStyle = colours.alarm;
        for (let x = explorer.MARGIN; x < width; x += 8) context.fillRect(x, bottom - limit * scale, 5, 1.5);
      }
      context.fillStyle = peak > limit ? colours.alarm : colours.text;
      const middle = (index + 0.5) * rowHeight;
      if (index % named === 0) context.fillText(explorer.crop(context, explorer.rowLabel(row, answer), explorer.MARGIN - 8), 0, rowHeight > 26 ? middle - 7 : middle);
      if (rowHeight <= 26) return;
      context.fillStyle = peak > limit ? colours.alarm : colours.faint;
      context.fillText(explorer.crop(context, `${explorer.mib(peak)}`, explorer.MARGIN - 6), 0, middle + 7);
    });
    axis.ticks(context, width, height + 2);
    context.restore();
  }
  drawRank(context, rank, bottom, scale, width, colours) {
    const { start } = this.answer.timeline.spans[rank], memory = this.answer.timeline.memory[rank], { axis } = this;
    const { length } = start, left = explorer.MARGIN;
    context.fillStyle = colours.fixed;
    context.fillRect(left, bottom - memory.fixed * scale, Math.min(axis.x(this.answer.timeline.length, width), width) - left, memory.fixed * scale);
    const first = Math.max(0, explorer.firstEndingAfter(start, axis.from) - 1), base = bottom - memory.fixed * scale;
    let from = Math.round(Math.max(axis.x(start[first], width), left)), stash = 0, workspace = 0, drawn = null;
    const fill = () => {
      if (!drawn) return;
      context.fillStyle = colours.stash;
      context.fillRect(drawn.from, base - drawn.stash * scale, drawn.to - drawn.from, drawn.stash * scale);
      if (!drawn.workspace) return;
      context.fillStyle = colours.workspace;
      context.fillRect(drawn.from, base - (drawn.stash + drawn.workspace) * scale, drawn.to - drawn.from, drawn.workspace * scale);
    };
    for (let i = first; i < length && start[i] <= axis.to; i++) {
      const to = Math.round(i + 1 < length ? axis.x(start[i + 1], width) : axis.x(this.answer.timeline.length, width));
      stash = Math.max(stash, memory.stash[i]);
      workspace = Math.max(workspace, memory.workspace[i]);
      if (to - from < 1 && i + 1 < length) continue; // draws the maximum of what falls on one pixel
      if (drawn && drawn.stash === stash && drawn.workspace === workspace) drawn.to = to; // one rectangle with its neighbour
      else {
        fill();
        drawn = { from, to, stash, workspace };
      }
      [from, stash, workspace] = [to, 0, 0];
    }
    fill();
  }
  describe(event) {
    const shown = this.rows && this.rows[Math.floor((event.offsetY - explorer.TOP) / this.rowHeight)];
    if (!shown) return "";
    const { rank } = shown, row = this.answer.ranks[rank], memory = this.answer.timeline.memory[rank], { mib } = explorer;
    const time = this.axis.time(event.offsetX, this.canvas.clientWidth);
    const i = explorer.firstEndingAfter(this.answer.timeline.spans[rank].start, time) - 1;
    const now = event.offsetX >= explorer.MARGIN && i >= 0 ? `\nnow: stashes ${mib(memory.stash[i])}, workspace ${mib(memory.workspace[i])}, the rest ${mib(memory.fixed)}` : "";
    return `${explorer.rowLabel(shown, this.answer)}: ${mib(row.peak)} at its peak, ${mib(row.limit)} in all (${explorer.percent(row.peak / Math.max(row.limit, 1))})${now}`;
  }
};
