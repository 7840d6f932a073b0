// The time axis that the timeline and the memory charts share: which part of the step is seen.
"use strict";
explorer.MARGIN = 84;
explorer.TOP = 4;

explorer.Axis = class {
  constructor(redraw) {
    this.step = 1;
    this.from = 0;
    this.to = 1;
    this.redraw = redraw;
  }
  // A new step keeps the part of it that is seen.
  setStep(step) {
    const scale = Math.max(step, 1) / this.step;
    this.from *= scale;
    this.to *= scale;
    this.step = Math.max(step, 1);
  }
  show(from, to) {
    const length = Math.min(Math.max(to - from, this.step / 1e5, 10), this.step);
    this.from = Math.min(Math.max(from, 0), this.step - length);
    this.to = this.from + length;
    this.redraw();
  }
  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }
  pan(share) {
    const by = (this.to - this.from) * share;
    this.show(this.from + by, this.to + by);
  }
  x(time, width) {
    return explorer.MARGIN + ((time - this.from) / (this.to - this.from)) * (width - explorer.MARGIN);
  }
  time(x, width) {
    return this.from + ((x - explorer.MARGIN) / (width - explorer.MARGIN)) * (this.to - this.from);
  }
  ticks(context, width, y) {
    const smallest = (this.to - this.from) / Math.max(2, Math.floor((width - explorer.MARGIN) / 90));
    const power = 10 ** Math.floor(Math.log10(Math.max(smallest, 1)));
    const tick = [1, 2, 5, 10].map((k) => k * power).find((t) => t >= smallest) || power * 10;
    context.fillStyle = explorer.colour("faint");
    context.textAlign = "center";
    for (let time = Math.ceil(this.from / tick) * tick; time <= this.to; time += tick) {
      const x = this.x(time, width);
      context.fillRect(x, y, 1, 4);
      if (x < width - 24) context.fillText(explorer.ms(time), x, y + 11);
    }
    context.textAlign = "left";
  }
  // Drag to move, Ctrl and the wheel (or a pinch) to zoom, and the keys.
  attach(canvas) {
    let held = null;
    canvas.tabIndex = 0;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, from: this.from, to: this.to };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) return;
      const by = ((held.x - event.clientX) / (canvas.clientWidth - explorer.MARGIN)) * (held.to - held.from);
      if (by) this.show(held.from + by, held.to + by);
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (held = null));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      if (event.shiftKey) this.pan((event.deltaY || event.deltaX) / 1000);
      else this.zoom(Math.exp(event.deltaY / 300), this.time(event.offsetX, canvas.clientWidth));
    }, { passive: false });
    canvas.addEventListener("dblclick", () => this.show(0, this.step));
    canvas.addEventListener("keydown", (event) => {
      const actions = { "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), "0": () => this.show(0, this.step), ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1) };
      if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      actions[event.key]();
    });
  }
};
