// One status: {kind, text, values, code?} or {kind, joined: [[text, values]]} of paligemma/webapp/messages.py. With
// props.shows_updates, the status of page updates too.

const { t, formatMessage, create, parseValue, resetValue, subscribe } = window.paligemma;
const part = element.querySelector(".part");
const message = create("span", "message");
part.append(create("span", "dot"), message);
part.setAttribute("role", "status");

let status = parseValue(props.value);
let queuePosition = null; // [text, position, length of the queue]

function draw() {
  const { kind, joined } = status || { kind: "idle", joined: [] };
  part.className = "part status " + kind;
  part.setAttribute("aria-live", kind === "busy" ? "off" : "polite"); // do not announce every token
  const texts = joined ? joined.map(([text, values]) => t(text, values)) : [formatMessage(status)];
  if (queuePosition && kind === "busy") {
    texts.push(t("position {position} of {length}", { position: queuePosition[1], length: queuePosition[2] }));
  }
  message.textContent = texts.join(" · ");
}

// While an event is queued, Gradio 6 writes "queue: 2/3" into an element next to this part.
function readQueuePosition() {
  const found = /(\d+)\/(\d+)/.exec(block.querySelector(".progress-text")?.textContent || "");
  if (String(found) === String(queuePosition)) return;
  queuePosition = found;
  draw();
}

function show(value) {
  status = value;
  draw();
}
subscribe("language", draw);
watch("value", () => show(parseValue(props.value)));
const block = element.closest(".block");
if (props.shows_updates) {
  subscribe("new status", (value) => {
    show(value);
    resetValue(props);
  });
  new MutationObserver(readQueuePosition).observe(block, { childList: true, subtree: true, characterData: true });
}
