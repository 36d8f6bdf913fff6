// What a run changes on the page comes as one value, {number, notice?, strip?, objects?, runs?, scene?} of
// paligemma/webapp/execution.py, and is handed on to the parts. Nothing is drawn.

const { read, publish } = window.paligemma;
let last = null;

watch("value", () => {
  const { number, ...changes } = read(props.value) || {};
  if (number === undefined) return;
  // The browser may take in two values at once, and then the first one is lost.
  if (last !== null && number !== last + 1) trigger("resync", {});
  last = number;
  for (const [name, change] of Object.entries(changes)) publish("new " + name, change);
});
