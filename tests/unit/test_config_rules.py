"""What keys mean together: inheritance, limits, routing, peers, selectors, profiles (compatibility 1.3-1.13)."""

from __future__ import annotations

import pytest

from qmflask.config import Config, ConfigError, LaunchError, Model, Source, load
from qmflask.config.go_regex import compile_go
from qmflask.config.resolved import check_address
from qmflask.config.units import GIB, parse_duration, parse_size, show_duration
from qmflask.config.urls import url_fault

TWO = "models: {a: {cmd: 'r ${PORT}', aliases: [al]}, b: {cmd: 'r ${PORT}'}}\n"


def config(text: str) -> Config:
    return load([Source("f.yaml", text)], {}).config


def errors(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([Source("f.yaml", text)], {})
    return str(caught.value)


def model(body: str, top: str = "") -> Model:
    return config(f"{top}\nmodels:\n  m: {{cmd: 'r ${{PORT}}', {body}}}").models["m"]


def test_inheritance_and_floors() -> None:
    top = "healthCheckTimeout: 3\nunloadTimeout: 0\nglobalTTL: 90\npatienceMs: 5\nholdMs: 6\nhold: never\n"
    top += "idleStreamTimeout: 1m"
    plain = model("ttl: ~", top)
    assert (plain.health_check_timeout, plain.unload_timeout, plain.ttl) == (15, 10, 90)
    assert (plain.patience_ms, plain.hold_ms, plain.hold, plain.idle_stream_timeout) == (5, 6, "never", 60)
    own = model("healthCheckTimeout: 40, unloadTimeout: 3, ttl: 0, patienceMs: 7, holdMs: 0, hold: always", top)
    assert (own.health_check_timeout, own.unload_timeout, own.ttl) == (40, 3, 0)
    assert (own.patience_ms, own.hold_ms, own.hold) == (7, 0, "always")
    assert model("healthCheckTimeout: 2").health_check_timeout == 15
    assert model("x: 1", "routing: {scheduler: {settings: {fifo: {patienceMs: 9}}}}").patience_ms == 9
    both = "patienceMs: 1\nrouting: {scheduler: {settings: {fifo: {patienceMs: 2}}}}"
    assert "patienceMs is set twice" in errors(both)


def test_special_model_and_limits() -> None:
    assert model("concurrencyLimit: -4").concurrency_limit == 0
    assert model("x-y: 1").concurrency_limit == 0
    comfy = config("models: {comfyui_auto: {cmd: 'r ${PORT}', concurrencyLimit: 3}}").models["comfyui_auto"]
    assert comfy.concurrency_limit == 50 and comfy.compat.ignore_websockets


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("globalTTL: -1", "globalTTL must be >= 0"),
        ("unloadTimeout: -1", "unloadTimeout must be >= 0"),
        ("startPort: -4", "startPort must be greater than 1"),
        ("logToStdout: ''", "logToStdout must be one of"),
        ("models: {m: {cmd: '${PORT}', unloadTimeout: -1}}", "model m: invalid unloadTimeout value -1"),
        ("models: {m: {cmd: '${PORT}', capabilities: {in: [video]}}}", "capabilities.in: invalid modality"),
        ("models: {m: {cmd: '${PORT}', capabilities: {out: [smell]}}}", "capabilities.out: invalid modality"),
        ("models: {m: {cmd: x, proxy: '://x'}}", "invalid proxy URL"),
        ("models: {m: {cmd: x, proxy: 'http://h:p'}}", "invalid proxy URL"),
        ("models: {m: {cmd: x, proxy: '127.0.0.1:80'}}", "invalid proxy URL"),
        ("models: {m: {name: z}}", "proxy uses ${PORT} but cmd does not"),
        ("models: {m: {cmd: '${PORT}', estVramGB: -1}}", "must be >= 0"),
        ("models: {m: {cmd: '${PORT}', estVramGB: lots}}", "expected a size"),
        ("models: {m: {cmd: '${PORT}', hold: maybe}}", "allowed: tools, always, never"),
        ("models: {m: {cmd: '${PORT}', warmup: {}}}", "warmup.path is required"),
        ("models: {m: {cmd: '${PORT}', env: {A: b}}}", "expected a list"),
        ("models: {m: {cmd: '${PORT}', aliases: word}}", "expected a list"),
        ("models: [a]", "models must be a mapping"),
        ("vramBudgetGB: .nan", "finite"),
        ("groups: {g: {pool: disk}}", "allowed: vram, ram"),
        ("performance: {every: 10}", "expected a duration with a unit"),
        ("performance: {every: 1d}", "expected a duration with a unit"),
        ("performance: {every: 4s}", "every must be at least 5s"),
        ("store: {}", "store.path must not be empty"),
        ("store: {path: ''}", "store.path must not be empty"),
        ("apiKeys: [~]", "apiKeys[0]"),
        ("apiKeys: [{name: x}]", "empty api key"),
        ("apiKeys: [{key: x, models: all}]", "expected a list"),
        ("defaultModel: ghost", "references unknown model"),
        ("oversize: maybe", "allowed: refuse, evict"),
        ("onShutdown: maybe", "allowed: stop, keep"),
        ("upstream: {ignorePaths: ['a**']}", "invalid regular expression"),
        ("upstream: {ignorePaths: ['(a)\\1']}", "invalid regular expression"),
        ("strict: true\nfoo: 1", "unknown key 'foo'"),
    ],
)
def test_limits(text: str, part: str) -> None:
    assert part in errors(text)


def test_defaults() -> None:
    found = config("performance: {every: 0s}\nmetricsMaxInMemory: 0\ncaptureBuffer: -1")
    assert (found.performance.every, found.metrics_max_in_memory, found.capture_buffer) == (5, 1000, 0)
    assert found.upstream_ignore_paths == (r".*\.(js|json|css|png|gif|jpg|jpeg|ico|txt)$",)
    assert found.ignores_path("/a/b.css") and not found.ignores_path("/a/b.css/c")
    assert found.ui.activity.session_id == ("X-Session-ID", "X-Litellm-Session-Id")
    ids = config("ui: {activity: {session_id: [' X-A ', x-a, '', b]}}").ui.activity.session_id
    assert ids == ("X-A", "b")


def test_api_keys() -> None:
    keys = config("apiKeys: [plain, 5, {key: k, models: ['q*'], name: n}, {key: adm, admin: yes}, \"t\\tb\"]").api_keys
    assert [key.key for key in keys] == ["plain", "5", "k", "adm", "t\tb"]
    assert [key.admin for key in keys] == [True, True, False, True, True]
    assert keys[2].models == ("q*",) and keys[0].models == ("*",)


# -- aliases and filters --


def test_aliases_and_automatic_aliases() -> None:
    found = config(
        "models: {m: {cmd: '${PORT}', aliases: [x, 5], filters: {setParamsByID: {z: {a: 1}, x: {}, m: {}, b: }}}}"
    )
    assert found.models["m"].aliases == ("x", "5", "b", "z")
    text = "models: {m: {cmd: '${PORT}', filters: {setParamsByID: {n: {}}}}, n: {cmd: '${PORT}'}}"
    assert "conflicts with an existing model ID" in errors(text)


def test_filters_protect_the_model() -> None:
    made = model(
        "filters: {stripParams: 'b, model,a ,,model.x', setParams: {z: 1, model: e, model.x: 1, a: ~}, "
        "setParamsByID: {q: {model: x, b: 1}}}"
    )
    assert made.filters.strip_params == ("a", "b")
    assert made.filters.set_params == {"a": None, "z": 1} and list(made.filters.set_params) == ["a", "z"]
    assert made.filters.set_params_by_id == {"q": {"b": 1}}
    assert model("filters: {strip_params: 'a'}").filters.strip_params == ("a",)
    assert model("filters: {strip_params: 'a', stripParams: b}").filters.strip_params == ("b",)
    peers = config("peers: {p: {proxy: 'http://p', models: [x], filters: {strip_params: a}}}").peers
    assert peers["p"].filters.strip_params == () and peers["p"].timeouts.response_header == 60


# -- routing --


def test_default_group() -> None:
    found = config(TWO + "groups: {(default): {swap: false, members: [a]}, g: {members: [b], pool: ram}}")
    assert found.groups["(default)"].members == ("a",) and found.groups["(default)"].swap
    assert (found.models["b"].group, found.models["b"].pool) == ("g", "ram")
    assert config(TWO).groups["(default)"].members == ("a", "b")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("groups: {g: {members: [a]}, h: {members: [b, a]}}", 'model "a" is in multiple groups: "g" and "h"'),
        ("groups: {g: {members: [a]}, h: {members: [a]}}", "is used in multiple groups"),
        ("groups: {g: {members: [a, a]}}", "duplicate model member"),
        ("groups: {g: {members: [a, a]}}", 'model "a" is in multiple groups: "g" and "g"'),
        ("groups: {g: {members: [ghost]}}", "no model config for"),
        ("groups: {g: {}}\nrouting: {router: {settings: {matrix: {sets: {s: a}}}}}", "migrate"),
        ("matrix: {sets: {s: a}}\nrouting: {router: {settings: {groups: {g: {}}}}}", "migrate"),
        ("groups: {g: {}}\nmatrix: {sets: {s: a}}", "cannot use both"),
        ("routing: {router: {use: matrix}}", "routing.router.settings.matrix is not set"),
        ("routing: {router: {use: Group}}", "unknown router"),
        ("routing: {scheduler: {use: lifo}}", "unknown scheduler"),
        ("matrix: {sets: {}}", "at least one set"),
        ("matrix: {vars: {a: a}}", "at least one set"),
        ("matrix: {sets: [a]}", "sets must be a mapping"),
        ("matrix: {sets: {s: ~}}", 'set "s": empty DSL expression'),
        ("matrix: {sets: {s: a}, vars: {v: ~}}", 'references unknown model ""'),
        ("matrix: {sets: {s: a}, evict_costs: {a: ~}}", "must be a positive integer"),
        ("matrix: {sets: {s: a}, vars: {'a_b': a}}", "must contain only alphanumeric"),
        (f"matrix: {{sets: {{s: a}}, vars: {{{'v' * 33}: a}}}}", "1-32"),
        ("matrix: {sets: {s: a}, vars: {v: al}}", 'references unknown model "al"'),
        ("matrix: {sets: {s: '(a'}}", "matrix: set"),
        ("matrix: {sets: {s: a}, evict_costs: {a: -1}}", "must be a positive integer"),
    ],
)
def test_routing_errors(text: str, part: str) -> None:
    assert part in errors(TWO + text)


def test_routing_places() -> None:
    new = config(TWO + "routing: {router: {settings: {groups: {g: {members: [a]}}}}}")
    assert new == config(TWO + "groups: {g: {members: [a]}}")
    ignored = config(TWO + "routing: {router: {settings: {matrix: {sets: {s: '((('}}}}}")
    assert ignored.router == "group" and ignored.matrix is None
    use = config(
        TWO + "routing: {router: {use: matrix, settings: {groups: {g: {members: [zz]}}, matrix: {sets: {s: a}}}}}"
    )
    assert use.router == "matrix" and use.groups == {}
    assert config(TWO + "groups: {g: {members: [a]}}\nrouting: {scheduler: {use: fifo}}\nmatrix: ~").router == "group"


def test_priorities_and_preload_resolve() -> None:
    text = TWO + "groups: {g: {members: [b, a]}}\nhooks: {on_startup: {preload: [' al ', b, '', ghost, b, g, far/x]}}\n"
    text += "routing: {scheduler: {settings: {fifo: {priority: {al: 5, b: -2}}}}}"
    found = config(text)
    assert found.priority == {"a": 5, "b": -2} and found.preload == ("a", "b", "b", "b", "a")


def test_an_alias_in_a_group_means_its_model() -> None:
    loaded = load([Source("f", TWO + "groups: {g: {members: [al]}}")], {})
    assert loaded.config.groups["g"].members == ("a",) and "is an alias" in loaded.warnings[0].message
    both = config(TWO + "groups: {g: {members: [al, b]}, h: {members: [a]}}")
    assert (both.groups["g"].members, both.groups["h"].members) == (("b",), ("a",))


# -- names --

PEERS = "peers: {far: {proxy: 'http://f', models: [m1, o/m2]}, near: {proxy: 'http://n', models: [m1]}}\n"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("peers: {p: {proxy: 'http://p', models: []}}", "peer models can not be empty"),
        (
            "peers: {a: {proxy: 'http://p', models: [b/c]}, a/b: {proxy: 'http://q', models: [c]}}",
            "is ambiguous between",
        ),
        (PEERS + "models: {m: {cmd: '${PORT}', aliases: [far/m1]}}", "conflicts with fully qualified peer model name"),
        (PEERS + "selectors: {far/m1: {strategy: pin, targets: [o/m2]}}", "conflicts with fully qualified"),
        (PEERS + "profiles: {p: {pins: {far/m1: o/m2}}}", "conflicts with fully qualified"),
        (TWO + "selectors: {' ': {strategy: pin, targets: [a]}}", "selector names cannot be empty"),
        (TWO + "selectors: {a: {strategy: pin, targets: [b]}}", "name conflicts with model ID"),
        (TWO + PEERS + "selectors: {s: {strategy: pin, targets: [m1]}}", 'references unknown model "m1"'),
        (TWO + "selectors: {s: {strategy: spillover, targets: [a], settings: {spillover: 0}}}", "must be >= 1"),
        (TWO + "selectors: {s: ~}", "strategy is required"),
        (
            TWO + "groups: {g: {swap: no, members: [a]}}\nselectors: {s: {strategy: spillover, targets: [a, b]}}",
            "must share one routing group",
        ),
        (
            TWO + "matrix: {sets: {s: a | b}}\nselectors: {s: {strategy: spillover, targets: [a, b]}}",
            "must all appear together in one expanded matrix set",
        ),
        ("profiles: [a]", "legacy list syntax"),
        ("profiles: {p: [a]}", "legacy list syntax"),
        (TWO + "profiles: {' ': {pins: {x: a}}}", "profile names cannot be empty"),
        (TWO + "profiles: {p: ~}", "must contain at least one entry"),
        (TWO + "profiles: {p: {pins: {'': a}}}", "pin names cannot be empty"),
        (TWO + "profiles: {p: {pins: {x: ghost}}}", "references unknown model"),
    ],
)
def test_name_errors(text: str, part: str) -> None:
    assert part in errors(text)


def test_names_that_are_fine() -> None:
    text = (
        TWO
        + PEERS
        + "selectors: {o/m2: {strategy: pin, targets: [a, a, far/m1]}, w: {strategy: warm, targets: [a, al]}}\n"
    )
    text += "matrix: {sets: {s: a & b}}\nprofiles: {p: {pins: {a: b, off: '', none: ~, s: o/m2, q: w}}}"
    found = config(text)
    assert found.profiles["p"].pins == {"a": "b", "off": "", "none": "", "s": "o/m2", "q": "w"}
    assert config("peers: {p: ~}").peers["p"].models == ()


# -- launching --


def test_launch_at_another_port() -> None:
    made = model(
        "proxy: 'http://h:${PORT}/v?x=1', env: ['A=${PORT}', 'B=x=y', odd], cmdStop: 'k ${PID} ${PORT}', "
        "checkEndpoint: 'hi'"
    )
    assert made.port == 5800 and made.launch() == made.launch(5800)
    moved = made.launch(9000)
    assert moved.argv == ("r", "9000") and moved.env == {"A": "9000", "B": "x=y"} and moved.port == 9000
    assert moved.proxy == "http://h:9000/v?x=1" and moved.check_url == "http://h:9000/hi"
    assert made.stop_argv(7, 9000) == ("k", "7", "9000") and model("x-y: 1").stop_argv(7) is None


def test_launch_hash_ignores_ports_names_and_other_models() -> None:
    text = "models: {{{} m: {{cmd: 'r ${{PORT}}', env: [A=b]{}}}}}"
    plain = config(text.format("", "")).models["m"]
    moved = config("startPort: 7000\n" + text.format("a: {cmd: 'r ${PORT}'},", ", ttl: 5, aliases: [q]")).models["m"]
    assert moved.port == 7001 and moved.launch_hash == plain.launch_hash and len(plain.launch_hash) == 64
    for change in (", cmd2: 1", ", cmdStop: x"):
        assert config(text.format("", change)).models["m"].launch_hash == plain.launch_hash
    for change in (", checkEndpoint: /x", ", proxy: 'http://127.0.0.1:${PORT}'"):
        assert config(text.format("", change)).models["m"].launch_hash != plain.launch_hash


def test_models_that_cannot_be_launched() -> None:
    for body in ("{cmd: '', proxy: 'http://h'}", '{cmd: "# x\\n", proxy: "http://h"}'):
        with pytest.raises(LaunchError, match="empty command"):
            config(f"models: {{m: {body}}}").models["m"].launch()
    with pytest.raises(LaunchError, match="upstream proxy missing"):
        config("models: {m: {cmd: x, proxy: ''}}").models["m"].launch()
    assert config("models: {m: {cmd: x, proxy: 'localhost:80'}}").models["m"].launch().proxy == "http://localhost:80"


@pytest.mark.parametrize(
    ("endpoint", "url", "host"),
    [
        ("/health", "http://h:1/health", None),
        ("", "http://h:1/", None),
        (" none ", None, None),
        ("v1/models?x=/y", "http://h:1/v1/models?x=/y", None),
        ("http://other:2/p?q=1", "http://h:1/p?q=1", "other:2"),
        ("https://other", "http://h:1/", "other"),
    ],
)
def test_check_address(endpoint: str, url: str | None, host: str | None) -> None:
    assert check_address("http://h:1/base?q=2", endpoint) == (url, host)


# -- values --


@pytest.mark.parametrize(
    ("value", "size"),
    [
        *[(1, GIB), (0.5, GIB // 2), ("8GB", 8 * GIB), ("8 GiB", 8 * GIB), ("500MiB", 500 * 1024**2)],
        *[("1.5g", GIB * 3 // 2), ("12", 12 * GIB), ("1T", 1024 * GIB), ("10kb", 10240), ("7B", 7), (0, 0)],
    ],
)
def test_sizes(value: object, size: int) -> None:
    assert parse_size(value, True) == parse_size(value, False) == size


def test_sizes_round_so_that_sums_fit() -> None:
    assert parse_size(7.3, True) == parse_size(7.3, False) + 1
    assert sum(parse_size(part, False) for part in (7.3, 7.3, 7.3)) <= parse_size(21.9, True)
    for bad in ("", "GB", "1e3", "-1", -1, True, None, [], "1 2", 1e300, "1XB", float("inf")):
        with pytest.raises(ValueError, match="size"):
            parse_size(bad, True)


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("5s", 5, "5s"),
        ("1m30s", 90, "1m30s"),
        ("6000ms", 6, "6s"),
        ("1h", 3600, "1h0m0s"),
        ("0", 0, "0s"),
        ("75.5s", 75.5, "1m15.5s"),
    ],
)
def test_durations(text: str, seconds: float, shown: str) -> None:
    assert parse_duration(text) == seconds and show_duration(seconds) == shown
    for bad in ("", "5", "5 s", "1d", "s", "5s5", "--5s"):
        with pytest.raises(ValueError, match="duration"):
            parse_duration(bad)


@pytest.mark.parametrize(
    "good", ["http://h", "localhost:80", "h", "/p", "http://[::1]:80/x", "http://u:p@h:1/p?q#f", "", "http://h%20"]
)
def test_urls(good: str) -> None:
    assert url_fault(good) is None


@pytest.mark.parametrize(
    "bad", ["://x", "http://[::1", "http://h:x", "http://h/%zz", "http://a b/", "1.2.3.4:5", "http://h\x01"]
)
def test_bad_urls(bad: str) -> None:
    assert url_fault(bad)


@pytest.mark.parametrize(
    ("pattern", "text", "hit"),
    [
        (r"\.(js|css)$", "/x.js", True),
        (r"^/api\z", "/api", True),
        (r"[[:alpha:]]+\d{2,3}", "/ab12", True),
        (r"(?i)API|v1", "/api", True),
        (r"a(?i)b|C", "c", True),
        (r"(a(?i)b|C)d", "cd", True),
        (r"(a(?i)b)C", "abc", False),
        (r"(?P<n>x)y", "xy", True),
        (r"\Qa.b\E", "axb", False),
        (r"a{,2}", "a{,2}", True),
        (r"x$", "x\n", False),
        (r"[]a]", "]", True),
        (r"[^/]+\x{2f}", "a/", True),
    ],
)
def test_go_patterns(pattern: str, text: str, hit: bool) -> None:
    assert (compile_go(pattern).search(text) is not None) is hit


@pytest.mark.parametrize(
    "bad",
    [
        "(",
        ")",
        "[a",
        "a**",
        "(?=x)",
        "(?!x)",
        "(?<=x)y",
        r"(a)\1",
        "(?P=n)",
        "(?>a)",
        r"\Z",
        "a{1001}",
        "\\",
        "[b-a]",
        "(?P<n>a)(?P<n>b)",
        "*a",
        "(?z)a",
    ],
)
def test_go_refuses(bad: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        compile_go(bad)
