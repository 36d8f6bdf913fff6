// Functions shared by the parts of the page, as window.paligemma. Loaded once, before the parts.
//
// t(text, values)            translate an English template and fill in its {placeholders}
// formatMessage(message)     the same for {text, values, code?}, such as a status
// create(tag, class, text)   create an element; text is set with textContent, never as HTML
// createButton, createSvg    create a button or an SVG element
// createTable(columns, rows) create a table
// replaceContent(part, ...)  replace the children of a part and keep the keyboard focus
// displayText(text)          an answer without its location and mask tokens
// parseValue, resetValue     read and reset a part's value
// publish, subscribe         topics between parts; a new subscriber receives the last value
//
// window.paligemmaMessages, {language: {error code or English template: translation}}, is assets/page/messages.json.

window.paligemma = (function () {
  const messages = window.paligemmaMessages || {};
  const lastValues = new Map();
  const subscribers = new Map();

  // Local storage throws where the browser blocks it, such as in a frame of another site.
  function store(name, value) {
    try {
      localStorage.setItem("paligemma." + name, value);
    } catch {
      /* the setting is lost when the page is closed */
    }
  }
  function load(name) {
    try {
      return localStorage.getItem("paligemma." + name);
    } catch {
      return null;
    }
  }

  function publish(topic, value) {
    lastValues.set(topic, value);
    for (const subscriber of subscribers.get(topic) || []) subscriber(value);
  }
  function subscribe(topic, subscriber) {
    subscribers.set(topic, [...(subscribers.get(topic) || []), subscriber]);
    if (lastValues.has(topic)) subscriber(lastValues.get(topic));
  }

  // Language

  let language = load("language") || (/^zh/i.test(navigator.language) ? "zh" : "en");

  // A value may be a message itself, such as the reason of an error.
  function formatMessage({ text, values = {}, code }) {
    const template = (messages[language] || {})[code || text] || text;
    return template.replace(/\{(\w+)\}/g, (placeholder, name) => {
      if (!(name in values)) return placeholder;
      return typeof values[name] === "object" ? formatMessage(values[name]) : values[name];
    });
  }
  const t = (text, values) => formatMessage({ text, values });

  // Gradio reads the browser's language once and cannot switch it, and falls back to English for "zh". So Gradio's
  // components have English labels, which are translated here. Parts translate their own text.
  const translations = new WeakMap();
  const attributeNames = ["placeholder", "aria-label", "title"];

  function translateNode(node, property) {
    const current = node[property];
    const { source, translated } = translations.get(node) || {};
    const original = source !== undefined && current === translated ? source : current;
    const key = original.trim();
    if (!key) return;
    const result = original.replace(key, () => t(key));
    if (result !== current) node[property] = result;
    if (result !== original || source !== undefined) translations.set(node, { source: original, translated: result });
  }
  function translateTree(root) {
    if (root.nodeType === Node.TEXT_NODE) {
      if (root.parentElement && !root.parentElement.closest(".part, textarea, script, style")) translateNode(root, "data");
      return;
    }
    if (root.nodeType !== Node.ELEMENT_NODE || root.closest(".part, script, style")) return;
    for (const name of attributeNames) {
      const attribute = root.getAttributeNode(name);
      if (attribute) translateNode(attribute, "value");
    }
    root.childNodes.forEach(translateTree);
  }
  function applyLanguage(code) {
    language = code;
    document.documentElement.lang = code === "zh" ? "zh-CN" : "en";
    translateTree(document.body);
    publish("language", code);
  }
  function setLanguage(code) {
    store("language", code);
    applyLanguage(code);
  }
  new MutationObserver((mutations) => {
    for (const mutation of mutations) {
      if (mutation.type === "characterData") translateTree(mutation.target);
      mutation.addedNodes.forEach(translateTree);
    }
  }).observe(document.body, { childList: true, subtree: true, characterData: true });

  // Theme

  function setTheme(theme) {
    store("theme", theme);
    document.body.classList.toggle("dark", theme === "dark");
  }
  function loadTheme() {
    const theme = load("theme");
    if (theme) document.body.classList.toggle("dark", theme === "dark");
  }

  // Elements

  function create(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function createButton(className, text, onClick) {
    const node = create("button", className, text);
    node.type = "button";
    node.addEventListener("click", onClick);
    return node;
  }
  function createSvg(tag, attributes) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    return node;
  }

  // Removing the focused element would reset the keyboard focus to the top of the page. Focus the element at the same
  // position instead, or the part itself if there is none.
  function replaceContent(part, ...children) {
    const focusable = () => [...part.querySelectorAll("button, select, input, [tabindex='0']")];
    const hadFocus = part.contains(document.activeElement);
    const index = focusable().indexOf(document.activeElement);
    part.replaceChildren(...children);
    if (!hadFocus) return;
    part.tabIndex = -1;
    (focusable()[Math.max(0, index)] || part).focus({ preventScroll: true });
  }

  const MAX_TITLE_LENGTH = 10; // of a column title in one line

  // columns: [title, kind], where kind is "text", "number", "minor" (hidden on phones), "label" (translated) or "share"
  // (with a bar). rows: [{cells: [text], share?, dropped?}]. decorate(tableRow, row, index) may change a table row.
  function createTable(columns, rows, decorate) {
    const table = create("table");
    const header = table.createTHead().insertRow();
    for (const [title, kind] of columns) {
      const cell = create("th", kind, t(title));
      cell.scope = "col";
      cell.classList.toggle("long", title.length > MAX_TITLE_LENGTH);
      header.append(cell);
    }
    const body = table.createTBody();
    rows.forEach((row, index) => {
      const tableRow = body.insertRow();
      tableRow.classList.toggle("dropped", Boolean(row.dropped));
      row.cells.forEach((text, column) => tableRow.append(createCell(columns[column][1], text, row.share)));
      if (decorate) decorate(tableRow, row, index);
    });
    return table;
  }
  function createCell(kind, text, share) {
    const cell = create("td", kind, kind === "label" ? t(text) : text);
    if (kind === "text") cell.title = text;
    if (kind === "share") {
      const bar = create("span", "bar");
      bar.style.setProperty("--share", share);
      cell.prepend(bar);
    }
    return cell;
  }

  // The location and mask tokens of an object become one symbol.
  const displayText = (text) => text.replace(/(<loc\d{4}>)+(\s*<seg\d{3}>)*\s*/g, "▢ ").trimStart();

  // A part's value is data, JSON text, or empty.
  function parseValue(value) {
    return typeof value === "string" ? (value ? JSON.parse(value) : null) : value || null;
  }
  // Gradio reports only a value that differs from the previous one. If a part has been updated by other means since, it
  // resets its value, so that setting the same value again triggers a change.
  function resetValue(props) {
    props.value = "";
  }

  document.addEventListener("keydown", (event) => {
    // During IME composition, such as for Chinese, Esc only cancels the composition.
    if (event.key === "Escape" && !event.isComposing) document.querySelector("#stop")?.click();
  });
  applyLanguage(language);
  return {
    t, formatMessage, create, createButton, createSvg, createTable, replaceContent, displayText, parseValue, resetValue,
    publish, subscribe, setLanguage, setTheme, loadTheme,
    get language() {
      return language;
    },
  };
})();
