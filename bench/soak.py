"""`python -m bench.soak`: the storm of `tests/storm.py` for as long as you like; what it finds is a bug.

Clients ask, stream and hang up; a monkey kills workers, leaders and models, stops workers, reloads, unloads and fills
logs. It fails if an answer was wrong or cut without a sign, if an error was none that asking again cures, if more
models lived than the budget has room for or one lived twice, or if anything is left afterwards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.storm import Storm


def main() -> int:
    """Run for the given time and judge."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two acts of the monkey")
    parser.add_argument("--times", type=int, default=1, help="that many storms, one after the other")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    bad = 0
    for number in range(options.times):
        seed = options.seed + number
        print(f"seed {seed}", flush=True)
        with tempfile.TemporaryDirectory(prefix="qmflask-soak-") as folder:
            storm = Storm(Path(folder), seed, options.clients)
            problems = storm.run(60 * options.minutes, options.every)
            print(storm.figures())
            log = Path("build/soak.log")
            log.parent.mkdir(exist_ok=True)
            log.write_text(storm.service.log())
            if problems:
                bad += 1
                print("\n".join([*problems, f"the service's log is in {log}"]))
                break
        print("nothing was lost, doubled or left behind", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
