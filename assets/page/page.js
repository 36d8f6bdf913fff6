// What all parts of the page share: window.paligemma. Loaded once, before any part is drawn.
//
// t(text, values)       text in the language of the page, with {name} filled in; the English text is the key
// retell(text)          the same for a sentence that comes with its values filled in
// make(tag, class, text) an element; text reaches the page through textContent only, whoever wrote it
// svg(tag, attributes)  the same for drawings
// table(columns, rows)  a table; see makeTable
// refill(part, ...)     other elements in a part, with the focus where it was
// readable(text)        an answer without its location and mask tokens
// read, forget          a part's value, and that it no longer shows it
// publish, subscribe    how parts tell each other what was chosen; a late subscriber gets the last word
//
// window.paligemmaWords, {language: {English text: translated text}}, comes from assets/page/messages.json.

window.paligemma = (function () {
  const words = window.paligemmaWords || {};
  const last = new Map();
  const listeners = new Map();

  // Browsers that allow no storage (a frame of another site) throw.
  function remember(name, value) {
    try {
      localStorage.setItem("paligemma." + name, value);
    } catch {
      /* then the choice lasts as long as the page */
    }
  }
  function recall(name) {
    try {
      return localStorage.getItem("paligemma." + name);
    } catch {
      return null;
    }
  }

  function publish(name, detail) {
    last.set(name, detail);
    for (const listener of listeners.get(name) || []) listener(detail);
  }
  function subscribe(name, listener) {
    listeners.set(name, [...(listeners.get(name) || []), listener]);
    if (last.has(name)) listener(last.get(name));
  }

  // Words

  let language = recall("language") || (/^zh/i.test(navigator.language) ? "zh" : "en");

  function t(text, values) {
    const found = (words[language] || {})[text] || text;
    return found.replace(/\{(\w+)\}/g, (hole, name) => (values && name in values ? values[name] : hole));
  }

  // Sentences with holes, and how they look when these are filled; the longest first, as it says most.
  const patterns = Object.keys(words.zh || {})
    .filter((sentence) => /\{\w+\}/.test(sentence))
    .sort((one, other) => other.length - one.length)
    .map((sentence) => {
      const literal = sentence.split(/\{\w+\}/).map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
      const names = sentence.match(/\{\w+\}/g).map((hole) => hole.slice(1, -1));
      return { sentence, names, regex: new RegExp("^" + literal.join("(.+?)") + "$", "s") };
    });

  function retell(text) {
    if (language === "en" || text in words[language]) return t(text);
    for (const { sentence, names, regex } of patterns) {
      const found = regex.exec(text);
      if (found) return t(sentence, Object.fromEntries(names.map((name, place) => [name, t(found[place + 1])])));
    }
    return t("The server says, in English: {text}", { text });
  }

  // Gradio translates its labels for browsers that say zh-CN, and a page cannot switch it. So the labels are English
  // to Gradio, and are translated where they stand. Parts of our own draw their words themselves.
  const originals = new WeakMap();
  const attributes = ["placeholder", "aria-label", "title"];

  function translateNode(holder, read, write) {
    const now = read();
    const known = originals.get(holder) || {};
    const source = now === known.shown ? known.source : now;
    const key = (source || "").trim();
    if (!key) return;
    const shown = source.replace(key, () => t(key));
    if (shown !== now) write(shown);
    if (shown !== source || known.source) originals.set(holder, { source, shown });
  }
  function translateTree(root) {
    if (root.nodeType === Node.TEXT_NODE) {
      if (root.parentElement && !root.parentElement.closest(".part, textarea, script, style")) {
        translateNode(root, () => root.data, (text) => (root.data = text));
      }
      return;
    }
    if (root.nodeType !== Node.ELEMENT_NODE || root.closest(".part, script, style")) return;
    for (const name of attributes) {
      const attribute = root.getAttributeNode(name);
      if (attribute) translateNode(attribute, () => attribute.value, (text) => (attribute.value = text));
    }
    root.childNodes.forEach(translateTree);
  }
  function useLanguage(chosen) {
    language = chosen;
    document.documentElement.lang = chosen === "zh" ? "zh-CN" : "en";
    translateTree(document.body);
    publish("language", chosen);
  }
  function chooseLanguage(chosen) {
    remember("language", chosen);
    useLanguage(chosen);
  }
  new MutationObserver((changes) => {
    for (const change of changes) {
      if (change.type === "characterData") translateTree(change.target);
      change.addedNodes.forEach(translateTree);
    }
  }).observe(document.body, { childList: true, subtree: true, characterData: true });

  // Light and dark

  function chooseTheme(theme) {
    remember("theme", theme);
    document.body.classList.toggle("dark", theme === "dark");
    publish("theme", theme);
  }
  function startTheme() {
    const chosen = recall("theme");
    if (chosen) document.body.classList.toggle("dark", chosen === "dark");
  }

  // Elements

  function make(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function button(className, text, onClick) {
    const node = make("button", className, text);
    node.type = "button";
    node.addEventListener("click", onClick);
    return node;
  }
  function svg(tag, settings) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(settings || {})) node.setAttribute(name, value);
    return node;
  }

  // Whoever uses a keyboard must not fall back to the top of the page when a part is drawn anew: the focus goes to what
  // stands in the same place, or to the part when it has nothing there.
  function refill(part, ...children) {
    const stops = () => [...part.querySelectorAll("button, select, input, [tabindex='0']")];
    const hadFocus = part.contains(document.activeElement);
    const place = stops().indexOf(document.activeElement);
    part.replaceChildren(...children);
    if (!hadFocus) return;
    part.tabIndex = -1;
    (stops()[Math.max(0, place)] || part).focus({ preventScroll: true });
  }

  // columns: [title, kind]; kind is "text", "number", "quiet", "word" (translated) or "share" (with a bar).
  // rows: [{cells: [text], share?, dropped?}]; decorate(line, row, index) may add to a row.
  function makeTable(columns, rows, decorate) {
    const table = make("table");
    const head = table.createTHead().insertRow();
    for (const [title, kind] of columns) {
      const cell = make("th", kind, t(title));
      cell.scope = "col";
      head.append(cell);
    }
    const body = table.createTBody();
    rows.forEach((row, index) => {
      const line = body.insertRow();
      line.classList.toggle("dropped", Boolean(row.dropped));
      row.cells.forEach((text, column) => {
        const kind = columns[column][1];
        const cell = make("td", kind, kind === "word" ? t(text) : text);
        if (kind === "text") cell.title = text;
        if (kind === "share") {
          const bar = make("span", "bar");
          bar.style.setProperty("--share", row.share);
          cell.prepend(bar);
        }
        line.append(cell);
      });
      if (decorate) decorate(line, row, index);
    });
    return table;
  }

  // An answer to be read: the location and mask tokens of an object are one sign.
  const readable = (raw) => raw.replace(/(<loc\d{4}>)+(\s*<seg\d{3}>)*\s*/g, "▢ ").trimStart();

  // A part's value: data, JSON text of it, or nothing.
  function read(value) {
    return typeof value === "string" ? (value ? JSON.parse(value) : null) : value || null;
  }
  // Gradio tells a part only of a value that differs from the one before. So a part that shows something else by now,
  // from news or by itself, forgets its value: then the same one can come again.
  function forget(props) {
    props.value = "";
  }

  document.addEventListener("keydown", (event) => {
    // While a word is being composed, as in Chinese, Esc only ends that.
    if (event.key === "Escape" && !event.isComposing) document.querySelector("#stop")?.click();
  });
  useLanguage(language);
  return {
    t, retell, make, button, svg, makeTable, refill, readable, read, forget, publish, subscribe, chooseLanguage,
    chooseTheme, startTheme,
    get language() {
      return language;
    },
  };
})();
