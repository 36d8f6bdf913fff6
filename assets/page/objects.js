// Table of the objects of the answer: {run, objects, problems, masks_unavailable} of paligemma/webapp/render/objects.py.
// Publishes "objects" for the image view. Selecting a row, a box or a token highlights the other two.

const { t, formatMessage, create, createButton, createTable, replaceContent, publish, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("objects");
const COLUMNS = [["label", "text"], ["pixels", "number"], ["mean p of location tokens", "number"]];
// Translated by the kind of the problem; English shows the exact reason.
const PROBLEM_KINDS = {
  locations: "problem.locations", codes: "problem.codes", range: "problem.range", order: "problem.order",
};
let value = null;
let highlighted = null;

function draw() {
  if (!value || !(value.objects.length || value.problems.length)) {
    const hint = t("No objects. Prompts that start with detect or segment return them.");
    return replaceContent(part, create("p", "empty", hint));
  }
  const parts = value.objects.length ? [createObjectTable()] : [];
  parts.push(...value.problems.map(createProblem));
  if (value.masks_unavailable) parts.push(create("p", "muted", t("Mask decoder unavailable; masks are not drawn.")));
  if (value.objects.length) parts.push(createDownloads());
  replaceContent(part, ...parts);
}

function createObjectTable() {
  const rows = value.objects.map((object) => ({
    cells: [object.label + (object.incomplete ? " …" : ""), object.pixels, object.score || "–"],
  }));
  const scroller = create("div", "scroller");
  scroller.append(createTable(COLUMNS, rows, decorate));
  return scroller;
}

function decorate(tableRow, row, index) {
  tableRow.classList.toggle("chosen", index === highlighted);
  tableRow.tabIndex = 0;
  tableRow.addEventListener("click", () => publish("select object", index));
  tableRow.addEventListener("keydown", (event) => event.key === "Enter" && publish("select object", index));
}

function createProblem(problem) {
  const line = create("p", "problem");
  const reason = formatMessage({ code: PROBLEM_KINDS[problem.kind], text: problem.reason });
  line.append(create("code", "", problem.text), create("span", "", " " + t("Malformed object: {reason}", { reason })));
  line.addEventListener("click", () => publish("select token", problem.tokens[0]));
  return line;
}

function createDownloads() {
  const line = create("p", "actions");
  line.append(
    createButton("chip", t("Download PNG"), () => trigger("download", { run: value.run, kind: "png" })),
    createButton("chip", t("Download COCO JSON"), () => trigger("download", { run: value.run, kind: "coco" })),
  );
  return line;
}

function highlight(index) {
  highlighted = index;
  publish("highlight object", index);
  draw();
}

subscribe("select object", (index) => {
  const object = value?.objects[index];
  if (!object) return;
  publish("select token", object.tokens[0]);
  publish("highlight tokens", object.tokens);
  highlight(index);
});
subscribe("selected token", (selection) => {
  const found = value && selection ? value.objects.findIndex(({ tokens }) => tokens.includes(selection.token.index)) : -1;
  const index = found < 0 ? null : found;
  if (index === highlighted) return;
  if (highlighted !== null) publish("highlight tokens", []);
  highlight(index);
});
subscribe("language", draw);
subscribe("new objects", (newValue) => {
  value = newValue;
  publish("objects", value);
  draw();
});
draw();
