// The layers in order, with bars of their times, the tensors between them, and the cuts that can be dragged.
"use strict";
explorer.MAX_SAVED = 8000; // pixels of a saved picture of all layers

explorer.Layers = class {
  // `actions.cut(cuts, done)` is called while a cut moves and when it is let go; `actions.pin(layer)` when a layer is
  // clicked.
  constructor(root, model, actions, live) {
    const { make } = explorer;
    this.model = model;
    this.actions = actions;
    this.live = live;
    this.count = model.layers.length;
    this.legend = [["F", "F"], ["I", "I"], ["W", "W"], ["transfer", "a cut's bytes"]];
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.space = make("div", { className: "space" }, this.canvas);
    this.scroll = make("div", { className: `scroll${live ? "" : " still"}`, tabIndex: 0, role: "group", ariaLabel: "layers in order; their figures are in the table of layers" }, this.space);
    const zoom = (factor) => () => this.setRow(this.row * factor);
    root.append(
      make("h2", {}, `${this.count} layers`),
      make("div", { className: "tools" },
        make("button", { type: "button", onclick: zoom(1 / 1.5), ariaLabel: "smaller rows" }, "−"),
        make("button", { type: "button", onclick: zoom(1.5), ariaLabel: "larger rows" }, "+"),
        ...this.legend.map(([name, text]) => explorer.key(name, text)), explorer.savePictures(this, "layers")),
      this.scroll,
    );
    this.scroll.addEventListener("scroll", () => this.draw());
    this.scroll.addEventListener("pointermove", (event) => explorer.tip(event, this.held === null ? this.describe(this.rowAt(event)) : this.describeCut(this.held)));
    this.scroll.addEventListener("pointerleave", (event) => explorer.tip(event, ""));
    this.space.addEventListener("click", (event) => {
      if (live && event.target === this.canvas) actions.pin(this.order[this.rowAt(event)]);
    });
    this.row = Math.min(22, Math.max((innerHeight - 120) / this.count, 5));
    this.handles = [];
    this.held = null; // the cut that is dragged
  }
  // `before` is the state before the last change: its cuts are drawn as dashed lines.
  update(state, data, before) {
    this.before = before && before.cuts.join() !== state.cuts.join() ? before.cuts : [];
    this.order = state.layer_order || this.model.layers.map((_, i) => i);
    this.natural = !state.layer_order;
    this.state = state;
    this.data = data;
    this.longest = this.order.reduce((most, i) => Math.max(most, data.F[i] + data.I[i] + data.W[i]), 1);
    this.largest = data.cut.reduce((most, bytes) => Math.max(most, bytes), 1);
    this.legal = this.natural ? this.model.legal : this.order.map((_, i) => i).slice(1);
    this.pinned = new Set(state.constraints.map((text) => text.split(" on ")[0]));
    this.placeHandles();
    this.draw();
  }
  setRow(height) {
    const middle = (this.scroll.scrollTop + this.scroll.clientHeight / 2) / this.row;
    this.row = Math.min(40, Math.max(height, Math.min(2, (innerHeight - 120) / this.count)));
    this.placeHandles();
    this.scroll.scrollTop = middle * this.row - this.scroll.clientHeight / 2;
    this.draw();
  }
  rowAt(event) {
    const y = event.clientY - this.scroll.getBoundingClientRect().top + this.scroll.scrollTop - this.scroll.clientTop;
    return Math.min(this.count - 1, Math.max(0, Math.floor(y / this.row)));
  }
  describe(row) {
    const i = this.order[row], layer = this.model.layers[i], { data } = this, { ms, mib } = explorer;
    if (data.isKnown === false) return layer.name;
    const sent = row + 1 < this.count && this.natural ? `\na cut behind it sends ${mib(data.cut[row + 1])}` : "";
    return `${layer.name} (${layer.kind})\nF ${ms(data.F[i])}, I ${ms(data.I[i])}, W ${ms(data.W[i])}\n` +
      `parameters ${mib(data.params[i])}, stash ${mib(data.stash[i])}${sent}` + (this.live ? "\nclick to pin it to its stage's devices for “best”" : "");
  }
  // What the two stages at a cut have, and what it sends.
  describeCut(index) {
    const { cuts } = this.state, bounds = [0, ...cuts, this.count], { data, order } = this, { ms, mib } = explorer;
    const stage = (s) => {
      const own = order.slice(bounds[s], bounds[s + 1]), sum = (column) => own.reduce((total, i) => total + data[column][i], 0);
      return `stage ${s}: ${own.length} layers, F ${ms(sum("F"))}, I + W ${ms(sum("I") + sum("W"))}`;
    };
    const sent = this.natural ? `, sends ${mib(data.cut[cuts[index]])}` : "";
    return `cut before ${this.model.layers[order[cuts[index]]].name}${sent}\n${stage(index)}\n${stage(index + 1)}`;
  }
  placeHandles() {
    const { make } = explorer, { cuts } = this.state;
    this.space.style.height = `${this.count * this.row}px`;
    while (this.handles.length > cuts.length) this.handles.pop().remove();
    while (this.handles.length < cuts.length) {
      const handle = make("div", { className: "cut", ...(this.live ? { tabIndex: 0, role: "slider" } : { role: "img" }) }, make("span"));
      if (this.live) this.hold(handle, this.handles.length);
      this.handles.push(handle);
      this.space.append(handle);
    }
    this.scroll.classList.toggle("thin", cuts.length * 20 > this.count * this.row);
    this.handles.forEach((handle, index) => {
      const cut = cuts[index];
      handle.style.top = `${cut * this.row}px`;
      const name = `cut between stage ${index} and stage ${index + 1}`, place = `before ${this.model.layers[this.order[cut]].name}`;
      const slider = { label: name, valuemin: index ? cuts[index - 1] + 1 : 1, valuemax: (cuts[index + 1] || this.count) - 1, valuenow: cut, valuetext: place };
      for (const [key, value] of Object.entries(this.live ? slider : { label: `${name}, ${place}` })) handle.setAttribute(`aria-${key}`, value);
      handle.firstChild.textContent = this.natural && this.data.isKnown !== false ? `${index} | ${index + 1}  ${explorer.mib(this.data.cut[cut])}` : `${index} | ${index + 1}`;
    });
  }
  hold(handle, index) {
    handle.addEventListener("pointerdown", (event) => {
      this.held = index;
      handle.classList.add("held");
      handle.setPointerCapture(event.pointerId);
      event.preventDefault();
      handle.focus();
    });
    handle.addEventListener("pointermove", (event) => {
      if (this.held !== index) return;
      const box = this.scroll.getBoundingClientRect();
      if (event.clientY < box.top + 20) this.scroll.scrollTop -= 12;
      if (event.clientY > box.bottom - 20) this.scroll.scrollTop += 12;
      this.move(index, Math.round((event.clientY - box.top + this.scroll.scrollTop) / this.row), false);
    });
    for (const end of ["pointerup", "pointercancel"]) handle.addEventListener(end, () => {
      if (this.held === index) this.actions.cut(this.state.cuts, true);
      this.held = null;
      handle.classList.remove("held");
    });
    handle.addEventListener("keydown", (event) => {
      const by = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -this.count, End: this.count }[event.key];
      if (!by) return;
      event.preventDefault();
      this.move(index, this.state.cuts[index] + by, true, Math.sign(by));
    });
  }
  // Moves a cut to the nearest place that is allowed, between its neighbours.
  move(index, wanted, done, direction = 0) {
    const { cuts } = this.state, low = index ? cuts[index - 1] : 0, high = index + 1 < cuts.length ? cuts[index + 1] : this.count;
    const places = this.legal.filter((cut) => cut > low && cut < high && (!direction || Math.sign(cut - cuts[index]) === direction));
    if (!places.length) return;
    const place = places.reduce((best, cut) => (Math.abs(cut - wanted) < Math.abs(best - wanted) ? cut : best));
    if (place === cuts[index]) return;
    const moved = cuts.with ? cuts.with(index, place) : cuts.map((cut, i) => (i === index ? place : cut));
    this.state = { ...this.state, cuts: moved };
    this.placeHandles();
    this.draw();
    this.actions.cut(moved, done);
  }
  draw() {
    if (!this.state) return;
    const { row, scroll } = this, width = scroll.clientWidth, isSaved = !!this.canvas.saves;
    const isWhole = isSaved && this.count * row <= explorer.MAX_SAVED; // else what is seen
    const height = isWhole ? Math.ceil(this.count * row) : scroll.clientHeight, scrollTop = isWhole ? 0 : scroll.scrollTop; // read once: each reading may lay out the page
    const context = explorer.context(this.canvas, width, height), { colour } = explorer;
    const first = Math.floor(scrollTop / row), last = Math.min(this.count, Math.ceil((scrollTop + height) / row));
    const bounds = [0, ...this.state.cuts, this.count], y = (index) => index * row - scrollTop;
    const rails = 26, railsWidth = this.natural ? Math.min(48, 6 * (1 + Math.max(0, ...this.model.rails.map((r) => r[0])))) : 0;
    const left = rails + railsWidth + 4, bars = Math.round(width * 0.5), named = row >= 11, cutRoom = this.natural ? Math.round(width * 0.16) : 0;
    bounds.slice(1).forEach((end, stage) => {
      const top = y(bounds[stage]), bottom = y(end);
      if (bottom < 0 || top > height) return;
      context.fillStyle = colour(stage % 2 ? "band-b" : "band-a");
      context.fillRect(0, top, rails - 4, bottom - top);
      context.fillStyle = colour("text");
      const middle = Math.min(Math.max((Math.max(top, 0) + Math.min(bottom, height)) / 2, 8), height - 8);
      if (bottom - top > 11 && this.state.devices[stage].length) context.fillText(`${stage}${this.state.recompute[stage] ? "r" : ""}`, 3, middle);
    });
    if (this.natural) this.drawRails(context, rails, y, height);
    const fills = explorer.fills(context, ["F", "I", "W"]), colours = Object.fromEntries(["transfer", "accent", "text"].map((name) => [name, colour(name)]));
    for (let index = first; index < last; index++) {
      const i = this.order[index], top = y(index), thickness = Math.max(row - (row > 5 ? 2 : 0), 0.7);
      let x = named ? bars : left + 4;
      const room = width - x - cutRoom - 6;
      for (const phase of ["F", "I", "W"]) {
        const length = (this.data[phase][i] / this.longest) * room;
        context.fillStyle = fills[phase];
        context.fillRect(x, top + 1, length, thickness);
        x += length;
      }
      if (cutRoom && index + 1 < this.count) {
        context.fillStyle = colours.transfer;
        const sent = (this.data.cut[index + 1] / this.largest) * (cutRoom - 4);
        context.fillRect(width - 2 - sent, top + row - Math.max(1, row / 6), sent, Math.max(0.8, Math.min(4, row / 3)));
      }
      if (this.before.includes(index)) {
        context.fillStyle = colours.accent;
        for (let dash = rails; dash < width; dash += 9) context.fillRect(dash, top - 0.5, 5, 1);
      }
      if (named) {
        const { name } = this.model.layers[i];
        context.fillStyle = colours[this.pinned.has(name) ? "accent" : "text"];
        context.fillText(explorer.crop(context, (this.pinned.has(name) ? "● " : "") + name, bars - left - 6), left, top + row / 2);
      }
    }
    if (isSaved) this.drawCuts(context, y, width);
  }
  // The cuts of a saved picture; on the page they are elements of their own.
  drawCuts(context, y, width) {
    const { colour } = explorer, isThin = this.scroll.classList.contains("thin");
    this.handles.forEach((handle, index) => {
      const at = y(this.state.cuts[index]), text = handle.firstChild.textContent, needs = context.measureText(text).width + 9;
      context.fillStyle = colour("accent");
      context.fillRect(0, at - 1.5, width, 3);
      if (isThin) return;
      context.fillRect(width - 2 - needs, at - 8, needs, 16);
      context.fillStyle = colour("page");
      context.fillText(text, width + 2.5 - needs, at);
    });
  }
  // A line for each tensor, from the layer that makes it to the layer that uses it last.
  drawRails(context, left, y, height) {
    context.strokeStyle = explorer.colour("transfer");
    context.beginPath();
    for (const [rail, begin, end] of this.model.rails) {
      const top = y(begin + 0.5), bottom = y(end + 0.5), x = left + Math.min(rail, 7) * 6 + 2.5;
      if (bottom < 0 || top > height) continue;
      context.moveTo(x, Math.max(top, -9));
      context.lineTo(x, Math.min(bottom, height + 9));
      if (this.row >= 5) for (const end of [top, bottom]) {
        context.moveTo(x - 2, end);
        context.lineTo(x + 2, end);
      }
    }
    context.stroke();
  }
};

