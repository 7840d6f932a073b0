// What is computed in the background: the best plan, the Pareto front, what-if curves, and the explanation of a plan.
"use strict";
explorer.AXES = {
  link: { name: "bandwidth of the links, times the given one", short: "bandwidth of the links", words: (value) => `× ${explorer.number(value)}`, log: true },
  devices: { name: "number of devices", short: "number of devices", words: (value) => String(Math.round(value)) },
  memory: { name: "memory of every device", short: "memory", words: (value) => explorer.mib(value) },
  minibatch: { name: "mini-batch", short: "mini-batch", words: (value) => String(Math.round(value)), log: true },
  latency: { name: "latency of the links, times the given one", short: "latency of the links", words: (value) => `× ${explorer.number(value)}`, log: true },
};

explorer.Analyses = class {
  // `page` has: live, fixedExchange (what other links do not change, "" without groups), ask(name, body), state(), settings(), progress(text), complain(text), choose(state, name),
  // canShow(state), best(state, from).
  constructor(page, kept) {
    const { make } = explorer;
    this.page = page;
    this.kept = kept;
    this.run = 0;
    this.running = null;
    this.buttons = new Map();
    const at = (id) => document.getElementById(id);
    this.front = new explorer.Chart("front", (point) => page.choose(point.state, point.name));
    this.frontTable = make("div");
    at("front").append(make("h2", {}, "Time, memory and devices"),
      make("p", { className: "why" }, "The Pareto front: no plan that was found is better than one of these in step time, peak memory and number of devices at once. Choose a point to see its plan."),
      this.button("front", "compute the front", () => this.computeFront()), this.front.element, this.frontTable);
    this.curve = new explorer.Chart("curve", (point) => page.choose(point.state, point.name));
    this.curveTable = make("div");
    this.axis = make("select", { ariaLabel: "what is varied", onchange: () => this.drawCurve() }, ...Object.entries(explorer.AXES).filter(([name]) => page.live || kept[name]).map(([value, axis]) => make("option", { value }, axis.short)));
    this.resources = make("p", { className: "why" });
    at("whatif").append(make("h2", {}, "What if"),
      make("p", { className: "why" }, "The best plan at each value, everything else as on the page. The dashed line is the plan of the page, unchanged." + (page.fixedExchange ? ` Of other links: ${page.fixedExchange}.` : "")),
      make("div", { className: "tools" }, this.axis, this.button("sweep", "compute this curve", () => this.computeCurve())), this.resources, this.curve.element, this.curveTable);
    this.sentences = make("dl", { className: "sentences" });
    this.changes = make("div");
    at("why").append(make("h2", {}, "Why this plan"), this.button("explain", "explain this plan", () => this.explain()), this.sentences, this.changes);
    this.drawFront();
    this.drawCurve();
  }
  button(kind, text, action) {
    const button = explorer.make("button", { type: "button", hidden: !this.page.live, onclick: () => (this.running === kind ? this.page.ask("stop") : action()) }, text);
    this.buttons.set(kind, [button, text]);
    return button;
  }
  // Begins a job and returns its result, null if another one began; `shown(status)` is called while it runs and returns
  // how far it is in words.
  async job(kind, extra, shown) {
    const { page } = this, run = ++this.run;
    page.complain("");
    const begun = await page.ask("begin", { state: page.state(), kind, ...page.settings(), ...extra });
    if (run !== this.run) return null;
    if (begun.error) return page.complain(begun.error), null;
    this.mark(kind);
    for (;;) {
      const status = await page.ask("status");
      if (run !== this.run) return null;
      if (!status.running) {
        this.mark(null);
        page.progress("");
        if (status.error) return page.complain(status.error), null;
        return status;
      }
      page.progress(shown(status));
      await new Promise((resolve) => setTimeout(resolve, 250));
    }
  }
  mark(kind) {
    this.running = kind;
    for (const [one, [button, text]] of this.buttons) button.textContent = one === kind ? "stop, and take what was found" : text;
  }
  async computeBest() {
    const from = this.page.state(), { ms, msDown, percentUp } = explorer;
    const found = await this.job("best", {}, (status) => (status.best ? `planning: ${explorer.counted(status.simulated, "plan")} simulated, best ${ms(status.best)}, no plan below ${msDown(status.bound)} (${percentUp(status.best / Math.max(status.bound, 1) - 1)} between them)` : "planning"));
    if (found) await this.page.best(found.state, from);
  }
  async computeFront() {
    const found = await this.job("front", {}, (status) => (status.devices ? `searching the front: plans on ${status.devices} devices with ${explorer.mib(status.limit)} each` : "searching the front"));
    if (!found) return;
    this.kept.front = found;
    this.drawFront();
  }
  async computeCurve() {
    const axis = this.axis.value;
    const found = await this.job("sweep", { axis }, (status) => {
      if (status.points && status.points.length) this.keepCurve(axis, status.points);
      return `planning: ${status.done || 0} of ${status.total || "?"} points`;
    });
    if (found) this.keepCurve(axis, found.points);
  }
  keepCurve(axis, points) {
    if (this.kept[axis] && this.kept[axis].points.length === points.length) return;
    this.kept[axis] = { axis, points };
    if (this.axis.value === axis) this.drawCurve();
  }
  async explain() {
    const found = await this.job("explain", {}, () => "explaining: planning again with more of each resource");
    if (!found) return;
    this.kept.explain = found;
    this.drawWhy();
  }
  choice(point, name, text = name) {
    const canBeChosen = this.page.canShow(point.state);
    return { cell: explorer.make("button", { type: "button", disabled: !canBeChosen, title: name, onclick: () => this.page.choose(point.state, name) }, explorer.name(text)) };
  }
  drawFront() {
    const { ms, mib } = explorer, points = this.kept.front ? this.kept.front.points : [];
    this.front.element.hidden = !points.length;
    if (!points.length) return;
    const named = points.map((point) => ({ ...point, name: `${explorer.counted(point.devices, "device")}, ${point.kind}` }));
    const shown = named.map((point) => ({ x: point.peak, y: point.step, label: String(point.devices), state: point.state, name: point.name, canBeChosen: this.page.canShow(point.state), text: `${point.name}\n${ms(point.step)}, ${mib(point.peak)} a device\nat most ${explorer.percentUp(point.gap)} above the best for them` }));
    this.front.update([{ points: shown, colour: "B" }],
      { x: { name: "peak memory of a device; labels: number of devices", words: mib, unit: 2 ** 20 }, y: { words: ms } }, `Pareto front of ${points.length} plans.`);
    const rows = named.map((point) => ({ cells: [this.choice(point, point.name), ms(point.step), mib(point.peak), String(point.devices), explorer.percentUp(point.gap)] }));
    this.frontTable.replaceChildren(...explorer.table("Plans on the front", ["plan", "step>", "peak of a device>", "devices>", "gap at most>"], rows));
  }
  drawCurve() {
    const { ms, mib, number } = explorer, name = this.axis.value || "link", axis = explorer.AXES[name], points = this.kept[name] ? this.kept[name].points : [];
    const found = points.filter((point) => point.step);
    this.curve.element.hidden = !found.length;
    this.curveTable.replaceChildren();
    if (!points.length) return;
    const rate = (ns, point) => (point.state.minibatch_size * 1e9) / Math.max(ns, 1), label = (point) => `${axis.short} ${axis.words(point.value)}`;
    const choice = (point) => this.choice(point, label(point), axis.words(point.value));
    const best = found.map((point) => ({ x: point.value, y: point.rate, label: point.isNewKind ? "∗" : "", state: point.state, name: label(point), canBeChosen: this.page.canShow(point.state), text: `${label(point)}\nbest: ${ms(point.step)}, ${number(point.rate)} samples/s\n${point.kind}${point.isNewKind ? " (another kind of plan)" : ""}` }));
    const same = found.filter((point) => point.same).map((point) => ({ x: point.value, y: rate(point.same, point), text: `${label(point)}\nthis plan: ${ms(point.same)}` }));
    this.curve.update([{ points: same, line: true, dash: [4, 3], colour: "transfer", name: "this plan" }, { points: best, line: true, colour: "B", name: "best plan" }],
      { x: { name: axis.name, words: axis.words, log: axis.log, values: found.map((point) => point.value) }, y: { words: (value) => `${number(value)}/s`, fromZero: true } }, `Samples per second of the best plan at ${found.length} values of the ${axis.short}.`);
    const rows = points.map((point) => ({ cells: point.step
      ? [choice(point), ms(point.step), number(point.rate), point.same ? ms(point.same) : "", mib(point.peak), point.kind + (point.isNewKind ? " ∗" : ""), explorer.percentUp(point.gap)]
      : [axis.words(point.value), "", "", "", "", { cell: point.whyNot, className: "words" }, ""] }));
    this.curveTable.replaceChildren(...explorer.table(`Best plans over the ${axis.short}; ∗: another kind than before`, [axis.short, "step>", "samples/s>", "this plan>", "peak>", "devices of each stage, schedule", "gap at most>"], rows));
  }
  showChanges(changes) {
    const { make } = explorer;
    this.changes.replaceChildren(make("h2", {}, "What the planner changed last"), make("ul", { className: "changes" }, ...changes.map((text) => make("li", {}, text))));
  }
  // Sentences beside what they speak of, as long as the plan is the one that was explained.
  drawWhy() {
    const { kept, page } = this, isOf = kept.explain && JSON.stringify(kept.explain.of) === JSON.stringify(page.state()), why = isOf ? kept.explain.why : {};
    for (const place of document.querySelectorAll("[data-why]")) place.textContent = place.dataset.why.split(",").map((topic) => why[topic] || "").join(" ");
    this.resources.textContent = why.resources || "";
    this.sentences.replaceChildren(...Object.entries(why).flatMap(([topic, text]) => [explorer.make("dt", {}, topic), explorer.make("dd", {}, text)]));
  }
  draw() {
    this.front.draw();
    this.curve.draw();
    this.drawWhy();
  }
};
