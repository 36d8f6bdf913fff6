// Distributes page updates to the parts: {number, status?, token_strip?, objects?, runs?, image_view?} of
// paligemma/webapp/page_update.py. Not visible.

const { parseValue, publish } = window.paligemma;
let lastNumber = null;

watch("value", () => {
  const { number, ...changes } = parseValue(props.value) || {};
  if (number === undefined) return;
  // The browser may process two values at once, and then the first one is lost.
  if (lastNumber !== null && number !== lastNumber + 1) trigger("resync", {});
  lastNumber = number;
  for (const [name, change] of Object.entries(changes)) publish("new " + name, change);
});
