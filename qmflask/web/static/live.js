// The box as it is now: pushed by /api/events, asked for every two seconds where no stream is to be had.

import { colour } from "./format.js";

export const ROOT = document.documentElement.dataset.root || "/";

const listeners = new Set();
const recordListeners = new Set();
let source = null;
let pollTimer = 0;
let reopenTimer = 0;
let state = "connecting";

/** The newest status, null before the first; `at` is this page's clock when it came. */
export const box = { status: null, at: 0, link: "connecting", refusal: "" };

/** Seconds that have passed here since the status was made: clocks go on between two messages. */
export function elapsed() {
  return (performance.now() - box.at) / 1000;
}

export function subscribe(listener) {
  listeners.add(listener);
  if (box.status) listener(box);
  return () => listeners.delete(listener);
}

/** Called when records were stored. */
export function onRecords(listener) {
  recordListeners.add(listener);
  return () => recordListeners.delete(listener);
}

function take(status) {
  box.status = status;
  box.at = performance.now();
  colour(status.models.map((model) => model.id));
  for (const listener of listeners) listener(box);
}

function setState(next) {
  state = next;
  box.link = next;
  for (const listener of listeners) listener(box);
}

export function connect() {
  clearTimeout(reopenTimer);
  source?.close();
  source = new EventSource(`${ROOT}api/events?types=status,activity`);
  source.addEventListener("message", (event) => {
    const { type, data } = JSON.parse(event.data);
    if (type === "status") {
      stopPolling();
      if (state !== "live") setState("live");
      take(JSON.parse(data));
    } else if (type === "activity") {
      for (const listener of recordListeners) listener(JSON.parse(data).id);
    }
  });
  source.addEventListener("error", () => {
    // A worker that ends closes the stream, and all streams may be taken: the page goes on by asking.
    source.close();
    startPolling();
    clearTimeout(reopenTimer);
    reopenTimer = setTimeout(connect, state === "live" ? 300 : 5000);
    if (state === "live") setState("connecting");
  });
}

function startPolling() {
  if (!pollTimer) poll();
}

function stopPolling() {
  clearTimeout(pollTimer);
  pollTimer = 0;
}

async function poll() {
  pollTimer = setTimeout(poll, 2000);
  try {
    const status = await get("api/status");
    if (pollTimer) {
      box.refusal = "";
      if (state !== "polling") setState("polling");
      take(status);
      for (const listener of recordListeners) listener(0);
    }
  } catch (error) {
    // A key that may chat need not be allowed to see what others do.
    box.refusal = [401, 403].includes(error.status) ? error.message : "";
    setState("lost");
  }
}

/** What went wrong, as a sentence. */
export class Failure extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function failure(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (error?.message) return new Failure(error.message, response.status, error.code);
  } catch {
    // not JSON: what it says will do
  }
  return new Failure(text.slice(0, 300) || `${response.status} ${response.statusText}`, response.status, "");
}

export async function get(path, options = {}) {
  const response = await fetch(ROOT + path, { headers: { Accept: "application/json" }, ...options });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export function post(path, body) {
  return send("POST", path, body);
}

export function put(path, body) {
  return send("PUT", path, body);
}

async function send(method, path, body) {
  const response = await fetch(ROOT + path, {
    method,
    headers: { "Content-Type": "application/json", Accept: "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw await failure(response);
  return response;
}

/** A model's name inside a path. */
export function name(model) {
  return model.split("/").map(encodeURIComponent).join("/");
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && source?.readyState === EventSource.CLOSED) connect();
});
