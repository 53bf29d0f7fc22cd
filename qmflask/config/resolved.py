"""The resolved configuration: every value after macros, inheritance and defaults; what the rest of qmflask reads.

Memory is in bytes, configured times in seconds, unless a name ends in `_ms`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from urllib.parse import urlsplit

from qmflask.config import plain
from qmflask.config.command import split_command
from qmflask.config.go_regex import compile_go
from qmflask.config.units import GIB

DEFAULT_GROUP = "(default)"
DEFAULT_IGNORE = r".*\.(js|json|css|png|gif|jpg|jpeg|ico|txt)$"

Hold = Literal["tools", "always", "never"]
LoadingState = bool | Literal["comments"]


class LaunchError(ValueError):
    """Raised when a model cannot be started as configured: empty command, or no address to reach it."""


@dataclass(frozen=True)
class Launch:
    """How to start and reach one model at one port.

    `env` holds only the model's own variables; the caller adds them to the inherited environment. `check_url` is None
    when `checkEndpoint` is `none`; `check_host` is the Host header to send with it, if not the address's own.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    proxy: str
    check_url: str | None
    port: int | None
    check_host: str | None = None


@dataclass(frozen=True)
class Filters:
    """How request bodies are edited: keys are paths, and are applied in this order (compatibility 1.5)."""

    strip_params: tuple[str, ...] = ()
    set_params: dict[str, Any] = field(default_factory=dict)
    set_params_by_id: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeouts:
    """Upstream timeouts in seconds; 0 = no limit."""

    connect: int = 30
    keepalive: int = 30
    response_header: int = 0
    tls_handshake: int = 10
    expect_continue: int = 1
    idle_conn: int = 90


@dataclass(frozen=True)
class Compat:
    """Exceptions for upstreams that need them."""

    ignore_websockets: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What a model takes and gives."""

    in_: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    tools: bool = False
    reranker: bool = False
    context: int = 0


@dataclass(frozen=True)
class Warmup:
    """A request that must succeed before the model counts as ready: POST with a body, GET without."""

    path: str
    body: Any = None


@dataclass(frozen=True)
class Model:
    """One model with effective values; `cmd`, `cmd_stop`, `proxy`, `check_endpoint` and `env` are at the nominal port.

    The `*_template` fields are the same before `${PORT}` is filled in (`cmd_stop` also keeps `${PID}`).
    """

    id: str
    cmd: str = ""
    cmd_stop: str = ""
    proxy: str = ""
    env: tuple[str, ...] = ()
    check_endpoint: str = "/health"
    cmd_template: str | None = None
    cmd_stop_template: str | None = None
    proxy_template: str | None = None
    env_template: tuple[str, ...] | None = None
    check_endpoint_template: str | None = None
    port: int | None = None
    launch_hash: str = ""
    aliases: tuple[str, ...] = ()
    ttl: int = 0
    unload_timeout: int = 10
    health_check_timeout: int = 120
    est_vram: int = 0
    est_ram: int = 0
    name: str = ""
    description: str = ""
    unlisted: bool = False
    use_model_name: str = ""
    concurrency_limit: int = 0
    filters: Filters = Filters()
    metadata: dict[str, Any] = field(default_factory=dict)
    capabilities: Capabilities = Capabilities()
    send_loading_state: LoadingState = False
    timeouts: Timeouts = Timeouts()
    compat: Compat = Compat()
    upstream_key: str = ""
    warmup: Warmup | None = None
    hold: Hold = "tools"
    hold_ms: int = 10_000
    patience_ms: int = 60_000
    idle_stream_timeout: float = 300
    displace: bool = True
    group: str = DEFAULT_GROUP
    pool: str = "vram"

    def __post_init__(self) -> None:
        """Fill in the templates and the hash of a model that was built by hand, as tests do."""
        for name in ("cmd", "cmd_stop", "proxy", "env", "check_endpoint"):
            if getattr(self, f"{name}_template") is None:
                object.__setattr__(self, f"{name}_template", getattr(self, name))
        if not self.launch_hash:
            object.__setattr__(self, "launch_hash", self._hash())

    def _hash(self) -> str:
        parts = [self.cmd_template, self.env_template, self.proxy_template, self.check_endpoint_template]
        return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()

    def launch(self, port: int | None = None) -> Launch:
        """How to start this model at `port` (its nominal port when None).

        Raises LaunchError("empty command") and LaunchError("upstream proxy missing").
        """
        port = self.port if port is None or self.port is None else port
        command = self._fill(self.cmd_template or "", port)
        try:
            argv = tuple(split_command(command))
        except ValueError as error:
            missing = "" if self.proxy_template else "; upstream proxy missing too"
            raise LaunchError(f"model {self.id}: {error}{missing}") from None
        proxy = self._fill(self.proxy_template or "", port).strip()
        if not proxy:
            raise LaunchError(
                f"model {self.id}: upstream proxy missing: set proxy to the address its server listens on"
            )
        proxy = proxy if "://" in proxy else f"http://{proxy.removeprefix('//')}"
        endpoint = self._fill(self.check_endpoint_template or "", port)
        url, host = check_address(proxy, endpoint)
        env = dict(self._fill(pair, port).split("=", 1) for pair in self.env_template or () if "=" in pair)
        return Launch(argv=argv, env=env, proxy=proxy, check_url=url, port=port, check_host=host)

    def stop_argv(self, pid: int, port: int | None = None) -> tuple[str, ...] | None:
        """The arguments of `cmdStop` for the process `pid`; None when there is none (or nothing but comments)."""
        text = (self.cmd_stop_template or "").replace("${PID}", str(pid))
        port = self.port if port is None or self.port is None else port
        try:
            return tuple(split_command(self._fill(text, port)))
        except ValueError:
            return None

    @staticmethod
    def _fill(template: str, port: int | None) -> str:
        return template if port is None else template.replace("${PORT}", str(port))


def check_address(proxy: str, endpoint: str) -> tuple[str | None, str | None]:
    """The health check's URL and Host header: host and port are always the proxy's, path and query the endpoint's."""
    endpoint = endpoint.strip()
    if endpoint == "none":
        return None, None
    host = None
    if "://" in endpoint.split("?")[0]:
        parts = urlsplit(endpoint)
        host = parts.netloc or None
        endpoint = parts.path + (f"?{parts.query}" if parts.query else "")
    if not endpoint.startswith("/"):
        endpoint = "/" + endpoint
    base = urlsplit(proxy)
    return f"{base.scheme}://{base.netloc}{endpoint}", host


@dataclass(frozen=True)
class Group:
    """One group; `members` are model ids in file order."""

    swap: bool = True
    exclusive: bool = True
    persistent: bool = False
    pool: str = "vram"
    displace: bool = True
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """The matrix router's settings: sets in definition order, costs by model id."""

    sets: tuple[tuple[str, str], ...] = ()
    vars: dict[str, str] = field(default_factory=dict)
    evict_costs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ApiKey:
    """One accepted key: `models` are globs over names; a key without restrictions is an admin's."""

    key: str
    name: str = ""
    models: tuple[str, ...] = ("*",)
    admin: bool = True


@dataclass(frozen=True)
class Peer:
    """Another host whose models are offered here as `peer/model`."""

    id: str
    proxy: str = ""
    models: tuple[str, ...] = ()
    api_key: str = ""
    filters: Filters = Filters()
    timeouts: Timeouts = Timeouts(response_header=60)


@dataclass(frozen=True)
class Selector:
    """A name that chooses among targets per request; targets stay as written."""

    id: str
    strategy: Literal["warm", "pin", "spillover"]
    targets: tuple[str, ...]
    spillover: int = 1
    name: str = ""
    description: str = ""
    unlisted: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """Pins names to targets while it is active; an empty target disables the name."""

    description: str = ""
    pins: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    default_model: str = ""


@dataclass(frozen=True)
class Store:
    """Where activity is kept: in memory without a path."""

    path: str | None = None
    keep_days: float = 0
    max_mb: int = 0


@dataclass(frozen=True)
class Performance:
    """Sampling of host and GPU figures; `every` is in seconds."""

    disabled: bool = False
    every: float = 5


@dataclass(frozen=True)
class UiActivity:
    """Which request headers the page shows as session ids."""

    session_id: tuple[str, ...] = ("X-Session-ID", "X-Litellm-Session-Id")


@dataclass(frozen=True)
class Ui:
    """Settings of the web page."""

    activity: UiActivity = UiActivity()


@dataclass(frozen=True)
class Config:
    """The whole configuration. Equal files give equal objects; `to_json` and `from_json` round-trip exactly."""

    models: dict[str, Model] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=lambda: {DEFAULT_GROUP: Group()})
    router: Literal["group", "matrix"] = "group"
    matrix: Matrix | None = None
    priority: dict[str, int] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    api_keys: tuple[ApiKey, ...] = ()
    peers: dict[str, Peer] = field(default_factory=dict)
    selectors: dict[str, Selector] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    default_model: str = ""
    return_after: float = 300

    vram_budget: int = 0
    ram_budget: int = 0
    vram_reserve: int = GIB
    oversize: Literal["refuse", "evict"] = "refuse"
    learn_sizes: bool = True
    reclaim_timeout: float = 30
    pressure_evict: bool = True
    pressure_grace: float = 30

    patience_ms: int = 60_000
    hold: Hold = "tools"
    hold_ms: int = 10_000
    on_shutdown: Literal["stop", "keep"] = "stop"
    max_body: int = 1024**3
    strict: bool = False
    idle_stream_timeout: float = 300

    health_check_timeout: int = 120
    unload_timeout: int = 10
    global_ttl: int = 0
    start_port: int = 5800
    send_loading_state: LoadingState = False
    include_aliases_in_list: bool = False
    log_level: str = "info"
    log_time_format: str = ""
    log_to_stdout: Literal["proxy", "upstream", "both", "none"] = "proxy"
    log_requests: bool = False
    metrics_max_in_memory: int = 1000
    capture_buffer: int = 5
    store: Store = Store()
    performance: Performance = Performance()
    ui: Ui = Ui()
    upstream_ignore_paths: tuple[str, ...] = (DEFAULT_IGNORE,)

    def to_json(self) -> bytes:
        """The resolved configuration as JSON; holds keys and environment values, so the file must be private."""
        return plain.dump(self)

    @classmethod
    def from_json(cls, data: bytes) -> Config:
        """What `to_json` made. Raises ValueError on anything else."""
        return plain.load(cls, data)

    @cached_property
    def _ignored(self) -> tuple[Any, ...]:
        return tuple(compile_go(pattern) for pattern in self.upstream_ignore_paths)

    def ignores_path(self, path: str) -> bool:
        """Whether a decoded path under `/upstream/M` must never load the model (`upstream.ignorePaths`)."""
        return any(pattern.search(path) for pattern in self._ignored)
