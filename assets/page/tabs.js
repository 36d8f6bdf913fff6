// Tabs over the panels of props.panels, [[id, title]]. All panels are in the page from the start, unlike those of
// Gradio's tabs: parts tell each other what was chosen, whether they are seen or not.

const { t, button, subscribe } = window.paligemma;
const part = element.querySelector(".part");
part.classList.add("tabs");
part.setAttribute("role", "tablist");
let shown = 0;

const panel = (id) => document.getElementById(id);

function show(index, focus) {
  shown = index;
  draw();
  if (focus) part.children[index].focus();
}

function draw() {
  part.setAttribute("aria-label", t("Views of the answer"));
  part.replaceChildren(
    ...props.panels.map(([id, title], index) => {
      const tab = button("plain tab", t(title), () => show(index, true));
      tab.id = "tab-" + id;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-selected", String(index === shown));
      tab.setAttribute("aria-controls", id);
      tab.tabIndex = index === shown ? 0 : -1;
      return tab;
    }),
  );
  props.panels.forEach(([id], index) => {
    const content = panel(id);
    if (!content) return;
    content.setAttribute("role", "tabpanel");
    content.setAttribute("aria-labeledby", "tab-" + id);
    content.dataset.shown = String(index === shown);
  });
}

part.addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (by) show((shown + by + props.panels.length) % props.panels.length, true);
});
subscribe("to the candidates", () => show(0, false));
subscribe("language", draw);
requestAnimationFrame(draw); // panels below are mounted by then
