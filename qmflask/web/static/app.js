// The frame: which view is shown, the link's state, notices, colours.

import { fill, h, say } from "./dom.js";
import { box, connect, subscribe } from "./live.js";
import { profilePicker } from "./names.js";

const VIEWS = {
  overview: ["Overview", () => import("./overview.js")],
  queue: ["Queue", () => import("./queue.js")],
  activity: ["Activity", () => import("./activity.js")],
  logs: ["Logs", () => import("./logs.js")],
  try: ["Try it", () => import("./try.js")],
  plan: ["Plan", () => import("./plan.js")],
};
const LINK = {
  connecting: "connecting",
  live: "live",
  polling: "every 2 s",
  lost: "no answer",
};

const main = document.getElementById("main");
let leave = null;
let shown = "";
let turn = 0;

/** #logs/some/model -> ["logs", "some/model"]; the rest is a view's own business. */
function place() {
  const text = location.hash.slice(1);
  const cut = text.indexOf("/");
  const view = cut < 0 ? text : text.slice(0, cut);
  return [view in VIEWS ? view : "overview", cut < 0 ? "" : decodeURIComponent(text.slice(cut + 1))];
}

async function show() {
  const [view, rest] = place();
  const mine = ++turn;
  leave?.();
  leave = null;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  try {
    const module = await VIEWS[view][1]();
    if (mine !== turn) return;
    fill(main);
    leave = module.show(main, rest) ?? null;
  } catch (error) {
    fill(main, h("p.empty", `This view could not be loaded: ${error.message}. Reload the page.`));
  }
  if (shown && shown !== view) {
    window.scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  shown = view;
  title();
}

function title() {
  const mark = { live: "●", polling: "◐", lost: "○", connecting: "○" }[box.link];
  document.title = `${mark} ${VIEWS[shown || "overview"][0]} – qmflask`;
}

function frame({ status, link, refusal }) {
  const element = document.getElementById("link");
  element.dataset.state = link;
  say(element.querySelector(".text"), LINK[link]);
  title();
  notices(status, link, refusal);
  if (!status) return;
  profilePicker(document.getElementById("profile"), status);
  const waiting = status.requests.filter((request) => request.state === "queued").length;
  const badge = document.querySelector('#views a[data-view="queue"] .badge');
  badge.hidden = waiting === 0;
  say(badge, waiting);
  badge.setAttribute("aria-label", `${waiting} waiting`);
}

let noticed = "";

function notices(status, link, refusal) {
  const found = [];
  if (link === "lost" && refusal) found.push(["bad", "Not allowed", `${refusal}. This page shows what everybody does; it needs a key with admin: true.`]);
  else if (link === "lost") found.push(["bad", "No answer", "qmflask does not answer. What is shown is old; it is asked again every 2 s."]);
  if (status && !status.service.leader) found.push(["bad", "No scheduler", "No worker leads: nothing is loaded until one does, usually within a second."]);
  if (status?.service.config_error) {
    found.push(["warn", "Configuration", `The changed file is not in force, the one before it is:\n${status.service.config_error}`]);
  }
  const key = JSON.stringify(found);
  if (key === noticed) return;
  noticed = key;
  fill(
    document.getElementById("notices"),
    found.map(([kind, head, text]) => h(kind === "bad" ? "div.notice.bad" : "div.notice", h("b", head), h("span", text))),
  );
}

// -- colours ----------------------------------------------------------------------------------------------------

const THEMES = ["automatic", "light", "dark"];
const GLYPHS = { automatic: "◐", light: "○", dark: "●" };
const button = document.getElementById("theme");
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    const value = localStorage.getItem("qmflask-theme");
    return THEMES.includes(value) ? value : "automatic";
  } catch {
    return "automatic"; // storage may be off
  }
}

function paint(theme) {
  const root = document.documentElement;
  if (theme === "automatic") root.removeAttribute("data-theme");
  else root.dataset.theme = theme;
  root.toggleAttribute("data-dark", theme === "dark" || (theme === "automatic" && prefersDark.matches));
  fill(button, h("span", { "aria-hidden": "true" }, GLYPHS[theme]), h("span.vh", `Colours: ${theme}`));
}

button.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(stored()) + 1) % THEMES.length];
  try {
    localStorage.setItem("qmflask-theme", next);
  } catch {
    // then it lasts as long as the page
  }
  paint(next);
});
prefersDark.addEventListener("change", () => paint(stored()));

paint(stored());
window.addEventListener("hashchange", show);
subscribe(frame);
connect();
show();
