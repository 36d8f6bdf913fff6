// A row of buttons and a sentence below: {chips: [{label, note, hint, picture?, prefix?}], note?}. "select" says which
// one was pressed.

const { t, make, button, refill, read, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("chips");
let pressed = null;

function draw() {
  const { chips, note } = read(props.value) || { chips: [] };
  part.setAttribute("role", "group");
  part.setAttribute("aria-label", t(props.name));
  refill(
    part,
    ...chips.map((chip, index) => {
      const node = button("chip", "", () => {
        pressed = index;
        draw();
        trigger("select", { index: index });
      });
      if (chip.picture) {
        const picture = make("img");
        picture.src = chip.picture;
        picture.alt = "";
        node.append(picture);
      }
      node.append(make("span", "", t(chip.label)));
      if (chip.note) node.append(make("span", "note", chip.note));
      node.title = chip.hint;
      node.setAttribute("aria-pressed", String(index === pressed));
      return node;
    }),
  );
  if (note) part.append(make("p", "quiet", t(note)));
}
subscribe("language", draw);
watch("value", draw);
