// Hands its value on to the other parts, under the name props.topic. Nothing is drawn.

const { read, forget, publish } = window.paligemma;

watch("value", () => {
  publish(props.topic, read(props.value));
  forget(props);
});
