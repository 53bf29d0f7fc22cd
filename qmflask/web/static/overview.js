// Memory as stacked bars, and every model as a card.

import { Keyed, fill, h, once, say, toast } from "./dom.js";
import { clock, hue, size, span } from "./format.js";
import { box, elapsed, name, post, subscribe } from "./live.js";
import { drawNames } from "./names.js";

const STATES = {
  ready: "ready",
  starting: "loading",
  draining: "finishing",
  stopping: "stopping",
  stopped: "not loaded",
  failed: "failed",
};

export function show(main) {
  const memory = h("section.panel.stack", { "aria-label": "Memory" });
  const names = h("section.panel.stack", { "aria-label": "Selectors and profile", hidden: true });
  const cards = h("div.cards");
  const none = h("p.empty");
  const filter = h("input", { type: "search", placeholder: "Filter models", "aria-label": "Filter models", oninput: draw });
  const unlisted = h("input", { type: "checkbox", onchange: draw });
  const unlistedLabel = h("label", unlisted, "unlisted");
  const all = h("button", { type: "button", onclick: unloadAll }, "Unload all");
  const service = h("p.faint");
  main.append(
    h("div.head", h("h1", "Overview"), unlistedLabel, filter, all),
    memory, cards, none, names, service,
  );
  const keyed = new Keyed(cards, card);

  function draw() {
    const { status } = box;
    if (!status) return;
    const word = filter.value.trim().toLowerCase();
    const matches = (model) => !word || [model.id, model.name, ...model.aliases].some((text) => text.toLowerCase().includes(word));
    const hidden = status.models.some((model) => model.unlisted);
    unlistedLabel.hidden = !hidden;
    const listed = status.models.filter((model) => (!model.unlisted || unlisted.checked || model.state !== "stopped") && matches(model));
    keyed.update(listed, (model) => model.id);
    none.hidden = listed.length > 0;
    say(none, status.models.length
      ? "No model matches."
      : "No models are configured yet. Add one under `models:` in your configuration file; it is taken up within two seconds.");
    all.disabled = !status.models.some((model) => ["ready", "starting", "draining"].includes(model.state));
    drawMemory(memory, status);
    drawNames(names, status);
    const { workers, leader, term, generation } = status.service;
    say(service, `${workers.length} worker${workers.length === 1 ? "" : "s"}, scheduler in process ${leader ?? "–"} (term ${term}), `
      + `configuration ${generation}, version ${document.documentElement.dataset.version}`);
  }

  function tick() {
    for (const part of keyed.parts.values()) part.tick();
  }

  const stop = subscribe(draw);
  const timer = setInterval(tick, 500);
  return () => {
    stop();
    clearInterval(timer);
  };
}

async function act(button, path, done) {
  button.disabled = true;
  try {
    await post(path);
    if (done) toast(done);
  } catch (error) {
    toast(error.message, true);
  } finally {
    button.disabled = false;
  }
}

function unloadAll(event) {
  act(event.currentTarget, "api/models/unload", "All models are unloaded.");
}

// -- one model --------------------------------------------------------------------------------------------------

function card(first) {
  const id = first.id;
  const title = h("h3");
  const sub = h("div.sub");
  const pill = h("span.pill");
  const facts = h("div.facts");
  const bar = h("div.progress", { role: "progressbar", "aria-label": `Loading ${id}`, "aria-valuemin": 0, "aria-valuemax": 100 }, h("i"));
  const why = h("div.why");
  const failed = h("div");
  const load = h("button.load", { type: "button", onclick: () => act(load, `api/models/load/${name(id)}`) }, "Load");
  const unload = h("button", { type: "button", onclick: () => act(unload, `api/models/unload/${name(id)}`) }, "Unload");
  const release = h("button", { type: "button", title: "Others may have its room again", onclick: () => act(release, `api/models/release/${name(id)}`) }, "Release hold");
  const links = h("span.links",
    h("a.button.plain", { href: `#logs/${encodeURIComponent(id)}`, "aria-label": `Log of ${id}` }, "Log"),
    h("a.button.plain", { href: `#plan/${encodeURIComponent(id)}`, "aria-label": `Plan for ${id}` }, "Plan"),
    h("a.button.plain", { href: `#try/${encodeURIComponent(id)}`, "aria-label": `Try ${id}` }, "Try"));
  const element = h("article.card", { "aria-label": id },
    h("div.card-head", h(`span.key.${hue(id)}`, { "aria-hidden": "true" }), h("div", title, sub), pill),
    bar, facts, why, failed, h("div.actions", load, unload, release, links));
  element.dataset.model = id;
  let model = first;

  function update(next) {
    model = next;
    const aliases = next.aliases.length ? `also ${next.aliases.join(", ")}` : "";
    say(title, next.name || id);
    say(sub, [next.name && next.name !== id ? id : "", next.removed ? "removed from the configuration" : aliases, next.description].filter(Boolean).join(" · "));
    sub.hidden = !sub.textContent;
    pill.className = `pill ${next.state}`;
    say(pill, STATES[next.state] ?? next.state);
    const up = ["ready", "draining", "starting"].includes(next.state);
    load.hidden = up || next.state === "stopping" || Boolean(next.removed);
    unload.hidden = !up;
    say(unload, next.state === "starting" ? "Cancel load" : "Unload");
    bar.hidden = next.state !== "starting";
    failed.hidden = !next.failure;
    if (next.failure) once(failed, [next.failure.message, next.failure.code], () => failureBox(next.failure));
    tick();
  }

  function tick() {
    const gone = elapsed();
    once(facts, factsOf(model, gone).map(([label, value]) => [label, value]), () =>
      factsOf(model, gone).map(([label, value]) => h("span", label, label && " ", h("b", value))));
    say(why, whyOf(model, gone));
    why.hidden = !why.textContent;
    release.hidden = !(model.hold && model.hold - gone > 0);
    if (model.state === "starting") drawProgress(bar, model, gone);
  }

  return { element, update, tick };
}

function factsOf(model, gone) {
  const facts = [];
  const pool = model.pool;
  const now = model.size?.measured?.[pool];
  const charged = model.size?.charged?.[pool];
  if (now) facts.push(["uses", size(now)]);
  if (charged) facts.push([now ? "charged" : "needs", `${size(charged)} ${originOf(model.size, pool)}`]);
  if (!now && !charged) facts.push(["size", "unknown"]);
  if (model.inflight) facts.push(["in flight", model.inflight]);
  if (model.queued) facts.push(["queued", model.queued]);
  if (model.state === "starting") {
    facts.push(["loading for", clock(model.loading + gone)]);
    if (model.usual_load) facts.push(["usually", span(model.usual_load)]);
  }
  if (model.idle !== null && model.idle !== undefined) facts.push(["idle for", clock(model.idle + gone)]);
  if (model.ttl_left !== undefined && !model.inflight) facts.push(["unloads in", clock(model.ttl_left - gone)]);
  if (model.hold && model.hold - gone > 0) facts.push(["held for its tool call", clock(model.hold - gone)]);
  if (model.used && model.state !== "starting" && !model.inflight && model.idle == null) facts.push(["last used", ago(model.used, gone)]);
  if (model.usual_load && (model.state === "stopped" || model.state === "failed")) facts.push(["loads in", span(model.usual_load)]);
  return facts;
}

/** Where a charge comes from; a measurement that overrules the configured figure stands beside it. */
function originOf(sizes, pool) {
  const origin = sizes.origin?.[pool] ?? "";
  const told = sizes.configured?.[pool];
  return origin === "measured" && told ? `measured, ${size(told)} configured` : origin;
}

function whyOf(model, gone) {
  if (model.state === "draining") return `Finishes its answers: ${model.reason ?? ""}`;
  if (model.state === "stopping") return `Stopping: ${model.reason ?? ""}`;
  if (model.failure) {
    const left = model.failure.retry_in - gone;
    return left > 0 ? `Not tried again for ${clock(left)}; Load tries at once.` : "The next request tries again.";
  }
  if (!model.stop) return "";
  const code = model.stop.exit_code;
  // A reason that tells of the exit names the code itself.
  const exit = code && !/exit|signal/.test(model.stop.reason) ? `, exit code ${code}` : "";
  return `Last stop${model.stop.wall ? ` ${ago(model.stop.wall, gone)}` : ""}: ${model.stop.reason}${exit}`;
}

/** How long ago a wall time of the service's clock is, in steps of five seconds: a text that changes is read aloud. */
function ago(wall, gone) {
  const seconds = Math.max(0, box.status.now - wall) + gone;
  return `${span(Math.round(seconds / 5) * 5 || 1)} ago`;
}

function failureBox(failure) {
  const [head, ...lines] = failure.message.split(/; last log lines: | \| /);
  if (!lines.length) return h("div.failure", head);
  return h("details.failure", { open: true }, h("summary", head), h("pre", lines.join("\n")));
}

function drawProgress(bar, model, gone) {
  const loading = model.loading + gone;
  const usual = model.usual_load || 0;
  // Without a usual time the bar creeps: it never claims to know.
  const share = usual ? Math.min(0.97, loading / usual) : 1 - Math.exp(-loading / 20);
  bar.classList.toggle("over", Boolean(usual) && loading > usual * 1.5);
  bar.firstElementChild.style.width = `${(share * 100).toFixed(1)}%`;
  bar.setAttribute("aria-valuenow", Math.round(share * 100));
}

// -- memory -----------------------------------------------------------------------------------------------------

const MUCH = 256 * 1024 ** 2;
const POOLS = [["vram", "VRAM"], ["ram", "RAM"]];

function drawMemory(panel, status) {
  once(panel, [status.memory.pools, status.memory.why], () => {
    const drawn = POOLS.map(([pool, title]) => poolBar(pool, title, status.memory.pools[pool])).filter(Boolean);
    if (drawn.length) return drawn;
    return h("p.empty", "No memory budget is set and no card is seen: models swap by their groups. Set vramBudgetGB to let memory decide.");
  });
}

function poolBar(pool, title, memory) {
  const { budget, ceiling, total, shares } = memory;
  if (!budget && !total && !shares.length) return null;
  if (pool === "ram" && !budget && !shares.length) return null;
  const ours = shares.reduce((sum, share) => sum + share.bytes, 0);
  // On cards, foreign use is what the scheduler trusts; of system memory it is all that is used and is not ours.
  const foreign = memory.foreign ?? (total ? Math.max(0, memory.used - ours) : 0);
  const scale = Math.max(total, budget, ours + foreign, 1);
  const room = Math.max(0, (total || budget) - ours - foreign);
  const percent = (bytes) => `${((100 * bytes) / scale).toFixed(2)}%`;
  const fillBar = h("div.fill");
  for (const share of shares) {
    const segment = h(`div.seg.${hue(share.model)}`, { title: `${share.model}: ${size(share.bytes)}` });
    segment.classList.toggle("estimate", !share.measured);
    segment.classList.toggle("moving", share.state !== "ready");
    segment.style.width = percent(share.bytes);
    fillBar.append(segment);
  }
  if (foreign) {
    const segment = h("div.seg.foreign", { title: `others: ${size(foreign)}` });
    segment.style.width = percent(foreign);
    fillBar.append(segment);
  }
  const track = h("div.track", { role: "img" }, fillBar);
  for (const [kind, bytes] of [["budget", budget], ["ceiling", ceiling]]) {
    if (bytes && !(kind === "ceiling" && bytes >= budget && budget)) {
      const mark = h(`i.mk.${kind}`, { title: `${kind}: ${size(bytes)}` });
      mark.style.left = percent(bytes);
      track.append(mark);
    }
  }
  // What a GPU model takes of system memory is in the bar; a line of its own it gets when it is much.
  const told = shares.filter((share) => share.charge || share.bytes >= MUCH);
  const tight = Boolean(ceiling && budget && ceiling < budget);
  const charged = shares.reduce((sum, share) => sum + (share.charge || share.bytes), 0);
  const head = [budget ? `${size(charged)} of ${size(budget)} budget taken` : `${size(ours)} by models`];
  if (total) head.push(`${size(total)} in all`);
  track.setAttribute("aria-label", `${title}: ${head.join(", ")}. ${shares.map((share) => `${share.model} ${size(share.bytes)}`).join(", ")}`);
  const item = (key, text) => h("li", h(`span.key.${key}`, { "aria-hidden": "true" }), h("span.break", { title: text }, text));
  return h("div.pool",
    h("div.pool-head", h("b", title), h("span.soft", head.join(" · "))),
    track,
    h("ul.legend",
      told.map((share) => item(hue(share.model), `${share.model} ${size(share.bytes)}${share.measured ? "" : " (charged)"}`)),
      foreign ? item("foreign", `others ${size(foreign)}`) : null,
      room > 0 ? item("free", `free ${size(room)}`) : null,
      budget ? item("line", `budget ${size(budget)}`) : null,
      tight ? item("line.ceiling", `ceiling now ${size(ceiling)}: ${pool === "vram" ? "others use the cards" : "no more is free"}`) : null));
}
