"""`python -m bench.flame STACKS OUT.svg`: draws collapsed stacks (`py-spy record --format raw`) as a flame graph.

Width is the share of samples, the caller is above what it calls; a plain picture whose boxes tell more when pointed at.
Frames below the thread's start are left out, and what has less than a five hundredth.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH, ROW, LETTER = 1200, 17, 6.1
LEAST = 1 / 500
#: Our own code, libraries, the server: by the path in the frame.
COLOURS = (("qmflask/", "#7fb3d5"), ("gunicorn/", "#f0b27a"), ("flask/", "#a9dfbf"), ("", "#d5d8dc"))
_START = re.compile(r"^(Thread\.(run|_bootstrap(_inner)?)|_run_code|_run_module_as_main|<module>) ")


@dataclass
class Node:
    """A function in its place, with the samples in it and below it."""

    name: str
    count: int = 0
    below: dict[str, Node] = field(default_factory=dict)


def tree(text: str) -> Node:
    """The stacks as a tree."""
    root = Node("all")
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        node = root
        node.count += int(count)
        for name in stack.split(";"):
            if _START.match(name):
                continue
            node = node.below.setdefault(name, Node(name))
            node.count += int(count)
    return root


def boxes(node: Node, total: int, left: float = 0.0, depth: int = 0) -> list[tuple[Node, float, int]]:
    """Every node that is wide enough, with its left edge (0 to 1) and its row."""
    found = [(node, left, depth)]
    for child in sorted(node.below.values(), key=lambda child: -child.count):
        if child.count >= total * LEAST:
            found += boxes(child, total, left, depth + 1)
            left += child.count / total
    return found


def picture(root: Node, title: str) -> str:
    """The SVG."""
    drawn = boxes(root, root.count)
    height = (max(depth for _, _, depth in drawn) + 3) * ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace"'
        ' font-size="10">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="4" y="{ROW - 5}" font-size="12">{escape(title)}: {root.count} samples</text>',
    ]
    for node, left, depth in drawn:
        x, y, width = left * WIDTH, (depth + 1.5) * ROW, node.count / root.count * WIDTH
        colour = next(colour for mark, colour in COLOURS if mark in node.name)
        room = int((width - 6) / LETTER)
        label = escape(node.name.partition(" (")[0][:room]) if room > 2 else ""
        lines.append(
            f"<g><title>{escape(node.name)}: {node.count / root.count:.1%}</title>"
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 0.5, 0.5):.1f}" height="{ROW - 1}" fill="{colour}"/>'
            f'<text x="{x + 3:.1f}" y="{y + 11:.1f}">{label}</text></g>'
        )
    return "\n".join([*lines, "</svg>"])


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(picture(tree(source.read_text()), target.stem) + "\n")
