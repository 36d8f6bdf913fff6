// The objects of the answer as a table: {run, objects, problems, has_codes} of paligemma/webapp/render/objects.py. Publishes
// "objects" for the picture; a row, its box and its tokens find each other.

const { t, make, button, makeTable, refill, publish, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("objects");
let value = null;
let marked = null;

function draw() {
  if (!value || !(value.objects.length || value.problems.length)) {
    return refill(part, make("p", "empty", t("Ask to detect or segment something, and its boxes are listed here.")));
  }
  const rows = value.objects.map((object) => ({
    cells: [object.label + (object.growing ? " …" : ""), object.pixels, object.score || "–"],
  }));
  const table = makeTable([["label", "text"], ["pixels", "number"], ["mean p of its location tokens", "number"]], rows, decorate);
  const scroller = make("div", "scroller");
  scroller.append(table);
  const parts = value.objects.length ? [scroller] : [];
  for (const problem of value.problems) parts.push(drawProblem(problem));
  if (value.has_codes) {
    parts.push(make("p", "quiet", t("Masks came as codes, and the decoder that reads them is not here: boxes only.")));
  }
  if (value.objects.length) parts.push(drawDownloads());
  refill(part, ...parts);
}

function decorate(line, row, index) {
  line.classList.toggle("chosen", index === marked);
  line.tabIndex = 0;
  line.addEventListener("click", () => publish("chosen object", index));
  line.addEventListener("keydown", (event) => event.key === "Enter" && publish("chosen object", index));
}

function drawProblem(problem) {
  const line = make("p", "problem");
  // In English the reason has its numbers; another language says what kind of problem it is.
  const reason = window.paligemma.language === "en" ? problem.reason : t("problem: " + problem.kind);
  line.append(make("code", "", problem.text), make("span", "", " " + t("is no object: {reason}", { reason: reason })));
  line.addEventListener("click", () => publish("choose token", problem.tokens[0]));
  return line;
}

function drawDownloads() {
  const line = make("p", "actions");
  line.append(
    button("chip", t("Download as PNG"), () => trigger("download", { run: value.run, kind: "png" })),
    button("chip", t("Download as COCO JSON"), () => trigger("download", { run: value.run, kind: "coco" })),
  );
  return line;
}

function mark(index) {
  marked = index;
  publish("marked object", index);
  draw();
}

subscribe("chosen object", (index) => {
  const object = value?.objects[index];
  if (!object) return;
  publish("choose token", object.tokens[0]);
  publish("marked tokens", object.tokens);
  mark(index);
});
// A token of an object marks its box.
subscribe("token", (shown) => {
  const found = value && shown ? value.objects.findIndex((object) => object.tokens.includes(shown.token.index)) : -1;
  const index = found < 0 ? null : found;
  if (index === marked) return;
  if (marked !== null) publish("marked tokens", []);
  mark(index);
});
subscribe("language", draw);
subscribe("new objects", (found) => {
  value = found;
  publish("objects", value);
  draw();
});
draw();
