r"""Regular expressions of rules, matched without backtracking.

Python's `re` backtracks, which takes exponential time for patterns such as ``(a+)+$``.
Rules may come from untrusted files, and are matched against every path. Here each part
of a pattern is matched once at each position, and gives all positions where its matches
can end. The time is proportional to the length of the pattern times the square of the
length of the text.

The syntax is that of `re` without backreferences, look-behind, possessive and atomic
groups, and conditions. Characters, classes and anchors are matched by `re` itself.
"""

import dataclasses
import functools
import re

_LONGEST = 1000
_DEEPEST = 50
_MOST = 1000

_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x..|u.{4}|U.{8}|N\{[^}]*\}|0[0-7]{0,2}|[0-3][0-7]{2}|(?P<number>\d)|.)",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"[*+?]|\{(?!\})(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?::|P<\w+>|(?P<look>[=!])|(?P<flags>[aisu]+)\)))?(?!\?)")
_SIMPLE = {"*": (0, None), "+": (1, None), "?": (0, 1)}

Ends = int
"""Positions at which a match can end, as a bit set."""


def fullmatch(pattern: str, text: str) -> bool:
    """Whether the whole text matches, as by `re.fullmatch`.

    >>> fullmatch(".*/mlp", "layer/mlp"), fullmatch("(a+)+b", "a" * 100)
    (True, False)

    Args:
        pattern: a pattern that `check` accepts.
        text: the text.
    """
    return bool(_Match(text).ends(_parsed(pattern), 0) >> len(text))


def of_text(text: str) -> str:
    r"""Returns a pattern that matches a text alone.

    Unlike `re.escape`, it leaves what needs no backslash, such as ``-``, readable.

    >>> of_text("blocks[0]/up-projection")
    'blocks\\[0\\]/up-projection'
    """
    return re.sub(r"[][.^$*+?{}\\|()]", r"\\\g<0>", text)


def check(pattern: str, where: str) -> None:
    """Checks a pattern.

    Args:
        pattern: the pattern.
        where: name of the pattern, for the message.

    Raises:
        ValueError: if it is not a regular expression, or uses unsupported syntax.
    """
    if len(pattern) > _LONGEST:
        raise ValueError(f"{where} has more than {_LONGEST} characters")
    try:
        re.compile(pattern)
        _parsed(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        hint = "; any text is written .*" if "*" in pattern else ""
        raise ValueError(
            f"{where}={pattern!r} is no regular expression: {error}{hint}"
        ) from error
    except _UnsupportedError as error:
        raise ValueError(
            f"{where}={pattern!r} has {error}, by which a match can take for ever; it "
            "takes characters, classes, groups, alternatives, repetitions, anchors and "
            "look-ahead"
        ) from error


def alternatives(pattern: str) -> list[tuple[str, str]]:
    """Returns the alternatives of a pattern, each with the pattern without the others.

    Those inside of a look-ahead are left out.

    >>> alternatives(".*/(up|down)")
    [('up', '.*/(up)'), ('down', '.*/(down)')]

    Args:
        pattern: a pattern that `check` accepts.
    """
    parser = _Parser(pattern)
    parser.parse()
    return [
        (pattern[first:last], pattern[: ends[0][0]] + pattern[first:last] + rest)
        for ends in parser.alternatives
        for rest in [pattern[ends[-1][1] :]]
        for first, last in ends
    ]


class _UnsupportedError(Exception):
    """Syntax of `re` that is not supported here."""


class _Node:
    """A part of a pattern."""

    def ends(self, match: "_Match", start: int) -> Ends:
        """Returns the ends of all matches that start at a position."""
        raise NotImplementedError


class _Match:
    """A text, with memoized ends for each part of a pattern and each position."""

    def __init__(self, text: str):
        self.text = text
        self._known: dict[tuple[int, int], Ends] = {}

    def ends(self, node: _Node, start: int) -> Ends:
        key = id(node), start
        if key not in self._known:
            self._known[key] = node.ends(self, start)
        return self._known[key]

    def ends_of_any(self, node: _Node, starts: int) -> Ends:
        found = 0
        while starts:
            first = starts & -starts
            found |= self.ends(node, first.bit_length() - 1)
            starts ^= first
        return found


@dataclasses.dataclass(frozen=True)
class _Characters(_Node):
    """Characters, classes and anchors in a row."""

    pattern: re.Pattern[str]

    def ends(self, match: _Match, start: int) -> Ends:
        found = self.pattern.match(match.text, start)
        return 0 if found is None else 1 << found.end()


@dataclasses.dataclass(frozen=True)
class _Run(_Node):
    """One character or class, repeated."""

    all_of_it: re.Pattern[str]
    low: int
    high: int | None

    def ends(self, match: _Match, start: int) -> Ends:
        found = self.all_of_it.match(match.text, start)
        last = start if found is None else found.end()
        if self.high is not None:
            last = min(last, start + self.high)
        first = start + self.low
        return (1 << last + 1) - (1 << first) if first <= last else 0


@dataclasses.dataclass(frozen=True)
class _Repeated(_Node):
    of: _Node
    low: int
    high: int | None

    def ends(self, match: _Match, start: int) -> Ends:
        reached = 1 << start
        for _ in range(self.low):
            after = match.ends_of_any(self.of, reached)
            if after == reached:
                break
            reached = after
        # Repeating from a position reached before would find nothing new.
        new, left = reached, self.high and self.high - self.low
        while new and left != 0:
            new = match.ends_of_any(self.of, new) & ~reached
            reached |= new
            left = left and left - 1
        return reached


@dataclasses.dataclass(frozen=True)
class _Sequence(_Node):
    parts: tuple[_Node, ...]

    def ends(self, match: _Match, start: int) -> Ends:
        reached = 1 << start
        for part in self.parts:
            reached = match.ends_of_any(part, reached)
        return reached


@dataclasses.dataclass(frozen=True)
class _Alternatives(_Node):
    parts: tuple[_Node, ...]

    def ends(self, match: _Match, start: int) -> Ends:
        found = 0
        for part in self.parts:
            found |= match.ends(part, start)
        return found


@dataclasses.dataclass(frozen=True)
class _LookAhead(_Node):
    of: _Node
    wanted: bool

    def ends(self, match: _Match, start: int) -> Ends:
        is_there = bool(match.ends(self.of, start))
        return 1 << start if is_there == self.wanted else 0


@functools.lru_cache(maxsize=256)
def _parsed(pattern: str) -> _Node:
    return _Parser(pattern).parse()


class _Parser:
    """Parses a pattern that `re` accepts."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.position = 0
        self.flags = re.NOFLAG
        self.alternatives: list[list[tuple[int, int]]] = []
        """First and last position of alternatives, for each list of several."""

    def parse(self) -> _Node:
        return self._alternatives(_DEEPEST)

    def _taken(self, what: re.Pattern[str]) -> re.Match[str] | None:
        found = what.match(self.pattern, self.position)
        if found is not None:
            self.position = found.end()
        return found

    def _next(self) -> str:
        return self.pattern[self.position : self.position + 1]

    def _alternatives(self, levels: int) -> _Node:
        if not levels:
            raise _UnsupportedError(f"groups more than {_DEEPEST} levels deep")
        first = self.position
        parts = [self._sequence(levels)]
        ends = [(first, self.position)]
        while self._next() == "|":
            self.position += 1
            first = self.position
            parts.append(self._sequence(levels))
            ends.append((first, self.position))
        if len(parts) > 1:
            self.alternatives.append(ends)
        return parts[0] if len(parts) == 1 else _Alternatives(tuple(parts))

    def _sequence(self, levels: int) -> _Node:
        parts: list[_Node] = []
        row: list[str] = []
        while self._next() not in ("", "|", ")"):
            group = self._group(levels) if self._next() == "(" else None
            source = "" if group else self._source()
            low, high = self._repetition()
            is_once = (low, high) == (1, 1)
            if group is None and is_once:
                row.append(source)
                continue
            parts += self._in_a_row(row)
            row = []
            if group is None:
                all_of_it = self._compiled(f"(?:{source})*")
                parts.append(_Run(all_of_it, low, high))
            else:
                parts.append(group if is_once else _Repeated(group, low, high))
        parts += self._in_a_row(row)
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _in_a_row(self, sources: list[str]) -> list[_Node]:
        return [_Characters(self._compiled("".join(sources)))] if sources else []

    def _compiled(self, source: str) -> re.Pattern[str]:
        return re.compile(source, self.flags)

    def _source(self) -> str:
        """Returns the source of the next character, class or anchor."""
        if self._next() == "[":
            found = self._taken(_CLASS)
        elif self._next() == "\\":
            found = self._taken(_ESCAPE)
            if found is not None and found["number"]:
                raise _UnsupportedError(f"the backreference {found[0]}")
        else:
            self.position += 1
            return self.pattern[self.position - 1]
        assert found is not None, self.pattern
        return found[0]

    def _repetition(self) -> tuple[int, int | None]:
        found = self._taken(_QUANTIFIER)
        if found is None:
            return 1, 1
        if self._next() == "+":
            raise _UnsupportedError(f"the possessive repetition {found[0]}+")
        if self._next() == "?":  # Lazy repetitions have the same ends.
            self.position += 1
        if found[0] in _SIMPLE:
            return _SIMPLE[found[0]]
        low, comma, high = found.groups()
        counts = int(low or 0), int(high) if high else None if comma else int(low)
        if max(counts[0], counts[1] or 0) > _MOST:
            raise _UnsupportedError(f"more than {_MOST} repetitions, {found[0]}")
        return counts

    def _group(self, levels: int) -> _Node:
        found = self._taken(_GROUP)
        if found is None:
            what = self.pattern[self.position : self.position + 4]
            raise _UnsupportedError(f"the group {what}...")
        if found["flags"]:
            self.flags |= functools.reduce(
                lambda flags, letter: flags | re.RegexFlag[letter.upper()],
                found["flags"],
                re.NOFLAG,
            )
            return _Sequence(())
        count = len(self.alternatives)
        inside = self._alternatives(levels - 1)
        self.position += 1  # The closing parenthesis.
        if not found["look"]:
            return inside
        del self.alternatives[count:]
        return _LookAhead(inside, found["look"] == "=")
