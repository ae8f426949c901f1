// The map of strategies over iterations: one canvas per run; kept strategies coloured by what they brought.

const mapState = { at: null, colour: "return", kind: "", others: true, playing: 0 }; // at: place in run.iterations, null: all

// Texts of the chosen iterations: how often drawn and kept, and the mean return, advantage and iteration of the kept.
function mapPoints(run, iteration) {
  const points = new Map();
  const nowhere = { drawn: 0, kept: 0, groups: [] }; // a text that was not placed
  const point = (text) => {
    if (!run.xy[text]) return nowhere;
    if (!points.has(text)) points.set(text, { text, drawn: 0, kept: 0, back: 0, better: 0, when: 0, counted: 0, groups: [] });
    return points.get(text);
  };
  for (const group of run.groups) {
    if (iteration !== null && group.i !== iteration) continue;
    if (mapState.kind && group.kind !== mapState.kind) continue;
    for (const text of group.candidates) point(text).drawn++;
    for (const s of group.strategies) {
      const p = point(s.text);
      p.kept++;
      p.when += group.i;
      p.groups.push([group, s.n]);
      if (isNumber(s.return)) {
        p.counted++;
        p.back += s.return;
        p.better += s.advantage || 0;
      }
    }
  }
  return [...points.values()].sort((a, b) => a.kept - b.kept || b.drawn - a.drawn);
}

// Colours of the page as numbers, since a canvas cannot mix custom properties.
function inks(node) {
  const style = getComputedStyle(node);
  const rgb = (name) => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((two) => parseInt(two, 16));
  const mix = (from, to, part) => `rgb(${rgb(from).map((c, i) => Math.round(c + (rgb(to)[i] - c) * clamp(part, 0, 1)))})`;
  return { mix, line: style.getPropertyValue("--line").trim(), quiet: style.getPropertyValue("--quiet").trim(), ink: style.getPropertyValue("--ink").trim(), face: style.getPropertyValue("--face").trim() };
}

class StrategyMap {
  constructor(run, number) {
    Object.assign(this, { run, number });
    this.mapped = [...new Set(run.groups.filter((group) => group.local).map((group) => group.i))]; // iterations with places
    this.canvas = el("canvas", { role: "img", "aria-label": `map of strategies of ${run.name}` });
    this.note = el("p", { class: "map-note" });
    this.node = el("section", { class: "map-run" }, state.b === null ? null : el("h2", {}, run.name), el("div", { class: "map-box" }, this.canvas), this.note);
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => { this.near = null; this.draw(); });
    this.canvas.addEventListener("click", () => this.open());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  refresh() {
    const iteration = mapState.at === null ? null : this.mapped[Math.min(mapState.at, this.mapped.length - 1)];
    this.points = mapPoints(this.run, iteration);
    this.ghosts = iteration === null ? [] : mapPoints(this.run, null);
    this.near = null;
    this.draw();
  }

  at(point) {
    const [x, y] = this.run.xy[point.text], pad = 26, { clientWidth: w, clientHeight: h } = this.canvas;
    return [pad + ((x + 1) / 2) * (w - 2 * pad), pad + ((1 - y) / 2) * (h - 2 * pad)];
  }

  draw() {
    if (!this.points) return;
    const { canvas, run } = this, scale = window.devicePixelRatio || 1, w = canvas.clientWidth, h = canvas.clientHeight;
    if (!w || !h) return;
    canvas.width = w * scale;
    canvas.height = h * scale;
    const pen = canvas.getContext("2d"), ink = inks(canvas);
    pen.scale(scale, scale);
    const disc = (point, radius, fill, stroke) => {
      const [x, y] = this.at(point);
      pen.beginPath();
      pen.arc(x, y, radius, 0, 7);
      if (fill) { pen.fillStyle = fill; pen.fill(); }
      if (stroke) { pen.lineWidth = 0.8; pen.strokeStyle = stroke; pen.stroke(); }
    };
    pen.globalAlpha = 0.5;
    for (const point of this.ghosts) disc(point, 1.5, ink.line);
    pen.globalAlpha = 1;
    const last = run.iterations[run.iterations.length - 1] || 1;
    const colour = {
      return: (p) => (p.counted ? ink.mix("--low", "--high", p.back / p.counted / run.mostReturn) : ink.quiet),
      advantage: (p) => (p.counted ? ink.mix("--mid", p.better < 0 ? "--neg" : "--pos", Math.abs(p.better / p.counted) / 1.5) : ink.quiet),
      iteration: (p) => ink.mix("--low", "--accent", p.when / p.kept / last),
    }[mapState.colour];
    const size = (p) => Math.min(13, 2.4 + 1.25 * Math.sqrt(p.kept || p.drawn));
    for (const point of this.points) {
      if (!point.kept && !mapState.others) continue;
      if (point.kept) disc(point, size(point) + 1.2, colour(point), ink.ink);
      else disc(point, Math.min(5, size(point)), null, ink.quiet);
    }
    if (this.near) disc(this.near, size(this.near) + 5, null, ink.ink);
    const drawn = this.points.reduce((sum, p) => sum + p.drawn, 0), kept = this.points.reduce((sum, p) => sum + p.kept, 0);
    this.note.replaceChildren(...(this.near ? this.words(this.near) : [`${count(drawn || kept, "candidate")}, ${count(kept, "strategy").replace("strategys", "strategies")} kept, ${count(this.points.length, "different text")}. Point at one to read it, click to open its task.`].map((text) => document.createTextNode(text))));
  }

  words(p) {
    const mean = p.counted ? ` · mean return ${format(p.back / p.counted)} · mean advantage ${signed(p.better / p.counted)}` : "";
    return [el("b", {}, this.run.texts[p.text] || "(empty)"), el("span", {}, `drawn ${p.drawn}×, kept ${p.kept}×${mean}`)];
  }

  hover(event) {
    let best = null, nearest = 16 ** 2;
    for (const point of this.points) {
      if (!point.kept && !mapState.others) continue;
      const [x, y] = this.at(point), far = (x - event.offsetX) ** 2 + (y - event.offsetY) ** 2;
      if (far <= nearest) [best, nearest] = [point, far];
    }
    if (best !== this.near) {
      this.near = best;
      this.canvas.style.cursor = best && best.kept ? "pointer" : "default";
      this.draw();
    }
  }

  open() {
    if (!this.near || !this.near.groups.length) return;
    const [group, n] = this.near.groups[0];
    set({ tab: "episodes", a: this.number, b: state.b === this.number ? null : state.b, refilter: true });
    set({ group: this.run.groups.indexOf(group), n, m: 0 });
    showPane("tree");
  }
}

function mapTab() {
  const shown = [state.a, state.b].filter((number) => number !== null);
  if (!INDEX.map || !shown.some((number) => runs()[number].groups.some((group) => group.strategies.length))) {
    return el("div", { class: "page" }, el("p", { class: "empty" }, INDEX.map ? "This method writes no strategies." : "No map was made: there are no strategies, or --map none was given."));
  }
  const maps = shown.map((number) => new StrategyMap(runs()[number], number));
  const most = extent(maps.map((map) => map.mapped.length))[1];
  const label = el("output", {});
  const slider = el("input", { type: "range", min: -1, max: most - 1, value: mapState.at === null ? -1 : mapState.at, "aria-label": "iteration", oninput: () => { stop(); at(Number(slider.value)); } });
  const kinds = [...new Set(maps.flatMap((map) => map.run.kinds))].filter((kind) => kind).sort();
  const at = (place) => {
    mapState.at = place < 0 ? null : Math.min(place, most - 1);
    slider.value = mapState.at === null ? -1 : mapState.at;
    label.textContent = mapState.at === null ? "all iterations" : `iteration ${maps.map((map) => map.mapped[Math.min(mapState.at, map.mapped.length - 1)]).join(" / ")}`;
    for (const map of maps) map.refresh();
  };
  const stop = () => {
    clearInterval(mapState.playing);
    mapState.playing = 0;
    play.textContent = "▶ Play";
  };
  const play = el("button", { type: "button", onclick: () => {
    if (mapState.playing) return stop();
    if (mapState.at === null || mapState.at >= most - 1) at(0);
    play.textContent = "❚❚ Pause";
    mapState.playing = setInterval(() => {
      if (!play.isConnected || mapState.at >= most - 1) return stop();
      at(mapState.at + 1);
    }, 260);
  } }, "▶ Play");
  const page = el("div", { class: "page map-page" },
    el("div", { class: "controls" }, play, slider, label, el("span", { class: "grow" }),
      kinds.length > 1 ? select("Task type", [["", "any task type"], ...kinds.map((kind) => [kind, kind])], mapState.kind, (value) => { mapState.kind = value; at(Number(slider.value)); }) : null,
      select("Colour", [["return", "colour: return"], ["advantage", "colour: advantage"], ["iteration", "colour: iteration"]], mapState.colour, (value) => { mapState.colour = value; at(Number(slider.value)); }),
      el("label", { class: "check" }, el("input", { type: "checkbox", checked: mapState.others, onchange: (event) => { mapState.others = event.target.checked; at(Number(slider.value)); } }), "candidates not kept")),
    el("div", { class: `maps${maps.length > 1 ? " two" : ""}` }, maps.map((map) => map.node)),
    el("p", { class: "quiet" }, `Principal components of ${INDEX.map.how}, ${INDEX.map.placed < INDEX.map.texts ? `${count(INDEX.map.placed, "text")} of ${INDEX.map.texts.toLocaleString("en")}, from iterations spread evenly (--map-texts 0 places all)` : count(INDEX.map.texts, "different text")}; the two directions hold ${Math.round(100 * INDEX.map.explained)} % of the variance, so near means alike and far may still be alike in part. Filled: kept by the selector. Hollow: drawn and not kept. Larger: drawn more often.`));
  page.step = (by) => { stop(); at((mapState.at === null ? -1 : mapState.at) + by); };
  page.redraw = () => maps.forEach((map) => map.draw());
  requestAnimationFrame(() => at(Number(slider.value)));
  return page;
}
