// The list of tasks: filters above, then one row per task of an iteration. Only the rows in sight exist.

const ROW = 58; // pixels, as in style.css

function cellStyle(run, j) {
  const t = run.trajectories;
  return state.colour === "outcome" ? shareColour(t.outcome[j]) : t.outcome[j] === null ? "var(--broken)" : advantageColour(t.advantage[j]);
}

function strip(run, group) {
  const t = run.trajectories, box = el("span", { class: "strip", "aria-hidden": "true" });
  let last = null;
  for (let j = group.start; j < group.start + group.count; j++) {
    const classes = ["bit", view.matches[j] ? "" : "dim", last !== null && t.n[j] !== last ? "gap" : ""];
    box.append(el("i", { class: classes.join(" ").trim(), style: { background: cellStyle(run, j) } }));
    last = t.n[j];
  }
  return box;
}

class TaskList {
  constructor() {
    this.inner = el("div", { class: "inner" });
    this.node = el("div", { class: "rows", role: "listbox", tabindex: "0", "aria-label": "Tasks", onscroll: () => this.draw(), onkeydown: (event) => this.key(event) }, this.inner);
    this.rows = new Map();
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  reset() {
    this.rows.clear();
    this.inner.replaceChildren();
    this.inner.style.height = `${view.groups.length * ROW}px`;
    if (!view.groups.length) this.inner.append(el("p", { class: "empty" }, view.active ? "Nothing passes these filters." : "This run has no trajectories (log.trajectories was false, or nothing was written yet)."));
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.node.scrollTop / ROW) - 4);
    const last = Math.min(view.groups.length, Math.ceil((this.node.scrollTop + this.node.clientHeight) / ROW) + 4);
    for (const [place, row] of this.rows) {
      if (place < first || place >= last) {
        row.remove();
        this.rows.delete(place);
      }
    }
    for (let place = first; place < last; place++) {
      if (!this.rows.has(place)) {
        const row = this.row(place);
        this.rows.set(place, row);
        this.inner.append(row);
      }
      const chosen = view.groups[place].number === state.group;
      this.rows.get(place).setAttribute("aria-selected", String(chosen));
      if (chosen) this.node.setAttribute("aria-activedescendant", `row-${place}`);
    }
  }

  row(place) {
    const run = runs()[state.a], group = view.groups[place];
    return el("div", { class: "row", role: "option", id: `row-${place}`, style: { top: `${place * ROW}px` }, "aria-setsize": view.groups.length, "aria-posinset": place + 1, onclick: () => choose(group, true) },
      el("span", { class: "name", title: group.task }, el("b", {}, group.task || `task ${group.p}`)),
      el("span", { class: "mean", title: "mean outcome" }, isNumber(group.mean) ? group.mean.toFixed(2) : "–"),
      el("span", { class: "at" }, `iteration ${group.i}`, group.count ? ` · ${group.solved}/${group.count} solved` : ""),
      strip(run, group));
  }

  place() {
    return view.groups.findIndex((group) => group.number === state.group);
  }

  move(by) {
    if (!view.groups.length) return;
    const now = this.place();
    choose(view.groups[clamp(now < 0 ? 0 : now + by, 0, view.groups.length - 1)], false);
    this.reveal();
  }

  reveal() {
    const top = this.place() * ROW;
    if (top < 0) return;
    const below = top + ROW - this.node.clientHeight;
    if (this.node.scrollTop > top) this.node.scrollTop = top;
    else if (this.node.scrollTop < below) this.node.scrollTop = below;
    this.draw();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW) - 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      event.stopPropagation();
      this.move(by);
    } else if (event.key === "Enter") showPane("tree");
  }
}

// A trajectory that passes the filters, in this group: the one looked at if it does, else the first.
function choose(group, advance) {
  const t = runs()[state.a].trajectories;
  let pick = null;
  for (let j = group.start; j < group.start + group.count; j++) {
    if (pick === null && view.matches[j]) pick = j;
    if (view.matches[j] && t.n[j] === state.n && t.m[j] === state.m) pick = j;
  }
  set({ group: group.number, n: pick === null ? 0 : t.n[pick], m: pick === null ? 0 : t.m[pick], bn: 0, bm: 0 });
  if (advance) showPane("tree");
}

function filterBar(run) {
  const names = (list) => [...new Set(list)].filter((text) => text !== "").sort().map((text) => [text, text]);
  const refresh = (patch) => set({ ...patch, refilter: true });
  const search = el("input", { type: "search", id: "search", placeholder: "Search tasks and strategies", "aria-label": "Search tasks and strategies  ( / )", value: state.query, oninput: debounce(() => { state.query = search.value; startSearch(); }, 160) });
  const bound = (label, key) => el("input", { type: "number", min: 0, placeholder: label, "aria-label": `iterations ${label}`, value: state[key] === null ? "" : state[key],
    oninput: (event) => refresh({ [key]: event.target.value === "" ? null : Number(event.target.value) }) });
  const box = (label, key, title, action) => el("label", { class: "check", title }, el("input", { type: "checkbox", checked: state[key], onchange: (event) => action(event.target.checked) }), label);
  const kinds = names(run.kinds), stops = names(run.stops);
  return el("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    search,
    box("in transcripts too", "deep", "also read every observation, response and judgment", (on) => { state.deep = on; startSearch(); }),
    box("flagged turns", "flagged", "only rollouts in which the judge flagged a turn", (on) => refresh({ flagged: on })),
    el("div", { class: "pair" },
      select("Outcome", [["", "any outcome"], ["solved", "solved"], ["partial", "partly solved"], ["zero", "outcome 0"], ["broken", "no outcome (broken)"]], state.result, (value) => refresh({ result: value })),
      select("Stop reason", [["", "any stop reason"], ...stops], state.stop, (value) => refresh({ stop: value }))),
    el("div", { class: "pair" },
      kinds.length ? select("Task type", [["", "any task type"], ...kinds], state.kind, (value) => refresh({ kind: value })) : null,
      select("Order", [["iteration", "by iteration"], ["newest", "newest first"], ["worst", "lowest outcome first"], ["best", "highest outcome first"], ["spread", "widest spread first"], ["task", "by task"]], state.sort, (value) => refresh({ sort: value }))),
    run.iterations.length > 1 ? el("div", { class: "pair" }, el("span", { class: "quiet" }, "iterations"), bound("from", "from"), bound("to", "to")) : null,
    el("p", { class: "found", "aria-live": "polite" }));
}

function startSearch() {
  set({ refilter: true });
  const bar = $(".found");
  searchTranscripts((part) => {
    set({ refilter: true });
    if (bar && part < 1) bar.dataset.progress = `reading transcripts, ${Math.round(100 * part)} %`;
    else if (bar) delete bar.dataset.progress;
  });
}
