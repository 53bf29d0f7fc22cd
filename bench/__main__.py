"""`python -m bench`: runs the figures, prints a table and writes JSON beside it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from bench.figures import MEASURES, Figure
from bench.parts import Rig, compile_to


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about three minutes")
    parser.add_argument("--only", nargs="*", choices=sorted(MEASURES), help="these measures only")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench.json"), help="where the numbers go (%(default)s)"
    )
    parser.add_argument("--peer", type=loopback_port, metavar="URL", help="another proxy, which serves a model m")
    parser.add_argument("--model-server", type=Path, metavar="FILE", help="only make the model server, for a peer")
    return parser.parse_args()


def loopback_port(url: str) -> int:
    """The port of an address of this machine: load stays on loopback, and times of two machines do not compare."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    if parts.hostname not in ("127.0.0.1", "localhost") or parts.port is None:
        raise argparse.ArgumentTypeError(f"{url!r} is not http://127.0.0.1:PORT")
    return parts.port


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "commit": commit or "?",
        "date": time.strftime("%Y-%m-%d"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _number(value: object) -> str:
    if not isinstance(value, float):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: list[dict[str, object]]) -> str:
    """The results as a Markdown table; `result` is the median over rounds, with the lowest and highest."""
    head = ["figure", "unit", "direct", "qmflask", "ratio", "result (lowest .. highest)", "must reach", "goal", "peer"]
    lines = [head, ["---"] * len(head)]
    for r in rows:
        spread = f"**{_number(r['result'])}** ({_number(r['lowest'])} .. {_number(r['highest'])})"
        cells = [r["name"], r["unit"], _number(r["direct"]), _number(r["via"]), _number(r["ratio"]), spread]
        lines.append([str(c) for c in [*cells, r["must"], r["goal"], _number(r["peer"])]])
    if all(r["peer"] is None for r in rows):
        lines = [line[:-1] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    """Measure; a measure that fails is named, the others go on, and the exit code says so."""
    options = parse_arguments()
    if options.model_server is not None:
        compile_to(options.model_server)
        return 0
    about, figures, failed = machine(), list[Figure](), []
    for name in options.only or MEASURES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            with Rig(options.peer) as rig:
                figures += MEASURES[name](rig, options.quick)
        except (RuntimeError, AssertionError, OSError) as e:
            failed.append(name)
            print(f"{name} failed: {e}", file=sys.stderr, flush=True)
    rows = [figure.row() for figure in figures]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": about, "quick": options.quick, "figures": rows}, indent=1) + "\n")
    print(" ".join(f"{k}={v}" for k, v in about.items()), end="\n\n")
    print(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
