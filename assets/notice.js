// A line that says what the app is doing: {kind, text, values?} of paligemma/view/words.py.

const { t, make, read, subscribe } = window.paligemma;
const part = element.querySelector(".part");
const dot = make("span", "dot");
const line = make("span", "words");
part.append(dot, line);
part.setAttribute("role", "status");

function draw() {
  const { kind, text, values, joined } = read(props.value) || { kind: "idle", text: "" };
  const sentences = joined || [[text, values]];
  part.className = "part notice " + kind;
  part.setAttribute("aria-live", kind === "busy" ? "off" : "polite"); // not every token is spoken
  line.textContent = sentences.map(([sentence, holes]) => t(sentence, holes)).join(" · ");
}
subscribe("language", draw);
watch("value", draw);
