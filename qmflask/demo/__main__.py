"""`python -m qmflask.demo` and the command `qmflask-demo`: the demonstration server's command line."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from types import FrameType

from qmflask.demo.server import DemoServer
from qmflask.demo.words import Voice


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line of one demonstration model."""
    parser = argparse.ArgumentParser(
        prog="qmflask-demo",
        description="A small model server that answers with words which name it. It computes nothing.",
    )
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--name", required=True, help="the model's name, which its answers repeat")
    parser.add_argument("--load-time", type=float, default=1.5, metavar="S", help="seconds to load (%(default)s)")
    parser.add_argument("--memory-gb", type=float, default=0, metavar="GB", help="size it pretends to have")
    parser.add_argument("--pace", type=float, default=30, metavar="N", help="words a second (%(default)s)")
    return parser.parse_args(argv)


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(0)


def main(argv: list[str] | None = None) -> None:
    """Serve until TERM or Ctrl-C; the port is open, and /health is 503, while the model loads."""
    options = parse_arguments(argv)
    voice = Voice(options.name, options.memory_gb)
    server = DemoServer((options.host, options.port), voice, options.pace)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    threading.Thread(target=server.load, args=(options.load_time,), daemon=True).start()
    with server:
        server.serve_forever()


if __name__ == "__main__":
    main()
