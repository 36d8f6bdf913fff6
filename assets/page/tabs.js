// Tabs for the panels of props.panels, [[id, title]]. Unlike with Gradio's tabs, hidden panels are part of the page from
// the start, because parts update each other whether they are visible or not.

const { t, createButton, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("tabs");
part.setAttribute("role", "tablist");
let selected = 0;

function select(index, hasFocus) {
  selected = index;
  draw();
  if (hasFocus) part.children[index].focus();
}

function draw() {
  part.setAttribute("aria-label", t("Answer views"));
  part.replaceChildren(
    ...props.panels.map(([id, title], index) => {
      const tab = createButton("plain tab", t(title), () => select(index, true));
      tab.id = "tab-" + id;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-selected", String(index === selected));
      tab.setAttribute("aria-controls", id);
      tab.tabIndex = index === selected ? 0 : -1;
      return tab;
    }),
  );
  props.panels.forEach(([id], index) => {
    const panel = document.getElementById(id);
    if (!panel) return;
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", "tab-" + id);
    panel.dataset.visible = String(index === selected);
  });
}

part.addEventListener("keydown", (event) => {
  const offset = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (offset) select((selected + offset + props.panels.length) % props.panels.length, true);
});
subscribe("focus candidates", () => select(0, false));
subscribe("language", draw);
requestAnimationFrame(draw); // the panels below this part are mounted by then
