// Reads server-sent events from a fetch: EventSource can only GET.

/** Yields {event, data} for each message of a response's body. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    rest += value;
    let end;
    while ((end = rest.search(/\r\n|\n|\r(?!$)/)) >= 0) {
      const line = rest.slice(0, end);
      rest = rest.slice(end + (rest.startsWith("\r\n", end) ? 2 : 1));
      if (!line) {
        if (data.length) yield { event: event || "message", data: data.join("\n") };
        event = "";
        data = [];
      } else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line.startsWith("event:")) event = line.slice(6).trim();
    }
  }
}
