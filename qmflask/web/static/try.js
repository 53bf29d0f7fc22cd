// Ask a model something: chat with streaming, embeddings, rerank.

import { fill, h, once, say } from "./dom.js";
import { clock, ms, rate, span } from "./format.js";
import { ROOT, box, elapsed, failure, subscribe } from "./live.js";
import { events } from "./sse.js";

const TABS = [["chat", "Chat", chat], ["embed", "Embeddings", embeddings], ["rerank", "Rerank", rerank]];
const MAX_IMAGE = 8 * 1024 * 1024;

let chosen = "";

export function show(main, rest) {
  if (rest) chosen = rest;
  const picker = h("select", { "aria-label": "Model", onchange: () => (chosen = picker.value) });
  const place = h("div");
  const state = h("p.faint", { role: "status" });
  const tabs = TABS.map(([id, label]) => h("button", { type: "button", role: "tab", id: `tab-${id}`, onclick: () => select(id), onkeydown: move }, label));
  const none = h("p.empty", { hidden: true }, "No models are configured yet. Add one under `models:` in your configuration file.");
  main.append(h("div.head", h("h1", "Try it"), h("div.tabs", { role: "tablist" }, tabs), h("label", "Model", picker)), none, place, state);
  const pages = new Map();

  function select(id) {
    TABS.forEach(([each], index) => {
      tabs[index].setAttribute("aria-selected", String(each === id));
      tabs[index].tabIndex = each === id ? 0 : -1;
    });
    if (!pages.has(id)) {
      const page = TABS.find(([each]) => each === id)[2](() => picker.value);
      page.element.setAttribute("role", "tabpanel");
      page.element.setAttribute("aria-labelledby", `tab-${id}`);
      pages.set(id, page);
    }
    fill(place, pages.get(id).element);
  }

  function move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(event.currentTarget) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  }

  function models({ status }) {
    if (!status) return;
    const local = status.models.filter((model) => !model.removed).flatMap((model) => [model.id, ...model.aliases]);
    const wanted = [...new Set([...local, ...pinned(status), ...status.selectors.map((each) => each.id), ...status.peers.map((peer) => peer.id)])];
    if (chosen && !wanted.includes(chosen)) wanted.push(chosen);
    none.hidden = wanted.length > 0;
    place.hidden = wanted.length === 0;
    once(picker, wanted, () => wanted.map((id) => h("option", { value: id }, id)));
    if (!chosen && wanted.length) chosen = (status.models.find((model) => model.state === "ready") ?? { id: wanted[0] }).id;
    if (chosen) picker.value = chosen;
    tell();
  }

  function tell() {
    const model = box.status?.models.find((each) => each.id === picker.value || each.aliases.includes(picker.value));
    if (!model) return say(state, "");
    const usual = model.usual_load ? `, which usually takes ${span(model.usual_load)}` : "";
    const text = {
      ready: "Loaded: the answer begins at once.",
      starting: `Loading for ${clock((model.loading ?? 0) + elapsed())}${usual}.`,
      draining: "It finishes its answers and stops; a request waits for its next load.",
      stopping: "It stops; a request waits for its next load.",
    }[model.state] ?? `Not loaded: the first request loads it${usual}. See Plan for what that stops.`;
    return say(state, text);
  }

  select("chat");
  const stop = subscribe(models);
  const timer = setInterval(tell, 500);
  return () => {
    stop();
    clearInterval(timer);
    for (const page of pages.values()) page.leave?.();
  };
}

/** Names that only the active profile gives a meaning to. */
function pinned(status) {
  const active = status.profiles.find((profile) => profile.id === status.service.profile);
  return Object.entries(active?.pins ?? {}).filter(([, target]) => target).map(([name]) => name);
}

async function send(path, body, signal) {
  return fetch(ROOT + path, { method: "POST", headers: { "Content-Type": "application/json", Accept: "application/json, text/event-stream" }, body: JSON.stringify(body), signal });
}

// -- chat -------------------------------------------------------------------------------------------------------

function chat(model) {
  const messages = [];
  const list = h("div.chat", { "aria-live": "polite" });
  const none = h("p.empty", "Say something. The page keeps nothing once it is closed.");
  const system = h("input.grow", { type: "text", placeholder: "System prompt (optional)", "aria-label": "System prompt" });
  const limit = h("input", { type: "number", min: 1, value: 512, "aria-label": "Most tokens", size: 6 });
  const text = h("textarea", { rows: 3, placeholder: "Message (Enter sends, Shift+Enter begins a line)", "aria-label": "Message", onkeydown: keys });
  const file = h("input.vh", { type: "file", accept: "image/*", multiple: true, id: "attach", onchange: attach });
  const thumbs = h("div.thumbs");
  const go = h("button.primary", { type: "button", onclick: ask }, "Send");
  const halt = h("button", { type: "button", hidden: true, onclick: () => abort?.abort() }, "Stop");
  const fresh = h("button.plain", { type: "button", onclick: clear }, "New chat");
  const element = h("div.stack", h("section.panel.stack", none, list),
    h("section.panel.composer", { "aria-label": "Message" }, text, thumbs,
      h("div.row", go, halt, file, h("label.button", { htmlFor: "attach" }, "Attach image"), system, h("label", "tokens at most", limit), fresh)));
  let images = [];
  let abort = null;

  function keys(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  }

  function clear() {
    abort?.abort();
    messages.length = 0;
    fill(list);
    none.hidden = false;
  }

  async function attach() {
    for (const each of file.files) {
      if (each.size > MAX_IMAGE) continue;
      const url = await new Promise((done, fail) => {
        const reader = new FileReader();
        reader.onload = () => done(reader.result);
        reader.onerror = () => fail(reader.error);
        reader.readAsDataURL(each);
      });
      images.push(url);
    }
    file.value = "";
    fill(thumbs, images.map((url) => h("img", { src: url, alt: "attached image" })));
  }

  function bubble(who) {
    const thought = h("div.thought", { hidden: true });
    const says = h("div.says");
    const stats = h("div.stats");
    const part = h(`div.msg.${who}`, h("div.who", who === "user" ? "you" : model()), thought, says, stats);
    list.append(part);
    return { part, says, stats, thought };
  }

  async function ask() {
    const said = text.value.trim();
    if (abort || (!said && !images.length)) return;
    none.hidden = true;
    const mine = bubble("user");
    say(mine.says, said);
    mine.part.append(...images.map((url) => h("img", { src: url, alt: "attached image" })));
    const content = images.length ? [{ type: "text", text: said }, ...images.map((url) => ({ type: "image_url", image_url: { url } }))] : said;
    messages.push({ role: "user", content });
    text.value = "";
    images = [];
    fill(thumbs);
    await answer();
  }

  async function answer() {
    const theirs = bubble("assistant");
    const began = performance.now();
    const waiting = setInterval(() => say(theirs.stats, `waiting ${clock((performance.now() - began) / 1000)}`), 250);
    abort = new AbortController();
    go.disabled = true;
    halt.hidden = false;
    let said = "";
    try {
      const prompt = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
      const body = { model: model(), messages: [...prompt, ...messages], stream: true, stream_options: { include_usage: true }, max_tokens: Number(limit.value) || 512 };
      const response = await send("v1/chat/completions", body, abort.signal);
      if (!response.ok) throw await failure(response);
      said = await stream(response, theirs, began, () => clearInterval(waiting));
    } catch (error) {
      clearInterval(waiting);
      const stopped = error.name === "AbortError";
      said = theirs.says.textContent;
      theirs.stats.append(h(stopped ? "span" : "span.bad-text", stopped ? "stopped" : error.message));
    } finally {
      clearInterval(waiting);
      abort = null;
      go.disabled = false;
      halt.hidden = true;
    }
    if (said) messages.push({ role: "assistant", content: said });
    else messages.pop(); // a question without an answer would be asked twice
    text.focus();
  }

  async function stream(response, theirs, began, begun) {
    let first = null;
    let usage = null;
    let timings = null;
    let said = "";
    let pieces = 0;
    for await (const { event, data } of events(response)) {
      if (data === "[DONE]") break;
      const message = JSON.parse(data);
      if (event === "error" || message.error) throw new Error(message.error?.message ?? "the answer broke off");
      usage = message.usage ?? usage;
      timings = message.timings ?? timings;
      const delta = message.choices?.[0]?.delta ?? {};
      const thought = delta.reasoning_content ?? delta.reasoning;
      if (thought) {
        theirs.thought.hidden = false;
        theirs.thought.append(thought);
      }
      if (!delta.content && !thought) continue;
      if (first === null) {
        first = performance.now();
        begun();
        say(theirs.stats, "");
      }
      if (delta.content) {
        pieces += 1;
        said += delta.content;
        theirs.says.append(delta.content);
      }
    }
    begun();
    stats(theirs.stats, response, { began, first, ended: performance.now(), usage, timings, pieces });
    return said;
  }

  return { element, leave: () => abort?.abort() };
}

function stats(element, response, seen) {
  const wait = Number(response.headers.get("X-QM-Wait-Ms") ?? NaN);
  const loaded = response.headers.get("X-QM-Loaded") === "1";
  const tokens = seen.timings?.predicted_n ?? seen.usage?.completion_tokens ?? seen.pieces;
  const speed = seen.timings?.predicted_per_second ?? (seen.first ? tokens / ((seen.ended - seen.first) / 1000) : 0);
  const parts = [
    Number.isNaN(wait) ? "" : `waited ${ms(wait)}${loaded ? " for its load" : ""}`,
    seen.first ? `first token ${ms(seen.first - seen.began)}` : "no token",
    `${tokens} tokens`, speed > 0 && Number.isFinite(speed) ? `${rate(speed)} tokens/s` : "", `${ms(seen.ended - seen.began)} in all`,
  ];
  fill(element, parts.filter(Boolean).map((text) => h("span", text)));
}

// -- forms ------------------------------------------------------------------------------------------------------

function form(title, fields, path, body, draw) {
  const out = h("section.panel", { "aria-live": "polite" }, h("p.empty", "The answer shows up here."));
  const go = h("button.primary", { type: "button", onclick: ask }, title);
  let abort = null;
  async function ask() {
    abort?.abort();
    abort = new AbortController();
    go.disabled = true;
    fill(out, h("p.empty", "Waiting …"));
    const began = performance.now();
    try {
      const response = await send(path, body(), abort.signal);
      if (!response.ok) throw await failure(response);
      const answer = await response.json();
      fill(out, h("p.faint", `${ms(performance.now() - began)}, waited ${ms(Number(response.headers.get("X-QM-Wait-Ms") ?? 0))}`), draw(answer));
    } catch (error) {
      fill(out, h("p.bad-text", error.message));
    } finally {
      go.disabled = false;
    }
  }
  return { element: h("div.stack", h("section.panel.composer", fields, h("div.row", go)), out), leave: () => abort?.abort() };
}

function embeddings(model) {
  const input = h("textarea", { rows: 4, placeholder: "One text a line", "aria-label": "Texts, one a line" });
  const texts = () => input.value.split("\n").filter((line) => line.trim());
  return form("Embed", [input], "v1/embeddings", () => ({ model: model(), input: texts() }), (answer) => {
    const vectors = (answer.data ?? []).map((item) => item.embedding).filter(Array.isArray);
    if (!vectors.length) return h("pre.json", JSON.stringify(answer, null, 2).slice(0, 5000));
    const given = texts();
    return h("div.scroll", h("table.stacked",
      h("thead", h("tr", ["Text", "Dimensions", "Like the first", "Begins"].map((label) => h("th", { scope: "col" }, label)))),
      h("tbody", vectors.map((vector, index) => h("tr",
        h("td.break", { "data-label": "Text" }, given[index] ?? ""), h("td", { "data-label": "Dimensions" }, vector.length),
        h("td", { "data-label": "Like the first" }, cosine(vectors[0], vector).toFixed(3)),
        h("td.mono", { "data-label": "Begins" }, vector.slice(0, 4).map((v) => Number(v).toFixed(4)).join(", ")))))));
  });
}

function cosine(a, b) {
  let [dot, left, right] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    dot += a[i] * b[i];
    left += a[i] ** 2;
    right += b[i] ** 2;
  }
  return left && right ? dot / Math.sqrt(left * right) : 0;
}

function rerank(model) {
  const query = h("input", { type: "text", placeholder: "Query", "aria-label": "Query" });
  const documents = h("textarea", { rows: 5, placeholder: "One document a line", "aria-label": "Documents, one a line" });
  const texts = () => documents.value.split("\n").filter((line) => line.trim());
  return form("Rerank", [query, documents], "v1/rerank", () => ({ model: model(), query: query.value, documents: texts() }), (answer) => {
    const results = (answer.results ?? answer.data ?? []).map((item) => [item.index, Number(item.relevance_score ?? item.score ?? 0)]);
    if (!results.length) return h("pre.json", JSON.stringify(answer, null, 2).slice(0, 5000));
    const scores = results.map(([, score]) => score);
    // Probabilities are what they are; other scores say only which is higher.
    const probable = scores.every((score) => score >= 0 && score <= 1);
    const [low, high] = probable ? [0, 1] : [Math.min(...scores), Math.max(...scores)];
    const given = texts();
    return h("div.stack", results.sort((a, b) => b[1] - a[1]).map(([index, score]) => {
      const bar = h("div.scorebar");
      bar.style.width = `${high > low ? 4 + (96 * (score - low)) / (high - low) : 100}%`;
      return h("div", h("div.break", given[index] ?? `document ${index}`), bar, h("span.faint", score.toFixed(4)));
    }));
  });
}
