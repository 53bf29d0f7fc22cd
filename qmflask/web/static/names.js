// What names mean now: the profile picker in the frame, and on the overview the selectors and the active profile's pins.

import { h, once, toast } from "./dom.js";
import { hue } from "./format.js";
import { put } from "./live.js";

const STRATEGIES = {
  pin: () => "the first",
  warm: () => "one that is loaded, else the first",
  spillover: (each) => `spread: ${each.spillover} request${each.spillover === 1 ? "" : "s"} each, then the next is loaded`,
};
const STATES = { ready: "ready", starting: "loading", draining: "finishing", stopping: "stopping", failed: "failed" };

/** Keep the frame's picker in step with the service; it hides where no profiles are configured. */
export function profilePicker(select, status) {
  select.hidden = status.profiles.length === 0;
  const listed = status.profiles.map((profile) => [profile.id, profile.description]);
  once(select, listed, () => [
    h("option", { value: "-" }, "no profile"),
    listed.map(([id, description]) => h("option", { value: `=${id}`, title: description }, id)),
  ]);
  if (!select.onchange) select.onchange = () => activate(select);
  if (!select.disabled) select.value = chosen(status);
  select.dataset.active = chosen(status);
}

function chosen(status) {
  return status.service.profile === null ? "-" : `=${status.service.profile}`;
}

async function activate(select) {
  const wanted = select.value;
  select.disabled = true; // the status that was on its way would put the old one back
  try {
    await put("api/profiles/active", { name: wanted === "-" ? null : wanted.slice(1) });
    select.dataset.active = wanted;
    toast(wanted === "-" ? "No profile is active." : `The profile ${wanted.slice(1)} is active.`);
  } catch (error) {
    toast(error.message, true);
  } finally {
    select.disabled = false;
    select.value = select.dataset.active;
    select.focus();
  }
}

/** The overview's panel; it hides where there is nothing but models. */
export function drawNames(panel, status) {
  const active = status.profiles.find((profile) => profile.id === status.service.profile);
  const states = Object.fromEntries(status.models.flatMap((model) => [model.id, ...model.aliases].map((name) => [name, model])));
  panel.hidden = !status.selectors.length && !active;
  once(panel, [status.selectors, active, status.models.map((model) => [model.id, model.state])], () => [
    active ? profile(active) : null,
    status.selectors.length ? selectors(status.selectors, states) : null,
  ]);
}

function profile(active) {
  const pins = Object.entries(active.pins);
  const also = [
    active.preload.length ? `loaded with it: ${active.preload.join(", ")}` : "",
    active.default_model ? `comes back when the box is idle: ${active.default_model}` : "",
  ].filter(Boolean);
  return h("div.stack",
    h("div.head", h("h2.break", `Profile ${active.id}`), h("span.soft.break", active.description)),
    pins.length
      ? h("div.scroll", h("table.stacked",
          h("thead", h("tr", ["Name", "Means"].map((label) => h("th", { scope: "col" }, label)))),
          h("tbody", pins.map(([name, target]) => h("tr",
            h("td.break", { "data-label": "Name" }, name),
            h("td.break", { "data-label": "Means" }, target || h("span.faint", "nothing: requests for it get 404")))))))
      : null,
    also.length ? h("p.soft.break", also.join(" · ")) : null);
}

function selectors(listed, models) {
  const cell = (label, ...value) => h("td.break", { "data-label": label }, ...value);
  return h("div.stack",
    h("div.head", h("h2", "Selectors"), h("span.soft", "names that choose a model for each request")),
    h("div.scroll", h("table.stacked",
      h("thead", h("tr", ["Selector", "Takes", "Targets", ""].map((label) => h("th", { scope: "col" }, label || h("span.vh", "Actions"))))),
      h("tbody", listed.map((each) => h("tr",
        cell("Selector", h("div", each.id, [each.name, each.description].filter((text) => text && text !== each.id).map((text) => h("div.faint", text)))),
        cell("Takes", STRATEGIES[each.strategy](each)),
        cell("Targets", h("ul.legend", each.targets.map((name) => target(name, models[name])))),
        h("td", h("a.button.plain", { href: `#plan/${encodeURIComponent(each.id)}`, "aria-label": `Plan for ${each.id}` }, "Plan"),
          h("a.button.plain", { href: `#try/${encodeURIComponent(each.id)}`, "aria-label": `Try ${each.id}` }, "Try"))))))));
}

function target(name, model) {
  const state = model ? STATES[model.state] ?? "not loaded" : "elsewhere";
  return h("li", h(`span.key.${model ? hue(model.id) : "nohue"}`, { "aria-hidden": "true" }), h("span.break", name), h("span.faint", state));
}
