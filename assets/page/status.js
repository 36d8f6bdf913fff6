// A line that says what the app is doing: {kind, text, values?} of paligemma/webapp/messages.py. With props.follows it
// also shows the notices of runs.

const { t, retell, make, read, forget, subscribe } = window.paligemma;
const part = element.querySelector(".part");
const dot = make("span", "dot");
const line = make("span", "words");
part.append(dot, line);
part.setAttribute("role", "status");

let shown = read(props.value);
let place = null;

function draw() {
  const { kind, text, values, joined } = shown || { kind: "idle", text: "" };
  const sentences = joined || [[text, values]];
  part.className = "part status " + kind;
  part.setAttribute("aria-live", kind === "busy" ? "off" : "polite"); // not every token is spoken
  const isFilled = kind === "error" && !Object.keys(values || {}).length; // an error of the library
  const texts = isFilled ? [retell(text)] : sentences.map(([sentence, holes]) => t(sentence, holes));
  if (place && kind === "busy") texts.push(t("place {place} of {count}", { place: place[1], count: place[2] }));
  line.textContent = texts.join(" · ");
}

// While a request waits, Gradio writes its place in the queue beside this part, as "queue: 2/3".
function readPlace() {
  const found = /(\d+)\/(\d+)/.exec(parent.querySelector(".progress-text")?.textContent || "");
  if (String(found) === String(place)) return;
  place = found;
  draw();
}

function show(value) {
  shown = value;
  draw();
}
subscribe("language", draw);
watch("value", () => show(read(props.value)));
const parent = element.closest(".block");
if (props.follows) {
  subscribe("new status", (news) => {
    show(news);
    forget(props);
  });
  new MutationObserver(readPlace).observe(parent, { childList: true, subtree: true, characterData: true });
}
