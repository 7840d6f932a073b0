// Tables of stages, devices, actions and layers; that of stages is also a control.
"use strict";
explorer.stageTable = (root, state, answer, model, data, actions) => {
  const { make, ms, mib } = explorer, bounds = [0, ...state.cuts, model.layers.length];
  const order = state.layer_order || model.layers.map((_, i) => i);
  const busy = Object.fromEntries((answer.ranks || []).map((rank) => [rank.device, rank.busy]));
  const loads = state.devices.map((devices) => Math.max(0, ...devices.map((device) => busy[device] || 0))), longest = Math.max(1, ...loads);
  const hasGroups = (answer.exchange || []).some((share) => share !== null);
  const isLongest = (s) => loads[s] === longest && loads.length > 1;
  root.style.setProperty("--longest", longest); // a new longest stage changes the bars of all, but no row has to be made anew
  const row = (s) => {
    const devices = state.devices[s], own = order.slice(bounds[s], bounds[s + 1]), sum = (column) => own.reduce((total, i) => total + data[column][i], 0);
    const times = data.isKnown === false ? ["", "", ""] : [ms(sum("F")), ms(sum("I") + sum("W")), mib(sum("params"))];
    const sends = s + 1 < state.devices.length && !state.layer_order && data.isKnown !== false ? mib(data.cut[bounds[s + 1]]) : "";
    const last = hasGroups ? [sends, answer.exchange[s] === null ? "" : explorer.percent(answer.exchange[s])] : [sends];
    const facts = [devices, state.recompute[s], own.length, own[0], own[own.length - 1], loads[s], isLongest(s), times, last];
    return { key: JSON.stringify(facts), make: () => made(s, own, times, last) };
  };
  const made = (s, own, times, last) => {
    const names = state.devices[s].join(", "), name = (i) => explorer.nameCell(model.layers[i].name);
    const recompute = make("input", { type: "checkbox", checked: state.recompute[s], disabled: !actions, ariaLabel: `stage ${s} recomputes its forward` });
    const place = actions ? make("input", { type: "text", value: names, ariaLabel: `devices of stage ${s}` }) : explorer.nameCell(names);
    if (actions) {
      recompute.addEventListener("change", () => actions.recompute(s, recompute.checked));
      place.addEventListener("change", () => actions.place(s, place.value));
    }
    const load = make("span", { className: "bar" }, make("i", { style: `width:calc(100% * ${loads[s]} / var(--longest)); background-color: var(--F)` }));
    return { now: isLongest(s), cells: [String(s), String(own.length), name(own[0]), name(own[own.length - 1]), actions ? { cell: place } : place, { cell: recompute }, loads[s] ? { cell: load, title: "busy in a step" } : "", loads[s] ? ms(loads[s]) : "", ...times, ...last] };
  };
  explorer.updateTable(root, "Stages", ["stage", "layers>", "first", "last", "devices", "recompute", "busy", "in a step>", "F a micro-batch>", "I + W>", "parameters>", "sends>", ...(hasGroups ? ["members exchange>"] : [])], state.devices.map((_, s) => row(s)));
};

explorer.deviceTable = (root, answer, rows) => {
  const { make, ms, mib, percent } = explorer, step = Math.max(answer.step, 1);
  const fill = { "before its first action": "band-b", transfer: "transfer", "another stage": "I", "after its last action": "fixed", "no stage": "band-a" };
  const shown = new Map(rows.map((row) => [row.rank, row])), folded = new Set(rows.flatMap((row) => row.ranks.slice(1)));
  const cells = answer.ranks.map((rank, index) => {
    if (folded.has(index)) return null;
    const causes = Object.entries(rank.causes).filter(([, ns]) => ns > 0).sort((a, b) => b[1] - a[1]);
    const part = (ns, name, title) => make("i", { title: `${title}: ${ms(ns)}`, className: explorer.STRIPES[name] ? `stripes${explorer.STRIPES[name]}` : "", style: `width:${(100 * ns) / step}%; background-color: var(--${name})` });
    const bar = make("span", { className: "bar" }, part(rank.busy, "F", "busy"), ...causes.map(([name, ns]) => part(ns, fill[name], name)), part(rank.sync, "sync", "sync"));
    const lack = rank.peak - rank.limit, row = shown.get(index);
    const hosts = [...new Set((row ? row.ranks : [index]).map((one) => answer.ranks[one].host))].join(", ");
    const name = { cell: explorer.name(row ? explorer.rowLabel(row, answer) : rank.device), title: row ? explorer.rowTitle(row, answer) : rank.device };
    const memory = make("span", { className: "bar short" }, make("i", { style: `width:${Math.min(100, (100 * rank.peak) / Math.max(rank.limit, 1))}%; background-color: var(--${lack > 0 ? "alarm" : "stash"})` }));
    const why = causes.slice(0, 2).map(([cause, ns]) => `${cause} ${ms(ns)}`).join(", ");
    const kind = rank.members.length ? { cell: `${rank.kind}, ${rank.members.length} members`, title: rank.members.join(", ") } : rank.kind;
    return { cells: [name, kind, hosts, String(rank.speed), { cell: bar }, ms(rank.busy), ms(rank.sync), ms(rank.idle), percent(rank.idle / step), { cell: why, className: "words" }, { cell: memory }, mib(rank.peak), mib(rank.limit), lack > 0 ? { cell: `lacks ${mib(lack)}`, className: "alarm" } : "yes"] };
  }).filter(Boolean);
  explorer.replace(root, ...explorer.table("Devices, and why they are idle", ["device", "kind", "host", "speed>", "a step", "busy>", "sync>", "idle>", "idle share>", "longest causes", "memory", "peak>", "limit>", "fits"], cells),
    make("div", { className: "tools keys" }, explorer.key("F", "busy"), explorer.key("sync", "sync: waits for an all-reduce"), ...Object.entries(fill).map(([name, colour]) => explorer.key(colour, `idle: ${name}`))));
};

// The actions of a timeline as a table, for those who cannot see the picture; made when it is opened,
// and again a moment after the picture was drawn.
explorer.MAX_ROWS = 2000;
explorer.actionTable = (view) => {
  const { make, ms } = explorer, inside = make("div"), details = make("details", {}, make("summary", {}, "The actions as a table"), inside);
  const fill = () => {
    if (!details.open) return;
    const seen = view.rows.flatMap((row) => row.spans.start.map((start, i) => ({ row, i, start, end: row.spans.end[i] })).filter((one) => one.end >= view.axis.from && one.start <= view.axis.to));
    const rows = seen.slice(0, explorer.MAX_ROWS).map(({ row, i, start, end }) => ({ cells: [explorer.rowLabel(row, view.answer) + (row.isMeasured ? ", measured" : ""), explorer.PHASES[row.spans.phase[i]], String(row.spans.stage[i]), String(row.spans.microbatch[i]), ms(start), ms(end - start)] }));
    const title = seen.length > rows.length ? `The first ${rows.length} of ${seen.length} actions in the part that is shown; zoom in for others` : "Actions in the part that is shown";
    explorer.replace(inside, ...explorer.table(title, ["device", "action", "stage>", "micro-batch>", "begins>", "takes>"], rows));
  };
  details.addEventListener("toggle", fill);
  let later = 0;
  details.drawn = () => {
    clearTimeout(later);
    if (details.open) later = setTimeout(fill, 200);
  };
  return details;
};

// The figures of the picture of the layers; what is drawn of a closed panel is drawn when it is opened.
explorer.LayerTable = class {
  // `pin(layer)` is called when a layer is pinned or let go; null if none can be.
  constructor(root, model, pin) {
    const { make } = explorer;
    Object.assign(this, { root, model, pin });
    this.search = make("input", { type: "search", placeholder: "name or kind", oninput: () => this.draw() });
    this.place = make("div");
    root.append(make("label", {}, "find layers", this.search), this.place);
  }
  update(data, state) {
    const key = JSON.stringify([state && state.constraints, state && state.layer_order]);
    if (data === this.data && key === this.key) return;
    Object.assign(this, { data, key, isStale: true });
    this.order = (state && state.layer_order) || this.model.layers.map((_, i) => i);
    this.isNatural = !(state && state.layer_order);
    this.pinned = new Set(state ? state.constraints.map((text) => text.split(" on ")[0]) : []);
    this.open();
  }
  open() {
    if (this.isStale && !this.root.hidden) this.draw();
  }
  draw() {
    const { ms, mib } = explorer, { model, data, order } = this, wanted = this.search.value.toLowerCase();
    const rows = order.map((i, at) => ({ layer: model.layers[i], i, at })).filter(({ layer }) => `${layer.name} ${layer.kind}`.toLowerCase().includes(wanted)).map(({ layer, i, at }) => ({ cells: [
      String(at), explorer.nameCell(layer.name), explorer.nameCell(layer.kind), ms(data.F[i]), ms(data.I[i]), ms(data.W[i]), mib(data.params[i]), mib(data.stash[i]),
      this.isNatural && at + 1 < order.length ? mib(data.cut[at + 1]) : "", ...(this.pin ? [{ cell: this.pinBox(i, layer) }] : [])] }));
    this.isStale = false;
    explorer.replace(this.place, ...explorer.table(`${rows.length} of ${order.length} layers`, ["number>", "layer", "kind", "F>", "I>", "W>", "parameters>", "stash>", "a cut behind it sends>", ...(this.pin ? ["pinned"] : [])], rows));
  }
  pinBox(i, layer) {
    return explorer.make("input", { type: "checkbox", checked: this.pinned.has(layer.name), ariaLabel: `pin ${layer.name} to the devices of its stage`, onchange: () => this.pin(i) });
  }
};

// The actions whose measured time differs most from the predicted one.
explorer.WORST = 10;
// What it tells that nine of ten actions took at least `low` times as long as predicted, and nine of ten at most `high` times.
explorer.hintOf = (low, high) => {
  if (low <= 1.3) return "";
  return ` ${high <= 1.5 * low ? "Most actions were slower by much the same" : "Nine of ten actions were slower, by very different factors"}: this machine was busy, or the profile is of another one.`;
};
explorer.differenceTable = (root, answer, index = 0) => {
  const measured = answer.measured[index], { make, ms } = explorer;
  const all = explorer.differences(answer.timeline, measured.timeline), ratio = (one) => one.measured / Math.max(one.predicted, 1);
  const ratios = all.map(ratio).sort((a, b) => a - b), middle = ratios[ratios.length >> 1] || 0, low = ratios[Math.floor(ratios.length / 10)] || 0, high = ratios[Math.floor((ratios.length * 9) / 10)] || 0;
  const worst = [...all].sort((a, b) => Math.abs(b.measured - b.predicted) - Math.abs(a.measured - a.predicted)).slice(0, explorer.WORST);
  const rows = worst.map((one) => ({ cells: [one.name, answer.ranks[one.rank].device, explorer.PHASES[one.name.match(/[FBIW]/)[0]], ms(one.predicted), ms(one.measured), explorer.signed(ms(one.measured - one.predicted), one.measured - one.predicted), ratio(one).toFixed(2), explorer.signed(ms(one.began - one.start), one.began - one.start)] }));
  const words = `${measured.title}: the step took ${ms(measured.timeline.length)}, predicted ${ms(answer.step)} (${(measured.timeline.length / Math.max(answer.step, 1)).toFixed(2)} times as long). The median action took ${middle.toFixed(2)} times as long as predicted, eight of ten between ${low.toFixed(2)} and ${high.toFixed(2)}.`;
  root.replaceChildren(...explorer.table(`The ${rows.length} largest differences of ${all.length} actions`, ["action", "device", "phase", "predicted>", "measured>", "difference>", "times>", "began later by>"], rows));
  root.firstChild.after(make("p", {}, words + explorer.hintOf(low, high)));
};
