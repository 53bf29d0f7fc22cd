"""RE2 patterns (`upstream.ignorePaths`) translated to Python's `re`; what RE2 refuses is refused."""

from __future__ import annotations

import re

_POSIX = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7f",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "word": r"0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
_FLAGS = re.compile(r"\(\?([imsU]*)(?:-([imsU]+))?([:)])")
_NAMED = re.compile(r"\(\?P?<([A-Za-z_][A-Za-z0-9_]*)>")
_HEX = re.compile(r"\\x\{([0-9a-fA-F]{1,6})\}")
_BRACKET = re.compile(r"\[:(\^?)([a-z]+):\]")
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


class _Translator:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0
        self.out: list[str] = []
        self.opened: list[list[str]] = [[]]  # per open group: the scoped flags to close and reopen at `|`

    def run(self) -> str:
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            if char == "\\":
                self.escape(in_class=False)
            elif char == "[":
                self.character_class()
            elif char == "(":
                self.group()
            elif char == ")":
                self.close()
            elif char == "|":
                flags = self.opened[-1]
                self.put(")" * len(flags) + "|" + "".join(flags), 1)
            elif char == "$":
                self.put(r"\Z", 1)
            elif char in "*+?{":
                self.repeat(char)
            else:
                self.put(char, 1)
        self.out.append(")" * len(self.opened[-1]))
        if len(self.opened) > 1:
            raise ValueError("missing closing )")
        return "".join(self.out)

    def put(self, text: str, length: int) -> None:
        self.out.append(text)
        self.at += length

    def escape(self, in_class: bool) -> None:
        rest = self.pattern[self.at :]
        after = rest[1:2]
        hexed = _HEX.match(rest)
        if hexed:
            self.put(re.escape(chr(min(int(hexed.group(1), 16), 0x10FFFF))), hexed.end())
        elif not after:
            raise ValueError("trailing backslash")
        elif after == "Q" and not in_class:
            end = rest.find(r"\E", 2)
            quoted = rest[2:] if end < 0 else rest[2:end]
            self.put(re.escape(quoted), len(rest) if end < 0 else end + 2)
        elif after == "z" and not in_class:
            self.put(r"\Z", 2)
        elif after in "pPCK" or after in "123456789" or (after == "Z") or (after in "kgGXRN"):
            raise ValueError(f"invalid escape sequence \\{after}")
        elif after in "dDwWsSbB":
            self.put({"s": r"\t\n\f\r "}.get(after, f"\\{after}") if in_class and after == "s" else f"\\{after}", 2)
        elif after.isalpha() and after not in "aAfnrtvx":
            raise ValueError(f"invalid escape sequence \\{after}")
        else:
            self.put(f"\\{after}" if after.isascii() else after, 2)

    def character_class(self) -> None:
        self.put("[", 1)
        if self.pattern[self.at : self.at + 1] == "^":
            self.put("^", 1)
        first = True
        while True:
            char = self.pattern[self.at : self.at + 1]
            bracket = _BRACKET.match(self.pattern, self.at)
            if not char:
                raise ValueError("missing closing ]")
            if char == "]" and not first:
                self.put("]", 1)
                return
            if bracket:
                name = bracket.group(2)
                if name not in _POSIX or bracket.group(1):
                    raise ValueError(f"invalid character class range {bracket.group(0)}")
                self.put(_POSIX[name], len(bracket.group(0)))
            elif char == "\\":
                self.escape(in_class=True)
            else:
                self.put(f"\\{char}" if char in "[&~|]" else char, 1)
            first = False

    def group(self) -> None:
        rest = self.pattern[self.at :]
        flags, named = _FLAGS.match(rest), _NAMED.match(rest)
        if flags:
            on, off, end = flags.groups()
            scoped = "".join(sorted(set(on) - {"U"})) + (f"-{''.join(sorted(set(off) - {'U'}))}" if off else "")
            opening = f"(?{scoped.rstrip('-')}:"
            if end == ":":
                self.opened.append([])
            else:
                self.opened[-1].append(opening)
            self.put(opening, flags.end())
        elif named:
            self.opened.append([])
            self.put(f"(?P<{named.group(1)}>", named.end())
        elif rest.startswith("(?"):
            raise ValueError("invalid or unsupported Perl syntax " + rest[:4])
        else:
            self.opened.append([])
            self.put("(", 1)

    def close(self) -> None:
        if len(self.opened) == 1:
            raise ValueError("unexpected )")
        self.put(")" * len(self.opened.pop()) + ")", 1)

    def repeat(self, char: str) -> None:
        if char == "{":
            match = _REPEAT.match(self.pattern, self.at)
            if not match:
                self.put(r"\{", 1)
                return
            if max(int(part) for part in match.groups() if part) > 1000:
                raise ValueError("invalid repeat count")
            self.put(match.group(0), match.end() - match.start())
        else:
            self.put(char, 1)
        after = self.pattern[self.at : self.at + 1]
        if after == "?":
            self.put("?", 1)
            after = self.pattern[self.at : self.at + 1]
        if after and after in "*+?":
            raise ValueError("invalid nested repetition operator")


def compile_go(pattern: str) -> re.Pattern[str]:
    """Compile an RE2 pattern for an unanchored `search`. Raises ValueError with the reason."""
    if len(pattern) > 10_000:
        raise ValueError("pattern too long")
    try:
        return re.compile(_Translator(pattern).run())
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
