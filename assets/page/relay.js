// Publishes its value under the topic props.topic. Not visible.

const { parseValue, resetValue, publish } = window.paligemma;

watch("value", () => {
  publish(props.topic, parseValue(props.value));
  resetValue(props);
});
