// Candidate table of the selected token. Each token includes its table data, built by paligemma/webapp/render/candidates.py.
// Triggers "branch" to regenerate the answer from this token with another candidate.

const { t, create, createButton, createTable, replaceContent, publish, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("candidates-view");
let selection = null;

function draw() {
  if (!selection) {
    return replaceContent(part, create("p", "empty", t("Select a token to see its candidates.")));
  }
  const { token, count } = selection;
  const scroller = create("div", "scroller");
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "region");
  scroller.setAttribute("aria-label", t("Candidates"));
  scroller.append(createTable([...columns(), ["", "action"]], token.rows, decorate));
  replaceContent(part, createHeader(token, count), scroller, createMetrics(token));
}

function columns() {
  return props.columns.map(([title, kind]) => {
    return [title === "logit" && selection.soft_capped ? "soft-capped logit" : title, kind];
  });
}

function createHeader(token, count) {
  const header = create("div", "header");
  const title = create("strong", "", t("Token {number} of {count}", { number: token.index + 1, count: count }) + ": ");
  title.append(create("code", "", token.piece));
  if (token.role) title.append(create("span", "muted", " " + token.role));
  if (token.forced) title.append(create("span", "muted", " " + forcedNote(token)));
  const pager = create("span", "pager");
  for (const [symbol, offset, label] of [["◂", -1, t("Previous token")], ["▸", 1, t("Next token")]]) {
    const button = createButton("plain", symbol, () => publish("move selection", offset));
    button.title = label;
    button.setAttribute("aria-label", label);
    pager.append(button);
  }
  header.append(title, pager);
  return header;
}

function createMetrics(token) {
  const metrics = create("p", "metrics");
  for (const [name, number] of token.metrics) {
    const metric = create("span", "", t(name) + " ");
    metric.append(create("b", "", number));
    metrics.append(metric);
  }
  metrics.title = t("Computed from the full distribution at temperature 1. The top-k mass is that of the listed candidates.");
  return metrics;
}

function forcedNote(token) {
  return token.selected_manually ? t("selected manually") : t("copied from the parent run");
}

function decorate(tableRow, row, index) {
  const { run, token } = selection;
  tableRow.classList.toggle("chosen", index === token.chosen);
  const cell = create("td", "action");
  if (index === token.chosen) {
    tableRow.setAttribute("aria-current", "true");
    cell.append(create("span", "muted", t("chosen")));
  } else {
    const branch = createButton("plain branch", t("Branch"), () => {
      trigger("branch", { run: run, index: token.index, token_id: row.id });
    });
    branch.title = t("Regenerate from here with this token");
    branch.setAttribute("aria-label", `${t("Branch")} ${row.cells[1]}`);
    cell.append(branch);
  }
  tableRow.append(cell);
}

subscribe("selected token", (value) => {
  selection = value;
  draw();
});
subscribe("focus candidates", () => part.querySelector(".branch")?.focus());
subscribe("language", draw);
