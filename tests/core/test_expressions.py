"""Expressions give the answers of `re`, whichever engine runs, and end when patience does."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.core.expressions import LONGEST, Expression, Patience

_TOKENS = ["a", "b", "_", "1", ".", r"\.", "*", "+", "?", "*?", "*+", "(", ")", "(?:", "(?=", "(?!",
           "(?<=", "(?>", "|", "[ab]", "[^a]", "[", "]", "[[:alpha:]]", "{1}", "{,2}", "{2,}",
           "{,}", "{e}", "{e<=1}", "{", "}", "^", "$", r"\d", r"\w", r"\b", r"\B", r"\Z",
           r"\1", "(?P<x>", "(?P=x)", "(?(1)a|b)", "(?i)", "(?s)", "(?i:", r"\N{DIGIT ONE}",
           "(?#c)", "&&", "--",
           "A"]  # fmt: skip
_NAMES = [
    "a",
    "ab",
    "1",
    "aab",
    "b.a1",
    "A",
    "a\n",
    "a-b",
    "{e}",
    "a{e<=1}",
    "aba",
    "a.b.1",
    "[:a]",
]


def is_sane(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(_TOKENS), max_size=7).map("".join).filter(is_sane))
def test_both_engines_answer_as_re_does(text):
    expression, plain = Expression(text), re.compile(text)
    for name in _NAMES:
        for how in ("match", "fullmatch"):
            expected = getattr(plain, how)(name)
            found = getattr(expression, how)(name, Patience())
            other = getattr(expression._interruptible, how)(name)
            assert (found is None, other is None) == (expected is None, expected is None), name
            if expected is not None:
                assert found.span() == other.span() == expected.span()


@pytest.mark.parametrize(
    "text", [r"(a|aa)+$", r"(?:\w|\w\w)+\d$", "(a?){60}a{60}!", r"((a|a)*b?)*c", "(a|a)" * 40 + "!"]
)  # fmt: skip
def test_patience_ends_and_is_shared_by_calls(text):
    patience, began = Patience(0.2), time.monotonic()
    expression = Expression(text)
    ended = False
    for _ in range(50):
        try:
            assert expression.match("a" * 60 + "b", patience) is None
        except TimeoutError:
            ended = True
    assert time.monotonic() - began < 3
    assert ended or text.startswith(("(a?)", "((a", "(a|a)(a"))


def test_repeats_that_would_fill_the_memory_are_not_written_out():
    text = "(?:" * 4 + "(?:a|b){60}" + "){60}" * 4
    with pytest.raises(TimeoutError, match="repeats"):
        Expression(text).match("a" * 60, Patience())


def test_what_is_too_long_or_no_expression_is_told():
    for text, words in (
        ("a" * (LONGEST + 1), "longer"),
        ("(", "unterminated"),
        ("(?x) a", "verbose"),
    ):
        with pytest.raises(re.error, match=words):
            Expression(text)


def test_a_comment_hides_no_repeat():
    """`re` reads over comments, so that what follows one repeats the group before it."""
    for text in (r"(\w|\w\w|\w\w\w)(?#)+\s", r"(?:\w|\w\w|\w\w\w)(?#x)(?#y)+\s"):
        with pytest.raises(TimeoutError):
            Expression(text).fullmatch("a" * 60, Patience(0.2))
        assert Expression(text).fullmatch("aaa ", Patience())


@pytest.mark.parametrize("many", ["[a-\uffff]", r"[\x00-\uffff]"])
def test_many_wide_ranges_are_refused(many):
    """Each takes milliseconds to compile."""
    assert Expression("(?i)" + many * 4).fullmatch("abcd", Patience())
    with pytest.raises(re.error, match="sets with wide ranges"):
        Expression("(?i)" + many * 3000)
    assert Expression("[a-z0-9_]" * 1000).fullmatch("a" * 1000, Patience())
