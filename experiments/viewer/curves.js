// Curves of all metrics and the evaluations of all runs. Where a run is long, a faint line is the data and the strong one its
// moving mean; the number in the headline is always the last one measured.

const curveState = { x: "iteration", query: "", smooth: 9 };
const FIRST = ["reward/outcome", "reward/success", "rollout/turns", "advantage/dead_groups", "judge/flagged_share", "strategy/distance_selected", "update/approx_kl", "update/entropy", "update/clip_fraction", "time/iteration_seconds"];
const EVALUATED = ["score", "success", "turns"];
const POLICY = new Set(["warm start", "before training", "training", "after training"]);
const runColour = (number) => `var(--run-${number % 6})`;

const COSTS = { turns: "cost/environment_turns", tokens: "cost/sampled_tokens", seconds: "time/iteration_seconds" };

// What stands on the x axis of each line of metrics.jsonl: its iteration, or what had been spent after it.
function axis(run) {
  const { iteration, columns } = run.metrics;
  if (curveState.x === "iteration") return iteration;
  let sum = 0;
  return iteration.map((_, i) => (sum += (columns[COSTS[curveState.x]] || [])[i] || 0));
}

// The same for an evaluation after so many iterations.
function spentAt(run, iterations) {
  if (curveState.x === "iteration") return iterations;
  const before = run.metrics.iteration.filter((iteration) => iteration < iterations).length;
  return before ? axis(run)[before - 1] : 0;
}

function movingMean(points, window) {
  const half = Math.floor(window / 2);
  return points.map(([x], i) => {
    const part = points.slice(Math.max(0, i - half), i + half + 1);
    return [x, part.reduce((sum, point) => sum + point[1], 0) / part.length];
  });
}

// A run has to be eight times as long as the mean is wide: of a short one a mean over nearby iterations shows another run.
function windowOf(count, smooth) {
  const widest = Math.min(smooth, Math.floor(count / 8));
  return widest % 2 ? widest : Math.max(1, widest - 1);
}

// What only ever grows (or only ever falls) has no noise to smooth: a counter, a schedule.
function isMonotone(points) {
  return points.every(([, y], i) => !i || y >= points[i - 1][1]) || points.every(([, y], i) => !i || y <= points[i - 1][1]);
}

// series: [{colour, name, points: [[x, y]], raw, dots, faint}] -> a small figure with a readout that follows the pointer.
// `raw`: the data, where `points` are their moving mean.
function figure(title, series) {
  const width = 320, height = 132, left = 4, right = 4, top = 8, bottom = 8;
  const all = series.flatMap((one) => one.points);
  const readout = el("span", { class: "readout" });
  const latest = () => readout.replaceChildren(...series.filter((one) => !one.faint && one.points.length).map((one) => el("span", { style: { color: one.colour } }, format((one.raw || one.points)[one.points.length - 1][1]))));
  const card = el("figure", { class: "card" }, el("figcaption", {}, el("b", { title }, title), readout));
  if (!all.length) {
    card.append(el("p", { class: "quiet" }, "nothing yet"));
    return card;
  }
  const [x0, x1] = extent(all.map((p) => p[0]));
  let [y0, y1] = extent(all.map((p) => p[1]));
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) * 0.1 || 0.5), y1 + (Math.abs(y1) * 0.1 || 0.5)];
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right);
  const py = (y) => top + ((y1 - y) / (y1 - y0)) * (height - top - bottom);
  const drawing = el("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}, from ${format(y0)} to ${format(y1)}` });
  for (const part of [0, 0.5, 1]) drawing.append(el("line", { x1: 0, x2: width, y1: top + part * (height - top - bottom), y2: top + part * (height - top - bottom), class: "grid" }));
  for (const one of series) {
    const points = one.points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ");
    if (!one.lone) drawing.append(el("polyline", { points, class: one.faint ? "line faint" : "line", style: { stroke: one.colour } }));
    // A round dot in a stretched drawing is a line of no length with a round end.
    if (one.dots || one.points.length === 1) for (const [x, y] of one.points) drawing.append(el("path", { d: `M${px(x)} ${py(y)}h0`, class: one.lone ? "dot lone" : "dot", style: { stroke: one.colour } }));
  }
  const cursor = el("line", { class: "cursor", y1: 0, y2: height, x1: -9, x2: -9 });
  drawing.append(cursor);
  drawing.addEventListener("mousemove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (x1 - x0);
    const spans = [];
    let at = null;
    for (const one of series.filter((s) => !s.faint && s.points.length)) {
      const measured = one.raw || one.points;
      const nearest = measured.reduce((best, p, i) => (Math.abs(p[0] - x) < Math.abs(measured[best][0] - x) ? i : best), 0);
      at = at === null ? measured[nearest][0] : at;
      const mean = one.raw ? el("small", {}, ` mean ${format(one.points[nearest][1])}`) : null;
      spans.push(el("span", { style: { color: one.colour }, title: one.name }, format(measured[nearest][1]), mean));
    }
    cursor.setAttribute("x1", px(at));
    cursor.setAttribute("x2", px(at));
    readout.replaceChildren(el("span", { class: "quiet" }, `${curveState.x === "iteration" ? "it" : ""} ${format(at, 0)}`.trim()), ...spans);
  });
  drawing.addEventListener("mouseleave", () => { cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); latest(); });
  card.append(el("div", { class: "plot" }, drawing, el("span", { class: "y hi" }, format(y1)), el("span", { class: "y lo" }, format(y0))), el("div", { class: "x" }, el("span", {}, format(x0, 0)), el("span", {}, format(x1, 0))));
  latest();
  return card;
}

function metricFigure(name) {
  const series = [];
  runs().forEach((run, number) => {
    const column = run.metrics.columns[name] || [], x = axis(run);
    const points = column.map((y, i) => [x[i], y]).filter(([at, y]) => isNumber(at) && isNumber(y));
    if (!points.length) return;
    const width = isMonotone(points) ? 1 : windowOf(points.length, curveState.smooth);
    if (width > 1) series.push({ colour: runColour(number), name: run.name, points, faint: true });
    series.push({ colour: runColour(number), name: run.name, points: width > 1 ? movingMean(points, width) : points, raw: width > 1 ? points : null });
  });
  return figure(name, series);
}

function evaluationFigure(key) {
  const series = [];
  runs().forEach((run, number) => {
    const pointsOf = (own) => run.evaluations.filter((e) => POLICY.has(e.label) === own && isNumber(e.iteration) && isNumber(e[key])).map((e) => [spentAt(run, e.iteration), e[key]]);
    const points = pointsOf(true), others = pointsOf(false);
    if (points.length) series.push({ colour: runColour(number), name: run.name, points, dots: true });
    if (others.length) series.push({ colour: runColour(number), name: run.name, points: others, dots: true, lone: true, faint: true });
  });
  return series.length ? figure(`held-out ${key}`, series) : null;
}

function evaluationTable() {
  const rows = runs().flatMap((run, number) => run.evaluations.map((e) => [run, number, e]));
  if (!rows.length) return null;
  const columns = ["score", "success", "outcome", "turns"].filter((key) => rows.some(([, , e]) => isNumber(e[key])));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ["run", "evaluation", "iteration", "split", "tasks", ...columns].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.map(([run, number, e]) => el("tr", {},
      el("td", {}, el("i", { class: "swatch", style: { background: runColour(number) } }), run.name), el("td", {}, String(e.label ?? "")), el("td", { class: "num" }, format(e.iteration, 0)), el("td", {}, String(e.split ?? "")),
      el("td", { class: "num" }, format(e.num_tasks, 0), e.num_failed ? el("small", {}, ` (${e.num_failed} broken)`) : null), columns.map((key) => el("td", { class: "num" }, format(e[key]))))))));
}

// What the runs were told: of several, only where they differ.
function settings() {
  const flat = (value, prefix = "") => (value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key)) : [[prefix, Array.isArray(value) ? value.join(", ") : String(value)]]);
  const tables = runs().map((run) => new Map(flat(run.config)));
  const keys = [...new Set(tables.flatMap((table) => [...table.keys()]))].filter((key) => key);
  if (!keys.length) return null;
  const differ = keys.filter((key) => key !== "run.name" && new Set(tables.map((table) => table.get(key))).size > 1);
  const table = (list) => el("div", { class: "scroll" }, el("table", {},
    tables.length > 1 ? el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "option"), runs().map((run, number) => el("th", { scope: "col" }, el("i", { class: "swatch", style: { background: runColour(number) } }), run.name)))) : null,
    el("tbody", {}, list.map((key) => el("tr", {}, el("td", {}, el("code", {}, key)), tables.map((one) => el("td", {}, one.has(key) ? one.get(key) : "–")))))));
  const several = tables.length > 1;
  return el("section", {},
    several ? el("h2", {}, differ.length ? "Where the runs differ" : "All options are the same") : null,
    several && differ.length ? table(differ) : null,
    el("details", {}, el("summary", {}, `All ${keys.length} options`), table(keys)));
}

function curvesTab() {
  const grid = el("div", { class: "grid-cards" });
  const found = el("span", { class: "quiet" });
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      entry.target.replaceWith(metricFigure(entry.target.dataset.name));
    }
  }, { rootMargin: "400px" });
  const fill = () => {
    const names = [...new Set(runs().flatMap((run) => Object.keys(run.metrics.columns)))].sort();
    const ordered = [...FIRST.filter((name) => names.includes(name)), ...names.filter((name) => !FIRST.includes(name))];
    const shown = ordered.filter((name) => name.toLowerCase().includes(curveState.query.trim().toLowerCase()));
    found.textContent = `${shown.length} of ${count(names.length, "metric")}`;
    grid.replaceChildren();
    for (const name of shown) grid.append(el("figure", { class: "card waiting", "data-name": name }, el("figcaption", {}, el("b", {}, name))));
    for (const card of grid.children) watcher.observe(card);
  };
  const search = el("input", { type: "search", id: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics  ( / )", value: curveState.query, oninput: debounce(() => { curveState.query = search.value; fill(); }, 120) });
  const smooth = el("input", { type: "range", min: 1, max: 41, step: 2, value: curveState.smooth, oninput: () => { curveState.smooth = Number(smooth.value); fill(); } });
  const notes = runs().flatMap((run) => run.notes.map((note) => `${run.name}: ${note}`));
  const evaluations = EVALUATED.map(evaluationFigure).filter(Boolean);
  fill();
  return el("div", { class: "page" },
    notes.map((note) => el("p", { class: "note warn wide" }, note)),
    runs().length > 1 ? el("p", { class: "legend" }, runs().map((run, number) => el("span", {}, el("i", { class: "swatch", style: { background: runColour(number) } }), run.name))) : null,
    evaluations.length ? el("section", {}, el("h2", {}, "Evaluations"), el("div", { class: "grid-cards" }, evaluations),
      el("p", { class: "quiet note-line" }, "Strong: the policy on held-out tasks. Pale: strategies blanked or exchanged, other splits, controls."), evaluationTable()) : null,
    el("section", {}, el("h2", {}, "Metrics"),
      el("div", { class: "controls" }, search, found, el("span", { class: "grow" }),
        el("label", { class: "check" }, "smoothing", smooth),
        segmented("x axis", [["iteration", "iterations"], ["turns", "environment turns"], ["tokens", "sampled tokens"], ["seconds", "seconds"]], curveState.x, (x) => { curveState.x = x; set({ redraw: true }); })),
      grid),
    settings());
}
