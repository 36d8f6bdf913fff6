// Buttons with a note below: {chips: [{label, note, hint, image?}], note?}. Triggers "select" with the index of
// the pressed one.

const { t, create, createButton, replaceContent, parseValue, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("chips");
let pressed = null;

function draw() {
  const { chips, note } = parseValue(props.value) || { chips: [] };
  part.setAttribute("role", "group");
  part.setAttribute("aria-label", t(props.name));
  replaceContent(part, ...chips.map(createChip));
  if (note) part.append(create("p", "muted", t(note)));
}

function createChip(chip, index) {
  const node = createButton("chip", "", () => {
    pressed = index;
    draw();
    trigger("select", { index: index });
  });
  if (chip.image) {
    const image = create("img");
    image.src = chip.image;
    image.alt = "";
    node.append(image);
  }
  node.append(create("span", "", t(chip.label)));
  if (chip.note) node.append(create("span", "note", chip.note));
  node.title = chip.hint;
  node.setAttribute("aria-pressed", String(index === pressed));
  return node;
}
subscribe("language", draw);
watch("value", draw);
