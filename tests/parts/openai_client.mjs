// OpenAI's own JavaScript client against a service: `node openai_client.mjs URL KEY`, prints what it saw as JSON.
import OpenAI from "openai";

const [url, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const seen = {};

seen.models = (await client.models.list()).data.map((model) => model.id);
const answer = await client.chat.completions.create({ model: "gpt-x", messages, max_tokens: 16 });
seen.chat = answer.choices[0].message.content;

seen.stream = "";
for await (const chunk of await client.chat.completions.create({ model: "gpt-x", messages, max_tokens: 16, stream: true })) {
  seen.stream += chunk.choices[0]?.delta?.content ?? "";
}

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await client.chat.completions.create({ model: "caller", messages, tools, max_tokens: 99 });
seen.tool = called.choices[0].message.tool_calls[0].function;

seen.response = (await client.responses.create({ model: "gpt-x", input: "hi", max_output_tokens: 16 })).output_text;
seen.vectors = (await client.embeddings.create({ model: "embedder", input: ["one", "two"] })).data.length;

const file = await OpenAI.toFile(Buffer.alloc(300_000, "RIFF"), "a.wav");
const raw = await client.audio.transcriptions.create({ model: "ears", file }).asResponse();
seen.upload = (await raw.json()).length;

try {
  await client.chat.completions.create({ model: "gpt-y", messages });
} catch (error) {
  seen.unknown = { kind: error.constructor.name, status: error.status, code: error.code };
}
try {
  for await (const chunk of await client.chat.completions.create({ model: "broken", messages, stream: true })) void chunk;
  seen.broken = "ended well";
} catch (error) {
  seen.broken = error.message;
}
const stream = await client.chat.completions.create({ model: "gpt-x", messages, stream: true });
for await (const chunk of stream) {
  void chunk;
  break; // which aborts the request
}
console.log(JSON.stringify(seen));
