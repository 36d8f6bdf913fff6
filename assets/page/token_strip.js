// The answer: its text, its tokens, and curves of probability and entropy. Receives only new tokens: {run, start, count,
// done, soft_capped, tokens} of paligemma/webapp/render/token_strip.py. Publishes "selected token" with all its data, so
// that the other parts show it without a request to the server.

const { t, create, createSvg, createButton, displayText, publish, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("answer");

let run = null;
let tokens = [];
let softCapped = false; // the model soft-caps its logits (PaliGemma 2)
let selected = null;
let followsNewest = true; // select the newest token until the user selects one
let highlighted = [];
let imageShares = []; // share of each token's attention on the image
let coloring = "probability";

const countAbove = (value, thresholds) => thresholds.filter((threshold) => value > threshold).length;
const countBelow = (value, thresholds) => thresholds.filter((threshold) => value < threshold).length;

// level: which of the three tints a token has, 0 for none. levels: their labels in the legend.
const COLORINGS = {
  probability: {
    label: "Color by probability", tint: "warm",
    level: (token) => countBelow(token.prob, [0.9, 0.6, 0.3]), levels: ["p < 0.9", "< 0.6", "< 0.3"],
  },
  entropy: {
    label: "Color by entropy", tint: "warm",
    level: (token) => countAbove(token.entropy, [0.3, 1, 2]), levels: ["> 0.3 nats", "> 1", "> 2"],
  },
  rank: {
    label: "Color by rank", tint: "warm",
    level: (token) => countAbove(token.rank, [1, 2, 5]), levels: ["2", "3 – 5", "> 5"],
  },
  "image attention": {
    label: "Color by image attention", tint: "cool",
    level: (token) => countAbove(imageShares[token.index] ?? 0, [0.1, 0.25, 0.5]), levels: ["> 10 %", "> 25 %", "> 50 %"],
  },
};

// Elements that exist from the start

const title = create("h2");
const copyButton = createButton("plain copy", "", copyText);
const text = create("p", "text");
const tokenList = create("div", "tokens");
const curves = createSvg("svg", { viewBox: "0 0 600 50", preserveAspectRatio: "none", class: "curves" });
const legend = create("div", "legend");
const header = create("div", "header");
const select = create("select");
header.append(title, select, copyButton);
part.append(header, text, tokenList, curves, legend);
tokenList.setAttribute("role", "listbox");

function drawLabels() {
  title.textContent = t("Answer");
  copyButton.textContent = t("Copy");
  tokenList.setAttribute("aria-label", t("Answer tokens"));
  curves.setAttribute("role", "img");
  curves.setAttribute("aria-label", t("Probability and entropy of each token"));
  drawPlaceholder();
  drawSelect();
  drawLegend();
}

async function copyText() {
  const answer = part.dataset.text || "";
  try {
    await navigator.clipboard.writeText(answer);
  } catch {
    copyWithTextarea(answer); // the Clipboard API needs https or localhost
  }
  copyButton.textContent = t("Copied");
  setTimeout(() => (copyButton.textContent = t("Copy")), 1500);
}

function copyWithTextarea(answer) {
  const textarea = create("textarea");
  textarea.value = answer;
  copyButton.after(textarea);
  textarea.select();
  document.execCommand("copy");
  textarea.remove();
  copyButton.focus();
}

// CSS shows the placeholder while the text is empty.
function drawPlaceholder() {
  const isFinished = tokens.length && part.getAttribute("aria-busy") === "false";
  text.dataset.placeholder = isFinished ? t("Empty answer") : t("The answer appears here, token by token.");
}

function drawSelect() {
  select.setAttribute("aria-label", t("Color by"));
  select.replaceChildren(
    ...Object.entries(COLORINGS).map(([name, { label }]) => {
      const option = create("option", "", t(label));
      option.value = name;
      option.selected = name === coloring;
      return option;
    }),
  );
}
select.addEventListener("change", () => {
  coloring = select.value;
  requestImageShares();
  drawLegend();
  paintTokens();
});

// The attention on the image takes a forward pass, so it is computed on demand.
function requestImageShares() {
  if (coloring === "image attention" && imageShares.length < tokens.length) trigger("shares", { run: run });
}

function drawLegend() {
  const { tint, levels } = COLORINGS[coloring];
  const colors = create("span", "levels");
  levels.forEach((level, index) => colors.append(create("i", `swatch ${tint}${index + 1}`), create("span", "", level)));
  const lines = create("span", "levels");
  lines.append(create("i", "stroke prob"), create("span", "", t("probability")));
  lines.append(create("i", "stroke entropy"), create("span", "", t("entropy")));
  legend.replaceChildren(colors, lines);
}

// Tokens

function createToken(token) {
  const node = create("span", "token kind-" + token.kind, token.piece);
  node.setAttribute("role", "option");
  node.dataset.index = token.index;
  if (token.forced) node.classList.add("forced");
  node.addEventListener("click", () => selectToken(token.index, true));
  return node;
}

function describe(token) {
  const description = t("token {number}, probability {percent} %, rank {rank}", {
    number: token.index + 1, percent: (100 * token.prob).toFixed(1), rank: token.rank,
  });
  return `${token.piece}: ${description}`;
}

function paintToken(node, token) {
  const { tint, level } = COLORINGS[coloring];
  const tokenLevel = level(token);
  for (const name of ["warm", "cool"]) for (const index of [1, 2, 3]) node.classList.remove(name + index);
  if (tokenLevel) node.classList.add(tint + tokenLevel);
  node.classList.toggle("highlighted", highlighted.includes(token.index));
  node.title = describe(token);
}
const paintTokens = () => tokens.forEach((token, index) => paintToken(tokenList.children[index], token));

function addTokens(newTokens) {
  for (const token of newTokens) {
    const node = createToken(token);
    paintToken(node, token);
    tokens.push(token);
    tokenList.append(node);
  }
  part.dataset.text = tokens.map((token) => token.text).join("");
  text.textContent = displayText(part.dataset.text);
  drawCurves();
}

// Remove all tokens. The selection is kept if the same run is sent again.
function clear(newRun) {
  if (newRun !== run) {
    followsNewest = true;
    part.scrollIntoView({ block: "nearest" }); // on a phone, the answer is off-screen when the user presses Run
  }
  run = newRun;
  tokens = [];
  imageShares = [];
  highlighted = [];
  tokenList.replaceChildren();
  text.textContent = "";
  part.dataset.text = "";
  if (!followsNewest) return;
  selected = null;
  publish("selected token", null);
}

function selectToken(index, byUser, takesFocus = byUser) {
  if (index < 0 || index >= tokens.length) return;
  if (byUser) followsNewest = false;
  const previous = tokenList.children[selected];
  if (previous) {
    previous.setAttribute("aria-selected", "false");
    previous.tabIndex = -1;
  }
  selected = index;
  const node = tokenList.children[index];
  node.setAttribute("aria-selected", "true");
  node.tabIndex = 0;
  drawCursor();
  publish("selected token", { run: run, count: tokens.length, soft_capped: softCapped, token: tokens[index] });
  // Read sizes after all parts have been written, so that the browser computes the layout once.
  if (takesFocus) node.focus({ preventScroll: true });
  const bottom = node.offsetTop + node.offsetHeight + 4;
  if (bottom > tokenList.scrollTop + tokenList.clientHeight) tokenList.scrollTop = bottom - tokenList.clientHeight;
  else if (node.offsetTop < tokenList.scrollTop) tokenList.scrollTop = node.offsetTop - 4;
}

const OFFSETS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
tokenList.addEventListener("keydown", (event) => {
  if (event.key in OFFSETS) {
    event.preventDefault();
    selectToken(Math.min(tokens.length - 1, Math.max(0, (selected ?? 0) + OFFSETS[event.key])), true);
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    publish("focus candidates", selected);
  }
});

// Curves

const x = (index) => (tokens.length < 2 ? 300 : 10 + (580 * index) / (tokens.length - 1));

function drawCurves() {
  const maxEntropy = Math.max(1, ...tokens.map((token) => token.entropy));
  const createCurve = (name, height) => {
    const points = tokens.map((token, index) => `${x(index).toFixed(1)},${(46 - 42 * height(token)).toFixed(1)}`);
    return createSvg("polyline", { class: name, points: points.join(" ") });
  };
  curves.replaceChildren(
    createSvg("path", { class: "axis", d: "M0 46H600" }),
    createCurve("entropy", (token) => token.entropy / maxEntropy),
    createCurve("prob", (token) => token.prob),
    createSvg("path", { class: "cursor", d: "" }),
  );
  drawCursor();
}
function drawCursor() {
  const cursor = curves.querySelector(".cursor");
  if (cursor) cursor.setAttribute("d", selected === null ? "" : `M${x(selected).toFixed(1)} 2V46`);
}
curves.addEventListener("click", (event) => {
  const frame = curves.getBoundingClientRect();
  const position = (600 * (event.clientX - frame.left)) / frame.width;
  const distance = (index) => Math.abs(x(index) - position);
  selectToken(tokens.reduce((best, _, index) => (distance(index) < distance(best) ? index : best), 0), true);
});

// Updates

function update(value) {
  if (value.start === 0) clear(value.run);
  if (value.run !== run || value.start > tokens.length) return; // an update was lost; page_update.js requests all parts
  softCapped = value.soft_capped;
  addTokens(value.tokens.slice(tokens.length - value.start));
  part.setAttribute("aria-busy", String(!value.done));
  drawPlaceholder();
  text.setAttribute("aria-live", value.done ? "polite" : "off");
  if (tokens.length) selectToken(followsNewest ? tokens.length - 1 : Math.min(selected ?? 0, tokens.length - 1), false);
  text.scrollTop = text.scrollHeight;
  if (value.done) requestImageShares();
}

subscribe("move selection", (offset) => selectToken((selected ?? 0) + offset, true, false));
subscribe("select token", (index) => selectToken(index, true));
subscribe("highlight tokens", (indices) => {
  highlighted = indices;
  paintTokens();
});
subscribe("image shares", (value) => {
  if (!value || value.run !== run) return;
  imageShares = value.shares;
  paintTokens();
});
subscribe("language", () => {
  drawLabels();
  paintTokens();
});
subscribe("new token_strip", update);
drawCurves();
