// The session's runs as a tree, each branch below the run that it branched from, and a comparison of two runs:
// {runs, compared} of paligemma/webapp/render/runs.py. Triggers "open" to show a run, and "compare".

const { t, create, createButton, replaceContent, displayText, parseValue, resetValue, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("runs");
let selected = []; // numbers of the runs to compare, at most two
let value = { runs: [], compared: null };

function draw() {
  const { runs, compared } = value;
  selected = selected.filter((number) => runs.some((run) => run.number === number));
  if (!runs.length) {
    const hint = t("Your last {count} runs are listed here, each branch below its parent run.", { count: props.max_runs });
    return replaceContent(part, create("p", "empty", hint));
  }
  const list = create("ul", "tree");
  list.append(...runs.map(createItem));
  const parts = [list, create("p", "muted", t("Select two runs to compare them."))];
  if (compared && selected.length === 2) parts.push(createComparison(compared));
  replaceContent(part, ...parts);
}

function createItem(run) {
  const item = create("li", run.current ? "current" : "");
  item.style.setProperty("--depth", run.depth);
  const checkbox = create("input");
  checkbox.type = "checkbox";
  checkbox.checked = selected.includes(run.number);
  checkbox.setAttribute("aria-label", t("Compare run {number}", run));
  checkbox.addEventListener("change", () => select(run.number, checkbox.checked));
  const open = createButton("plain run", "", () => trigger("open", { run: run.number }));
  if (run.current) open.setAttribute("aria-current", "true");
  open.append(create("b", "", `${run.number} `), create("span", "", run.prompt + " "));
  if (run.branched_at) open.append(create("code", "", `↗ ${run.branched_at}: ${run.piece}`));
  if (run.imported) open.append(create("span", "muted", " " + t("imported")));
  open.append(create("span", "muted answer-text", displayText(run.text)));
  item.append(checkbox, open);
  return item;
}

function select(number, isSelected) {
  selected = [...selected.filter((other) => other !== number), ...(isSelected ? [number] : [])].slice(-2);
  if (selected.length === 2) trigger("compare", { runs: selected });
  draw();
}

function createComparison(runs) {
  const comparison = create("div", "comparison");
  for (const run of runs) {
    const column = create("div");
    column.append(create("h3", "", `${run.number} · ${run.prompt}`));
    const tokens = create("p", "tokens");
    for (const token of run.tokens) {
      const node = create("span", "token" + (token.same ? "" : " different"), token.piece);
      node.title = (100 * token.prob).toFixed(1) + " %";
      tokens.append(node);
    }
    column.append(tokens);
    comparison.append(column);
  }
  return comparison;
}

function show(tree) {
  value = tree;
  draw();
}
subscribe("language", draw);
watch("value", () => show(parseValue(props.value)));
subscribe("new runs", (tree) => {
  show(tree);
  resetValue(props);
  if (selected.length === 2) trigger("compare", { runs: selected }); // keep the comparison
});
