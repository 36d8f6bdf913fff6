// Saves a file: {serial, name, type, text?, base64?} of paligemma/webapp/handlers.py. Not visible.

const { parseValue } = window.paligemma;

function decodeBase64(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}
watch("value", () => {
  const file = parseValue(props.value);
  if (!file) return;
  const link = document.createElement("a");
  const content = file.base64 ? decodeBase64(file.base64) : file.text;
  link.href = URL.createObjectURL(new Blob([content], { type: file.type }));
  link.download = file.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
