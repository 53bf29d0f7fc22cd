"""Command lines as a POSIX shell would split them, without a shell (compatibility section 2)."""

from __future__ import annotations

_SEPARATORS = " \t\n"
#: What counts as blank at the ends of a line: Unicode white space.
_BLANK = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


def strip_comment_lines(text: str) -> str:
    """Drop the lines whose first non-blank character is `#`, as happens before macros are expanded."""
    if "#" not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.strip(_BLANK).startswith("#"))


def _joined(text: str) -> str:
    """Line stage: no comment lines; a line that ends in a backslash runs on after one space."""
    kept: list[str] = []
    for line in text.split("\n"):
        bare = line.strip(_BLANK)
        if bare.startswith("#"):
            continue
        kept.append(bare[:-1] + " " if bare.endswith("\\") else line)
    return "\n".join(kept)


class _Splitter:
    """Token stage: one pass over the characters, with the state of the quote it is in."""

    def __init__(self, text: str, separators: str) -> None:
        self.text, self.at = text, 0
        self.separators = frozenset(separators)
        self.words: list[str] = []
        self.word: list[str] | None = None

    def add(self, piece: str) -> None:
        """Glue a piece to the current word; an empty piece begins one (`""` is an argument)."""
        if self.word is None:
            self.word = []
        self.word.append(piece)

    def end_word(self) -> None:
        if self.word is not None:
            self.words.append("".join(self.word))
            self.word = None

    def take(self) -> str:
        """The next character, or nothing at the end."""
        char = self.text[self.at : self.at + 1]
        self.at += 1
        return char

    def single(self) -> None:
        end = self.text.find("'", self.at)
        end = len(self.text) if end < 0 else end
        self.add(self.text[self.at : end])
        self.at = end + 1

    def double(self) -> None:
        self.add("")
        while self.at < len(self.text):
            char = self.take()
            if char == '"':
                return
            if char == "\\":
                after = self.take()
                char = "" if after == "\n" else after if after and after in '$`"\\' else "\\" + after
            self.add(char)

    def run(self) -> list[str]:
        while self.at < len(self.text):
            char = self.take()
            if char in self.separators:
                self.end_word()
            elif char == "'":
                self.single()
            elif char == '"':
                self.double()
            elif char == "\\":
                after = self.take()
                if after and after != "\n":
                    self.add(after)
            else:
                self.add(char)
        self.end_word()
        return self.words


def split_command(text: str, more_separators: str = "") -> list[str]:
    """The arguments of a command; raises ValueError("empty command ...") when there are none.

    `more_separators` are characters that stand for spaces.
    """
    words = _Splitter(_joined(text), _SEPARATORS + more_separators).run()
    if not words:
        raise ValueError("empty command: there is nothing to run but blanks and comments")
    return words
