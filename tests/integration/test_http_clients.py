"""Real clients and real llama-servers, direct and through nginx."""

from __future__ import annotations

import json
import shutil
import subprocess
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.integration.echoing import echo_model, shared
from tests.integration.fronting import nginx
from tests.service import REPO, Service, llama

SAYS = "I am alpha and I am ready."
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, llama_server: Path, tiny_gguf: Callable[..., Path]
) -> Iterator[tuple[Service, dict[str, str]]]:
    """Real llama-servers side by side, with the addresses that lead to them."""
    folder = tmp_path_factory.mktemp("clients")
    socket_path = folder / "http.sock"
    rerank = tiny_gguf("rerank", "", "--arch", "qwen3", "--rerank")
    models = {
        "org/alpha:7b": {
            "cmd": llama(llama_server, tiny_gguf("alpha", SAYS)),
            "aliases": ["gpt-x"],
            "sendLoadingState": True,
        },
        "caller": {
            "cmd": llama(llama_server, tiny_gguf("caller", CALL, "--tools"), context=2048, extra="--jinja"),
            "sendLoadingState": "comments",
        },
        "embedder": {"cmd": llama(llama_server, tiny_gguf("alpha", SAYS), extra="--embeddings --pooling mean")},
        "ranker": {"cmd": llama(llama_server, rerank, extra="--rerank")},
        "broken": {"cmd": "false", "proxy": "http://127.0.0.1:1", "sendLoadingState": "comments"},
        "ears": echo_model(useModelName="whisper-1"),
    }
    config = {
        "apiKeys": ["sk-test"],
        "models": models,
        "groups": {"all": {"swap": False, "members": list(models)}},
    }
    with (
        shared(folder / "service", config, args=("--bind", f"unix:{socket_path}")) as service,
        nginx(folder / "nginx", socket_path) as port,
    ):
        yield service, {"direct": service.url, "nginx": f"http://127.0.0.1:{port}"}


@pytest.fixture(params=["direct", "nginx"])
def url(service: tuple[Service, dict[str, str]], request: pytest.FixtureRequest) -> str:
    """Where a client is pointed at."""
    return service[1][request.param]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0) as client:
        yield client


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt-x", messages=HI, max_tokens=16)
    assert answer.choices[0].message.content == SAYS
    assert answer.usage and answer.usage.completion_tokens > 0


def test_openai_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="org/alpha:7b", messages=HI, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == SAYS and len(chunks) > 4
    assert chunks[-1].usage is not None


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools(client: openai.OpenAI, stream: bool) -> None:
    if not stream:
        answer = client.chat.completions.create(model="caller", messages=HI, tools=[TOOL], max_tokens=99)
        assert answer.choices[0].finish_reason == "tool_calls"
        call: Any = (answer.choices[0].message.tool_calls or [])[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        return
    arguments, reason = "", None
    for chunk in client.chat.completions.create(model="caller", messages=HI, tools=[TOOL], max_tokens=99, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            arguments += (piece.function and piece.function.arguments) or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (json.loads(arguments), reason) == ({"city": "Paris"}, "tool_calls")


def test_openai_responses(client: openai.OpenAI) -> None:
    assert client.responses.create(model="gpt-x", input="hi", max_output_tokens=16).output_text == SAYS
    events = list(client.responses.create(model="gpt-x", input="hi", max_output_tokens=16, stream=True))
    assert events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == SAYS


def test_openai_completions_embeddings_models(client: openai.OpenAI) -> None:
    assert SAYS in client.completions.create(model="gpt-x", prompt="x", max_tokens=16).choices[0].text
    vectors = client.embeddings.create(model="embedder", input=["one", "two"]).data
    assert len(vectors) == 2 and vectors[0].embedding != vectors[1].embedding
    assert "org/alpha:7b" in [model.id for model in client.models.list()]
    assert client.models.retrieve("org/alpha:7b").id == "org/alpha:7b"
    assert client.models.retrieve("gpt-x").id == "org/alpha:7b"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_openai_upload(client: openai.OpenAI) -> None:
    wav = b"RIFF" + bytes(range(256)) * 800
    raw = client.audio.transcriptions.with_raw_response.create(model="ears", file=("a.wav", wav), language="en")
    seen = json.loads(raw.text if isinstance(raw.text, str) else raw.text())
    assert seen["path"] == "/v1/audio/transcriptions" and seen["length"] > len(wav)
    assert "whisper-1" in seen["body"] and "RIFF" in seen["body"]


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-y", messages=HI)
    assert caught.value.code == "model_not_found" and "gpt-x" in caught.value.message
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_clients_bear_the_loading_frames(client: openai.OpenAI, url: str) -> None:
    for model in ("org/alpha:7b", "caller"):
        client.post(f"{url}/api/models/unload/{model}", cast_to=object)
    chunks = list(client.chat.completions.create(model="gpt-x", messages=HI, max_tokens=16, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == SAYS
    thoughts = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    assert "org/alpha:7b" in thoughts and "Ready after" in thoughts
    with (
        anthropic.Anthropic(base_url=url, api_key="sk-test", max_retries=0) as other,
        other.messages.stream(model="caller", max_tokens=99, messages=HI) as stream,
    ):
        assert CALL in "".join(stream.text_stream)
    with pytest.raises(openai.APIError) as caught:
        list(client.chat.completions.create(model="broken", messages=HI, stream=True))
    assert "exit" in caught.value.message


def test_anthropic(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="sk-test", max_retries=0) as client:
        message = client.messages.create(model="gpt-x", max_tokens=16, messages=HI)
        assert message.content[0].type == "text" and message.content[0].text == SAYS
        with client.messages.stream(model="gpt-x", max_tokens=16, messages=HI) as stream:
            assert "".join(stream.text_stream) == SAYS
        assert client.messages.count_tokens(model="gpt-x", messages=HI).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", max_tokens=16, messages=HI)


def test_curl(url: str, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")

    def run(*arguments: str) -> str:
        command = [curl, "-sS", "--fail-with-body", "-H", "Authorization: Bearer sk-test", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    asked = '{"model": "gpt-x", "max_tokens": 16, "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
    stream = run("-N", f"{url}/v1/chat/completions", "-d", asked)
    assert stream.rstrip().endswith("data: [DONE]")
    ranked = json.loads(run(f"{url}/v1/rerank", "-d", '{"model": "ranker", "query": "a", "documents": ["a", "b"]}'))
    assert len(ranked["results"]) == 2
    (tmp_path / "a.wav").write_bytes(b"RIFF" * 1000)
    seen = json.loads(run(f"{url}/v1/audio/transcriptions", "-F", f"file=@{tmp_path}/a.wav", "-F", "model=ears"))
    assert "whisper-1" in seen["body"]
    props = json.loads(run(f"{url}/upstream/org%2Falpha%3A7b/props"))
    assert props["total_slots"] == 1
    seen = json.loads(run("--path-as-is", f"{url}/upstream/ears/a%2Fb%20c/%7e?x=%2f"))
    assert seen["path"] == "/a%2Fb%20c/%7e?x=%2f"


# --- clients that are installed for the occasion -----------------------------------------------------------

#: What `-m heavy` installs, in folders of its own; a few ten megabytes.
LANGCHAIN, NPM_OPENAI = "langchain-openai==1.7.4", "openai@7.55.0"


def told(*command: str) -> dict[str, Any]:
    """What such a client prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    print(json.dumps(found, indent=1))
    return found


@pytest.fixture(scope="module")
def langchain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with LangChain."""
    folder = tmp_path_factory.mktemp("langchain")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", LANGCHAIN], check=True, timeout=600)
    return python


@pytest.fixture(scope="module")
def npm_openai(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for node, beside the package that it needs."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), NPM_OPENAI]
    subprocess.run(install, check=True, timeout=600)
    return Path(shutil.copy(REPO / "tests" / "parts" / "openai_client.mjs", folder))


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_langchain(url: str, langchain: Path) -> None:
    seen = told(str(langchain), str(REPO / "tests" / "parts" / "langchain_client.py"), url, "sk-test")
    assert seen["chat"] == seen["responses"] == seen["stream"] == SAYS
    assert seen["batch"] == [SAYS] * 4 and seen["tokens"] > 0 and seen["vectors"] == 2
    assert [(call["name"], call["args"]) for call in seen["calls"]] == [("get_weather", {"city": "Paris"})]
    assert seen["unknown"] == "model_not_found" and "exit" in seen["broken"]


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_openai_for_javascript(url: str, npm_openai: Path) -> None:
    seen = told("node", str(npm_openai), url, "sk-test")
    assert "org/alpha:7b" in seen["models"] and seen["chat"] == seen["stream"] == seen["response"] == SAYS
    assert (seen["tool"]["name"], json.loads(seen["tool"]["arguments"])) == ("get_weather", {"city": "Paris"})
    assert seen["vectors"] == 2 and seen["upload"] > 300_000
    assert seen["unknown"] == {"kind": "NotFoundError", "status": 404, "code": "model_not_found"}
    assert "exit" in seen["broken"]
