// The heading of a card: props.text.

const { t, make, subscribe } = window.paligemma;

subscribe("language", () => element.querySelector(".part").replaceChildren(make("h2", "", t(props.text))));
