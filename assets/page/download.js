// Saves a file that the server made: {serial, name, type, text?, base64?} of app.py. Nothing is drawn.

const { read } = window.paligemma;

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}
watch("value", () => {
  const file = read(props.value);
  if (!file) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([file.base64 ? bytes(file.base64) : file.text], { type: file.type }));
  link.download = file.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
