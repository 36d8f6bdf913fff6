// A heading: props.text in an element props.tag.

const { t, make, subscribe } = window.paligemma;

subscribe("language", () => element.querySelector(".part").replaceChildren(make(props.tag, "", t(props.text))));
