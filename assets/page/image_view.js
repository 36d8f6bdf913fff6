// The image with the objects of the answer: {src, width, height, model_input, side, patches} of
// paligemma/webapp/render/image_view.py, and the objects published by objects.js. Publishes "image", the image of the
// displayed run; the image view may show another image that has been chosen since.

const { t, create, createButton, replaceContent, parseValue, resetValue, publish, subscribe } = window.paligemma;
const part = element.querySelector(".part");
const NUM_HUES = 6;
let state = null;
let objects = [];
let highlighted = null;

function draw() {
  document.body.classList.toggle("has-image", Boolean(state));
  if (!state) return replaceContent(part);
  const figure = create("div", "figure");
  figure.style.aspectRatio = `${state.width} / ${state.height}`;
  figure.style.setProperty("--ratio", state.width / state.height);
  const image = create("img");
  image.src = state.src;
  image.alt = t("Input image");
  figure.append(image, create("div", "layer"));
  const change = createButton("plain change", t("Change image"), () => {
    show(null);
    resetValue(props);
    trigger("clear", {});
  });
  replaceContent(part, figure, createModelInput(), change);
  drawObjects();
}

function createModelInput() {
  const node = create("div", "model-input");
  const image = create("img");
  image.src = state.model_input;
  image.alt = "";
  const caption = state.patches
    ? t("Model input: {side} × {side} pixels, {patches} patches", state)
    : t("Model input: {side} × {side} pixels", state);
  node.append(image, create("span", "", caption));
  return node;
}

// The box is in fractions of the image; percentages keep it in place at every size.
function setPosition(node, [left, top, width, height]) {
  Object.assign(node.style, {
    left: 100 * left + "%", top: 100 * top + "%", width: 100 * width + "%", height: 100 * height + "%",
  });
}

function drawObjects() {
  part.querySelector(".layer")?.replaceChildren(...objects.map(createBox));
}

function createBox(object, index) {
  const box = createButton("box hue" + (index % NUM_HUES), "", () => publish("select object", index));
  setPosition(box, object.box);
  box.setAttribute("aria-label", `${object.label} ${object.score || ""}`);
  box.classList.toggle("highlighted", index === highlighted);
  if (object.mask) {
    const mask = create("span", "mask");
    mask.style.maskImage = mask.style.webkitMaskImage = `url("${object.mask}")`;
    box.append(mask);
  }
  const label = create("b", "", object.label);
  const [left, top] = object.box;
  label.classList.toggle("inside", top < 0.09);
  label.classList.toggle("align-right", left > 0.5);
  if (object.score) label.append(create("small", "", " " + object.score));
  box.append(label);
  return box;
}

function show(value) {
  state = value;
  draw();
}

subscribe("new token_strip", ({ start }) => {
  if (start === 0) publish("image", state); // a run starts, or an earlier run is shown
});
subscribe("new image_view", (value) => {
  show(value);
  publish("image", state);
  resetValue(props);
});
subscribe("objects", (value) => {
  objects = value.objects;
  drawObjects();
});
subscribe("highlight object", (index) => {
  highlighted = index;
  drawObjects();
});
subscribe("language", draw);
watch("value", () => {
  objects = []; // they belong to the previous image
  show(parseValue(props.value));
});
