// The rows of the pictures over time: devices that do the same at the same times share one row.
"use strict";
// Returns a row for each device of a timeline that runs actions, two if it runs forwards and backwards side by side.
// `groups` are the ranks of each stage's replicas.
explorer.rowsOf = (timeline, groups, folds) => {
  const leader = new Map(), members = new Map();
  for (const group of folds ? groups : []) {
    group.forEach((rank, index) => {
      const first = group.slice(0, index).find((other) => !leader.has(other) && explorer.isAlike(timeline, other, rank));
      if (first === undefined || leader.has(rank)) return;
      leader.set(rank, first);
      members.set(first, [...(members.get(first) || [first]), rank]);
    });
  }
  const rows = [];
  timeline.spans.forEach((spans, rank) => {
    if (!spans.start.length || leader.has(rank)) return;
    const ranks = members.get(rank) || [rank];
    if (timeline.lanes[rank] < 2) rows.push({ rank, ranks, lane: 0, spans });
    else [true, false].forEach((forward, lane) => {
      const kept = [...spans.phase].map((phase, i) => ((phase === "F") === forward ? i : -1)).filter((i) => i >= 0);
      const pick = (column) => kept.map((i) => column[i]);
      rows.push({ rank, ranks, lane, spans: { stage: pick(spans.stage), microbatch: pick(spans.microbatch), start: pick(spans.start), end: pick(spans.end), phase: pick(spans.phase).join("") } });
    });
  });
  return rows;
};

explorer.isAlike = (timeline, a, b) => {
  const first = timeline.spans[a], second = timeline.spans[b], equal = (x, y) => x.length === y.length && x.every((value, i) => value === y[i]);
  const memory = [a, b].map((rank) => timeline.memory[rank]);
  return first.phase === second.phase && equal(first.start, second.start) && equal(first.end, second.end) && equal(first.stage, second.stage) &&
    (!memory[0] || (memory[0].fixed === memory[1].fixed && equal(memory[0].stash, memory[1].stash)));
};

explorer.rowLabel = (row, answer) => {
  const name = answer.ranks[row.rank].device;
  return row.ranks.length > 1 ? `${name} × ${row.ranks.length}` : name;
};
explorer.rowTitle = (row, answer) => row.ranks.map((rank) => answer.ranks[rank].device).join(", ");

// The index of the first action that ends after a time.
explorer.firstEndingAfter = (ends, time) => {
  let low = 0, high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
};

// A predicted and a measured timeline: for each action how long it was predicted to take, and how long it took.
explorer.differences = (predicted, measured) => {
  const found = [];
  predicted.spans.forEach((spans, rank) => {
    const other = measured.spans[rank];
    if (!other) return;
    const times = new Map(other.start.map((start, i) => [`${other.stage[i]}${other.phase[i]}${other.microbatch[i]}`, [start, other.end[i]]]));
    spans.start.forEach((start, i) => {
      const name = `${spans.stage[i]}${spans.phase[i]}${spans.microbatch[i]}`, took = times.get(name);
      if (took) found.push({ rank, name, start, predicted: spans.end[i] - start, began: took[0], measured: took[1] - took[0] });
    });
  });
  return found;
};
