// The languages, and light or dark.

const { t, make, button, refill, chooseLanguage, chooseTheme, startTheme, subscribe } = window.paligemma;
const part = element.querySelector(".part");
const LANGUAGES = [["en", "EN", "English"], ["zh", "中文", "简体中文"]];

function draw() {
  const choices = make("div", "choices");
  choices.setAttribute("role", "group");
  choices.setAttribute("aria-label", t("Language"));
  for (const [code, label, name] of LANGUAGES) {
    const choice = button("plain", label, () => chooseLanguage(code));
    choice.lang = code;
    choice.title = name;
    choice.setAttribute("aria-pressed", String(code === window.paligemma.language));
    choices.append(choice);
  }
  const theme = button("plain theme", "◐", () => {
    chooseTheme(document.body.classList.contains("dark") ? "light" : "dark");
  });
  theme.title = t("Light or dark");
  theme.setAttribute("aria-label", t("Light or dark"));
  refill(part, choices, theme);
}
startTheme();
subscribe("language", draw);
