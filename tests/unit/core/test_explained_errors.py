"""Errors of other people's code in one line, also those that say nothing."""

from __future__ import annotations

from megatron_ft.core.errors import explain


def test_an_error_without_a_text_is_explained_by_its_place() -> None:
    try:
        assert explain is None
    except AssertionError as caught:
        error = AssertionError().with_traceback(caught.__traceback__)
    text = explain(error)
    assert text.startswith("AssertionError: in test_an_error_without") and f"{__file__}:" in text
    assert explain(ValueError()) == "ValueError: no reason given"
    assert explain(ValueError("x")) == "ValueError: x"
