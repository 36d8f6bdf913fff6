// Draws a table from data; the script of a gr.HTML whose template is static.
//
// props.columns  [title, kind] of each column; kind is "text", "number" or "share"
// props.pick     true when a row can be chosen; choosing one triggers "select" with its index
// props.empty    what an empty table says
// props.value    {title?, rows: [{cells, share, dropped?}], selected, facts?}: see paligemma/view/tokens.py
//
// Text reaches the page through textContent only: whatever a model or a person writes stays text.

const scroller = element.querySelector(".scroller");
const body = element.querySelector("tbody");
let selected = null;

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function makeRow(row, index) {
  const line = make("tr", row.dropped ? "dropped" : "");
  row.cells.forEach((text, column) => {
    const kind = props.columns[column][1];
    const cell = make("td", kind, text);
    if (kind === "text") cell.title = text; // where it is too long to be seen whole
    if (kind === "share") {
      const bar = make("span", "bar");
      bar.style.setProperty("--share", row.share);
      cell.prepend(bar);
    }
    line.append(cell);
  });
  if (props.pick) line.addEventListener("click", () => pick(index));
  return line;
}

function mark(index) {
  selected = index;
  [...body.rows].forEach((line, position) => {
    line.classList.toggle("selected", position === index);
    if (!props.pick) return;
    line.setAttribute("aria-selected", position === index);
    line.tabIndex = position === index ? 0 : -1;
  });
}

function pick(index) {
  if (index < 0 || index >= body.rows.length) return;
  mark(index);
  body.rows[index].focus();
  trigger("select", { index: index, value: null });
}

function drawRows(rows) {
  const drawn = JSON.stringify;
  rows.forEach((row, index) => {
    const old = body.rows[index];
    if (old && old.dataset.source === drawn(row)) return;
    const line = makeRow(row, index);
    line.dataset.source = drawn(row);
    if (old) old.replaceWith(line);
    else body.append(line);
  });
  while (body.rows.length > rows.length) body.lastElementChild.remove();
}

function drawFacts(facts) {
  const list = element.querySelector(".facts");
  list.replaceChildren(
    ...facts.map(([name, number]) => {
      const fact = make("span", "", name + " ");
      fact.append(make("b", "", number));
      return fact;
    }),
  );
}

function draw() {
  const value = props.value || { rows: [], selected: null };
  const grew = value.rows.length > body.rows.length;
  drawRows(value.rows);
  mark(value.selected);
  element.querySelector(".title").textContent = value.title || props.label;
  element.querySelector(".empty").textContent = value.rows.length ? "" : props.empty;
  drawFacts(value.facts || []);
  if (grew && props.pick) scroller.scrollTop = scroller.scrollHeight;
}

const keys = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
body.addEventListener("keydown", (event) => {
  if (!props.pick || !(event.key in keys)) return;
  event.preventDefault();
  const last = body.rows.length - 1;
  pick(Math.min(last, Math.max(0, (selected ?? 0) + keys[event.key])));
});

element.querySelector("table").setAttribute("role", props.pick ? "grid" : "table");
element.querySelector("table").setAttribute("aria-label", props.label);
element.querySelector("thead tr").append(
  ...props.columns.map(([title, kind]) => {
    const cell = make("th", kind, title);
    cell.scope = "col";
    return cell;
  }),
);
draw();
watch("value", draw);
