// The runs of this visit, each below the one that it branched from, and two of them side by side:
// {runs, compared} of paligemma/webapp/runs.py. "open" shows a run again, "compare" asks for two.

const { t, make, button, refill, readable, read, forget, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("runs");
let ticked = [];

let value = { runs: [], compared: null };

function draw() {
  const { runs, compared } = value;
  ticked = ticked.filter((number) => runs.some((run) => run.number === number));
  if (!runs.length) {
    const kept = t("The last {count} runs stay here, and every branch below the run it left.", { count: props.most });
    return refill(part, make("p", "empty", kept));
  }
  const list = make("ul", "tree");
  list.append(...runs.map(drawRun));
  const parts = [list, make("p", "quiet", t("Tick two runs to see them side by side."))];
  if (compared && ticked.length === 2) parts.push(drawCompared(compared));
  refill(part, ...parts);
}

function drawRun(run) {
  const item = make("li", run.current ? "current" : "");
  item.style.setProperty("--depth", run.depth);
  const tick = make("input");
  tick.type = "checkbox";
  tick.checked = ticked.includes(run.number);
  tick.setAttribute("aria-label", t("Compare run {number}", run));
  tick.addEventListener("change", () => toggle(run.number, tick.checked));
  const open = button("plain run", "", () => trigger("open", { run: run.number }));
  if (run.current) open.setAttribute("aria-current", "true");
  open.append(make("b", "", `${run.number} `), make("span", "", run.prompt + " "));
  if (run.branched_at) open.append(make("code", "", `↗ ${run.branched_at}: ${run.piece}`));
  if (run.imported) open.append(make("span", "quiet", " " + t("from a file")));
  open.append(make("span", "quiet said", readable(run.text)));
  item.append(tick, open);
  return item;
}

function toggle(number, isOn) {
  ticked = [...ticked.filter((other) => other !== number), ...(isOn ? [number] : [])].slice(-2);
  if (ticked.length === 2) trigger("compare", { runs: ticked });
  draw();
}

function drawCompared(sides) {
  const block = make("div", "compared");
  for (const side of sides) {
    const column = make("div");
    column.append(make("h3", "", `${side.number} · ${side.prompt}`));
    const tokens = make("p", "strip");
    for (const token of side.tokens) {
      const chip = make("span", "token" + (token.same ? "" : " differs"), token.piece);
      chip.title = (100 * token.prob).toFixed(1) + " %";
      tokens.append(chip);
    }
    column.append(tokens);
    block.append(column);
  }
  return block;
}

function show(tree) {
  value = tree;
  draw();
}
subscribe("language", draw);
watch("value", () => show(read(props.value)));
subscribe("new runs", (tree) => {
  show(tree);
  forget(props);
  if (ticked.length === 2) trigger("compare", { runs: ticked }); // they stay side by side
});
