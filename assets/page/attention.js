// Where the model looked when it wrote the chosen token, and what each layer would have written:
// {run, index, grid, attention, picture_share, rows} of paligemma/webapp/render/attention.py, asked for with "inspect".

const { t, make, button, makeTable, refill, read, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("attention-view");
let token = null;
let picture = null;
let layer = -1; // -1 is the mean
let head = -1;

const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;

// The chosen layer and head, or the mean over all.
function pick(table) {
  const layers = layer < 0 ? table : [table[layer]];
  const chosen = layers.flatMap((heads) => (head < 0 ? heads : [heads[head]]));
  return Array.isArray(chosen[0]) ? chosen[0].map((_, patch) => mean(chosen.map((row) => row[patch]))) : mean(chosen);
}

function draw() {
  const value = read(props.value);
  const fits = value && token && value.run === token.run && value.index === token.token.index;
  const ask = button("chip ask", t("Look inside this token"), () => {
    trigger("inspect", { run: token.run, index: token.token.index });
  });
  ask.disabled = !token;
  const shown = make("div", "shown");
  if (fits) shown.append(drawAttention(value), drawLens(value));
  else shown.append(make("p", "empty", t("One forward pass shows where the model looked when it wrote the chosen token, and what each layer would have written.")));
  refill(part, ...(fits ? [] : [ask]), shown);
}

function drawAttention(value) {
  const block = make("div", "two");
  const words = make("div", "quiet");
  const share = make("p");
  share.append(make("strong", "", (100 * pick(value.picture_share)).toFixed(1) + " %"));
  share.append(make("span", "", " " + t("of this token's attention goes to the picture.")));
  words.append(share, choice("layer", value.attention.length, layer, (chosen) => (layer = chosen)));
  words.append(choice("head", value.attention[0].length, head, (chosen) => (head = chosen)));
  words.append(make("p", "", t("Attention shows where information was read from. It is not an explanation.")));
  block.append(drawHeat(value), words);
  return block;
}

function drawHeat(value) {
  const figure = make("div", "picture heat");
  if (picture) {
    figure.style.aspectRatio = `${picture.width} / ${picture.height}`;
    const image = make("img");
    image.src = picture.src;
    image.alt = t("Attention over the picture");
    figure.append(image);
  }
  const [rows, columns] = value.grid;
  const weights = pick(value.attention);
  const most = Math.max(...weights) || 1;
  const grid = make("div", "patches");
  grid.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${columns}, 1fr)`;
  weights.forEach((weight, patch) => {
    const cell = make("i");
    cell.style.opacity = (0.85 * weight) / most;
    cell.dataset.patch = patch;
    grid.append(cell);
  });
  figure.append(grid);
  return figure;
}

function choice(name, count, chosen, use) {
  const label = make("label", "choice", t(name) + " ");
  const select = make("select");
  for (let index = -1; index < count; index++) {
    const option = make("option", "", index < 0 ? t("mean") : `${index + 1} / ${count}`);
    option.value = index;
    option.selected = index === chosen;
    select.append(option);
  }
  select.addEventListener("change", () => {
    use(Number(select.value));
    draw();
  });
  label.append(select);
  return label;
}

function drawLens(value) {
  const block = make("div", "lens");
  const scroller = make("div", "scroller");
  scroller.append(makeTable(props.columns, value.rows));
  block.append(
    make("h3", "", t("Logit lens")),
    make("p", "quiet", t("Each layer's output, read as if it were the last one's.")),
    scroller,
  );
  return block;
}

subscribe("picture", (scene) => (picture = scene));
subscribe("token", (value) => {
  const isSame = token && value && token.run === value.run && token.token.index === value.token.index;
  token = value;
  if (!isSame) draw();
});
subscribe("language", draw);
watch("value", () => {
  const value = read(props.value);
  if (!value) return;
  // Another model may have fewer of them.
  if (layer >= value.attention.length) layer = -1;
  if (head >= value.attention[0].length) head = -1;
  draw();
});
