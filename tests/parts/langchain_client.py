"""LangChain against a service: `langchain_client.py URL KEY`, prints what it saw as JSON. Has a venv of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import APIError, NotFoundError

URL, KEY = sys.argv[1:3]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


def chat(model: str, **more: Any) -> ChatOpenAI:
    """A chat model of the service."""
    return ChatOpenAI(model=model, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, max_tokens=99, **more)


def main() -> None:
    """Each kind of call once."""
    seen: dict[str, Any] = {}
    messages = [HumanMessage("hi")]
    seen["chat"] = chat("gpt-x").invoke(messages).content
    seen["responses"] = chat("gpt-x", use_responses_api=True).invoke(messages).text
    whole: AIMessageChunk | None = None
    for chunk in chat("gpt-x", stream_usage=True).stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    seen["stream"], seen["tokens"] = whole.content, (whole.usage_metadata or {}).get("output_tokens", 0)
    seen["calls"] = chat("caller").bind_tools([get_weather]).invoke(messages).tool_calls
    embeddings = OpenAIEmbeddings(model="embedder", base_url=f"{URL}/v1", api_key=KEY, check_embedding_ctx_length=False)
    seen["vectors"] = len(embeddings.embed_documents(["one", "two"]))
    seen["batch"] = [answer.content for answer in chat("gpt-x").batch([messages] * 4)]
    try:
        chat("gpt-y").invoke(messages)
    except NotFoundError as error:
        seen["unknown"] = error.code
    try:
        list(chat("broken").stream(messages))
    except APIError as error:
        seen["broken"] = error.message
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
