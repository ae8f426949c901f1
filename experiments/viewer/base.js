// Small tools: elements, text that is safe to look at, numbers, colours.  Nothing here ever parses markup.

const $ = (selector, root = document) => root.querySelector(selector);

// el("button", {class: "x", onclick: f, style: {"--p": "3"}}, "text", node, ...): text children are text, never markup.
function el(tag, props, ...children) {
  const node = tag === "svg" || SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = visible(value);
    else node.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : visible(String(child)));
  }
  return node;
}
const SVG = new Set(["path", "circle", "line", "g", "rect", "polyline"]);

// Control characters, direction overrides and half surrogate pairs are shown as what they are: nothing hides.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
function visible(text) {
  return String(text).replace(/\r\n|[\u2028\u2029]/g, "\n").replace(HIDDEN, (c) => `\u27e8U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function format(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e7)) return value.toExponential(1);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  return String(+value.toFixed(size >= 100 ? 1 : digits));
}
const signed = (value, digits = 2) => (!isNumber(value) ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(digits));
const short = (value) => (!isNumber(value) ? "×" : value >= 0.995 ? "1" : value <= 0.0049 ? "0" : value.toFixed(2).slice(1));
const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
// The least and the greatest. Math.max(...values) overflows the call stack at some 100,000 values.
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// Outcomes and returns run from --low to --high, advantages from --neg over --mid to --pos.
const shareColour = (value) => (isNumber(value) ? `color-mix(in oklab, var(--high) ${(100 * clamp(value, 0, 1)).toFixed(1)}%, var(--low))` : "var(--broken)");
function advantageColour(value, most = 2) {
  if (!isNumber(value)) return "var(--broken)";
  const part = clamp(Math.abs(value) / most, 0, 1);
  return `color-mix(in oklab, var(${value < 0 ? "--neg" : "--pos"}) ${(100 * part).toFixed(1)}%, var(--mid))`;
}
// Ink on a coloured cell; the darker end of a scale wants the light ink.
const isDeep = (part) => part > 0.55;

function debounce(action, milliseconds) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), milliseconds);
  };
}

function announce(text) {
  $("#say").textContent = visible(text);
}

function segmented(label, options, value, onchange) {
  return el("div", { class: "segmented", role: "group", "aria-label": label },
    options.map(([key, text, title]) => el("button", { type: "button", "aria-pressed": String(key === value), title, onclick: () => onchange(key) }, text)));
}

function select(label, options, value, onchange) {
  const node = el("select", { "aria-label": label, title: label, onchange: () => onchange(node.value) },
    options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text)));
  return node;
}
