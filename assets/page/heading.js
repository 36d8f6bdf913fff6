// A heading: props.text in an element props.tag.

const { t, create, subscribe } = window.paligemma;

subscribe("language", () => element.querySelector(".part").replaceChildren(create(props.tag, "", t(props.text))));
