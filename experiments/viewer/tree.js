// One task of one iteration: the candidates as a small map, then strategies -> rollouts, each with what it was worth.

function chip(label, value, colour, deep, title) {
  return el("span", { class: `chip${deep ? " deep" : ""}`, style: colour ? { background: colour } : null, title }, label ? el("small", {}, label) : null, value);
}

const advantageChip = (value) => chip("A", signed(value), advantageColour(value), isNumber(value) && isDeep(Math.abs(value) / 2), "advantage: how much better than its group");

function rollout(run, group, j, side) {
  const t = run.trajectories, o = t.outcome[j], a = t.advantage[j];
  const byOutcome = state.colour === "outcome";
  const part = byOutcome ? o : Math.abs(a) / 2;
  const chosen = side === "a" ? t.n[j] === state.n && t.m[j] === state.m : t.n[j] === state.bn && t.m[j] === state.bm;
  const stop = run.stops[t.stop[j]];
  const classes = ["cell", o === null ? "broken" : isDeep(part) ? "deep" : "", side === "a" && !view.matches[j] ? "dim" : "", t.success[j] ? "solved" : ""];
  const words = [`rollout ${t.m[j]}`, o === null ? "no outcome" : `outcome ${format(o)}`, t.success[j] ? "solved" : "", `advantage ${signed(a)}`, `${count(t.turns[j], "turn")}`, stop, t.flagged[j] ? count(t.flagged[j], "flagged turn") : ""];
  return el("button", { type: "button", class: classes.join(" "), "aria-pressed": String(chosen), title: words.filter(Boolean).join(" · "), "aria-label": words.filter(Boolean).join(", "), style: { background: cellStyle(run, j) },
    onclick: () => { set(side === "a" ? { n: t.n[j], m: t.m[j] } : { bn: t.n[j], bm: t.m[j] }); showPane("transcript"); } },
    el("b", {}, byOutcome || o === null ? short(o) : signed(a, 1)),
    el("small", {}, `${t.turns[j]}`, t.flagged[j] ? el("i", { class: "flag" }, "⚑") : null, stop && stop !== "done" ? el("i", { class: "stop" }, "⊣") : null));
}

function treeOf(run, group, side) {
  const t = run.trajectories;
  const byStrategy = new Map();
  for (let j = group.start; j < group.start + group.count; j++) {
    if (!byStrategy.has(t.n[j])) byStrategy.set(t.n[j], []);
    byStrategy.get(t.n[j]).push(j);
  }
  for (const s of group.strategies) if (!byStrategy.has(s.n)) byStrategy.set(s.n, []);
  const known = new Map(group.strategies.map((s) => [s.n, s]));
  const cards = [...byStrategy].sort((a, b) => a[0] - b[0]).map(([n, rollouts]) => {
    const s = known.get(n);
    const chosen = side === "a" ? n === state.n : n === state.bn;
    return el("section", { class: `strategy${chosen ? " chosen" : ""}` },
      el("header", {},
        el("span", { class: "badge" }, s ? `${n + 1}` : "•"),
        s ? el("p", { class: "text" }, run.texts[s.text] || "(empty)") : el("p", { class: "text quiet" }, "one group of rollouts, no strategy"),
        s ? el("span", { class: "worth" }, chip("R", format(s.return), shareColour(isNumber(s.return) ? s.return / run.mostReturn : null), isDeep(s.return / run.mostReturn), "return of the strategy"), advantageChip(s.advantage)) : null),
      el("div", { class: "cells" }, rollouts.map((j) => rollout(run, group, j, side))));
  });
  return el("div", { class: "tree" },
    el("header", { class: "head" },
      el("button", { type: "button", class: "back", onclick: () => showPane("list") }, "‹ tasks"),
      el("h2", {}, group.task || `task ${group.p}`),
      el("p", { class: "quiet" }, [`iteration ${group.i}`, group.kind, isNumber(group.mean) ? `mean outcome ${group.mean.toFixed(2)}` : "no outcomes", `${group.solved} of ${group.count} solved`, group.learns === false ? "all advantages are 0: nothing to learn" : ""].filter(Boolean).join(" · "))),
    group.local ? candidateMap(run, group) : null,
    cards);
}

// The candidates of this task by likeness; the kept ones are numbered and coloured by their return.
function candidateMap(run, group) {
  const width = 360, height = 132, pad = 16;
  const kept = new Map(group.strategies.filter((s) => s.candidate !== null).map((s) => [s.candidate, s]));
  const at = (xy) => [pad + ((xy[0] + 1) / 2) * (width - 2 * pad), pad + ((1 - xy[1]) / 2) * (height - 2 * pad)];
  const drawn = el("svg", { viewBox: `0 0 ${width} ${height}`, class: "local", role: "img", "aria-label": `${group.candidates.length} candidate strategies by likeness, ${kept.size} kept` });
  group.local.forEach((xy, c) => {
    if (kept.has(c)) return;
    const [x, y] = at(xy);
    drawn.append(titled(el("circle", { cx: x, cy: y, r: 3.5, class: "other" }), run.texts[group.candidates[c]]));
  });
  for (const [c, s] of kept) {
    if (!group.local[c]) continue;
    const [x, y] = at(group.local[c]);
    const mark = el("g", { class: "kept" }, el("circle", { cx: x, cy: y, r: 9, style: { fill: shareColour(isNumber(s.return) ? s.return / run.mostReturn : null) } }));
    const label = document.createElementNS("http://www.w3.org/2000/svg", "text");
    label.setAttribute("x", x);
    label.setAttribute("y", y + 3.6);
    label.setAttribute("class", isDeep(s.return / run.mostReturn) ? "deep" : "");
    label.textContent = String(s.n + 1);
    mark.append(label);
    drawn.append(titled(mark, run.texts[s.text]));
  }
  return el("figure", { class: "map-small" }, drawn,
    el("figcaption", {}, `${group.candidates.length} candidates, ${kept.size} kept (numbered, coloured by return); near means alike`));
}

function titled(node, text) {
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = visible(text || "");
  node.append(title);
  return node;
}
