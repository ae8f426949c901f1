// What is on the page now: header, tabs, panes, keys.

const TABS = [["episodes", "Episodes"], ["map", "Strategy map"], ["curves", "Curves"]];
const KEYS = [["1 2 3", "episodes, strategy map, curves"], ["j k  or  ↓ ↑", "next, previous task"], ["h l  or  ← →", "previous, next rollout"], ["n N", "next, previous rollout that passes the filters"], ["[ ]", "previous, next iteration"], ["f", "next flagged turn"], ["/", "search"], ["c", "colour by outcome or advantage"], ["t", "text or tokens"], ["d", "dark, light or as the system"], ["Esc", "back"], ["?", "this help"]];
let tasks = null, page = null, shell = "", listKey = "", scheduled = false;
const tickets = { a: 0, b: 0 };

function set(patch) {
  const { refilter: wanted, redraw, ...rest } = patch;
  const other = "a" in rest && rest.a !== state.a;
  Object.assign(state, rest);
  if (other) Object.assign(state, { group: 0, n: 0, m: 0, kind: "", stop: "", from: null, to: null });
  if (other) deepHits = null;
  if (state.b === state.a) state.b = null;
  if (wanted || other) refilter();
  if (other && view.groups.length) Object.assign(state, { group: view.groups[0].number });
  if (redraw) shell = "";
  if (!scheduled) {
    scheduled = true;
    requestAnimationFrame(render);
  }
}

function render() {
  scheduled = false;
  const wanted = [state.tab, state.a, state.b].join("|");
  if (wanted !== shell) {
    shell = wanted;
    listKey = "";
    header();
    page = { episodes: episodesTab, map: mapTab, curves: curvesTab }[state.tab]();
    $("#main").replaceChildren(page);
  }
  if (state.tab === "episodes") renderEpisodes();
  remember();
}

function header() {
  $(".tabs").replaceChildren(...TABS.map(([key, text], place) => el("button", { type: "button", role: "tab", "aria-selected": String(state.tab === key), title: `${text}  ( ${place + 1} )`, onclick: () => set({ tab: key }) }, text)));
  const names = runs().map((run, number) => [number, run.name]);
  const many = runs().length > 1;
  $(".runs").replaceChildren(...[
    many ? select("Run", names, state.a, (value) => set({ a: Number(value) })) : el("b", { class: "run-name", title: runs()[0].name }, runs()[0].name),
    many ? el("span", { class: "quiet" }, "beside") : null,
    many ? select("Run beside it", [["", "no other"], ...names.filter(([number]) => number !== state.a)], state.b === null ? "" : state.b, (value) => set({ b: value === "" ? null : Number(value) })) : null,
  ].filter(Boolean));
  $(".tools").replaceChildren(
    state.tab === "episodes" ? segmented("Colour by", [["outcome", "Outcome", "colour by outcome  ( c )"], ["advantage", "Advantage", "colour by advantage  ( c )"]], state.colour, (colour) => recolour(colour)) : "",
    el("button", { type: "button", class: "icon", title: "Dark, light or as the system  ( d )", "aria-label": "Colour scheme", onclick: nextTheme }, "◐"),
    el("button", { type: "button", class: "icon", title: "Keys  ( ? )", "aria-label": "Keys", onclick: help }, "?"));
}

function recolour(colour) {
  set({ colour });
  listKey = "";
  header();
}

// ---------------------------------------------------------------------------------------------------------- episodes

function episodesTab() {
  tasks = new TaskList();
  const column = (side) => el("div", { class: "column", "data-side": side },
    state.b === null ? null : el("h3", { class: "column-name" }, el("i", { class: "swatch", style: { background: runColour(state[side]) } }), runs()[state[side]].name),
    el("section", { class: "pane tree-pane", "aria-label": "Strategies and rollouts", tabindex: "-1" }), el("section", { class: "pane transcript-pane", "aria-label": "Transcript", tabindex: "-1" }));
  return el("div", { class: `episodes${state.b === null ? "" : " compare"}` },
    el("section", { class: "pane list-pane", "aria-label": "Tasks" }, filterBar(runs()[state.a]), tasks.node),
    column("a"), state.b === null ? null : column("b"));
}

function renderEpisodes() {
  const key = [view.total, view.groups.length, state.sort, state.colour, state.query, state.result, state.stop, state.kind, state.flagged, state.from, state.to, deepHits && deepHits.size].join("|");
  if (key !== listKey) {
    listKey = key;
    tasks.reset();
    const all = runs()[state.a].trajectories.n.length;
    $(".found").textContent = view.active ? `${view.total.toLocaleString("en")} of ${count(all, "rollout")} in ${count(view.groups.length, "task")}` : `${count(all, "rollout")} in ${count(view.groups.length, "task")}`;
  } else tasks.draw();
  column("a", runs()[state.a], runs()[state.a].groups[state.group]);
  if (state.b !== null) {
    const group = runs()[state.a].groups[state.group];
    column("b", runs()[state.b], group ? partner(runs()[state.b], group) : null);
  }
}

async function column(side, run, group) {
  const ticket = ++tickets[side];
  const root = $(`.column[data-side="${side}"]`), tree = $(".tree-pane", root), transcript = $(".transcript-pane", root);
  if (!group) {
    tree.replaceChildren(el("p", { class: "empty" }, side === "b" ? "The other run has no trajectories." : "Choose a task."));
    transcript.replaceChildren();
    return;
  }
  const [n, m] = side === "a" ? [state.n, state.m] : [state.bn, state.bm];
  const held = tree.scrollTop, stranger = side === "b" && group.task !== runs()[state.a].groups[state.group].task;
  tree.replaceChildren(...[stranger ? el("p", { class: "note warn column-note" }, "The task does not come in this run; this is another one of the same iteration or kind.") : null, treeOf(run, group, side)].filter(Boolean));
  tree.scrollTop = tree.dataset.group === String(group.number ?? `${group.i}-${group.p}`) ? held : 0;
  tree.dataset.group = String(group.number ?? `${group.i}-${group.p}`);
  const chunk = await chunkOf(side === "a" ? state.a : state.b, group);
  if (ticket !== tickets[side]) return;
  const record = chunk && (chunk.trajectories.find((r) => r.strategy_index === n && r.rollout_index === m) || chunk.trajectories[0]);
  if (!record) {
    transcript.replaceChildren(el("p", { class: "empty" }, "No rollout was written for this task."));
    return;
  }
  const strategy = chunk.strategies.find((s) => s.strategy_index === record.strategy_index);
  const same = transcript.dataset.at === `${group.i}-${group.p}-${n}-${m}`;
  const before = transcript.scrollTop;
  transcript.replaceChildren(transcriptOf(record, run, group, side, strategy));
  transcript.scrollTop = same ? before : 0;
  transcript.dataset.at = `${group.i}-${group.p}-${n}-${m}`;
}

function showPane(name) {
  document.body.dataset.pane = name;
}

// The next rollout of the task (only: those that pass the filters), over tasks where `across` says so.
function step(by, across) {
  const run = runs()[state.a], t = run.trajectories, group = run.groups[state.group];
  if (!group) return;
  let now = group.start;
  for (let j = group.start; j < group.start + group.count; j++) if (t.n[j] === state.n && t.m[j] === state.m) now = j;
  for (let j = now + by; j >= group.start && j < group.start + group.count; j += by) {
    if (!across || view.matches[j]) return set({ n: t.n[j], m: t.m[j] });
  }
  if (!across) return;
  const next = view.groups[view.groups.indexOf(group) + by];
  if (!next) return announce("no more");
  const order = [...Array(next.count).keys()].map((i) => next.start + i).filter((j) => view.matches[j]);
  const j = by > 0 ? order[0] : order[order.length - 1];
  set({ group: next.number, ...(j === undefined ? {} : { n: t.n[j], m: t.m[j] }), bn: 0, bm: 0 });
  requestAnimationFrame(() => tasks.reveal());
}

function jumpIteration(by) {
  const run = runs()[state.a], group = run.groups[state.group];
  const place = run.iterations.indexOf(group ? group.i : 0) + by;
  const next = view.groups.find((other) => other.i === run.iterations[place]);
  if (next) {
    choose(next, false);
    requestAnimationFrame(() => tasks.reveal());
  }
}

function nextFlagged() {
  const turns = [...document.querySelectorAll('.column[data-side="a"] .turn.flagged')];
  if (!turns.length) return announce("no flagged turn here");
  const now = turns.indexOf(document.activeElement);
  const turn = turns[(now + 1) % turns.length];
  showPane("transcript");
  turn.scrollIntoView({ block: "center" });
  turn.focus({ preventScroll: true });
}

// --------------------------------------------------------------------------------------------------------------- keys

const ACTIONS = {
  1: () => set({ tab: "episodes" }), 2: () => set({ tab: "map" }), 3: () => set({ tab: "curves" }),
  j: () => tasks.move(1), k: () => tasks.move(-1), ArrowDown: () => tasks.move(1), ArrowUp: () => tasks.move(-1),
  h: () => step(-1, false), l: () => step(1, false), ArrowLeft: () => step(-1, false), ArrowRight: () => step(1, false),
  n: () => step(1, true), N: () => step(-1, true), "[": () => jumpIteration(-1), "]": () => jumpIteration(1), f: nextFlagged,
  c: () => recolour(state.colour === "outcome" ? "advantage" : "outcome"), t: () => set({ tokens: !state.tokens }),
  Escape: () => showPane(document.body.dataset.pane === "transcript" ? "tree" : "list"),
};
const ANYWHERE = new Set(["1", "2", "3", "/", "?", "d"]);

function onkey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("#help").open) return;
  const field = event.target.closest("input:not([type=checkbox], [type=range]), select, textarea"); // those that take letters
  if (field) {
    if (event.key === "Escape") field.blur();
    return;
  }
  if (event.key === "/") $("#search")?.focus();
  else if (event.key === "?") help();
  else if (event.key === "d") nextTheme();
  else if (state.tab === "map" && ["[", "]", "ArrowLeft", "ArrowRight"].includes(event.key) && page.step) page.step(event.key === "]" || event.key === "ArrowRight" ? 1 : -1);
  else if (ACTIONS[event.key] && (state.tab === "episodes" || ANYWHERE.has(event.key))) ACTIONS[event.key]();
  else return;
  event.preventDefault();
}

function help() {
  const box = $("#help");
  box.replaceChildren(el("h2", {}, "Keys"), el("dl", {}, KEYS.map(([keys, what]) => [el("dt", {}, keys.split(" ").filter(Boolean).map((key) => (key === "or" ? " or " : el("kbd", {}, key)))), el("dd", {}, what)])),
    el("h2", {}, "Marks"), el("p", {}, "A cell is a rollout: its outcome (or advantage), below it the number of turns. ⚑ the judge flagged a turn, ⊣ it ended otherwise than done, × the environment broke, a ring: solved. R is a return, A an advantage."),
    el("p", { class: "quiet" }, `Written ${INDEX.made}. Nothing on this page leaves it.`),
    el("form", { method: "dialog" }, el("button", { class: "primary" }, "Close")));
  box.showModal();
}

function nextTheme() {
  const root = document.documentElement;
  const order = ["", "dark", "light"];
  const next = order[(order.indexOf(root.dataset.theme || "") + 1) % order.length];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  try { localStorage.setItem("hsg-theme", next); } catch { /* a file may have no storage */ }
  announce(next ? `${next} colours` : "colours as the system has them");
  page?.redraw?.();
}

// ------------------------------------------------------------------------------------------------------------- address

function remember() {
  const kept = new URLSearchParams({ tab: state.tab, a: state.a, group: state.group, n: state.n, m: state.m });
  if (state.b !== null) kept.set("b", state.b);
  try { history.replaceState(null, "", `#${kept}`); } catch { /* some browsers refuse it for files */ }
}

function recall() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (name, below) => {
    const value = Number(given.get(name));
    return given.has(name) && Number.isInteger(value) && value >= 0 && value < below ? value : null;
  };
  if (TABS.some(([key]) => key === given.get("tab"))) state.tab = given.get("tab");
  state.a = whole("a", runs().length) ?? 0;
  state.b = whole("b", runs().length) ?? (runs().length === 2 && !given.has("a") && innerWidth > 1000 ? 1 : null);
  if (state.b === state.a) state.b = null;
  state.group = whole("group", runs()[state.a].groups.length) ?? 0;
  state.n = whole("n", 1e6) ?? 0;
  state.m = whole("m", 1e6) ?? 0;
}

async function boot() {
  try {
    const theme = localStorage.getItem("hsg-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch { /* a file may have no storage */ }
  try {
    if (!("DecompressionStream" in window)) throw new Error("this browser is too old: it has no DecompressionStream (Chrome 80, Firefox 113, Safari 16.4 have)");
    INDEX = await unpack("index");
    runs().forEach(prepare);
    recall();
    refilter();
    document.addEventListener("keydown", onkey);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page?.redraw?.());
    render();
    if (state.tab === "episodes") tasks.reveal(); // of a link that names a late one
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    $("#main").replaceChildren(el("p", { class: "loading" }, `The page could not be read: ${error.message}`));
    document.documentElement.dataset.ready = "failed";
    throw error;
  }
}
boot();
