// Attention heatmap on the image and logit lens of the selected token: {run, index, grid, attention, picture_share,
// rows} of paligemma/webapp/render/attention.py, after the part has triggered "inspect".

const { t, create, createButton, createTable, replaceContent, parseValue, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("attention-view");
const MEAN = -1; // over all layers or heads
let selection = null;
let image = null;
let layer = MEAN;
let head = MEAN;

const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;

// The values [layer][head] of the selected layer and head, or their mean.
function selectHeads(values) {
  const layers = layer === MEAN ? values : [values[layer]];
  const selected = layers.flatMap((heads) => (head === MEAN ? heads : [heads[head]]));
  if (!Array.isArray(selected[0])) return mean(selected);
  return selected[0].map((_, patch) => mean(selected.map((weights) => weights[patch])));
}

function draw() {
  const value = parseValue(props.value);
  if (value && selection && value.run === selection.run && value.index === selection.token.index) {
    return replaceContent(part, createAttention(value), createLens(value));
  }
  const inspect = createButton("chip inspect", t("Inspect this token"), () => {
    trigger("inspect", { run: selection.run, index: selection.token.index });
  });
  inspect.disabled = !selection;
  const hint = t("Shows the attention on the image and the logit lens of the selected token, from one forward pass.");
  replaceContent(part, inspect, create("p", "empty", hint));
}

function createAttention(value) {
  const columns = create("div", "two-columns");
  const controls = create("div", "muted");
  const share = create("p");
  share.append(create("strong", "", (100 * selectHeads(value.picture_share)).toFixed(1) + " %"));
  share.append(create("span", "", " " + t("of the attention is on image tokens")));
  controls.append(share, createSelect(t("Layer"), value.attention.length, layer, (index) => (layer = index)));
  controls.append(createSelect(t("Head"), value.attention[0].length, head, (index) => (head = index)));
  controls.append(create("p", "", t("Attention weights are not an explanation of the answer.")));
  columns.append(createHeatmap(value), controls);
  return columns;
}

function createHeatmap(value) {
  const figure = create("div", "figure heatmap");
  if (image) {
    figure.style.aspectRatio = `${image.width} / ${image.height}`;
    const node = create("img");
    node.src = image.src;
    node.alt = t("Attention heatmap");
    figure.append(node);
  }
  const [rows, columns] = value.grid;
  const weights = selectHeads(value.attention);
  const max = Math.max(...weights) || 1;
  const grid = create("div", "patches");
  grid.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`;
  weights.forEach((weight, index) => {
    const patch = create("i");
    patch.style.opacity = (0.85 * weight) / max;
    patch.dataset.patch = index;
    grid.append(patch);
  });
  figure.append(grid);
  return figure;
}

function createSelect(name, count, selected, onSelect) {
  const label = create("label", "field", name + " ");
  const select = create("select");
  for (let index = MEAN; index < count; index++) {
    const option = create("option", "", index === MEAN ? t("Mean") : `${index + 1} / ${count}`);
    option.value = index;
    option.selected = index === selected;
    select.append(option);
  }
  select.addEventListener("change", () => {
    onSelect(Number(select.value));
    draw();
  });
  label.append(select);
  return label;
}

function createLens(value) {
  const lens = create("div", "lens");
  const title = create("h3", "", t("Logit lens"));
  title.title = t("The next-token prediction from the hidden state after each layer");
  const scroller = create("div", "scroller");
  scroller.append(createTable(props.columns, value.rows));
  lens.append(title, scroller);
  return lens;
}

subscribe("image", (value) => (image = value));
subscribe("selected token", (value) => {
  const isSame =
    selection && value && selection.run === value.run && selection.token.index === value.token.index;
  selection = value;
  if (!isSame) draw();
});
subscribe("language", draw);
watch("value", () => {
  const value = parseValue(props.value);
  if (!value) return;
  // Another model may have fewer layers and heads.
  if (layer >= value.attention.length) layer = MEAN;
  if (head >= value.attention[0].length) head = MEAN;
  draw();
});
