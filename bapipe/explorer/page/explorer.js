// The page: what its controls say, the requests to the server, and everything drawn again after an answer.
"use strict";
(() => {
  const { make, ms, mib, number, percent } = explorer;
  const given = JSON.parse(document.getElementById("data").textContent), live = given.live;
  const at = (id) => document.getElementById(id);
  let model, state, answer, layerData, past = [], future = [], tried = [], shown = 0, sizes = [], wanted = null, busy = false, searching = 0;
  const layersOf = new Map(Object.entries(given.layers || {}));
  const views = {}, controls = {};

  const ask = async (name, body = {}) => {
    try {
      const response = await fetch(name, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
      return response.ok ? await response.json() : { error: `the server answers ${response.status}` };
    } catch {
      return { error: "bapipe explore does not run any more: start it again" };
    }
  };
  const complain = (text) => {
    at("error").textContent = text || "";
    at("error").hidden = !text;
  };

  const figures = () => {
    if (answer.error) return { error: answer.error };
    const used = answer.ranks.filter((_, rank) => answer.timeline.spans[rank].start.length);
    return { step: answer.step, peak: Math.max(0, ...used.map((rank) => rank.peak)), gap: answer.bound.ns ? answer.step / answer.bound.ns - 1 : 0, fits: used.every((rank) => rank.peak <= rank.limit) };
  };

  // One request at a time; while it is under way only the newest wish is kept.
  const judge = async (detailed) => {
    wanted = { detailed: detailed || (wanted && wanted.detailed) };
    if (busy) return;
    busy = true;
    while (wanted) {
      const request = { state, detailed: wanted.detailed };
      wanted = null;
      const size = String(state.microbatch_size);
      if (!layersOf.has(size)) {
        const found = await ask("layers", { microbatch_size: state.microbatch_size });
        if (!found.error) layersOf.set(size, found);
      }
      const found = await ask("judge", request);
      answer = found;
      draw(request.detailed);
    }
    busy = false;
  };

  const draw = (detailed = true) => {
    layerData = layersOf.get(String(state.microbatch_size)) || layerData;
    if (layerData) views.layers.update(state, layerData);
    complain(answer.error);
    explorer.stageTable(at("stages"), state, answer, model, layerData, live ? { recompute: setRecompute, place: setPlace } : null);
    if (answer.error) return drawControls();
    views.axis.setStep(answer.step);
    const ranks = Object.fromEntries(answer.ranks.map((rank, index) => [rank.device, index]));
    views.timeline.stageRanks = state.devices.map((group) => group.map((name) => ranks[name]));
    views.timeline.update(answer);
    views.memory.update(answer);
    drawFigures();
    if (detailed) {
      explorer.deviceTable(at("devices"), answer);
      if (tried[shown]) tried[shown].figures = figures();
      drawTried();
      drawOutput();
    }
    drawControls();
  };

  const drawFigures = () => {
    const found = figures(), entry = (name, value, alarm) => make("div", {}, make("dt", {}, name), make("dd", { className: alarm ? "alarm" : "" }, value));
    at("figures").replaceChildren(
      entry("step", ms(found.step)), entry("samples/s", number(answer.rate)), entry("bubble", percent(answer.bubble)),
      entry("peak", mib(found.peak) + (found.fits ? "" : ": does not fit"), !found.fits),
      entry("above the bound", answer.bound.ns ? (found.gap ? percent(found.gap) : "nothing: optimal") : "unknown"));
    at("figures").dataset.step = answer.step;
    at("bound").textContent = `No plan takes less than ${ms(answer.bound.ns)}${answer.bound.searched ? "" : " (from the work alone; “best” proves more)"}: ${answer.bound.space}`;
  };

  // A change that can be undone.
  const change = (changes, name) => {
    past.push(state);
    future = [];
    state = { ...state, ...changes };
    note(name);
    judge(true);
  };
  const note = (name) => {
    tried.push({ name: `${tried.length}: ${name}`, state, figures: {} });
    shown = tried.length - 1;
  };
  const go = (to, from, onto) => {
    onto.push(from);
    state = to;
    const index = tried.findIndex((entry) => entry.state === state);
    if (index >= 0) shown = index;
    judge(true);
  };
  const undo = () => past.length && go(past.pop(), state, future);
  const redo = () => future.length && go(future.pop(), state, past);

  const setRecompute = (stage, on) => change({ recompute: state.recompute.map((old, s) => (s === stage ? on : old)) }, `stage ${stage} ${on ? "recomputes" : "keeps"}`);
  const setPlace = (stage, text) => change({ devices: state.devices.map((old, s) => (s === stage ? text.split(",").map((name) => name.trim()).filter(Boolean) : old)) }, `stage ${stage} on ${text}`);
  let before = null;
  const moveCut = (cuts, done) => {
    before = before || state;
    state = { ...state, cuts };
    if (!done) return judge(false);
    if (before.cuts.join() === cuts.join()) {
      before = null;
      return;
    }
    past.push(before);
    future = [];
    const moved = cuts.findIndex((cut, index) => cut !== before.cuts[index]);
    note(`cut ${moved} before ${model.layers[(state.layer_order || model.layers.map((_, i) => i))[cuts[moved]]].name}`);
    before = null;
    judge(true);
  };
  const pin = (layer) => {
    const { name } = model.layers[layer], order = state.layer_order || model.layers.map((_, i) => i);
    const stage = state.cuts.filter((cut) => cut <= order.indexOf(layer)).length;
    if (/\s/.test(name)) return complain(`a layer whose name has a space cannot be pinned: ${name}`);
    const others = state.constraints.filter((text) => text.split(" on ")[0] !== name);
    const constraints = others.length < state.constraints.length ? others : [...others, `${name} on ${state.devices[stage].join(",")}`];
    change({ constraints }, constraints.length > others.length ? `pin ${name}` : `unpin ${name}`);
  };

  const restage = async (changes, numStages, name) => {
    const found = await ask("stages", { state: { ...state, ...changes }, num_stages: numStages });
    if (found.error) {
      complain(found.error);
      drawControls();
    } else change(found, name);
  };

  const drawControls = () => {
    if (!live) return;
    controls.undo.disabled = !past.length;
    controls.redo.disabled = !future.length;
    const set = (control, value) => document.activeElement !== control && (control.value = value);
    set(controls.schedule, state.schedule);
    set(controls.stages, state.cuts.length + 1);
    set(controls.minibatch, state.minibatch_size);
    set(controls.devices, state.num_devices);
    set(controls.bandwidth, Math.log2(state.bandwidth));
    set(controls.latency, state.latency ? Math.log2(state.latency) : -6);
    controls.bandwidthText.textContent = `bandwidth × ${number(state.bandwidth)}`;
    controls.latencyText.textContent = `latency × ${number(state.latency)}`;
    set(controls.memory, state.memory_bytes ? state.memory_bytes / 2 ** 20 : "");
    const names = (answer.ranks || []).map((rank) => rank.device);
    if (names.length && names.join() !== [...controls.slow.options].map((o) => o.value).join()) controls.slow.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    const factor = state.speeds[controls.slow.value] || 1;
    set(controls.speed, Math.log2(factor));
    controls.speedText.textContent = `its speed × ${number(factor)}`;
    const options = sizes.includes(state.microbatch_size) ? sizes : [...sizes, state.microbatch_size];
    controls.microbatch.replaceChildren(...options.map((size) => make("option", { value: size, selected: size === state.microbatch_size }, `${size}`)));
  };

  const drawTried = () => {
    const marked = tried.filter((entry) => entry.marked);
    explorer.triedTable(at("tried"), tried, shown, {
      show: (index) => {
        if (!live) {
          shown = index;
          ({ state, answer } = tried[index]);
          return draw();
        }
        past.push(state);
        future = [];
        state = tried[index].state;
        shown = index;
        judge(true);
      },
      mark: (index, on) => {
        tried[index].marked = on;
        drawTried();
      },
      compare: live,
      compared: live ? [make("button", { type: "button", disabled: marked.length !== 2, onclick: () => compare(...marked) }, "compare the two marked plans"), views.compared] : [],
    });
  };
  const compare = async (a, b) => {
    const found = await ask("compare", { before: a.state, after: b.state });
    views.compared.textContent = found.error || `${a.name} -> ${b.name}\n${found.join("\n")}`;
    views.compared.hidden = false;
  };

  const drawOutput = () => {
    const lines = answer.command || [];
    at("output").replaceChildren(make("h2", {}, "The same from the command line"),
      make("pre", {}, lines.length ? lines.join("\n") : "No command makes this plan: its cluster was changed, or its order has no name. Download plan.json."));
  };

  const save = (name, content, type = "application/octet-stream") => {
    const url = content instanceof Blob ? URL.createObjectURL(content) : URL.createObjectURL(new Blob([content], { type }));
    make("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  };
  const download = (kind) => async () => {
    const found = await ask("export", { state, kind, tried: tried.slice(-20).map((entry) => [entry.name, entry.state]) });
    if (found.error) complain(found.error);
    else save(found.name, found.text, { html: "text/html", svg: "image/svg+xml" }[kind] || "application/json");
  };
  const picture = (canvas, name) => {
    const copy = make("canvas", { width: canvas.width, height: canvas.height }), context = copy.getContext("2d");
    context.fillStyle = explorer.colour("page");
    context.fillRect(0, 0, copy.width, copy.height);
    context.drawImage(canvas, 0, 0);
    copy.toBlob((blob) => save(name, blob));
  };

  const search = async () => {
    if (searching) {
      searching = 0;
      controls.best.textContent = "best";
      at("progress").textContent = "search stopped";
      return ask("cancel");
    }
    const number = (searching = Date.now()), from = state;
    const choice = controls.searched.value;
    const schedules = choice === "this" && model.schedules.includes(state.schedule) ? [state.schedule] : choice === "all" ? model.schedules.filter((name) => name !== "fbp-as") : ["1f1b", "gpipe"];
    const begun = await ask("search", { state, schedules, seconds: Math.max(1, Number(controls.seconds.value) || 20) });
    if (begun.error) {
      searching = 0;
      return complain(begun.error);
    }
    controls.best.textContent = "stop";
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, 300));
      if (searching !== number) return;
      const status = await ask("status");
      if (searching !== number) return;
      if (status.running) {
        at("progress").textContent = status.best ? `planning: ${status.simulated} plans simulated, best ${ms(status.best)}, no plan below ${ms(status.bound)} (${percent(status.best / Math.max(status.bound, 1) - 1)} between them)` : "planning";
        continue;
      }
      searching = 0;
      controls.best.textContent = "best";
      at("progress").textContent = status.error ? "" : "planned";
      if (status.error) return complain(status.error);
      const compared = await ask("compare", { before: from, after: status.state });
      if (!compared.error) at("progress").textContent = `the planner changed: ${compared.join("; ")}`;
      return change(status.state, "best");
    }
  };

  const refreshSizes = async () => {
    const found = await ask("sizes", { state });
    if (Array.isArray(found)) sizes = found;
    return found;
  };

  const setMinibatch = async (value) => {
    const size = Math.max(1, Math.round(Number(value) || 1)), found = await ask("sizes", { state: { ...state, minibatch_size: size } });
    if (!Array.isArray(found)) return complain(found.error);
    sizes = found;
    const nearest = found.reduce((best, one) => (Math.abs(one - state.microbatch_size) < Math.abs(best - state.microbatch_size) ? one : best));
    change({ minibatch_size: size, microbatch_size: nearest }, `mini-batch ${size}`);
  };

  const buildControls = () => {
    const button = (name, text, action, main) => (controls[name] = make("button", { type: "button", onclick: action, className: main ? "main" : "" }, text));
    const labelled = (text, ...parts) => make("label", {}, text, ...parts);
    const input = (name, attributes, changed) => (controls[name] = make("input", { ...attributes, onchange: (event) => changed(event.target.value) }));
    const choice = (name, values, changed) => (controls[name] = make("select", { onchange: (event) => changed(event.target.value) }, ...values.map(([value, text]) => make("option", { value }, text))));
    at("toolbar").append(
      button("undo", "undo", undo), button("redo", "redo", redo), button("best", "best", search, true),
      labelled("searches", choice("searched", [["usual", "1f1b, gpipe"], ["this", "this schedule"], ["all", "all schedules"]], () => {})),
      labelled("for at most, s", input("seconds", { type: "number", min: 1, value: 20 }, () => {})),
      button("plan", "plan.json", download("plan")), button("cluster", "cluster.json", download("cluster")), button("html", "page", download("html")), button("svg", "SVG", download("svg")),
      button("png", "PNG", () => (picture(views.timeline.canvas, "timeline.png"), picture(views.memory.canvas, "memory.png"))));
    const log = { type: "range", min: -6, max: 6, step: 0.25 }, text = (name, words) => (controls[name] = make("span", {}, words));
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("controls").append(
      labelled("schedule", choice("schedule", model.schedules.concat(model.schedules.includes(state.schedule) ? [] : [state.schedule]).map((name) => [name, name]), async (schedule) => {
        const found = await ask("judge", { state: { ...state, schedule }, detailed: false });
        if (found.error) restage({ schedule }, null, schedule);
        else change({ schedule }, schedule);
      })),
      labelled("stages", input("stages", { type: "number", min: 1 }, (value) => restage({}, Math.max(1, Number(value) || 1), `${value} stages`))),
      labelled("micro-batch", choice("microbatch", [], (value) => change({ microbatch_size: Number(value) }, `micro-batches of ${value}`))),
      labelled("mini-batch", input("minibatch", { type: "number", min: 1 }, setMinibatch)),
      labelled("devices", input("devices", { type: "number", min: 1, max: 256 }, (value) => restage({ num_devices: Math.min(256, Math.max(1, Number(value) || 1)) }, null, `${value} devices`))),
      labelled(text("bandwidthText", "bandwidth"), input("bandwidth", { ...log }, (value) => change({ bandwidth: 2 ** Number(value) }, `bandwidth × ${number(2 ** value)}`))),
      labelled(text("latencyText", "latency"), input("latency", { ...log }, (value) => change({ latency: 2 ** Number(value) }, `latency × ${number(2 ** value)}`))),
      labelled("device", choice("slow", [], drawControls)),
      labelled(text("speedText", "its speed"), input("speed", { ...log, min: -3, max: 3 }, (value) => {
        const { [controls.slow.value]: _, ...speeds } = state.speeds;
        change({ speeds: Number(value) ? { ...speeds, [controls.slow.value]: 2 ** Number(value) } : speeds }, `${controls.slow.value} × ${number(2 ** value)}`);
      })),
      labelled("memory limit, MiB", input("memory", { type: "number", min: 1, placeholder: "as given" }, (value) => change({ memory_bytes: value ? Math.max(1, Math.round(Number(value) * 2 ** 20)) : null }, value ? `${value} MiB` : "memory as given"))));
    document.addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.target.matches("input")) return;
      const key = event.key.toLowerCase();
      if (key !== "z" && key !== "y") return;
      event.preventDefault();
      if (key === "y" || event.shiftKey) redo();
      else undo();
    });
  };

  const begin = async () => {
    model = live ? await ask("model") : given.model;
    if (model.error) return complain(model.error);
    at("model").textContent = model.model;
    views.axis = new explorer.Axis(() => {
      views.timeline.draw();
      views.memory.draw();
    });
    views.timeline = new explorer.Timeline(at("timeline"), views.axis);
    views.memory = new explorer.Memory(at("memory"), views.axis);
    views.layers = new explorer.Layers(at("layers"), model, { cut: moveCut, pin }, live);
    views.compared = make("pre", { hidden: true });
    const redraw = () => [views.layers, views.timeline, views.memory].forEach((view) => view.draw());
    addEventListener("resize", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    if (live) {
      state = model.state;
      buildControls();
      await refreshSizes();
      note("start");
      await judge(true);
    } else {
      tried = given.tried;
      for (const entry of tried) {
        ({ state, answer } = entry);
        entry.figures = figures();
      }
      ({ state, answer } = tried[0]);
      draw();
    }
    document.body.dataset.ready = "yes";
  };
  begin();
})();
