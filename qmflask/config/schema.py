"""The configuration file's format: every key with its type, default, meaning and example.

One source for validation, for unknown-key hints, for `qmflask schema` and for the table in docs/configuration.md.
Fields hold what the file says; what they mean together is worked out in `load` and kept in `resolved`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema

from qmflask.config.macros import text_of
from qmflask.config.scalars import (
    Bool,
    Budget,
    Charge,
    Duration,
    Free,
    Int,
    ItemText,
    Loading,
    Millis,
    Number,
    Seconds,
    Text,
    kind_of,
    wrong,
)


def option(default: Any, meaning: str, example: Any = None, *, alias: str | None = None, ours: bool = False) -> Any:
    """One key: its default, what it means in a sentence, an example, and whether llama-swap does not know it."""
    extra: dict[str, Any] = {"x-ours": True} if ours else {}
    if callable(default):
        return Field(
            default_factory=default, description=meaning, examples=[example], json_schema_extra=extra, alias=alias
        )
    return Field(default, description=meaning, examples=[example], json_schema_extra=extra, alias=alias)


class Section(BaseModel):
    """A mapping of the file. A null value behaves as if its key were absent."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, extra="ignore")

    #: Keys that are known and do nothing, with the reason.
    legacy: ClassVar[dict[str, str]] = {}
    #: Keys whose null means something.
    keeps_null: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name in cls.keeps_null}


class FiltersSection(Section):
    """Edits of JSON request bodies; keys are paths such as `a.b` or `list.-1`."""

    strip_params: Text = option(
        "", "Body keys to remove, separated by commas; `model` is never removed.", "temperature, top_k"
    )
    set_params: dict[str, Free] = option(dict, "Body keys to set, after stripping.", {"temperature": 0.7})
    set_params_by_id: dict[str, dict[str, Free] | None] = option(
        dict,
        "More keys to set when the request names this id; each id becomes an alias of the model.",
        {"qwen:high": {"reasoning_effort": "high"}},
        alias="setParamsByID",
    )


class ModelFiltersSection(FiltersSection):
    """Filters of a model, with the old spelling of `stripParams`."""

    old_strip_params: Text = option(
        "", "Old spelling of `stripParams`; used only when that is empty.", "top_k", alias="strip_params"
    )


class TimeoutsSection(Section):
    """Timeouts towards the model server in seconds; 0 = no limit."""

    connect: Int = option(30, "Seconds to connect.", 5)
    keepalive: Int = option(30, "Seconds between TCP keep-alive probes.", 30)
    response_header: Int = option(0, "Seconds until the response headers must have come; 0 = no limit.", 600)
    tls_handshake: Int = option(10, "Seconds for the TLS handshake.", 10)
    expect_continue: Int = option(1, "Seconds to wait for `100 Continue`.", 1)
    idle_conn: Int = option(90, "Seconds an idle connection is kept.", 90)


class PeerTimeoutsSection(TimeoutsSection):
    """Timeouts towards a peer."""

    response_header: Int = option(60, "Seconds until the response headers must have come; 0 = no limit.", 600)


class CompatSection(Section):
    """Exceptions for servers that need them."""

    ignore_websockets: Bool = option(False, "Websockets neither load the model nor count as requests.", True)


class CapabilitiesSection(Section):
    """What the model takes and gives; shown in `/v1/models`."""

    in_: list[ItemText] = option(list, "What it takes: text, audio, image.", ["text", "image"], alias="in")
    out: list[ItemText] = option(
        list,
        "What it gives: text, audio, image, video. While an image or video is rendered, no other model starts.",
        ["text"],
    )
    tools: Bool = option(False, "It can call tools.", True)
    reranker: Bool = option(False, "It is a reranker.", True)
    context: Int = option(0, "Context length in tokens; 0 = not said.", 32768)


class WarmupSection(Section):
    """A request that must succeed before the model counts as ready."""

    path: Text = option("", "Path on the model's server.", "/v1/chat/completions")
    body: Free = option(None, "Body sent as JSON with POST; without a body the request is a GET.", {"max_tokens": 1})


HoldWord = Literal["tools", "always", "never"]
_HOLD = (
    "When a model is kept for the next round: after an answer that ended in a tool call, after every answer, or never."
)
_HOLD_MS = "How long (in ms) a model is kept for the next round of an agent."
_PATIENCE = "How long (in ms) a queued request lets others pass before what blocks it must drain."
_IDLE_STREAM = (
    "Seconds after which a GET stream under `/upstream` that moves no byte no longer keeps a draining model; 0 = never."
)


class ModelSection(Section):
    """One model: how to start it, how to reach it, what it needs."""

    cmd: Text = option(
        "",
        "The command that starts the server; no shell. `${PORT}` gets a free port.",
        "llama-server --port ${PORT} -m q.gguf",
    )
    cmd_stop: Text = option(
        "",
        "The command that stops it; `${PID}` is the process. Without it: TERM, then KILL.",
        "docker stop ${MODEL_ID}",
    )
    proxy: Text = option(
        "http://localhost:${PORT}",
        "The server's URL; its path is put before every request's.",
        "http://127.0.0.1:${PORT}",
    )
    aliases: list[ItemText] = option(list, "Other names for the model.", ["gpt-4o-mini"])
    env: list[ItemText] = option(
        list, "Environment variables, each `NAME=value`, added to qmflask's own.", ["CUDA_VISIBLE_DEVICES=0"]
    )
    check_endpoint: Text = option(
        "/health", "The path that answers 200 when the model is ready; `none` = do not check.", "/v1/models"
    )
    health_check_timeout: Int | None = option(
        None, "Seconds the model may take to become healthy (at least 15). Default: the global value.", 300
    )
    ttl: Int = option(-1, "Seconds of idleness after which the model is unloaded; 0 = never, -1 = `globalTTL`.", 600)
    unload_timeout: Int = option(0, "Seconds to stop before it is killed; 0 = the global value.", 30)
    unlisted: Bool = option(False, "Leave it out of `/v1/models`; it still works.", True)
    use_model_name: Text = option(
        "", "The model name the server expects; rewritten in JSON and multipart bodies.", "Qwen/Qwen3-8B"
    )
    name: Text = option("", "Name shown to people.", "Qwen3 8B")
    description: Text = option("", "Description shown to people.", "Quick answers")
    concurrency_limit: Int = option(0, "Most requests at a time, waiting ones included; more get 429. 0 = no limit.", 4)
    filters: ModelFiltersSection = option(
        ModelFiltersSection, "Edits of JSON request bodies.", {"stripParams": "top_k"}
    )
    macros: dict[str, Free] = option(
        dict, "Macros of this model; they replace global ones of the same name.", {"ctx": 8192}
    )
    metadata: dict[str, Free] = option(dict, "Shown in `/v1/models` under `meta`.", {"family": "qwen"})
    capabilities: CapabilitiesSection = option(CapabilitiesSection, "What the model takes and gives.", {"in": ["text"]})
    send_loading_state: Loading | None = option(
        None,
        "While it loads, streaming chats get reasoning text (true) or SSE comments (`comments`). Default: global.",
        True,
    )
    timeouts: TimeoutsSection = option(TimeoutsSection, "Timeouts towards the server.", {"connect": 5})
    compat: CompatSection = option(CompatSection, "Exceptions for servers that need them.", {"ignoreWebsockets": True})
    est_vram: Charge = option(
        0, "VRAM it takes once loaded; 0 = unknown, measured at first use.", 7.5, alias="estVramGB", ours=True
    )
    est_ram: Charge = option(
        0, "System memory it takes once loaded; 0 = unknown.", "500MiB", alias="estRamGB", ours=True
    )
    upstream_key: Text = option("", "API key sent to the model's server.", "${env.VLLM_KEY}", ours=True)
    warmup: WarmupSection | None = option(
        None, "A request that must succeed before the model counts as ready.", {"path": "/props"}, ours=True
    )
    hold: HoldWord | None = option(None, _HOLD + " Default: global.", "always", ours=True)
    hold_ms: Millis | None = option(None, _HOLD_MS + " Default: global.", 20000, ours=True)
    patience_ms: Millis | None = option(None, _PATIENCE + " Default: global.", 30000, ours=True)
    idle_stream_timeout: Seconds | None = option(None, _IDLE_STREAM + " Default: global.", 600, ours=True)
    displace: Bool = option(
        True, "false: while loaded it is never stopped for another model (that request gets 409).", False, ours=True
    )


class GroupSection(Section):
    """Models that share a rule for what may run together."""

    swap: Bool = option(True, "Only one member is loaded at a time.", False)
    exclusive: Bool = option(True, "Loading a member stops the members of other groups.", False)
    persistent: Bool = option(False, "Other groups never stop its members.", True)
    members: list[ItemText] = option(list, "Model ids; a model is in at most one group.", ["embed", "rerank"])
    pool: Literal["vram", "ram"] = option(
        "vram", "The memory its members are admitted against; `ram` = CPU-only models.", "ram", ours=True
    )
    displace: Bool = option(True, "false: its loaded members are never stopped for another model.", False, ours=True)


class MatrixSection(Section):
    """Which models may run together, as expressions; instead of groups."""

    legacy: ClassVar[dict[str, str]] = {"var": "only `vars` works"}

    sets: dict[str, Text | None] = option(
        dict, "Named sets in order of preference: `a & (b | c)`; `+other` is another set.", {"work": "coder & embed"}
    )
    vars: dict[str, Text | None] = option(dict, "Short names for model ids inside expressions.", {"q": "org/qwen"})
    evict_costs: dict[str, Int | None] = option(
        dict, "Cost of stopping a model, by id or var; the cheapest set wins.", {"coder": 10}, alias="evict_costs"
    )


class RouterSettingsSection(Section):
    """Settings of the routers."""

    groups: dict[str, GroupSection | None] = option(dict, "The groups.", {"small": {"members": ["embed"]}})
    matrix: MatrixSection | None = option(None, "The matrix.", {"sets": {"work": "coder & embed"}})


class RouterSection(Section):
    """What decides which models may run together."""

    use: Text = option("", "`group` (default) or `matrix`.", "matrix")
    settings: RouterSettingsSection = option(RouterSettingsSection, "Settings of the routers.", {"groups": {}})


class FifoSection(Section):
    """Settings of the queue."""

    priority: dict[str, Int] = option(dict, "Priority by model or alias; higher goes first, default 0.", {"chat": 10})
    patience_ms: Millis | None = option(None, _PATIENCE + " Same as the global key.", 30000, ours=True)


class SchedulerSettingsSection(Section):
    """Settings of the schedulers."""

    fifo: FifoSection = option(FifoSection, "Settings of the queue.", {"priority": {"chat": 10}})


class SchedulerSection(Section):
    """In which order waiting requests are served."""

    use: Text = option("", "`fifo` (the only one).", "fifo")
    settings: SchedulerSettingsSection = option(SchedulerSettingsSection, "Settings of the schedulers.", {"fifo": {}})


class RoutingSection(Section):
    """Router and scheduler."""

    router: RouterSection = option(RouterSection, "What decides which models may run together.", {"use": "group"})
    scheduler: SchedulerSection = option(
        SchedulerSection, "In which order waiting requests are served.", {"use": "fifo"}
    )


class PeerSection(Section):
    """Another host whose models are offered here as `peer/model`."""

    proxy: Text = option("", "The peer's URL.", "http://192.168.1.7:8080")
    models: list[ItemText] = option(list, "The peer's models.", ["llama-70b"])
    api_key: Text = option("", "Key sent to the peer.", "${env.PEER_KEY}")
    filters: FiltersSection = option(FiltersSection, "Edits of JSON request bodies.", {"setParams": {"user": "box"}})
    timeouts: PeerTimeoutsSection = option(PeerTimeoutsSection, "Timeouts towards the peer.", {"responseHeader": 300})


class ProfileSection(Section):
    """A set of pins that can be made active at run time."""

    description: Text = option("", "Shown to people.", "Long context")
    pins: dict[str, ItemText | None] = option(
        dict, "Name to target; an empty target disables the name.", {"chat": "qwen-long"}
    )
    preload: list[ItemText] = option(
        list,
        "Models, aliases or groups to load when the profile becomes active, and at a start with it.",
        ["qwen-long"],
        ours=True,
    )
    default_model: Text = option("", "Overrides the global `defaultModel` while active.", "qwen-long", ours=True)


class SelectorSettingsSection(Section):
    """Settings of a selector."""

    spillover: Int = option(1, "Requests per target before the next target is used.", 2)


class SelectorSection(Section):
    """A name that chooses among targets for each request."""

    strategy: Text = option(
        "", "`pin` (first target), `warm` (a loaded one first) or `spillover` (spread by load).", "warm"
    )
    targets: list[ItemText] = option(list, "Models, aliases or peer models.", ["qwen", "llama"])
    settings: SelectorSettingsSection = option(SelectorSettingsSection, "Settings.", {"spillover": 2})
    name: Text = option("", "Name shown to people.", "Any coder")
    description: Text = option("", "Description shown to people.", "Whichever coder is loaded")
    unlisted: Bool = option(False, "Leave it out of `/v1/models`.", True)
    metadata: dict[str, Free] = option(dict, "Shown in `/v1/models` under `meta`.", {"kind": "coder"})


class StoreSection(Section):
    """Where activity is kept; without it, in memory."""

    path: Text | None = option(None, "SQLite file for the activity records.", "/var/lib/qmflask/activity.db")
    keep_days: Number = option(0, "Days that records are kept; 0 = for ever.", 30, ours=True)
    max_mb: Int = option(
        0, "Largest size of the file in MiB; the oldest records go first. 0 = no limit.", 500, alias="maxMB", ours=True
    )


class PerformanceSection(Section):
    """Sampling of host and GPU figures."""

    legacy: ClassVar[dict[str, str]] = {"enable": "sampling is on unless `disabled: true`"}

    disabled: Bool = option(False, "Switch the history off.", True)
    every: Duration = option(5.0, "Time between samples, at least 5s; 0s means 5s.", "15s")


class UiActivitySection(Section):
    """The activity page."""

    session_id: list[ItemText] = option(
        lambda: ["X-Session-ID", "X-Litellm-Session-Id"],
        "Request headers shown as session id.",
        ["X-Session-ID"],
        alias="session_id",
    )


class UiSection(Section):
    """The web page."""

    activity: UiActivitySection = option(UiActivitySection, "The activity page.", {"session_id": ["X-Session-ID"]})


class StartupSection(Section):
    """What happens when the service starts."""

    preload: list[ItemText] = option(
        list, "Models, aliases or groups to load at start, in this order.", ["embed", "chat"]
    )


class HooksSection(Section):
    """Hooks."""

    on_startup: StartupSection = option(
        StartupSection, "What happens when the service starts.", {"preload": ["chat"]}, alias="on_startup"
    )


class UpstreamSection(Section):
    """Direct access to model servers under `/upstream/MODEL`."""

    ignore_paths: list[ItemText] = option(
        list,
        "Regular expressions (RE2) of paths that never load a model; empty = common static files.",
        [r"\.(css|js|png)$"],
    )


class ApiKeySection(Section):
    """A key: as plain text it may do everything; as a mapping it is restricted."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        if isinstance(data, str | int | float):
            return {"key": text_of(data), "admin": True}
        if not isinstance(data, dict):
            raise wrong(f"expected a key, not {kind_of(data)}", "text, or a mapping {key, name, models, admin}")
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": ["string", "number"]}, handler(core)]}

    key: Text = option("", "The key itself.", "${env.TEAM_KEY}", ours=True)
    name: Text = option("", "Name shown in logs and metrics instead of the key.", "team", ours=True)
    models: list[ItemText] = option(lambda: ["*"], "Globs of the names this key may use.", ["small-*"], ours=True)
    admin: Bool = option(False, "It may load, unload, reload, cancel and read logs.", True, ours=True)


class RootSection(Section):
    """The whole file."""

    models: dict[str, ModelSection | None] = option(
        dict, "The models, by id.", {"qwen": {"cmd": "llama-server --port ${PORT}"}}
    )
    groups: dict[str, GroupSection | None] = option(
        dict, "The groups (also under `routing.router.settings`).", {"small": {"members": ["embed"]}}
    )
    matrix: MatrixSection | None = option(
        None, "The matrix (also under `routing.router.settings`).", {"sets": {"s": "a & b"}}
    )
    routing: RoutingSection = option(RoutingSection, "Router and scheduler.", {"router": {"use": "group"}})
    macros: dict[str, Free] = option(
        dict,
        "Names for repeated values; `${name}` uses one. Later ones may use earlier ones.",
        {"bin": "/opt/llama-server"},
    )
    vram_budget: Budget = option(
        0, "VRAM that all loaded models together may take; 0 = no budget.", 24, alias="vramBudgetGB", ours=True
    )
    ram_budget: Budget = option(
        0, "System memory that all loaded models together may take; 0 = no budget.", 64, alias="ramBudgetGB", ours=True
    )
    vram_reserve: Budget = option(
        1024**3, "VRAM kept free once other programs use the card.", "500MiB", alias="vramReserveGB", ours=True
    )
    oversize: Literal["refuse", "evict"] = option(
        "refuse", "A model that cannot fit: refuse it, or stop all it may and try.", "evict", ours=True
    )
    learn_sizes: Bool = option(
        True, "Charge the measured size of a model when it is larger than its estimate.", False, ours=True
    )
    reclaim_timeout: Seconds = option(
        30, "How long stopped models may take to give memory back before the load fails.", 60, ours=True
    )
    pressure_evict: Bool = option(True, "Unload idle models when other programs need the memory.", False, ours=True)
    pressure_grace: Seconds = option(30, "How long such pressure must last.", "1m", ours=True)
    patience_ms: Millis | None = option(None, _PATIENCE + " Default: 60000.", 30000, ours=True)
    hold: HoldWord = option("tools", _HOLD, "always", ours=True)
    hold_ms: Millis = option(10_000, _HOLD_MS, 20000, ours=True)
    on_shutdown: Literal["stop", "keep"] = option(
        "stop", "Stop the models with the service, or keep them for the next start.", "keep", ours=True
    )
    max_body_mb: Int = option(1024, "Largest request body in MiB; 0 = no limit.", 100, alias="maxBodyMB", ours=True)
    strict: Bool = option(False, "Unknown keys are errors.", True, ours=True)
    idle_stream_timeout: Seconds = option(300, _IDLE_STREAM, 600, ours=True)
    default_model: Text = option("", "Loaded again when the box has been idle and it fits.", "chat", ours=True)
    return_after: Seconds = option(300, "Seconds of idleness before `defaultModel` is loaded again.", 600, ours=True)
    start_port: Int = option(5800, "First port for `${PORT}`.", 9000)
    health_check_timeout: Int = option(120, "Seconds a model may take to become healthy; at least 15.", 300)
    unload_timeout: Int = option(10, "Seconds a model gets to stop before it is killed.", 30)
    global_ttl: Int = option(0, "Default `ttl` of the models in seconds; 0 = never.", 600, alias="globalTTL")
    send_loading_state: Loading = option(False, "Default of the models' `sendLoadingState`.", True)
    include_aliases_in_list: Bool = option(False, "List aliases in `/v1/models` too.", True)
    api_keys: list[ApiKeySection] = option(list, "Keys that clients must send; none = open.", ["${env.API_KEY}"])
    peers: dict[str, PeerSection | None] = option(
        dict, "Other hosts whose models are offered here.", {"big": {"proxy": "http://big:8080"}}
    )
    selectors: dict[str, SelectorSection | None] = option(
        dict, "Names that choose among targets.", {"coder": {"strategy": "warm"}}
    )
    profiles: dict[str, ProfileSection | None] = option(
        dict, "Sets of pins, switched at run time.", {"night": {"pins": {"chat": "big"}}}
    )
    hooks: HooksSection = option(HooksSection, "Hooks.", {"on_startup": {"preload": ["chat"]}})
    upstream: UpstreamSection = option(UpstreamSection, "Direct access to model servers.", {"ignorePaths": []})
    log_level: Text = option("info", "debug, info, warn or error.", "debug")
    log_time_format: Text = option(
        "", "Time stamps of log lines: rfc3339, kitchen, stamp, ...; empty = none.", "rfc3339"
    )
    log_to_stdout: Text = option("proxy", "What goes to stdout: proxy, upstream, both, none.", "both")
    log_requests: Bool = option(False, "Does nothing; accepted for old files.", True)
    metrics_max_in_memory: Int = option(1000, "Activity records kept in memory without `store.path`.", 5000)
    capture_buffer: Int = option(5, "MiB of request captures kept in memory; 0 = none.", 20)
    store: StoreSection | None = option(None, "Where activity is kept.", {"path": "activity.db"})
    performance: PerformanceSection = option(PerformanceSection, "Sampling of host and GPU figures.", {"every": "10s"})
    ui: UiSection = option(UiSection, "The web page.", {"activity": {"session_id": []}})
