// What loading a model would do now, and why; nothing is done by looking.

import { fill, h, once, say, toast } from "./dom.js";
import { hue, size, span } from "./format.js";
import { box, get, name, post, subscribe } from "./live.js";

const VERDICTS = { serve: "Served at once", join: "Joins a load that is under way", queue: "Waits", start: "Loads", refuse: "Refused" };

export function show(main, rest) {
  const picker = h("select", { "aria-label": "Model", onchange: () => (location.hash = `plan/${encodeURIComponent(picker.value)}`) });
  const load = h("button.primary", { type: "button", onclick: go }, "Load it now");
  const out = h("div.stack");
  main.append(h("div.head", h("h1", "Plan"), h("label", "If this were asked for now:", picker), load), out);
  let model = rest;
  let target = ""; // what is loaded: a selector's choice of the moment
  let seen = "";
  let left = false;

  function changed({ status }) {
    if (!status) return;
    const wanted = [...status.models.filter((each) => !each.removed), ...status.selectors].map((each) => each.id);
    if (!wanted.length) {
      fill(out, h("section.panel", h("p.empty", "No models are configured yet. Add one under `models:` in your configuration file.")));
      picker.hidden = load.hidden = true;
      return;
    }
    picker.hidden = load.hidden = false;
    if (!model) model = (status.models.find((each) => each.state === "stopped" && !each.removed) ?? { id: wanted[0] }).id;
    if (!wanted.includes(model)) wanted.push(model);
    once(picker, wanted, () => wanted.map((id) => h("option", { value: id }, id)));
    picker.value = model;
    const key = JSON.stringify([model, status.models.map((each) => [each.id, each.state, each.inflight]), status.swaps.length, status.requests.length, status.service.profile]);
    if (key !== seen) {
      seen = key;
      look();
    }
  }

  async function look() {
    try {
      const plan = await get(`api/plan?model=${encodeURIComponent(model)}`);
      if (!left) draw(plan);
    } catch (error) {
      if (left) return;
      const text = error.status === 404 && error.code !== "model_not_found" ? "This qmflask cannot tell its plans yet; update it." : error.message;
      fill(out, h("section.panel", h("p.empty", text)));
    }
  }

  function draw(plan) {
    target = plan.model;
    load.disabled = ["ready", "starting", "peer"].includes(plan.state);
    const { decision, why, victims, blockers, pools, notes, others, hints } = plan;
    once(out, [plan.model, decision, why, victims, blockers, pools, notes, others, hints], () => [
      h("section.panel.stack",
        h("p.verdict", h("b", VERDICTS[plan.decision] ?? plan.decision), ": ", plan.why),
        h("dl.pairs",
          plan.model === model ? null : pair("Goes to", plan.model),
          pair("Now", plan.state),
          plan.charge && pair("Needs", needOf(plan)),
          pair("Would stop", plan.victims?.length ? plan.victims.join(", ") : "nothing"),
          plan.blockers?.length ? pair("Waits for", plan.blockers.join(", ")) : null,
          plan.position ? pair("Place in the queue", plan.position) : null,
          othersOf(plan.others)),
        plan.notes?.length ? h("ul", plan.notes.map((note) => h("li.soft", typeof note === "string" ? note : JSON.stringify(note)))) : null),
      (plan.pools ?? []).filter(matters).map((pool) => poolTable(pool, plan)),
    ]);
  }

  async function go() {
    load.disabled = true;
    try {
      await post(`api/models/load/${name(target || model)}`);
      toast(`${target || model} is loaded.`);
    } catch (error) {
      toast(error.message, true);
    } finally {
      load.disabled = false;
    }
  }

  const stop = subscribe(changed);
  const timer = setInterval(() => box.status && look(), 5000);
  return () => {
    left = true;
    stop();
    clearInterval(timer);
  };
}

function needOf(plan) {
  const parts = ["vram", "ram"].filter((pool) => plan.charge[pool]).map((pool) => `${chargeOf(plan, plan.model, pool, plan.charge[pool])} ${pool.toUpperCase()}`);
  return parts.join(", ") || chargeOf(plan, plan.model, plan.sizes?.[plan.model]?.pool ?? "vram", 0);
}

function pair(label, value) {
  return [h("dt", label), h("dd", String(value))];
}

/** A pool of which the model takes nothing and in which nothing stops would only distract. */
function matters(pool, index, pools) {
  return pool.charge > (pool.cap ?? pool.budget ?? 0) / 100 || (pool.residents ?? []).some((line) => line.stops) || pools.every((each) => !each.charge);
}

function poolTable(pool, plan) {
  const name = pool.pool === "ram" ? "RAM" : "VRAM";
  const cap = pool.cap ?? pool.budget;
  const sums = [
    pool.charge !== undefined ? `needs ${size(pool.charge)}` : "",
    pool.total !== undefined ? `with all that runs ${size(pool.total)}` : "",
    pool.after !== undefined ? `after ${size(pool.after)}` : "",
    cap ? `of ${size(cap)}${pool.budget && cap < pool.budget ? ` (ceiling now; the budget is ${size(pool.budget)})` : ""}` : "no budget",
  ];
  const residents = pool.residents ?? [];
  const rule = pool.rule === "memory" ? "memory decides" : pool.rule ? `${pool.rule} rule decides` : "";
  return h("section.panel.stack",
    h("div.head", h("h2", name), h("span.soft", sums.filter(Boolean).join(", ")), rule ? h("span.chip", rule) : null),
    cap ? bars(pool, plan, cap) : null,
    residents.length
      ? h("div.scroll", h("table.stacked",
          h("thead", h("tr", ["Model", "Charge", "Would stop", "Why", "Idle", "In flight"].map((label) => h("th", { scope: "col" }, label)))),
          h("tbody", residents.map((line) => resident(line, plan, pool.pool)))))
      : h("p.soft", "Nothing else is loaded."));
}

/** A charge with its origin; for a model of unknown size what its header or file suggests. */
function chargeOf(plan, model, pool, charge) {
  if (charge) return `${size(charge)} ${plan.sizes?.[model]?.[pool]?.origin ?? ""}`;
  const guess = plan.hints?.[model];
  return guess?.[pool] ? `unknown; its ${guess.origin} suggests ${size(guess[pool])}` : "unknown";
}

/** What programs of others hold on the cards, as far as a sample tells. */
function othersOf(others) {
  if (!others?.foreign) return null;
  const names = (others.foreign_processes ?? []).map((each) => `${each.name} ${size(each.bytes)}`).join(", ");
  const growth = others.excess ? `, ${size(others.excess)} above their floor` : "";
  return pair("Others hold", `${size(others.foreign)} on the cards${growth}${names ? `: ${names}` : ""}`);
}

function resident(line, plan, pool) {
  const cell = (label, value) => h("td", { "data-label": label }, value);
  return h("tr",
    cell("Model", h("span", h(`span.key.${hue(line.model)}`, { "aria-hidden": "true" }), " ", h("span.break", line.model))),
    cell("Charge", chargeOf(plan, line.model, pool, line.charge)), cell("Would stop", line.stops ? h("b", "yes") : "no"),
    cell("Why", line.why ?? ""), cell("Idle", line.idle_seconds === null || line.idle_seconds === undefined ? "–" : span(line.idle_seconds)),
    cell("In flight", `${line.in_flight ?? 0}${line.held ? ", held" : ""}`));
}

function bars(pool, plan, cap) {
  const residents = pool.residents ?? [];
  const target = { model: plan.model, charge: pool.charge ?? 0 };
  const running = residents.some((line) => line.model === plan.model);
  const before = residents.filter((line) => line.charge);
  const after = [...before.filter((line) => !line.stops), ...(running ? [] : [target])].filter((line) => line.charge);
  const scale = Math.max(cap, ...[before, after].map((lines) => lines.reduce((sum, line) => sum + line.charge, 0)), 1);
  return h("div.stack", [["now", before], ["then", after]].map(([label, lines]) => {
    const track = h("div.track", { role: "img", "aria-label": `${label}: ${lines.map((line) => `${line.model} ${size(line.charge)}`).join(", ") || "nothing"}` },
      h("div.fill", lines.map((line) => {
        const segment = h(`div.seg.${hue(line.model)}`, { title: `${line.model}: ${size(line.charge)}` });
        segment.style.width = `${(100 * line.charge) / scale}%`;
        return segment;
      })));
    const mark = h("i.mk", { title: `cap: ${size(cap)}` });
    mark.style.left = `${(100 * cap) / scale}%`;
    track.append(mark);
    return h("div.pool", h("span.faint", label), track);
  }));
}
