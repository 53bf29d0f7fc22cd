"""The records of `/v1/models`: models, aliases, selectors, peers' models and the active profile's pins (3.7)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from qmflask.config import ApiKey, Config, Model, Selector
from qmflask.config.resolved import Capabilities
from qmflask.configuration import Live
from qmflask.names import Names
from qmflask.states import DOWN, State
from qmflask.web import auth

#: Members of `metadata` that give way to what the capabilities say.
_SAID_BY_CAPABILITIES = frozenset({"architecture", "capabilities", "supported_parameters", "context_length"})

Record = dict[str, Any]
States = Mapping[str, State]


def records(live: Live, states: States, pins: Mapping[str, str] | None, key: ApiKey | None) -> list[Record]:
    """All records that this key may see, sorted by the bytes of their ids.

    `states` has the models that were ever started; `pins` are those of the active profile.
    """
    config, names = live.config, live.names
    found = [
        *_models(config, states, key),
        *_peers(config, key),
        *_selectors(config, names, states, key),
        *_pins(config, names, states, pins or {}, key),
    ]
    return sorted(found, key=lambda record: record["id"].encode("utf-8", "surrogatepass"))


def _record(name: str, meta: Record, *, loaded: bool, title: str = "", description: str = "", **more: Any) -> Record:
    """One record. `meta` is there twice, under the name that clients of llama-swap read and under our own."""
    record: Record = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "qmflask"}
    if title.strip():
        record["name"] = title.strip()
    if description.strip():
        record["description"] = description.strip()
    n_ctx = {"n_ctx": more["context_length"]} if "context_length" in more else {}
    record.update(more)
    record["meta"] = {"llamaswap": meta, "qmflask": meta, **n_ctx}
    record["status"] = {"value": "loaded" if loaded else "unloaded"}
    return record


def _models(config: Config, states: States, key: ApiKey | None) -> Iterator[Record]:
    for model in config.models.values():
        aliases = [alias for alias in model.aliases if alias.strip()]
        if model.unlisted or not auth.sees(key, (model.id, *aliases)):
            continue
        said = described(model.capabilities)
        meta = {name: value for name, value in model.metadata.items() if not said or name not in _SAID_BY_CAPABILITIES}
        loaded = states.get(model.id, State.STOPPED) not in DOWN
        more = {"loaded": loaded, "title": model.name, "description": model.description, **said}
        own: Record = {"type": "model", **({"aliases": aliases} if aliases else {})}
        yield _record(model.id, {**meta, **own}, **more)
        if config.include_aliases_in_list:
            for alias in aliases:
                yield _record(alias, {**meta, "type": "alias", "modelID": model.id}, **more)


def described(can: Capabilities) -> Record:
    """What a record says of capabilities; empty where none are configured."""
    said: Record = {}
    architecture: Record = {}
    if can.in_:
        architecture["input_modalities"] = list(can.in_)
    if can.out:
        architecture["output_modalities"] = list(can.out)
    if can.in_ and can.out:
        architecture["modality"] = f"{'+'.join(can.in_)}->{'+'.join(can.out)}"
    flags = {
        "vision": "image" in can.in_,
        "audio_transcriptions": "audio" in can.in_ and "text" in can.out,
        "audio_speech": "text" in can.in_ and "audio" in can.out,
        "image_generation": "text" in can.in_ and "image" in can.out,
        "image_to_image": "image" in can.in_ and "image" in can.out,
        "function_calling": can.tools,
        "reranker": can.reranker,
    }
    capabilities = {name: True for name, has in flags.items() if has}
    if architecture:
        said["architecture"] = architecture
    if capabilities:
        said["capabilities"] = capabilities
    if can.tools:
        said["supported_parameters"] = ["tools", "tool_choice"]
    if can.context > 0:
        said["context_length"] = can.context
    return said


def _peers(config: Config, key: ApiKey | None) -> Iterator[Record]:
    for peer in config.peers.values():
        for model in dict.fromkeys(peer.models):
            name = f"{peer.id}/{model}"
            if auth.sees(key, (name, model)):
                meta = {"type": "peer", "peerID": peer.id}
                yield _record(name, meta, loaded=False, title=f"{peer.id}: {model}")


def _selectors(config: Config, names: Names, states: States, key: ApiKey | None) -> Iterator[Record]:
    for selector in config.selectors.values():
        if selector.unlisted or not auth.sees(key, (selector.id,)):
            continue
        meta = {
            **selector.metadata,
            "type": "selector",
            "strategy": selector.strategy,
            "targets": list(selector.targets),
        }
        if selector.strategy == "spillover":
            meta["spillover"] = selector.spillover
        loaded = _serves_now(selector, names, states)
        yield _record(selector.id, meta, loaded=loaded, title=selector.name, description=selector.description)


def _serves_now(selector: Selector, names: Names, states: States) -> bool:
    considered = selector.targets[:1] if selector.strategy == "pin" else selector.targets
    for target in considered:
        meaning = names.resolve(target)
        if meaning is not None and states.get(meaning.id) in (State.READY, State.STARTING):
            return True
    return False


def _pins(
    config: Config, names: Names, states: States, pins: Mapping[str, str], key: ApiKey | None
) -> Iterator[Record]:
    for pin, target in pins.items():
        meaning = names.resolve(target) if target else None
        if meaning is None or names.resolve(pin) is not None or not auth.may_use(key, config, pin, meaning):
            continue
        loaded = meaning.kind == "model" and states.get(meaning.id, State.STOPPED) not in DOWN
        if meaning.kind == "selector":
            loaded = _serves_now(config.selectors[meaning.id], names, states)
        yield _record(pin, {"type": "profile", "target": target}, loaded=loaded)


def title_of(model: Model | None) -> tuple[str, str]:
    """Name and description as `/running` shows them."""
    return (model.name.strip(), model.description.strip()) if model is not None else ("", "")
