// Shows props.value, {kind, text} (paligemma/view/words.py), as one line; the script of a gr.HTML whose template
// is static. Text reaches the page through textContent only.

function draw() {
  const { kind, text } = props.value || { kind: "idle", text: "" };
  const line = element.querySelector(".notice");
  line.className = "notice " + kind;
  line.querySelector(".words").textContent = text;
}
draw();
watch("value", draw);
