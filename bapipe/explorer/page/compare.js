// The plans that were tried, and two of them side by side.
"use strict";
explorer.triedTable = (root, tried, now, actions) => {
  const { make, ms, mib, number } = explorer, listed = tried.filter((entry) => entry.name), first = listed[0] && listed[0].figures && listed[0].figures.rate;
  const fastest = Math.max(...listed.filter((entry) => entry.figures && entry.figures.fits).map((entry) => entry.figures.rate)); // mini-batches may differ
  const rows = listed.map((entry) => {
    const index = tried.indexOf(entry), figures = entry.figures || {};
    const go = make("button", { type: "button", ariaCurrent: index === now ? "true" : "false", title: entry.name, onclick: () => actions.show(index) }, explorer.name(entry.name));
    const mark = make("input", { type: "checkbox", checked: !!entry.marked, ariaLabel: `compare ${entry.name}`, onchange: () => actions.mark(index, mark.checked) });
    const against = first && figures.rate && figures.rate !== first ? explorer.percentChange(first / figures.rate - 1) : "";
    const fits = figures.fits ? (figures.rate === fastest ? "fastest" : "") : { cell: "does not fit", className: "alarm" };
    const shown = !entry.figures ? ["", "", "", "", "", "not simulated yet"] : figures.error ? ["", "", "", "", "", { cell: figures.error, className: "words alarm" }] : [ms(figures.step), number(figures.rate), against, mib(figures.peak), explorer.percentUp(figures.gap), fits];
    return { now: index === now, cells: [{ cell: mark }, { cell: go }, entry.state.schedule, String(entry.state.cuts.length + 1), `${entry.state.minibatch_size / entry.state.microbatch_size} of ${entry.state.microbatch_size}`, ...shown] };
  });
  explorer.replace(root, ...explorer.table("Plans tried", ["compare", "plan", "schedule", "stages>", "micro-batches>", "step>", "samples/s>", "against the first>", "peak>", "above the bound>", "remark"], rows),
    make("p", { className: "why" }, "Mark two plans to see them side by side."));
};

// Two plans side by side: figures, stages, and both timelines on one axis; what differs is marked.
explorer.Compared = class {
  constructor(root) {
    this.root = root;
    this.axis = new explorer.Axis(() => this.timelines.forEach((view) => view.draw()));
    this.figures = explorer.make("div");
    this.words = explorer.make("ul", { className: "changes" });
    this.places = [explorer.make("div"), explorer.make("div")];
    root.append(this.figures, this.words, ...this.places);
    this.timelines = this.places.map((place, i) => new explorer.Timeline(place, this.axis, { small: true, name: `timeline-${i}`, title: "" }));
    root.hidden = true;
  }
  show(pair, words, model) {
    this.root.hidden = !pair;
    if (!pair) return;
    this.figures.replaceChildren(...this.tables(pair, model));
    this.words.replaceChildren(...words.map((text) => explorer.make("li", {}, text)));
    const length = Math.max(...pair.map((one) => one.answer.timeline.length));
    this.axis.setStep(length);
    this.axis.from = 0;
    this.axis.to = length;
    pair.forEach((one, i) => {
      const ranks = Object.fromEntries(one.answer.ranks.map((rank, index) => [rank.device, index]));
      this.timelines[i].heading.textContent = `${one.name}: ${explorer.ms(one.answer.step)}`;
      this.timelines[i].update({ ...one.answer, measured: [] }, one.state.devices.map((group) => group.map((name) => ranks[name])));
    });
  }
  draw() {
    if (!this.root.hidden) this.timelines.forEach((view) => view.draw());
  }
  tables([a, b], model) {
    const { ms, mib, number, percent, percentUp } = explorer, peak = (one) => Math.max(...one.answer.ranks.map((rank) => rank.peak));
    const gap = (one) => (one.answer.bound.ns ? one.answer.step / one.answer.bound.ns - 1 : 0);
    const change = (x, y) => explorer.percentChange(x ? y / x - 1 : 0), more = (x, y) => explorer.signed(String(y - x), y - x);
    const points = (words, digits) => (x, y) => `${explorer.signed((parseFloat(words(y).replace(/,/g, "")) - parseFloat(words(x).replace(/,/g, ""))).toFixed(digits), y - x)} points`; // of the figures that are shown
    const lines = [
      ["step", ms, (one) => one.answer.step, change], ["samples/s", number, (one) => one.answer.rate, change], ["bubble", percent, (one) => one.answer.bubble, points(percent, 1)],
      ["largest peak", mib, peak, change], ["above the bound", percentUp, gap, points(percentUp, 2)], ["devices used", String, (one) => new Set(one.state.devices.flat()).size, more],
    ].map(([name, words, value, difference]) => {
      const [x, y] = [value(a), value(b)];
      return { cells: [name, words(x), words(y), x === y ? "equal" : { cell: difference(x, y), className: "differs" }] };
    });
    const settings = [["schedule", (one) => one.state.schedule], ["micro-batches", (one) => `${one.state.minibatch_size / one.state.microbatch_size} of ${one.state.microbatch_size}`]].map(([name, value]) => ({ cells: [name, value(a), value(b), value(a) === value(b) ? "equal" : { cell: "differs", className: "differs" }] }));
    const stage = (one, s) => {
      if (s >= one.state.devices.length) return "none";
      const bounds = [0, ...one.state.cuts, model.layers.length], order = one.state.layer_order || model.layers.map((_, i) => i);
      return `${model.layers[order[bounds[s]]].name} … ${model.layers[order[bounds[s + 1] - 1]].name} (${bounds[s + 1] - bounds[s]}), ${one.state.devices[s].join(", ")}${one.state.recompute[s] ? ", recomputes" : ""}`;
    };
    const stages = Array.from({ length: Math.max(a.state.devices.length, b.state.devices.length) }, (_, s) => {
      const [x, y] = [stage(a, s), stage(b, s)];
      return { cells: [`stage ${s}`, { cell: x, className: "words" }, { cell: y, className: "words" }, x === y ? "equal" : { cell: "differs", className: "differs" }] };
    });
    return explorer.table("Side by side", ["figure", a.name, b.name, "difference"], [...lines, ...settings, ...stages]);
  }
};
