// What the model could have written in place of the chosen token. Everything comes with the token itself, from
// paligemma/webapp/render/token_strip.py; "branch" asks to answer anew from here with another one.

const { t, make, button, makeTable, refill, publish, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("candidates-view");
let shown = null;

function draw() {
  if (!shown) {
    return refill(
      part,
      make("p", "empty", t("Choose a token to see what else the model could have written in its place.")),
    );
  }
  const { token, count } = shown;
  const facts = make("p", "facts");
  for (const [name, number] of token.facts) {
    const fact = make("span", "", t(name) + " ");
    fact.append(make("b", "", number));
    facts.append(fact);
  }
  const scroller = make("div", "scroller");
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "region");
  scroller.setAttribute("aria-label", t("Candidates"));
  scroller.append(makeTable([...columns(), ["", "action"]], token.rows, decorate));
  refill(part, makeHead(token, count), scroller, facts, make("p", "quiet", note()));
}

function columns() {
  return props.columns.map(([title, kind]) => [title === "logit" && shown.soft_capped ? "soft-capped logit" : title, kind]);
}

function note() {
  return t("From left to right, what becomes of a candidate: its logit, divided by the temperature T, kept or dropped by top-k or top-p, and the probability that it was drawn with.");
}

function makeHead(token, count) {
  const head = make("div", "head");
  const name = make("strong", "", t("Token {number} of {count}", { number: token.index + 1, count: count }) + ": ");
  name.append(make("code", "", token.piece));
  if (token.role) name.append(make("span", "quiet", " " + token.role));
  if (token.forced) name.append(make("span", "quiet", " " + origin(token)));
  const moves = make("span", "moves");
  for (const [sign, by, label] of [["◂", -1, "Previous token"], ["▸", 1, "Next token"]]) {
    const move = button("plain", sign, () => publish("move", by));
    move.setAttribute("aria-label", t(label));
    moves.append(move);
  }
  head.append(name, moves);
  return head;
}

function origin(token) {
  return token.by_hand ? t("chosen by hand, in place of the run's own") : t("taken over from the run it branched from");
}

function decorate(line, row, index) {
  const { run, token } = shown;
  line.classList.toggle("chosen", index === token.chosen);
  const cell = make("td", "action");
  if (index === token.chosen) {
    line.setAttribute("aria-current", "true");
    cell.append(make("span", "quiet", t("chosen")));
  } else {
    const branch = button("plain branch", t("branch ↗"), () => {
      trigger("branch", { run: run, index: token.index, token_id: row.id });
    });
    branch.title = t("Answer anew from here with this piece");
    branch.setAttribute("aria-label", `${t("branch ↗")} ${row.cells[1]}`);
    cell.append(branch);
  }
  line.append(cell);
}

subscribe("token", (value) => {
  shown = value;
  draw();
});
subscribe("to the candidates", () => part.querySelector(".branch")?.focus());
subscribe("language", draw);
