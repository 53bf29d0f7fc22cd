"""What a demonstration model says: pure functions from a request to words and numbers."""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Length of an embedding; small, since nothing is learned from it.
DIMENSIONS = 32


@dataclass(frozen=True)
class Voice:
    """A demonstration model's name and pretended size, which its answers repeat."""

    name: str
    memory_gb: float = 0

    def reply(self, prompt: str, answers: int) -> str:
        """The answer to `prompt` by a model that has given `answers` answers since it was loaded."""
        size = f" that pretends to need {self.memory_gb:g} GB" if self.memory_gb else ""
        count = "my first answer" if answers == 0 else f"answer number {answers + 1}"
        heard = f' You said: "{_shorten(prompt)}".' if prompt else ""
        return f"I am {self.name}, a demo model{size}. This is {count} since I was loaded.{heard}"


def _shorten(text: str, limit: int = 120) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit].rstrip() + " ..."


def tokens(text: str) -> list[str]:
    """The words of `text`, each with the space before it, so that joining them gives the text again."""
    words = text.split(" ")
    return [word if i == 0 else " " + word for i, word in enumerate(words)]


def cut(text: str, limit: object) -> tuple[list[str], str]:
    """The tokens to send and the finish reason: `length` if `limit` (max_tokens) ends them early, else `stop`."""
    words = tokens(text)
    if isinstance(limit, int) and 0 <= limit < len(words):
        return words[:limit], "length"
    return words, "stop"


def last_prompt(body: Mapping[str, Any]) -> str:
    """The text of the last user message, or the `prompt` of a completion; empty if there is none."""
    messages = body.get("messages")
    if isinstance(messages, list):
        said = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
        return _content_text(said[-1]) if said else ""
    prompt = body.get("prompt", "")
    return _content_text(prompt)


def _content_text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [p if isinstance(p, str) else p.get("text", "") for p in content if isinstance(p, (str, dict))]
        return " ".join(p for p in parts if isinstance(p, str) and p)
    return ""


def usage(prompt: str, completion: int) -> dict[str, int]:
    """OpenAI's usage object; a token is a word."""
    before = len(prompt.split())
    return {"prompt_tokens": before, "completion_tokens": completion, "total_tokens": before + completion}


def embedding(name: str, text: str) -> list[float]:
    """A vector of length 1 that depends on the model and the text, and means nothing."""
    digest = hashlib.shake_128(f"{name}\0{text}".encode()).digest(DIMENSIONS)
    values = [byte / 127.5 - 1 for byte in digest]
    length = math.sqrt(sum(v * v for v in values)) or 1.0
    return [v / length for v in values]


def encode_vector(values: Sequence[float], encoding: object) -> list[float] | str:
    """As JSON numbers, or as base64 of little-endian 32-bit floats if the client asked for that."""
    if encoding == "base64":
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")
    return list(values)
