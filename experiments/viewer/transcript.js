// One rollout as it was played: turns with what the judge and the advantages said of them, or its tokens one by one.

const SHOWN = new Set(["observation", "response", "action", "reward", "valid", "flagged", "return", "advantage", "format_penalty", "length_penalty", "invalid_action_penalty", "strategy", "tokens"]);

function prose(text, name) {
  const node = el("pre", { class: name, text: text === null || text === undefined ? "" : text });
  if (String(text || "").split("\n").length <= 14 && String(text || "").length <= 1200) return node;
  node.classList.add("long");
  const more = el("button", { type: "button", class: "more", "aria-expanded": "false", onclick: () => {
    const open = node.classList.toggle("open");
    more.textContent = open ? "show less" : "show all";
    more.setAttribute("aria-expanded", String(open));
  } }, "show all");
  return el("div", { class: "folded" }, node, more);
}

function turnOf(turn, k, run) {
  const notes = [];
  if (turn.flagged) notes.push(el("span", { class: "note warn" }, "⚑ judged wasted"));
  if (turn.action === null) notes.push(el("span", { class: "note warn" }, "could not be parsed, nothing sent"));
  else if (turn.valid === false) notes.push(el("span", { class: "note" }, "not understood by the environment"));
  if (isNumber(turn.reward) && turn.reward !== 0) notes.push(el("span", { class: "note good" }, `reward ${signed(turn.reward)}`));
  for (const name of ["format_penalty", "length_penalty", "invalid_action_penalty"]) if (isNumber(turn[name]) && turn[name] !== 0) notes.push(el("span", { class: "note" }, `${name.replaceAll("_", " ")} ${signed(turn[name])}`));
  const plain = typeof turn.response === "string" && typeof turn.action === "string" && turn.response.trim() === `<action>${turn.action}</action>`;
  const others = Object.entries(turn).filter(([name, value]) => !SHOWN.has(name) && value !== null && typeof value !== "object" && value !== "");
  return el("li", { class: `turn${turn.flagged ? " flagged" : ""}`, id: `turn-${k}`, tabindex: "-1", style: { "--bar": advantageColour(turn.advantage) } },
    el("span", { class: "number", title: `turn ${k + 1}` }, k + 1),
    el("div", { class: "said" },
      prose(turn.observation, "observation"),
      typeof turn.strategy === "string" && turn.strategy ? el("p", { class: "turn-strategy" }, el("small", {}, "strategy of this turn"), el("span", {}, turn.strategy)) : null,
      plain ? null : prose(turn.response, "response"),
      typeof turn.action === "string" ? el("p", { class: "action" }, el("span", { "aria-hidden": "true" }, "▸"), el("code", {}, turn.action === "" ? "(empty)" : turn.action)) : null,
      turn.tokens && state.tokens ? tokenRow(turn.tokens, run) : null,
      el("p", { class: "notes" }, notes, advantageChip(turn.advantage), isNumber(turn.return) ? chip("R", format(turn.return), null, false, "return of this turn") : null,
        others.map(([name, value]) => el("span", { class: "note" }, `${name}: ${typeof value === "number" ? format(value) : value}`)))));
}

// Sampled tokens are coloured one by one; what the policy only read is one dim piece of text.
function tokenRow(tokens, run) {
  const texts = run.vocabulary || {}, box = el("div", { class: "tokens" });
  const textOf = (id) => (texts[id] === undefined ? `[${id}] ` : texts[id]);
  const place = new Map(tokens.at.map((position, i) => [position, i]));
  let read = "";
  const flush = () => {
    if (read) box.append(el("span", { class: "read" }, read));
    read = "";
  };
  tokens.ids.forEach((id, position) => {
    const i = place.get(position);
    if (i === undefined) {
      read += textOf(id);
      return;
    }
    flush();
    const [logprob, temperature, advantage] = [tokens.logprob[i], tokens.temperature[i], tokens.advantage[i]];
    const colour = { advantage: () => advantageColour(advantage), temperature: () => advantageColour((temperature - 1) * 3), probability: () => shareColour(Math.exp(logprob)) }[state.tokenColour]();
    const deep = isDeep({ advantage: Math.abs(advantage) / 2, temperature: Math.abs(temperature - 1) * 1.5, probability: Math.exp(logprob) }[state.tokenColour]);
    box.append(el("span", { class: `token${deep ? " deep" : ""}`, style: { background: colour },
      title: `id ${id} · p ${format(Math.exp(logprob))} · log-prob ${format(logprob)} · temperature ${format(temperature)} · advantage ${signed(advantage, 3)}` },
      textOf(id).replace(/\n/g, "⏎\n")));
  });
  flush();
  return box;
}

// The earlier attempt that the prompt showed (methods with reflection).
function reflectionOf(shown) {
  if (!shown || typeof shown !== "object") return null;
  const strategies = Array.isArray(shown.strategies) ? shown.strategies : [];
  return el("details", { class: "reflection" }, el("summary", {}, `the prompt showed an earlier attempt that ${shown.success ? "succeeded" : "failed"}`),
    strategies.map((text) => prose(text, "observation")), shown.feedback ? prose(shown.feedback, "observation") : null);
}

function transcriptOf(record, run, group, side, strategyRecord) {
  const broken = record.outcome === null || record.outcome === undefined;
  const flagged = record.turns.filter((turn) => turn.flagged).length;
  const facts = [
    ["outcome", broken ? "none" : format(record.outcome)], ["score", format(record.score)], ["solved", record.success ? "yes" : "no"], ["stop", record.stop_reason || "–"],
    ["turns", record.turns.length], ["flagged", flagged], ["split", record.split], ["seed", record.seed],
  ].filter(([, value]) => value !== undefined && value !== null);
  const hasTokens = Boolean(record.tokens || record.turns.some((turn) => turn.tokens));
  return el("article", { class: "transcript" },
    el("header", { class: "head" },
      el("button", { type: "button", class: "back", onclick: () => showPane("tree") }, "‹ strategies"),
      el("h2", {}, strategyRecord || group.strategies.length ? `Strategy ${record.strategy_index + 1}, rollout ${record.rollout_index + 1}` : `Rollout ${record.rollout_index + 1}`),
      el("span", { class: `outcome${broken ? " broken" : isDeep(record.outcome) ? " deep" : ""}`, style: { background: shareColour(broken ? null : record.outcome) } }, broken ? "broken" : record.success ? "solved" : format(record.outcome, 2)),
      el("span", { class: "grow" }),
      hasTokens ? segmented("Show", [[false, "Text"], [true, "Tokens"]], state.tokens, (on) => set({ tokens: on })) : null,
      hasTokens && state.tokens ? segmented("Colour tokens by", [["advantage", "A", "advantage"], ["temperature", "T", "temperature"], ["probability", "p", "probability"]], state.tokenColour, (by) => set({ tokenColour: by })) : null),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    record.strategy ? el("blockquote", {}, el("small", {}, "strategy"), prose(record.strategy, "strategy-text"), strategyRecord && strategyRecord.tokens && state.tokens ? tokenRow(strategyRecord.tokens, run) : null) : null,
    reflectionOf(record.reflection),
    state.tokens && record.tokens ? tokenRow(record.tokens, run) : el("ol", { class: "turns" }, record.turns.map((turn, k) => turnOf(turn, k, run))),
    el("footer", {},
      record.final_observation ? el("section", {}, el("small", {}, "last observation"), prose(record.final_observation, "observation")) : null,
      record.error ? el("section", { class: "error" }, el("small", {}, "error"), prose(record.error, "observation")) : null,
      record.feedback ? el("section", {}, el("small", {}, "feedback"), prose(record.feedback, "observation")) : null,
      typeof record.judgment === "string" ? el("section", {}, el("small", {}, "self-judgment"), prose(record.judgment, "observation")) : null));
}
