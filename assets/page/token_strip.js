// The answer: its text, a chip a token, and a line over all tokens. Gets only what is new:
// {run, start, count, done, soft_capped, tokens} of `strip_of` in paligemma/webapp/execution.py. Publishes "token", the chosen one with all its
// numbers, so that it is shown without asking the server again.

const { t, make, button, svg, readable, publish, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("answer");

let run = null;
let tokens = [];
let softCapped = false; // the run's logits, which only PaliGemma 2 does
let chosen = null;
let follows = true; // the newest token is the chosen one until a person chooses
let marked = [];
let shares = [];
let coloring = "probability";

// What each coloring looks at, and from where on a chip gets its three tints.
const COLORINGS = {
  probability: { tint: "warm", level: (token) => below(token.prob, [0.9, 0.6, 0.3]), steps: ["p < 0.9", "< 0.6", "< 0.3"] },
  entropy: { tint: "warm", level: (token) => above(token.entropy, [0.3, 1, 2]), steps: ["> 0.3 nats", "> 1", "> 2"] },
  rank: { tint: "warm", level: (token) => above(token.rank, [1, 2, 5]), steps: ["2", "3 – 5", "> 5"] },
  "image attention": {
    tint: "cool", level: (token) => above(shares[token.index] ?? 0, [0.1, 0.25, 0.5]), steps: ["> 10 %", "> 25 %", "> 50 %"],
  },
};
const above = (value, bounds) => bounds.filter((bound) => value > bound).length;
const below = (value, bounds) => bounds.filter((bound) => value < bound).length;

// The frame, made once

const title = make("h2");
const copy = button("plain copy", "", copyText);
const text = make("p", "text");
const strip = make("div", "strip");
const line = svg("svg", { viewBox: "0 0 600 50", preserveAspectRatio: "none", class: "line" });
const legend = make("div", "legend");
const head = make("div", "head");
const select = make("select");
head.append(title, select, copy);
part.append(head, text, strip, line, legend);
strip.setAttribute("role", "listbox");

function drawWords() {
  title.textContent = t("Answer");
  copy.textContent = t("Copy");
  strip.setAttribute("aria-label", t("Tokens of the answer"));
  line.setAttribute("role", "img");
  line.setAttribute("aria-label", t("Probability and entropy over all tokens"));
  drawEmpty();
  drawSelect();
  drawLegend();
}

async function copyText() {
  const answer = part.dataset.text || "";
  try {
    await navigator.clipboard.writeText(answer);
  } catch {
    copySelected(answer); // over plain http there is no clipboard
  }
  copy.textContent = t("Copied");
  setTimeout(() => (copy.textContent = t("Copy")), 1500);
}

function copySelected(answer) {
  const field = make("textarea");
  field.value = answer;
  copy.after(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  copy.focus();
}

// What stands where an answer has no text.
function drawEmpty() {
  const hasEnded = tokens.length && part.getAttribute("aria-busy") === "false";
  text.dataset.empty = hasEnded ? t("The model ended its answer without a word.") : t("The answer appears here, token by token.");
}

function drawSelect() {
  select.setAttribute("aria-label", t("Color by"));
  select.replaceChildren(
    ...Object.keys(COLORINGS).map((name) => {
      const option = make("option", "", t("color by " + name));
      option.value = name;
      option.selected = name === coloring;
      return option;
    }),
  );
}
select.addEventListener("change", () => {
  coloring = select.value;
  askForShares();
  drawLegend();
  paintChips();
});

// How much of its attention a token gave to the picture is worked out when it is wanted.
function askForShares() {
  if (coloring === "image attention" && shares.length < tokens.length) trigger("shares", { run: run });
}

function drawLegend() {
  const { tint, steps } = COLORINGS[coloring];
  const meaning = make("span", "steps", coloring === "image attention" ? t("attention on the picture") : t("where unsure"));
  steps.forEach((step, index) => meaning.append(make("i", `swatch ${tint}${index + 1}`), make("span", "", step)));
  const curves = make("span", "steps");
  curves.append(make("i", "stroke prob"), make("span", "", t("probability")));
  curves.append(make("i", "stroke entropy"), make("span", "", t("entropy")));
  legend.replaceChildren(meaning, curves);
}

// Chips

function makeChip(token) {
  const chip = make("span", "token kind-" + token.kind, token.piece);
  chip.setAttribute("role", "option");
  chip.dataset.index = token.index;
  if (token.forced) chip.classList.add("forced");
  chip.addEventListener("click", () => choose(token.index, true));
  return chip;
}

function describe(token) {
  const said = t("token {number}, probability {percent} %, rank {rank}", {
    number: token.index + 1, percent: (100 * token.prob).toFixed(1), rank: token.rank,
  });
  return `${token.piece}: ${said}`;
}

function paintChip(chip, token) {
  const { tint, level } = COLORINGS[coloring];
  const tinted = level(token);
  for (const name of ["warm", "cool"]) for (const step of [1, 2, 3]) chip.classList.remove(name + step);
  if (tinted) chip.classList.add(tint + tinted);
  chip.classList.toggle("marked", marked.includes(token.index));
  chip.title = describe(token);
}
const paintChips = () => tokens.forEach((token, index) => paintChip(strip.children[index], token));

function addTokens(added) {
  for (const token of added) {
    const chip = makeChip(token);
    paintChip(chip, token);
    tokens.push(token);
    strip.append(chip);
  }
  part.dataset.text = tokens.map((token) => token.text).join("");
  text.textContent = readable(part.dataset.text);
  drawLine();
}

// Begin again with nothing. A person's choice stays when the same run is sent again.
function empty(number) {
  if (number !== run) {
    follows = true;
    // On a phone the buttons that begin a run are not where its answer is.
    part.scrollIntoView({ block: "nearest" });
  }
  run = number;
  tokens = [];
  shares = [];
  marked = [];
  strip.replaceChildren();
  text.textContent = "";
  part.dataset.text = "";
  if (!follows) return;
  chosen = null;
  publish("token", null);
}

function choose(index, byPerson, takesFocus = byPerson) {
  if (index < 0 || index >= tokens.length) return;
  if (byPerson) follows = false;
  const before = strip.children[chosen];
  if (before) {
    before.setAttribute("aria-selected", "false");
    before.tabIndex = -1;
  }
  chosen = index;
  const chip = strip.children[index];
  chip.setAttribute("aria-selected", "true");
  chip.tabIndex = 0;
  drawCursor();
  publish("token", { run: run, count: tokens.length, soft_capped: softCapped, token: tokens[index] });
  // Sizes are asked for when all is written, else the browser works them out for each part anew.
  if (takesFocus) chip.focus({ preventScroll: true });
  const bottom = chip.offsetTop + chip.offsetHeight + 4;
  if (bottom > strip.scrollTop + strip.clientHeight) strip.scrollTop = bottom - strip.clientHeight;
  else if (chip.offsetTop < strip.scrollTop) strip.scrollTop = chip.offsetTop - 4;
}

const keys = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
strip.addEventListener("keydown", (event) => {
  if (event.key in keys) {
    event.preventDefault();
    choose(Math.min(tokens.length - 1, Math.max(0, (chosen ?? 0) + keys[event.key])), true);
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    publish("to the candidates", chosen);
  }
});

// The line

const x = (index) => (tokens.length < 2 ? 300 : 10 + (580 * index) / (tokens.length - 1));

function drawLine() {
  const most = Math.max(1, ...tokens.map((token) => token.entropy));
  const curve = (name, height) => {
    const points = tokens.map((token, index) => `${x(index).toFixed(1)},${(46 - 42 * height(token)).toFixed(1)}`);
    return svg("polyline", { class: name, points: points.join(" ") });
  };
  line.replaceChildren(
    svg("path", { class: "ground", d: "M0 46H600" }),
    curve("entropy", (token) => token.entropy / most),
    curve("prob", (token) => token.prob),
    svg("path", { class: "cursor", d: "" }),
  );
  drawCursor();
}
function drawCursor() {
  const cursor = line.querySelector(".cursor");
  if (cursor) cursor.setAttribute("d", chosen === null ? "" : `M${x(chosen).toFixed(1)} 2V46`);
}
line.addEventListener("click", (event) => {
  const frame = line.getBoundingClientRect();
  const at = (600 * (event.clientX - frame.left)) / frame.width;
  const nearest = tokens.reduce((best, _, index) => (Math.abs(x(index) - at) < Math.abs(x(best) - at) ? index : best), 0);
  choose(nearest, true);
});

// What comes in

function update(value) {
  if (value.start === 0) empty(value.run);
  if (value.run !== run || value.start > tokens.length) return; // all of it was asked for again: see news.js
  softCapped = value.soft_capped;
  addTokens(value.tokens.slice(tokens.length - value.start));
  part.setAttribute("aria-busy", String(!value.done));
  drawEmpty();
  text.setAttribute("aria-live", value.done ? "polite" : "off");
  if (tokens.length) choose(follows ? tokens.length - 1 : Math.min(chosen ?? 0, tokens.length - 1), false);
  text.scrollTop = text.scrollHeight;
  if (value.done) askForShares();
}

subscribe("move", (by) => choose((chosen ?? 0) + by, true, false));
subscribe("marked tokens", (indices) => {
  marked = indices;
  paintChips();
});
subscribe("shares", (value) => {
  if (!value || value.run !== run) return;
  shares = value.shares;
  paintChips();
});
subscribe("choose token", (index) => choose(index, true));
subscribe("language", () => {
  drawWords();
  paintChips();
});
subscribe("new token_strip", update);
drawLine();
