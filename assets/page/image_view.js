// The picture with what the answer says is in it: {src, width, height, seen, side, patches} of
// paligemma/webapp/images.py, and the objects that the table of objects publishes. Publishes "picture", that of the
// run whose answer is shown: a person may have chosen another one since.

const { t, make, button, refill, read, forget, publish, subscribe } = window.paligemma;
const part = element.querySelector(".part");
let objects = [];
let marked = null;

let scene = null;

function draw() {
  document.body.classList.toggle("has-picture", Boolean(scene));
  if (!scene) return refill(part);
  const figure = make("div", "picture");
  figure.style.aspectRatio = `${scene.width} / ${scene.height}`;
  figure.style.setProperty("--ratio", scene.width / scene.height);
  const image = make("img");
  image.src = scene.src;
  image.alt = t("The picture that was asked about");
  figure.append(image, make("div", "layer"));
  const other = button("plain change", t("Choose another picture"), () => {
    show(null);
    forget(props);
    trigger("clear", {});
  });
  refill(part, figure, seenLine(scene), other);
  drawObjects();
}

function seenLine(scene) {
  const line = make("div", "seen");
  const seen = make("img");
  seen.src = scene.seen;
  seen.alt = t("What the model sees");
  const sentence = scene.patches
    ? t("What the model sees: squeezed to {side} × {side} pixels, {patches} patches.", scene)
    : t("What the model sees: squeezed to {side} × {side} pixels.", scene);
  line.append(seen, make("span", "", sentence));
  return line;
}

// Shares of the picture become percentages, so that boxes stay in place at every size.
function place(node, [left, top, width, height]) {
  Object.assign(node.style, {
    left: 100 * left + "%", top: 100 * top + "%", width: 100 * width + "%", height: 100 * height + "%",
  });
}

function drawObjects() {
  const layer = part.querySelector(".layer");
  if (!layer) return;
  layer.replaceChildren(
    ...objects.map((object, index) => {
      const box = button("box hue" + (index % 6), "", () => publish("chosen object", index));
      place(box, object.box);
      box.setAttribute("aria-label", `${object.label} ${object.score || ""}`);
      box.classList.toggle("marked", index === marked);
      if (object.mask) {
        const mask = make("span", "mask");
        mask.style.maskImage = mask.style.webkitMaskImage = `url("${object.mask}")`;
        box.append(mask);
      }
      const name = make("b", "", object.label);
      name.classList.toggle("inside", object.box[1] < 0.09);
      name.classList.toggle("leftward", object.box[0] > 0.5);
      if (object.score) name.append(make("small", "", " " + object.score));
      box.append(name);
      return box;
    }),
  );
}

function show(value) {
  scene = value;
  draw();
}

subscribe("new token_strip", ({ start }) => {
  if (start === 0) publish("picture", scene); // a run begins, or is shown again
});
subscribe("new image_view", (value) => {
  show(value);
  publish("picture", scene);
  forget(props);
});
subscribe("objects", (value) => {
  objects = value.objects;
  drawObjects();
});
subscribe("marked object", (index) => {
  marked = index;
  drawObjects();
});
subscribe("language", draw);
watch("value", () => {
  objects = []; // they are in the picture before
  show(read(props.value));
});
