// The memory of every device over the step, against its limit.
"use strict";
explorer.Memory = class {
  constructor(root, axis) {
    const { make, key } = explorer;
    this.axis = axis;
    this.canvas = make("canvas", { className: "chart", role: "img" });
    root.append(
      make("h2", {}, "Memory over time"),
      make("div", { className: "tools" }, key("fixed", "parameters, gradients, optimizer, buffers"), key("stash", "stashes"), key("workspace", "workspace"), key("alarm", "limit")),
      this.canvas,
    );
    axis.attach(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => explorer.tip(event, this.describe(event)));
    this.canvas.addEventListener("pointerleave", (event) => explorer.tip(event, ""));
  }
  update(answer) {
    this.answer = answer;
    this.rows = answer.timeline.spans.map((_, rank) => rank).filter((rank) => answer.timeline.spans[rank].start.length);
    const short = this.rows.filter((rank) => answer.ranks[rank].peak > answer.ranks[rank].limit).map((rank) => answer.ranks[rank].device);
    this.canvas.setAttribute("aria-label", `Memory of ${this.rows.length} devices. ${short.length ? `Over its limit: ${short.join(", ")}` : "All fit."}`);
    this.draw();
  }
  get rowHeight() {
    return Math.min(64, Math.max(14, Math.floor(420 / Math.max(this.rows.length, 1))));
  }
  draw() {
    if (!this.answer) return;
    const { axis, rows, rowHeight, answer } = this, width = this.canvas.parentElement.clientWidth, height = rows.length * rowHeight;
    const context = explorer.context(this.canvas, width, height + 20), colour = explorer.colour;
    const most = Math.max(1, ...rows.map((rank) => answer.ranks[rank].peak));
    const colours = { fixed: colour("fixed"), stash: colour("stash"), workspace: colour("workspace"), alarm: colour("alarm"), text: colour("text") };
    rows.forEach((rank, index) => {
      const bottom = (index + 1) * rowHeight - 3, scale = (rowHeight - 5) / most, { peak, limit, device } = answer.ranks[rank];
      context.save();
      context.beginPath();
      context.rect(explorer.MARGIN, 0, width, height);
      context.clip();
      this.drawRank(context, rank, bottom, scale, width, colours);
      context.restore();
      if (limit <= most) {
        context.fillStyle = colours.alarm;
        for (let x = explorer.MARGIN; x < width; x += 8) context.fillRect(x, bottom - limit * scale, 5, 1.5);
      }
      context.fillStyle = peak > limit ? colours.alarm : colours.text;
      const middle = bottom - rowHeight / 2;
      context.fillText(explorer.crop(context, device, explorer.MARGIN - 8), 0, rowHeight > 26 ? middle - 6 : middle + 2);
      if (rowHeight > 26) context.fillText(explorer.mib(peak), 0, middle + 8);
    });
    axis.ticks(context, width, height + 2);
  }
  drawRank(context, rank, bottom, scale, width, colours) {
    const { start } = this.answer.timeline.spans[rank], memory = this.answer.timeline.memory[rank], { axis } = this;
    const { length } = start, left = explorer.MARGIN;
    context.fillStyle = colours.fixed;
    context.fillRect(left, bottom - memory.fixed * scale, width, memory.fixed * scale);
    const first = Math.max(0, explorer.firstEndingAfter(start, axis.from) - 1);
    let from = Math.max(axis.x(start[first], width), left), stash = 0, workspace = 0;
    for (let i = first; i < length && start[i] <= axis.to; i++) {
      const to = i + 1 < length ? axis.x(start[i + 1], width) : axis.x(this.answer.step, width);
      stash = Math.max(stash, memory.stash[i]);
      workspace = Math.max(workspace, memory.workspace[i]);
      if (to - from < 0.7 && i + 1 < length) continue; // draws the maximum of what falls on one pixel
      const base = bottom - memory.fixed * scale;
      context.fillStyle = colours.stash;
      context.fillRect(from, base - stash * scale, to - from + 0.3, stash * scale);
      context.fillStyle = colours.workspace;
      context.fillRect(from, base - (stash + workspace) * scale, to - from + 0.3, workspace * scale);
      [from, stash, workspace] = [to, 0, 0];
    }
  }
  describe(event) {
    const rank = this.rows && this.rows[Math.floor(event.offsetY / this.rowHeight)];
    if (rank === undefined) return "";
    const row = this.answer.ranks[rank], memory = this.answer.timeline.memory[rank], { mib } = explorer;
    const time = this.axis.time(event.offsetX, this.canvas.clientWidth);
    const i = explorer.firstEndingAfter(this.answer.timeline.spans[rank].start, time) - 1;
    const now = event.offsetX >= explorer.MARGIN && i >= 0 ? `\nnow: stashes ${mib(memory.stash[i])}, workspace ${mib(memory.workspace[i])}, the rest ${mib(memory.fixed)}` : "";
    return `${row.device}: ${mib(row.peak)} at its peak, ${mib(row.limit)} in all${now}`;
  }
};
