// What was served: totals, speeds over time, and a table with filters, paging and details.

import { fill, h, once, s, say } from "./dom.js";
import { count, hue, ms, rate, size, time } from "./format.js";
import { box, get, onRecords, subscribe } from "./live.js";

const COLUMNS = [
  ["time", "Time"], ["model", "Model"], ["req_path", "Request"], ["resp_status_code", "Status"], ["prompt", "Prompt"],
  ["generated", "Generated"], ["cached", "Cached"], ["gen_speed", "Tokens/s"], [null, "First byte"], [null, "Waited"], ["duration", "Duration"],
];
const NUMBERS = new Set(["Prompt", "Generated", "Cached", "Tokens/s", "First byte", "Waited", "Duration"]);
const CHARTED = 300;
const SINCE = [[0, "any time"], [15, "last 15 minutes"], [60, "last hour"], [1440, "last day"], [10080, "last week"]];

export function show(main, rest) {
  const choice = { model: rest, since: 0, failed: false, sort: "id", order: "desc", page: 1, limit: 25 };
  const picker = h("select", { "aria-label": "Model", onchange: () => change({ model: picker.value }) });
  const limit = h("select", { "aria-label": "Rows", onchange: () => change({ limit: Number(limit.value) }) },
    [25, 50, 100, 250].map((n) => h("option", { value: n }, `${n} rows`)));
  const since = h("select", { "aria-label": "Since", onchange: () => change({ since: Number(since.value) }) },
    SINCE.map(([minutes, label]) => h("option", { value: minutes }, label)));
  const failed = h("input", { type: "checkbox", onchange: () => change({ failed: failed.checked }) });
  const totals = h("div.totals");
  const charts = h("div.charts");
  const head = h("tr");
  const body = h("tbody");
  const table = h("div.scroll", h("table.stacked", h("thead", head), body));
  const none = h("p.empty");
  const pages = h("span.soft");
  const back = h("button", { type: "button", onclick: () => change({ page: choice.page - 1 }) }, "Newer");
  const on = h("button", { type: "button", onclick: () => change({ page: choice.page + 1 }) }, "Older");
  main.append(
    h("div.head", h("h1", "Activity"), picker, since, h("label", failed, "failed only"), limit),
    h("section.panel", { "aria-label": "Totals" }, totals),
    h("section.panel", { "aria-label": "Over time" }, charts),
    h("section.panel.stack", { "aria-label": "Requests" }, table, none, h("div.pager", pages, back, on)),
  );
  let timer = 0;
  let left = false;
  let asked = 0;

  function change(more) {
    Object.assign(choice, "page" in more ? more : { ...more, page: 1 });
    load();
  }

  function models({ status }) {
    if (!status) return;
    const wanted = ["", ...status.models.map((model) => model.id)];
    if (choice.model && !wanted.includes(choice.model)) wanted.push(choice.model);
    once(picker, wanted, () => wanted.map((id) => h("option", { value: id }, id || "all models")));
    picker.value = choice.model;
  }

  function heads() {
    once(head, [choice.sort, choice.order], () => COLUMNS.map(([column, label]) => {
      const sorted = column === choice.sort;
      const cell = h("th", { scope: "col" });
      if (NUMBERS.has(label)) cell.className = "num";
      if (!column) return fill(cell, label), cell;
      if (sorted) cell.setAttribute("aria-sort", choice.order === "asc" ? "ascending" : "descending");
      const arrow = sorted ? (choice.order === "asc" ? " ↑" : " ↓") : "";
      cell.append(h("button", { type: "button", onclick: () => change({ sort: column, order: sorted && choice.order === "desc" ? "asc" : "desc" }) }, label + arrow));
      return cell;
    }));
  }

  async function load() {
    clearTimeout(timer);
    timer = 0;
    const mine = ++asked;
    heads();
    const query = new URLSearchParams({ sort: choice.sort, order: choice.order, page: choice.page, limit: choice.limit });
    const newest = new URLSearchParams({ limit: CHARTED });
    const about = choice.model ? `?model=${encodeURIComponent(choice.model)}` : "";
    const start = choice.since ? new Date(Date.now() - choice.since * 60000).toISOString().replace(/\.\d+/, "") : "";
    for (const each of [query, newest]) {
      if (choice.model) each.set("model", choice.model);
      if (start) each.set("start", start);
    }
    if (choice.failed) query.set("failed", "1");
    try {
      const [rows, recent, sums] = await Promise.all([
        get(`api/metrics/activity?${query}`), get(`api/metrics/activity?${newest}`), get(`api/metrics/stats${about}`),
      ]);
      if (left || mine !== asked) return;
      drawTotals(totals, sums);
      drawCharts(charts, recent.data.reverse(), sums);
      drawRows(rows);
    } catch (error) {
      if (left) return;
      none.hidden = false;
      say(none, `Activity cannot be read: ${error.message}`);
    }
  }

  function drawRows({ data, page, total, total_pages }) {
    none.hidden = total > 0;
    table.hidden = total === 0;
    say(none, nothing(choice));
    say(pages, total ? `page ${page} of ${Math.max(1, total_pages)} · ${count(total)} request${total === 1 ? "" : "s"}` : "");
    back.disabled = page <= 1;
    on.disabled = page >= total_pages;
    once(body, data, () => data.map(row));
  }

  const soon = () => {
    if (!timer) timer = setTimeout(load, 800);
  };
  const stop = [subscribe(models), onRecords(soon)];
  models(box);
  load();
  return () => {
    left = true;
    clearTimeout(timer);
    stop.forEach((end) => end());
  };
}

function nothing(choice) {
  if (choice.failed) return choice.since || choice.model ? "No request like that has failed." : "No request has failed.";
  if (choice.since) return "Nothing was asked in that time. Choose a longer one.";
  if (choice.model) return "Nothing has been asked of this model yet.";
  return "Nothing has been asked yet. Requests show up here as soon as they end; try one under Try it.";
}

function row(record) {
  const { tokens } = record;
  const cell = (label, value, more = {}) => h(NUMBERS.has(label) ? "td.num" : "td", { "data-label": label, ...more }, value);
  const ok = record.resp_status_code < 400;
  const status = cell("Status", record.resp_status_code);
  if (!ok) status.classList.add("bad");
  const open = () => details(record);
  const key = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // else the same key presses the dialog's Close
    open();
  };
  return h("tr.click", { tabIndex: 0, onclick: open, onkeydown: key },
    cell("Time", h("span.whole", time(record.timestamp))),
    cell("Model", [
      h("span.model", { title: record.model }, h(`span.key.${hue(record.model)}`, { "aria-hidden": "true" }), " ", record.model),
      record.metadata?.selector ? h("div.faint", `asked: ${record.metadata.selector}`) : null,
    ]),
    cell("Request", h("span.break", h("span.mono", record.req_path), record.error_msg ? h("div.bad-text.break.brief", record.error_msg.slice(0, 300)) : null)),
    status,
    cell("Prompt", count(tokens.input_tokens)), cell("Generated", count(tokens.output_tokens)), cell("Cached", count(tokens.cache_tokens)),
    cell("Tokens/s", rate(tokens.tokens_per_second)), cell("First byte", ms(record.first_byte_ms)), cell("Waited", ms(record.wait_ms)),
    cell("Duration", ms(record.duration_ms)));
}

function drawTotals(element, sums) {
  const one = (label, value) => h("div", h("b", value), h("span.soft", label));
  const speed = sums.gen_histogram;
  once(element, sums, () => [
    one("requests", count(sums.total_requests)),
    one("prompt tokens", count(sums.total_input_tokens)),
    one("generated tokens", count(sums.total_output_tokens)),
    one("cached tokens", count(sums.total_cache_tokens)),
    one("tokens/s, median", speed ? rate(speed.p50) : "–"),
  ]);
}

// -- charts -----------------------------------------------------------------------------------------------------

const WIDTH = 360;
const HEIGHT = 120;
const LEFT = 34;
const BOTTOM = 18;

function drawCharts(element, records, sums) {
  const spoken = records.filter((record) => record.tokens.tokens_per_second > 0);
  const answered = records.filter((record) => record.first_byte_ms !== null);
  once(element, [records.map((record) => record.id), sums.gen_histogram], () => [
    scatter("Tokens per second", spoken, (record) => record.tokens.tokens_per_second, (value) => rate(value)),
    scatter("Time to first byte", answered, (record) => record.first_byte_ms, ms),
    bars("Speeds: how often", sums.gen_histogram),
  ]);
}

function chart(title, text, ...parts) {
  return h("figure.chart", h("h3.soft", title),
    s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": text }, ...parts));
}

function empty(title, text) {
  return h("figure.chart", h("h3.soft", title), h("p.empty", text));
}

function scatter(title, records, value, show) {
  if (!records.length) return empty(title, "No figures yet.");
  const times = records.map((record) => Date.parse(record.timestamp));
  const [first, last] = [Math.min(...times), Math.max(...times)];
  const top = Math.max(...records.map(value)) * 1.08 || 1;
  const x = (at) => LEFT + ((WIDTH - LEFT - 6) * (at - first)) / Math.max(1, last - first);
  const y = (v) => (HEIGHT - BOTTOM) * (1 - v / top) + 4;
  const dots = records.map((record, index) => {
    const dot = s("circle", { cx: x(times[index]).toFixed(1), cy: y(value(record)).toFixed(1), r: 2.6, class: hue(record.model) },
      s("title", {}, `${record.model}: ${show(value(record))}, ${time(record.timestamp)}`));
    return dot;
  });
  return chart(title, `${title}, ${records.length} requests, highest ${show(top / 1.08)}`, axis(y, top, show), ...dots,
    s("text", { x: LEFT, y: HEIGHT - 2 }, time(records[0].timestamp)),
    s("text", { x: WIDTH - 4, y: HEIGHT - 2, "text-anchor": "end" }, time(records[records.length - 1].timestamp)));
}

function axis(y, top, show) {
  return [0, top / 2].map((v) => s("g", {},
    s("line", { x1: LEFT, x2: WIDTH, y1: y(v), y2: y(v), class: "grid" }),
    s("text", { x: LEFT - 4, y: y(v) + 3, "text-anchor": "end" }, v ? show(v).replace(" ", "") : "0")));
}

function bars(title, histogram) {
  if (!histogram) return empty(title, "No figures yet.");
  const { bins, min, max, p50 } = histogram;
  const most = Math.max(...bins);
  const width = (WIDTH - LEFT - 6) / bins.length;
  const y = (v) => (HEIGHT - BOTTOM) * (1 - v / (most * 1.08)) + 4;
  return chart(title, `Tokens per second from ${rate(min)} to ${rate(max)}, median ${rate(p50)}`,
    axis(y, most, (v) => String(Math.round(v))),
    bins.map((n, index) => s("rect", { x: LEFT + index * width + 1, y: y(n), width: Math.max(1, width - 2), height: Math.max(0, HEIGHT - BOTTOM + 4 - y(n)), rx: 1.5 },
      s("title", {}, `${n} requests`))),
    s("text", { x: LEFT, y: HEIGHT - 2 }, rate(min)), s("text", { x: WIDTH - 4, y: HEIGHT - 2, "text-anchor": "end" }, rate(max)));
}

// -- one record -------------------------------------------------------------------------------------------------

async function details(record) {
  const kept = h("div.stack");
  const dialog = h("dialog", { "aria-label": `Request ${record.id}`, onclose: () => dialog.remove() },
    h("div.stack",
      h("div.head", h("h1", `Request ${record.id}`), h("button", { type: "button", onclick: () => dialog.close() }, "Close")),
      h("dl.pairs", pairs(record).flatMap(([label, value]) => [h("dt", label), h("dd", value)])),
      kept));
  document.body.append(dialog);
  dialog.showModal();
  if (!record.has_capture) {
    fill(kept, h("p.faint", "No capture is kept of it (captureBuffer)."));
    return;
  }
  try {
    const capture = await get(`api/captures/${record.id}`);
    fill(kept, part("Request", capture.req_headers, capture.req_body), part("Answer", capture.resp_headers, capture.resp_body));
  } catch (error) {
    fill(kept, h("p.faint", error.message));
  }
}

function pairs(record) {
  const { tokens } = record;
  const found = [
    ["Time", time(record.timestamp)], ["Model", record.model], ["Selector", record.metadata?.selector], ["Path", record.req_path], ["Status", record.resp_status_code],
    ["Error", record.error_msg], ["Key", record.key_name], ["Client", record.remote], ["Request id", record.request_id],
    ["Waited", record.wait_ms === null ? "" : `${ms(record.wait_ms)}${record.load_ms === null ? "" : `, of that ${ms(record.load_ms)} loading`}`],
    ["First byte", record.first_byte_ms === null ? "" : ms(record.first_byte_ms)], ["Duration", ms(record.duration_ms)], ["Bytes", size(record.bytes)],
    ["Tokens", `${count(tokens.input_tokens)} in, ${count(tokens.output_tokens)} out, ${count(tokens.cache_tokens)} cached`],
    ["Speed", tokens.tokens_per_second > 0 ? `${rate(tokens.prompt_per_second)} prompt, ${rate(tokens.tokens_per_second)} generated tokens/s` : ""],
    ["Drafted", tokens.draft_tokens > 0 ? `${tokens.draft_tokens}, ${tokens.draft_acc_tokens} accepted` : ""],
  ];
  return found.filter(([, value]) => value !== "" && value !== null && value !== undefined);
}

function part(title, headers, body) {
  const bytes = Uint8Array.from(atob(body), (c) => c.charCodeAt(0));
  let text = new TextDecoder().decode(bytes);
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // not one JSON document: as it is
  }
  const shown = text.length > 200000 ? `${text.slice(0, 200000)}\n… ${text.length - 200000} more characters` : text;
  return h("details", { open: true }, h("summary", title),
    h("pre.json", Object.entries(headers).map(([key, value]) => `${key}: ${value}`).join("\n")),
    shown ? h("pre.json", shown) : h("p.faint", "no body kept"));
}
