// Tables of stages, devices and tried plans; those of stages are also controls.
"use strict";
explorer.stageTable = (root, state, answer, model, data, actions) => {
  const { make, ms, mib } = explorer, bounds = [0, ...state.cuts, model.layers.length];
  const order = state.layer_order || model.layers.map((_, i) => i);
  const busy = Object.fromEntries((answer.ranks || []).map((rank) => [rank.device, rank.busy]));
  const rows = state.devices.map((devices, s) => {
    const own = order.slice(bounds[s], bounds[s + 1]), sum = (column) => own.reduce((total, i) => total + data[column][i], 0);
    const name = (i) => ({ cell: model.layers[i].name, className: "name", title: model.layers[i].name });
    const recompute = make("input", { type: "checkbox", checked: state.recompute[s], disabled: !actions, ariaLabel: `stage ${s} recomputes its forward` });
    const place = actions ? make("input", { type: "text", value: devices.join(", "), ariaLabel: `devices of stage ${s}` }) : devices.join(", ");
    if (actions) {
      recompute.addEventListener("change", () => actions.recompute(s, recompute.checked));
      place.addEventListener("change", () => actions.place(s, place.value));
    }
    const busiest = Math.max(0, ...devices.map((device) => busy[device] || 0));
    return { cells: [String(s), String(own.length), name(own[0]), name(own[own.length - 1]), { cell: place }, { cell: recompute }, ms(sum("F")), ms(sum("I") + sum("W")), mib(own.reduce((total, i) => total + model.layers[i].params, 0)), s + 1 < state.devices.length && !state.layer_order ? mib(data.cut[bounds[s + 1]]) : "", busiest ? ms(busiest) : ""] };
  });
  root.replaceChildren(...explorer.table("Stages", ["stage", "layers>", "first", "last", "devices", "recompute", "F a micro-batch>", "I + W>", "parameters>", "sends>", "busy in a step>"], rows));
};

explorer.deviceTable = (root, answer) => {
  const { make, ms, mib, percent } = explorer, step = Math.max(answer.step, 1);
  const fill = { "before its first action": "band-b", transfer: "transfer", "another stage": "I", "all-reduce": "sync", "after its last action": "fixed", "no stage": "band-a" };
  const rows = answer.ranks.map((rank) => {
    const causes = Object.entries(rank.causes).filter(([, ns]) => ns > 0);
    const bar = make("span", { className: "bar", title: causes.map(([name, ns]) => `${name}: ${ms(ns)}`).join("\n") },
      make("i", { style: `width:${(100 * rank.busy) / step}%; background: var(--F)` }),
      ...causes.map(([name, ns]) => make("i", { style: `width:${(100 * ns) / step}%; background: var(--${fill[name]})` })));
    const longest = causes.sort((a, b) => b[1] - a[1])[0];
    const lack = rank.peak - rank.limit;
    return { cells: [rank.device, rank.kind, String(rank.speed), ms(rank.busy), percent(rank.idle / step), { cell: bar }, longest ? `${longest[0]} ${ms(longest[1])}` : "", mib(rank.peak), mib(rank.limit), lack > 0 ? { cell: `lacks ${mib(lack)}`, className: "alarm" } : "fits"] };
  });
  root.replaceChildren(...explorer.table("Devices, and why they are idle", ["device", "kind", "speed>", "busy>", "idle>", "busy and idle", "longest cause", "peak>", "limit>", "memory"], rows),
    make("div", { className: "tools" }, explorer.key("F", "busy"), ...Object.entries(fill).map(([name, colour]) => explorer.key(colour, name))));
};

explorer.triedTable = (root, tried, now, actions) => {
  const { make, ms, mib, percent } = explorer;
  const rows = tried.map((entry, index) => {
    const go = make("button", { type: "button", onclick: () => actions.show(index) }, entry.name);
    const mark = make("input", { type: "checkbox", checked: !!entry.marked, disabled: !actions.compare, ariaLabel: `compare ${entry.name}`, onchange: () => actions.mark(index, mark.checked) });
    const failed = entry.figures.error;
    return { now: index === now, cells: [{ cell: mark }, { cell: go, className: "name", title: entry.name }, entry.state.schedule, String(entry.state.cuts.length + 1), `${entry.state.minibatch_size / entry.state.microbatch_size} of ${entry.state.microbatch_size}`, ...(failed ? ["", "", "", { cell: failed, className: "name", title: failed }] : [ms(entry.figures.step), mib(entry.figures.peak), percent(entry.figures.gap), entry.figures.fits ? "" : { cell: "does not fit", className: "alarm" }])] };
  });
  root.replaceChildren(...explorer.table("Plans tried", ["", "plan", "schedule", "stages>", "micro-batches>", "step>", "peak>", "above the bound>", ""], rows), ...(actions.compared || []));
};
