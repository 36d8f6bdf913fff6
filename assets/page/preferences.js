// Language and theme.

const { t, create, createButton, replaceContent, setLanguage, setTheme, loadTheme, subscribe } = window.paligemma;
const part = element.querySelector(".part");
const LANGUAGES = [["en", "EN", "English"], ["zh", "中文", "简体中文"]];

function draw() {
  const languages = create("div", "languages");
  languages.setAttribute("role", "group");
  languages.setAttribute("aria-label", t("Language"));
  for (const [code, label, name] of LANGUAGES) {
    const language = createButton("plain", label, () => setLanguage(code));
    language.lang = code;
    language.title = name;
    language.setAttribute("aria-pressed", String(code === window.paligemma.language));
    languages.append(language);
  }
  const theme = createButton("plain theme", "◐", () => {
    setTheme(document.body.classList.contains("dark") ? "light" : "dark");
  });
  theme.title = t("Toggle dark theme");
  theme.setAttribute("aria-label", t("Toggle dark theme"));
  replaceContent(part, languages, theme);
}
loadTheme();
subscribe("language", draw);
