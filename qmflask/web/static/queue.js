// Who waits for what and why, what is being swapped, and what is in flight.

import { Keyed, h, once, say, toast } from "./dom.js";
import { clock, hue, span } from "./format.js";
import { box, elapsed, post, subscribe } from "./live.js";

const PHASES = [["draining", "answers end"], ["stopping", "models stop"], ["reclaim", "memory is freed"], ["starting", "starts"], ["probing", "loads"]];

export function show(main) {
  const swaps = h("div.stack");
  const waiting = table(["#", "Model", "Waits for", "Waited", "Patience left", "From", ""]);
  const flying = table(["Model", "Request", "Since", "Waited", "From", ""]);
  const none = (text) => h("p.empty", text);
  const noSwaps = none("No model is being swapped.");
  const noWaiting = none("Nobody waits. Requests for a loaded model are served at once.");
  const noFlying = none("Nothing is in flight.");
  main.append(
    h("div.head", h("h1", "Queue and in flight")),
    h("section.panel.stack", h("h2", "Swaps"), swaps, noSwaps),
    h("section.panel.stack", h("h2", "Waiting"), waiting.element, noWaiting),
    h("section.panel.stack", h("h2", "In flight"), flying.element, noFlying),
  );
  const swapParts = new Keyed(swaps, swapRow);
  const waitingParts = new Keyed(waiting.body, waitingRow);
  const flyingParts = new Keyed(flying.body, flyingRow);

  function draw() {
    const { status } = box;
    if (!status) return;
    const queued = status.requests.filter((request) => request.state === "queued" && request.kind !== "unload");
    const granted = status.requests.filter((request) => request.state === "granted");
    swapParts.update(status.swaps, (swap) => swap.id);
    waitingParts.update(queued, (request) => request.id);
    flyingParts.update(granted, (request) => request.id);
    noSwaps.hidden = status.swaps.length > 0;
    noWaiting.hidden = queued.length > 0;
    waiting.element.hidden = queued.length === 0;
    noFlying.hidden = granted.length > 0;
    flying.element.hidden = granted.length === 0;
  }

  function tick() {
    for (const parts of [swapParts, waitingParts, flyingParts]) for (const part of parts.parts.values()) part.tick();
  }

  const stop = subscribe(draw);
  const timer = setInterval(tick, 500);
  return () => {
    stop();
    clearInterval(timer);
  };
}

function table(heads) {
  const body = h("tbody");
  const element = h("div.scroll", h("table.stacked", h("thead", h("tr", heads.map((head) => h("th", { scope: "col" }, head || h("span.vh", "Actions"))))), body));
  return { element, body };
}

function modelCell(model) {
  return h("span", h(`span.key.${hue(model)}`, { "aria-hidden": "true" }), " ", h("span.break", model));
}

function cell(label, ...children) {
  return h("td", { "data-label": label }, ...children);
}

function cancelButton(request) {
  const button = h("button", { type: "button", "aria-label": `Cancel the request for ${request.model}`, onclick: cancel }, "Cancel");
  async function cancel() {
    button.disabled = true;
    try {
      await post(`api/inflight/${encodeURIComponent(request.id)}/cancel`);
      toast("The request is cancelled.");
    } catch (error) {
      toast(error.message, true);
      button.disabled = false;
    }
  }
  return ["infer", "peer"].includes(request.kind) ? button : null;
}

function from(request) {
  const { detail } = request;
  return [detail.selector && `asked: ${detail.selector}`, detail.key, detail.remote].filter(Boolean).join(" · ") || { preload: "preload", load: "load command" }[request.kind] || "–";
}

function waitingRow(first) {
  let request = first;
  const [position, why, waited, patience] = ["#", "Waits for", "Waited", "Patience left"].map((label) => cell(label));
  why.classList.add("break");
  const element = h("tr", position, cell("Model", modelCell(first.model)), why, waited, patience, cell("From", from(first)), h("td.num", cancelButton(first)));
  element.dataset.request = first.id;
  function tick() {
    const gone = elapsed();
    say(waited, clock(request.wait + gone));
    const left = request.patience_left - gone;
    say(patience, left > 0 ? clock(left) : "over: its turn comes first");
  }
  return {
    element,
    tick,
    update(next) {
      request = next;
      say(position, next.position ?? "–");
      say(why, next.why ?? "");
      tick();
    },
  };
}

function flyingRow(first) {
  let request = first;
  const since = cell("Since");
  const path = [first.detail.method, first.detail.path].filter(Boolean).join(" ") || first.kind;
  const element = h("tr", cell("Model", modelCell(first.model)), cell("Request", h("span.mono.break", path)), since,
    cell("Waited", `${span(first.wait)}${first.paid ? " (load)" : ""}`), cell("From", from(first)), h("td.num", cancelButton(first)));
  element.dataset.request = first.id;
  const tick = () => say(since, clock(request.age - request.wait + elapsed()));
  return {
    element,
    tick,
    update(next) {
      request = next;
      tick();
    },
  };
}

function swapRow(first) {
  let swap = first;
  const age = h("span.soft");
  const steps = h("ol.steps");
  const names = (models) => models.map((model, index) => [index ? ", " : "", modelCell(model)]);
  const element = h("div.stack",
    h("div.swap", h("b", modelCell(first.target)), h("span.soft", "loads"),
      first.victims.length ? h("span", "and ", names(first.victims), first.victims.length > 1 ? " stop" : " stops") : h("span.soft", "beside the others"),
      first.blockers.length ? h("span", "after ", names(first.blockers)) : null, age),
    steps);
  const tick = () => say(age, `for ${clock(swap.age + elapsed())}`);
  return {
    element,
    tick,
    update(next) {
      swap = next;
      const at = PHASES.findIndex(([phase]) => phase === next.phase);
      once(steps, at, () => PHASES.map(([, text], index) => {
        const step = h("li", text);
        if (index < at) step.className = "done";
        if (index === at) step.setAttribute("aria-current", "step");
        return step;
      }));
      tick();
    },
  };
}
