// The controls above the pictures: the decisions of the plan, the cluster, the planner, and files to save.
"use strict";
explorer.Controls = class {
  // `page` has: model, state(), change(changes, name), restage(changes, numStages, name), setMinibatch(value), undo, redo,
  // best, download(kind), judged(state) (a promise), progress(text).
  constructor(page) {
    const { make, number, counted } = explorer, at = (id) => document.getElementById(id);
    this.page = page;
    const { model } = page;
    const button = (name, text, action, className = "") => (this[name] = make("button", { type: "button", onclick: action, className }, text));
    const labelled = (text, ...parts) => make("label", {}, text, ...parts);
    const group = (title, ...parts) => make("fieldset", {}, make("legend", {}, title), ...parts);
    const input = (name, attributes, changed) => (this[name] = make("input", { ...attributes, onchange: (event) => changed(event.target.value) }));
    const choice = (name, values, changed) => (this[name] = make("select", { onchange: (event) => changed(event.target.value) }, ...values.map(([value, text]) => make("option", { value }, text))));
    const log = { type: "range", min: -6, max: 6, step: 0.25 }, text = (name, words) => (this[name] = make("span", {}, words));
    // A field of a whole number. If another one is taken than was typed, it is put into the field, and a line says so.
    const whole = (name, most, words, changed) => input(name, { type: "number", min: 1, max: most }, async (typed) => {
      const value = Math.min(most, Math.max(1, Math.round(Number(typed) || 1)));
      this[name].value = value;
      await changed(value);
      if (Number(typed) !== value) page.progress(`${words}: ${typed || "what was typed"} is no whole number from 1 to ${number(most)}; ${value} was taken`);
    });
    at("toolbar").append(
      button("undo", "undo", page.undo), button("redo", "redo", page.redo),
      button("best", "best", page.best, "main"),
      labelled("searches", choice("searched", [["usual", "1f1b, gpipe"], ["this", "this schedule"], ["all", "all schedules"]], () => {})),
      labelled("for at most, s", whole("seconds", 1e6, "seconds", () => {})),
      make("span", { className: "saves" }, "save ", button("plan", "plan.json", page.download("plan")), button("cluster", "cluster.json", page.download("cluster")), button("html", "page", page.download("html"))));
    this.seconds.value = 20;
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("controls").append(
      group("plan",
        labelled("schedule", choice("schedule", model.schedules.concat(model.schedules.includes(page.state().schedule) ? [] : [page.state().schedule]).map((name) => [name, name]), (schedule) => this.setSchedule(schedule))),
        labelled("stages", whole("stages", 1e9, "stages", (value) => page.restage({}, value, counted(value, "stage")))),
        labelled("micro-batch", choice("microbatch", [], (value) => page.change({ microbatch_size: Number(value) }, `micro-batches of ${value}`))),
        labelled("mini-batch", whole("minibatch", 1e9, "mini-batch", page.setMinibatch))),
      group("cluster",
        labelled("devices", whole("devices", 256, "devices", (value) => page.restage({ num_devices: value }, null, counted(value, "device")))),
        labelled(text("bandwidthText", "bandwidth"), input("bandwidth", { ...log }, (value) => page.change({ bandwidth: 2 ** Number(value) }, `bandwidth × ${number(2 ** value)}`))),
        labelled(text("latencyText", "latency"), input("latency", { ...log }, (value) => page.change({ latency: 2 ** Number(value) }, `latency × ${number(2 ** value)}`))),
        labelled("device", choice("slow", [], () => this.draw())),
        labelled(text("speedText", "its speed"), input("speed", { ...log, min: -3, max: 3 }, (value) => this.setSpeed(Number(value)))),
        labelled("memory, MiB", input("memory", { type: "number", min: 1, placeholder: "as given" }, (value) => {
          if (!(value > 0)) this.memory.value = "";
          return page.change({ memory_bytes: value > 0 ? Math.max(1, Math.round(Number(value) * 2 ** 20)) : null }, value > 0 ? `${value} MiB` : "memory as given");
        }))));
    document.addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.target.matches("input")) return;
      const key = event.key.toLowerCase();
      if (key !== "z" && key !== "y") return;
      event.preventDefault();
      if (key === "y" || event.shiftKey) page.redo();
      else page.undo();
    });
  }
  async setSchedule(schedule) {
    const found = await this.page.judged({ ...this.page.state(), schedule });
    if (found.error) this.page.restage({ schedule }, null, schedule);
    else this.page.change({ schedule }, schedule);
  }
  setSpeed(power) {
    const { [this.slow.value]: _, ...speeds } = this.page.state().speeds;
    this.page.change({ speeds: power ? { ...speeds, [this.slow.value]: 2 ** power } : speeds }, `${this.slow.value} × ${explorer.number(2 ** power)}`);
  }
  // Which schedules are searched and for how long.
  settings() {
    const { model } = this.page, { schedule } = this.page.state();
    const schedules = this.searched.value === "this" && model.schedules.includes(schedule) ? [schedule] : this.searched.value === "all" ? ["all"] : ["1f1b", "gpipe"];
    return { schedules, seconds: Math.max(1, Number(this.seconds.value) || 20) };
  }
  draw(answer = this.answer, sizes = this.sizes, canUndo = !this.undo.disabled, canRedo = !this.redo.disabled) {
    const state = this.page.state(), { make, number } = explorer;
    Object.assign(this, { answer, sizes });
    this.undo.disabled = !canUndo;
    this.redo.disabled = !canRedo;
    const set = (control, value) => document.activeElement !== control && (control.value = value);
    set(this.schedule, state.schedule);
    set(this.stages, state.cuts.length + 1);
    set(this.minibatch, state.minibatch_size);
    set(this.devices, state.num_devices);
    set(this.bandwidth, Math.log2(state.bandwidth));
    set(this.latency, state.latency ? Math.log2(state.latency) : -6);
    this.bandwidthText.textContent = `bandwidth × ${number(state.bandwidth)}`;
    this.latencyText.textContent = `latency × ${number(state.latency)}`;
    set(this.memory, state.memory_bytes ? state.memory_bytes / 2 ** 20 : "");
    const names = (answer.ranks || []).map((rank) => rank.device);
    if (names.length && names.join() !== [...this.slow.options].map((o) => o.value).join()) this.slow.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    const factor = Object.hasOwn(state.speeds, this.slow.value) ? state.speeds[this.slow.value] : 1;
    set(this.speed, Math.log2(factor));
    this.speedText.textContent = `its speed × ${number(factor)}`;
    const options = sizes.includes(state.microbatch_size) ? sizes : [...sizes, state.microbatch_size];
    this.microbatch.replaceChildren(...options.map((size) => make("option", { value: size, selected: size === state.microbatch_size }, `${size}`)));
  }
};
