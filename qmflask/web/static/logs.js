// The log of qmflask or of one model, as it grows: asked for piece by piece, so that no connection is held.

import { Ansi } from "./ansi.js";
import { fill, h, say } from "./dom.js";
import { box, get, name, subscribe } from "./live.js";

const OWN = "proxy";
const EVERY = 700;
const MAX_LINES = 5000;

export function show(main, rest) {
  const picker = h("select", { "aria-label": "Which log", onchange: () => (location.hash = picker.value === OWN ? "logs" : `logs/${encodeURIComponent(picker.value)}`) });
  const search = h("input", { type: "search", placeholder: "Find", "aria-label": "Show lines with this text", oninput: filter });
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick: toggle }, "Pause");
  const wrap = h("input", { type: "checkbox", checked: true, onchange: () => lines.classList.toggle("wrap", wrap.checked) });
  const previous = h("input", { type: "checkbox", onchange: restart });
  const previousLabel = h("label", { hidden: !rest }, previous, "start before");
  const clear = h("button.plain", { type: "button", onclick: () => fill(lines) }, "Clear");
  const lines = h("div.logbox.wrap", { tabIndex: 0, role: "log", "aria-label": "Log lines", "aria-live": "off" });
  const state = h("p.faint", { role: "status" });
  main.append(
    h("div.head", h("h1", "Logs"), picker, search, h("label", wrap, "wrap"), previousLabel, pause, clear),
    lines, state,
  );
  const source = rest || OWN;
  let ansi = new Ansi();
  let cursor = "";
  let open = null; // the last line while it has no end yet
  let timer = 0;
  let paused = false;
  let left = false;
  let asked = 0;

  function sources({ status }) {
    if (!status) return;
    const wanted = [OWN, ...status.models.map((model) => model.id)];
    if (!wanted.includes(source)) wanted.push(source);
    const key = JSON.stringify(wanted);
    if (picker.dataset.key === key) return;
    picker.dataset.key = key;
    fill(picker, wanted.map((id) => h("option", { value: id }, id === OWN ? "qmflask itself" : id)));
    picker.value = source;
  }

  async function look() {
    clearTimeout(timer);
    const mine = ++asked;
    let more = false;
    if (!document.hidden) {
      try {
        const query = new URLSearchParams({ after: cursor });
        if (previous.checked) query.set("previous", "1");
        const piece = await get(`api/logs/${name(source)}?${query}`);
        if (left || mine !== asked) return;
        const before = cursor.split(":")[0];
        if (before && before !== piece.cursor.split(":")[0]) separator("a new start");
        if (piece.dropped) separator(`${piece.dropped} bytes are no longer kept`);
        cursor = piece.cursor;
        more = piece.text.length > 0;
        add(piece.text);
        say(state, lines.childElementCount ? "" : empty());
      } catch (error) {
        if (left) return;
        say(state, `The log cannot be read: ${error.message}`);
      }
    }
    if (!paused && !left) timer = setTimeout(look, more ? 60 : EVERY);
  }

  function empty() {
    if (previous.checked) return "There was no start before this one.";
    return source === OWN ? "Nothing has been logged yet." : "This model has written nothing yet; its log begins with its first start.";
  }

  function add(text) {
    if (!text) return;
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    const pieces = text.split("\n");
    const fresh = document.createDocumentFragment();
    pieces.forEach((piece, index) => {
      const ended = index < pieces.length - 1;
      if (open) {
        open.raw += piece;
        paint(open);
        if (ended) open = null;
      } else if (piece || ended) {
        const line = { element: h("div.ln"), raw: piece, start: snapshot(ansi) };
        paint(line);
        fresh.append(line.element);
        if (!ended) open = line;
      }
    });
    lines.append(fresh);
    while (lines.childElementCount > MAX_LINES) lines.firstElementChild.remove();
    if (atEnd) toEnd();
  }

  function toEnd() {
    const jump = () => (lines.scrollTop = lines.scrollHeight);
    jump();
    requestAnimationFrame(jump); // lines that were never shown have had a guessed height until now
  }

  function paint(line) {
    // A carriage return begins the line anew, as progress bars do.
    const raw = line.raw.replace(/\r$/, "");
    const text = raw.slice(raw.lastIndexOf("\r") + 1);
    restore(ansi, line.start);
    fill(line.element, ansi.line(text).map(part));
    const level = /^.{0,60}?\[(WARN|ERROR)\] /.exec(text);
    line.element.className = level ? `ln ${level[1].toLowerCase()}` : "ln";
    mark(line.element);
  }

  function part({ text, classes, front, back }) {
    if (!classes.length && !front && !back) return text;
    const element = h("span", text);
    element.className = classes.join(" ");
    if (front) element.style.color = front;
    if (back) element.style.backgroundColor = back;
    return element;
  }

  function separator(text) {
    open = null;
    ansi = new Ansi();
    lines.append(h("div.ln.faint", `— ${text} —`));
  }

  function mark(element) {
    const word = search.value.toLowerCase();
    element.hidden = Boolean(word) && !element.textContent.toLowerCase().includes(word);
  }

  function filter() {
    for (const element of lines.children) mark(element);
    lines.scrollTop = lines.scrollHeight;
    const hits = [...lines.children].filter((element) => !element.hidden).length;
    say(state, search.value ? `${hits} line${hits === 1 ? "" : "s"}` : "");
  }

  function toggle() {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    say(pause, paused ? "Go on" : "Pause");
    say(state, paused ? "Paused. Nothing is lost: Go on shows what has come meanwhile." : "");
    if (!paused) look();
  }

  function restart() {
    cursor = "";
    open = null;
    ansi = new Ansi();
    fill(lines);
    look();
  }

  const shown = () => document.hidden || paused || look();
  document.addEventListener("visibilitychange", shown);
  const stop = subscribe(sources);
  sources(box);
  look();
  return () => {
    left = true;
    clearTimeout(timer);
    stop();
    document.removeEventListener("visibilitychange", shown);
  };
}

function snapshot(ansi) {
  return { marks: new Set(ansi.marks), front: ansi.front, back: ansi.back };
}

function restore(ansi, state) {
  ansi.marks = new Set(state.marks);
  ansi.front = state.front;
  ansi.back = state.back;
}
