"""Patterns of rules match as those of `re` do, and never take for ever."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from aqtlite import Rule, edge
from aqtlite.program.rules import patterns

pytestmark = pytest.mark.code("quick")

_ATOMS = st.sampled_from(
    [
        *("a", "b", "/", ".", "[ab]", "[^a]", r"\w", r"\W", r"\d", r"\.", "1", "#"),
        *("[]a]", "[^]/]", r"\x61", "^", "$", r"\b", r"\B", r"\Z", r"[\]\-a]", "{"),
    ]
)
_REPETITIONS = st.sampled_from(
    ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{,2}", "{1,2}", "{0}", "{0,1}?"]
)
_GROUPS = st.sampled_from(["(", "(?:", "(?=", "(?!"])


def _larger(inner):
    groups = st.builds("{}{})".format, _GROUPS, inner)
    return (
        st.builds("".join, st.lists(inner, max_size=3))
        | st.builds("|".join, st.lists(inner, min_size=1, max_size=3))
        | groups
        | st.builds("(?:{}){}".format, inner, _REPETITIONS)
        | st.builds("".join, st.tuples(_ATOMS, _REPETITIONS))
    )


_TEXTS = st.text("ab/1#.é\nA{", max_size=7)


@hypothesis.given(st.recursive(_ATOMS, _larger, max_leaves=8), st.lists(_TEXTS))
@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.example(r"(?i)a\u0041", ["aA", "ab"])
@hypothesis.example(r"(?s).*(?!b)\Z", ["a\nb"])
@hypothesis.example(r"(?:a?){3}(a*)*b", ["aab", "b", "aaaaaa"])
@hypothesis.example(r"(?P<name>ab|a)(bc|c)", ["abc", "abbc", "ac"])
def test_is_that_of_re(pattern, texts):
    try:
        wanted = re.compile(pattern)
    except re.error:
        with pytest.raises(ValueError, match="is no regular expression"):
            patterns.check(pattern, "it")
        return
    patterns.check(pattern, "it")
    for text in texts:
        is_match = wanted.fullmatch(text) is not None
        assert patterns.fullmatch(pattern, text) == is_match, text


LONG = "a" * 300
EVIL = [
    "(a+)+$",
    "(a|a)*b",
    "(.*)*x",
    "(a*)*b",
    "((a+)*)+b",
    "(a|aa)+b",
    "(.|a)*(.|a)*(.|a)*b",
    "(a?){300}a{300}b",
    "((a+){10}){10}b",
    "(.*)(.*)(.*)(.*)(.*)(.*)b",
    "(?!(a+)+b)(?=(a|a)*b).*",
    "(((a{0,9}){0,9}){0,9}){0,9}b",
    "(" * 40 + "a" + "+)" * 40 + "b",
    "(((a|b){100,200}c?){0,500})*d",
]


@pytest.mark.parametrize("pattern", EVIL)
def test_backtracking(pattern):
    assert not patterns.fullmatch(pattern, LONG + "!")
    assert not edge.Rule(path=pattern).fits(LONG + "!")


def test_what_backtracking_would_find():
    assert patterns.fullmatch("(a+)+$", LONG)
    assert patterns.fullmatch("(a?){300}a{300}", LONG)
    assert patterns.fullmatch("(a|aa)+b", LONG + "b")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(a)\1", r"the backreference \\1"),
        ("(?P<x>a)(?P=x)", r"the group \(\?P="),
        ("(?<=a)b", r"the group \(\?<="),
        ("(?<!a)b", r"the group \(\?<!"),
        ("(?>a)b", r"the group \(\?>"),
        ("(a)?(?(1)b|c)", r"the group \(\?\("),
        ("(?i:a)", r"the group \(\?i:"),
        ("(?x)a", r"the group \(\?x"),
        ("a*+b", r"the possessive repetition \*\+"),
        ("a{1,2}+b", "the possessive repetition"),
        ("a{2000}", "more than 1000 repetitions"),
        ("(" * 60 + ")" * 60, "more than 50 levels deep"),
        ("a" * 1001, "more than 1000 characters"),
        ("a{99999999999999}", "no regular expression"),
        ("(" * 490 + ")" * 490, "no regular expression|50 levels deep"),
        ("*", "no regular expression.*any text is written"),
    ],
)
def test_refuses(pattern, words):
    with pytest.raises(ValueError, match=rf"^Rule.path.*({words})"):
        Rule(path=pattern, cfg=None)
    with pytest.raises(ValueError, match=rf"^Rule.equation.*({words})"):
        Rule(equation=pattern, cfg=None)
    with pytest.raises(ValueError, match=rf"^edge.Rule.path.*({words})"):
        edge.Rule(path=pattern)
