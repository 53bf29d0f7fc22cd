// Numbers and times as people read them.

const GIB = 1024 ** 3;

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  if (bytes >= 100 * GIB) return `${Math.round(bytes / GIB)} GiB`;
  if (bytes >= GIB / 10) return `${(bytes / GIB).toFixed(1).replace(/\.0$/, "")} GiB`;
  if (bytes >= 1024 ** 2) return `${Math.round(bytes / 1024 ** 2)} MiB`;
  return bytes >= 1024 ? `${Math.round(bytes / 1024)} KiB` : `${bytes} B`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0) return "0 s";
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** Whole seconds, for clocks that run: 0:07, 4:30, 1:02:03. */
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return `${Math.round(value)} ms`;
  return span(value / 1000);
}

export function count(value) {
  return value === null || value === undefined || value < 0 ? "–" : value.toLocaleString("en");
}

export function rate(value) {
  return value > 0 ? value.toFixed(value < 100 ? 1 : 0) : "–";
}

export function time(iso) {
  const when = new Date(iso);
  const today = new Date().toDateString() === when.toDateString();
  const clockTime = when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  return today ? clockTime : `${when.toLocaleDateString()} ${clockTime}`;
}

const hues = new Map();

/** Give the models their hues, in order, so that neighbours differ; a model keeps its own while the page is open. */
export function colour(models) {
  for (const model of models) if (!hues.has(model)) hues.set(model, hues.size % 8);
}

/** The class of a model's hue, the same everywhere; none for names that are no models. */
export function hue(model) {
  return hues.has(model) ? `hue${hues.get(model)}` : "nohue";
}
