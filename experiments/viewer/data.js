// The data of the page: the index at once, one task's transcripts when they are looked at; what is selected and filtered.

const state = {
  tab: "episodes", a: 0, b: null, // runs side by side; b null: one
  group: 0, n: 0, m: 0, bn: 0, bm: 0, // group of run a, the rollout looked at in either run
  colour: "outcome", tokens: false, tokenColour: "advantage",
  query: "", deep: false, kind: "", stop: "", result: "", from: null, to: null, flagged: false, sort: "iteration",
};
let INDEX = null;
const runs = () => INDEX.runs;

async function unpack(id) {
  const node = document.getElementById(id);
  if (!node) return null;
  const text = atob(node.textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const KEPT_CHUNKS = 24;
const chunks = new Map(); // insertion order is age
function chunkOf(run, group) {
  const id = `chunk-${run}-${group.i}-${group.p}`;
  const held = chunks.get(id) || unpack(id);
  chunks.delete(id);
  chunks.set(id, held);
  if (chunks.size > KEPT_CHUNKS) chunks.delete(chunks.keys().next().value);
  return held;
}

// What the lists show of a group, worked out once: means, spread, whether anything can be learned from it.
function prepare(run) {
  const { outcome, success } = run.trajectories;
  for (const group of run.groups) {
    const seen = [];
    group.solved = 0;
    for (let j = group.start; j < group.start + group.count; j++) {
      if (isNumber(outcome[j])) seen.push(outcome[j]);
      group.solved += success[j];
    }
    group.mean = seen.length ? seen.reduce((a, b) => a + b, 0) / seen.length : null;
    const [least, most] = extent(seen);
    group.spread = seen.length ? most - least : 0;
    group.task = run.tasks[group.t];
    group.kind = run.kinds[group.k];
    group.textOf = new Map(group.strategies.map((s) => [s.n, run.texts[s.text]]));
  }
  run.iterations = [...new Set(run.groups.map((group) => group.i))].sort((a, b) => a - b);
  run.mostReturn = Math.max(1, extent(run.groups.flatMap((group) => group.strategies.map((s) => s.return || 0)))[1]);
}

// Trajectories of run a that pass the filters, and their groups in the order of the list.
const view = { matches: null, groups: [], total: 0, active: false };
let deepHits = null; // trajectories whose transcript holds the query; null: not asked

function passes(run, j, group, query) {
  const t = run.trajectories;
  if (state.stop && run.stops[t.stop[j]] !== state.stop) return false;
  if (state.flagged && !t.flagged[j]) return false;
  const o = t.outcome[j];
  if (state.result === "solved" && !t.success[j]) return false;
  if (state.result === "partial" && !(isNumber(o) && o > 0 && !t.success[j])) return false;
  if (state.result === "zero" && o !== 0) return false;
  if (state.result === "broken" && o !== null) return false;
  if (!query) return true;
  if (group.task.toLowerCase().includes(query)) return true;
  if ((group.textOf.get(t.n[j]) || "").toLowerCase().includes(query)) return true;
  return deepHits !== null && deepHits.has(j);
}

const ORDERS = {
  iteration: (a, b) => a.i - b.i || a.p - b.p,
  newest: (a, b) => b.i - a.i || a.p - b.p,
  worst: (a, b) => (a.mean ?? -1) - (b.mean ?? -1),
  best: (a, b) => (b.mean ?? -1) - (a.mean ?? -1),
  spread: (a, b) => b.spread - a.spread,
  task: (a, b) => a.task.localeCompare(b.task) || a.i - b.i,
};

function refilter() {
  const run = runs()[state.a];
  const query = state.query.trim().toLowerCase();
  view.active = Boolean(query || state.kind || state.stop || state.result || state.flagged || state.from !== null || state.to !== null);
  view.matches = new Uint8Array(run.trajectories.n.length);
  view.groups = [];
  view.total = 0;
  run.groups.forEach((group, number) => {
    group.number = number;
    if (state.kind && group.kind !== state.kind) return;
    if (state.from !== null && group.i < state.from) return;
    if (state.to !== null && group.i > state.to) return;
    let found = 0;
    for (let j = group.start; j < group.start + group.count; j++) if (passes(run, j, group, query)) found += view.matches[j] = 1;
    view.total += found;
    if (found || (!view.active && !group.count)) view.groups.push(group);
  });
  view.groups.sort(ORDERS[state.sort]);
}

// Reads every transcript once for a text; results come in as they are found. A newer search ends an older one.
let searchNumber = 0;
async function searchTranscripts(onprogress) {
  const mine = ++searchNumber;
  deepHits = null;
  const run = state.a, query = state.query.trim().toLowerCase();
  if (!state.deep || query.length < 2) return;
  deepHits = new Set();
  const groups = runs()[run].groups;
  for (let i = 0; i < groups.length; i++) {
    const chunk = await unpack(`chunk-${run}-${groups[i].i}-${groups[i].p}`);
    if (mine !== searchNumber) return;
    (chunk ? chunk.trajectories : []).forEach((record, place) => {
      const said = record.turns.some((turn) => [turn.observation, turn.response, turn.strategy].some((text) => typeof text === "string" && text.toLowerCase().includes(query)));
      if (said || String(record.judgment || "").toLowerCase().includes(query)) deepHits.add(groups[i].start + place);
    });
    if (i % 20 === 19 || i === groups.length - 1) onprogress((i + 1) / groups.length);
  }
}

// The group of the other run that fits best: the same task, else one of its kind, in the nearest iteration.
function partner(run, group) {
  const nearest = (groups) => groups.reduce((best, other) => (best === null || Math.abs(other.i - group.i) < Math.abs(best.i - group.i) ? other : best), null);
  return nearest(run.groups.filter((other) => other.task === group.task)) || nearest(run.groups.filter((other) => group.kind && other.kind === group.kind)) || nearest(run.groups);
}
