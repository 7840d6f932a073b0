// The page: what its controls say, the requests to the server, and everything drawn again after an answer.
"use strict";
explorer.unpack = async (text) => {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
};

explorer.begin = async () => {
  const { make, ms, mib, number, percent } = explorer, at = (id) => document.getElementById(id);
  const given = await explorer.unpack(at("data").textContent), { live } = given;
  const layersOf = new Map(Object.entries(given.layers || {})), views = {};
  let model, state, answer, answered, layerData, past = [], future = [], tried = [], shown = 0, sizes = [], wanted = null, busy = false, controls = null;

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
  const progress = (text) => (at("progress").textContent = text);

  const figuresOf = (one) => {
    if (one.error) return { error: one.error };
    const used = one.ranks.filter((_, rank) => one.timeline.spans[rank].start.length), peak = Math.max(0, ...used.map((rank) => rank.peak));
    return { step: one.step, rate: one.rate, peak, full: Math.max(0, ...used.map((rank) => rank.peak / Math.max(rank.limit, 1))), gap: one.bound.ns ? one.step / one.bound.ns - 1 : 0, fits: used.every((rank) => rank.peak <= rank.limit) };
  };

  // One request at a time; while it is under way only the newest wish is kept. Plans whose wish was dropped are simulated
  // when nothing else is wanted, for their figures.
  const judge = async (detailed) => {
    wanted = { detailed: detailed || !!(wanted && wanted.detailed) };
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
      answer = await ask("judge", request);
      answered = request.state; // by now the page may be at another one
      const entry = request.detailed && tried.find((one) => one.state === request.state);
      if (entry) entry.figures = figuresOf(answer);
      draw(request.detailed);
      for (let left; !wanted && (left = tried.find((one) => !one.figures)); ) {
        left.figures = figuresOf(await ask("judge", { state: left.state, detailed: false }));
        drawTried();
      }
    }
    busy = false;
  };

  const draw = (detailed = true) => {
    layerData = (tried[shown] || {}).layers || layersOf.get(String(state.microbatch_size)) || layerData; // a plan of other profiles has its own
    if (layerData) views.layers.update(state, layerData, past.length ? past[past.length - 1] : null);
    if (layerData && layerData.isKnown !== false) views.layerTable.update(layerData, state);
    complain(answer.error);
    explorer.stageTable(at("stages"), state, answer, model, layerData, live ? { recompute: setRecompute, place: setPlace } : null);
    if (!answer.error) drawAnswer(detailed);
    if (detailed) drawTried();
    if (controls) controls.draw(answer, sizes, past.length > 0, future.length > 0);
  };
  const drawAnswer = (detailed) => {
    views.axis.setStep(Math.max(answer.timeline.length, ...(answer.measured || []).map((one) => one.timeline.length)));
    const ranks = Object.fromEntries(answer.ranks.map((rank, index) => [rank.device, index]));
    views.timeline.update(answer, answered.devices.map((group) => group.map((name) => ranks[name])));
    views.memory.update(answer, views.timeline.rows);
    drawFigures();
    views.timeline.heading.textContent = answer.orderOnly ? "The order of the actions, not to scale: without the profile their times are not known" : `One step${answer.drawn ? `: ${answer.drawn}` : ""}`;
    if (!detailed) return;
    explorer.deviceTable(at("devices"), answer, views.timeline.rows);
    views.tabs.show("measured", !!(answer.measured || []).length);
    if ((answer.measured || []).length) explorer.differenceTable(at("measured"), answer);
    drawOutput();
    views.analyses.drawWhy();
  };

  const drawFigures = () => {
    const found = figuresOf(answer), entry = (name, value, { alarm, share, title = "" } = {}) => make("div", { title, className: alarm ? "alarm" : "" }, make("dt", {}, name), make("dd", {}, value, ...(share === undefined ? [] : [make("span", { className: "gauge" }, make("i", { style: `width:${100 * Math.min(1, share)}%` }))])));
    if (answer.unjudged && answer.orderOnly) {
      at("figures").replaceChildren(entry("step", "not simulated"));
      at("bound").textContent = answer.unjudged;
      return;
    }
    const { ns, space = "", searched } = answer.bound, least = found.gap > 0 ? `takes less than ${explorer.msDown(ns)}` : "is faster";
    const proven = `No plan ${searched ? "of the searched space " : ""}${least}: ${space}${searched || !live ? "" : "; “best” proves more"}`;
    const bound = answer.unjudged ? `The file: ${answer.unjudged}. This page simulated it.` : ns ? proven : space;
    at("figures").replaceChildren(
      entry("step", ms(found.step)), entry("samples/s", number(answer.rate)), entry("bubble", percent(answer.bubble), { share: answer.bubble }),
      entry("peak memory", mib(found.peak) + (found.fits ? "" : ", does not fit"), { alarm: !found.fits, share: found.full, title: `the fullest device uses ${percent(found.full)} of its memory` }),
      entry("above the bound", answer.bound.ns ? (found.gap > 0 ? explorer.percentUp(found.gap) : "nothing") : "unknown", { share: answer.bound.ns ? found.gap : undefined, title: bound }));
    at("figures").dataset.step = answer.step;
    at("bound").textContent = at("bound").title = bound;
    document.body.classList.toggle("order", !!answer.orderOnly);
  };

  // A change that can be undone.
  const change = (changes, name) => {
    progress("");
    past.push(state);
    future = [];
    state = { ...state, ...changes };
    note(name);
    return judge(true);
  };
  const note = (name) => {
    tried.push({ name: `${tried.length}: ${name}`, state, figures: null });
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
  const orderOf = () => state.layer_order || model.layers.map((_, i) => i);
  let before = null;
  const moveCut = (cuts, done) => {
    before = before || state;
    state = { ...state, cuts };
    if (!done) return judge(false);
    const from = before;
    before = null;
    if (from.cuts.join() === cuts.join()) return (state = from);
    past.push(from);
    future = [];
    const moved = cuts.findIndex((cut, index) => cut !== from.cuts[index]);
    note(`cut ${moved} before ${model.layers[orderOf()[cuts[moved]]].name}`);
    return judge(true);
  };
  const pin = (layer) => {
    const { name } = model.layers[layer], stage = state.cuts.filter((cut) => cut <= orderOf().indexOf(layer)).length;
    if (/\s/.test(name)) return complain(`a layer whose name has a space cannot be pinned: ${name}`), views.layerTable.draw();
    const others = state.constraints.filter((text) => text.split(" on ")[0] !== name);
    const constraints = others.length < state.constraints.length ? others : [...others, `${name} on ${state.devices[stage].join(",")}`];
    return change({ constraints }, constraints.length > others.length ? `pin ${name}` : `unpin ${name}`);
  };
  const restage = async (changes, numStages, name) => {
    const found = await ask("stages", { state: { ...state, ...changes }, num_stages: numStages });
    if (!found.error) return change(found, name);
    complain(found.error);
    return controls.draw();
  };
  const setMinibatch = async (size) => {
    const found = await ask("sizes", { state: { ...state, minibatch_size: size } });
    if (!Array.isArray(found)) return complain(found.error);
    sizes = found;
    const nearest = found.reduce((best, one) => (Math.abs(one - state.microbatch_size) < Math.abs(best - state.microbatch_size) ? one : best));
    return change({ minibatch_size: size, microbatch_size: nearest }, `mini-batch ${size}`);
  };

  // Goes to a plan of the list, or to that of a point of a chart; a page without a server has the steps of some.
  const show = (index) => {
    shown = index;
    if (!live) {
      ({ state, answer } = tried[index]);
      answered = state;
      return draw();
    }
    past.push(state);
    future = [];
    state = tried[index].state;
    return judge(true);
  };
  const find = (wanted_) => tried.findIndex((entry) => entry.answer && JSON.stringify(entry.state) === JSON.stringify(wanted_));
  const choose = (to, name) => (live ? change(to, name) : show(find(to)));

  const drawTried = () => explorer.triedTable(at("tried"), tried, shown, {
    show,
    mark: (index, on) => {
      const marked = tried.filter((entry, i) => entry.marked && i !== index);
      marked.slice(0, on ? -1 : marked.length).forEach((entry) => on && (entry.marked = false)); // the newest two stay
      tried[index].marked = on;
      drawTried();
      compare(tried.filter((entry) => entry.marked));
    },
  });
  const compare = async (marked) => {
    if (marked.length !== 2) return views.compared.show(null);
    const answers = live ? await Promise.all(marked.map((entry) => ask("judge", { state: entry.state }))) : marked.map((entry) => entry.answer);
    const failed = answers.find((one) => one.error);
    if (failed) return complain(failed.error);
    const words = live ? await ask("compare", { before: marked[0].state, after: marked[1].state }) : given.changes || [];
    return views.compared.show(marked.map((entry, i) => ({ ...entry, answer: answers[i] })), Array.isArray(words) ? words : [], model);
  };

  const drawOutput = () => {
    const lines = answer.command || [];
    views.tabs.show("output", live || lines.length > 0);
    at("output").replaceChildren(make("h2", {}, "The same from the command line"),
      make("pre", {}, lines.length ? lines.join("\n") : "No command makes this plan: its cluster was changed, or its layers or actions have an order of their own. Save plan.json."));
  };
  const download = (kind) => async () => {
    const found = await ask("export", { state, kind, tried: tried.slice(-20).map((entry) => [entry.name, entry.state]) });
    if (found.error) complain(found.error);
    else explorer.save(found.name, found.text, { html: "text/html" }[kind] || "application/json");
  };
  const adoptBest = async (found, from) => {
    if (JSON.stringify(found) === JSON.stringify(from)) {
      await judge(true);
      return progress("no faster plan was found; the bound is that of the search");
    }
    const compared = await ask("compare", { before: from, after: found });
    await change(found, "best");
    views.analyses.showChanges(compared.error ? [] : compared);
    progress(compared.error ? "planned" : `the planner changed: ${compared.slice(0, 2).join("; ")}; all changes are under “Why”`);
    return null;
  };

  model = live ? await ask("model") : given.model;
  if (model.error) return complain(model.error);
  at("model").title = explorer.plain(model.model);
  at("model").replaceChildren(explorer.name(model.model));
  state = model.state;
  if (!live) tried = given.tried; // before the charts, whose points lead to these plans
  views.axis = new explorer.Axis(() => [views.timeline, views.memory].forEach((view) => view.draw()));
  const rowsChanged = () => {
    views.memory.update(answer, views.timeline.rows);
    explorer.deviceTable(at("devices"), answer, views.timeline.rows);
  };
  views.timeline = new explorer.Timeline(at("timeline"), views.axis, { rowsChanged });
  views.memory = new explorer.Memory(at("memory"), views.axis);
  views.layers = new explorer.Layers(at("layers"), model, { cut: moveCut, pin }, live);
  views.layerTable = new explorer.LayerTable(at("layer-table"), model, live ? pin : null);
  views.compared = new explorer.Compared(at("compared"));
  views.analyses = new explorer.Analyses({ live, fixedExchange: model.fixedExchange, ask, progress, complain, choose, state: () => state, settings: () => controls.settings(), canShow: (one) => live || find(one) >= 0, best: adoptBest }, given.kept || {});
  const redraw = () => [views.layers, views.timeline, views.memory, views.compared, views.analyses].forEach((view) => view.draw());
  views.tabs = new explorer.Tabs(at("tabs"), () => {
    [views.compared, views.analyses].forEach((view) => view.draw());
    views.layerTable.open();
  });
  addEventListener("resize", redraw);
  for (const media of ["screen and (prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", redraw); // other colours and widths
  views.tabs.show("measured", false);
  if (live) {
    const page = { model, state: () => state, change, restage, setMinibatch, undo, redo, download, progress, best: () => (views.analyses.running === "best" ? ask("stop") : views.analyses.computeBest()), judged: (one) => ask("judge", { state: one, detailed: false }) };
    controls = new explorer.Controls(page);
    views.analyses.buttons.set("best", [controls.best, "best"]);
    const found = await ask("sizes", { state });
    if (Array.isArray(found)) sizes = found;
    note("start");
    await judge(true);
  } else {
    document.body.classList.add("still");
    for (const entry of tried) entry.figures = figuresOf(entry.answer);
    for (const name of ["front", "whatif", "why"]) views.tabs.show(name, Object.keys(given.kept || {}).some((kept) => (name === "whatif" ? kept in explorer.AXES : kept === { front: "front", why: "explain" }[name])));
    const size = Object.keys(given.layers || {})[0];
    layerData = layersOf.get(size);
    views.tabs.show("layer-table", layerData.isKnown !== false);
    if (layerData.isKnown !== false) views.layerTable.update(layerData, null);
    if (tried.length) show(0);
    else views.layers.update(state, layerData, null);
    document.body.classList.toggle("profile", !tried.length);
    document.querySelector(".skip").hidden = !tried.length;
    if (given.title) at("bound").textContent = given.title;
    for (const name of tried.length ? [] : ["stage-panel", "devices", "try-panel", "output"]) views.tabs.show(name, false);
    if (given.open) views.tabs.open(given.open);
    if (given.marked) {
      tried.slice(0, 2).forEach((entry) => (entry.marked = true));
      drawTried();
      compare(tried.slice(0, 2));
    }
    redraw();
  }
  return (document.body.dataset.ready = "yes");
};
explorer.begin();
