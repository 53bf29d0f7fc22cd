"""`python -m bench.soak`: the storm of `tests/storm.py`, as long and as often as you like; what it finds is a bug.

Clients ask, stream and hang up; a monkey kills workers, leaders and models, stops workers, reloads, unloads and fills
logs. It fails if an answer was wrong or cut without a sign, if an error was none that asking again cures, if more
models lived than the budget has room for or one lived twice, or if anything is left afterwards.

Each storm prints a summary; all of them are in build/soak.json. The first one that finds something ends the series
with exit code 1, and leaves the service's log and its model servers' events beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.storm import Storm

BUILD = Path("build")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two acts of the monkey")
    parser.add_argument("--times", type=int, default=1, help="that many storms, one after the other")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args()


def one_storm(seed: int, minutes: float, every: float, clients: int) -> dict[str, Any]:
    """One storm with a service of its own; says what happened, and keeps the traces if that was wrong."""
    with tempfile.TemporaryDirectory(prefix="qmflask-soak-") as folder:
        storm = Storm(Path(folder), seed, clients)
        problems = storm.run(60 * minutes, every)
        print(storm.figures(), flush=True)
        if problems:
            (BUILD / "soak.log").write_text(storm.service.log())
            if storm.service.events_path.exists():
                shutil.copy(storm.service.events_path, BUILD / "soak-events.jsonl")
            print("\n".join([*problems, f"the service's log is {BUILD}/soak.log"]), flush=True)
        return {"seed": seed, "minutes": minutes, "every": every, **storm.result()}


def main() -> int:
    """Storm after storm, and judge."""
    given = options()
    BUILD.mkdir(exist_ok=True)
    results: list[dict[str, Any]] = []
    for number in range(given.times):
        seed = given.seed + number
        print(f"storm {number + 1} of {given.times}, seed {seed}: ", end="", flush=True)
        results.append(one_storm(seed, given.minutes, given.every, given.clients))
        (BUILD / "soak.json").write_text(json.dumps(results, indent=1) + "\n")
        if results[-1]["problems"]:
            return 1
    print(f"nothing was lost, doubled or left behind in {len(results)} storms of {given.minutes:g} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
