"""What changes in training and is set anew in an export: no DeepSpeed needed."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ext.exporter import client_entries, fill
from megatron_ft.core.errors import ExportError

DECLARED = {"step": "global_steps", "name": "constant"}


def objects(entries: dict[str, Any], given_at: int | None, step: int) -> dict[str, Any]:
    return {
        "training": {"counters": {"global_steps": step, "global_samples": 9, "skipped_steps": 0}},
        "client_state": {"entries": entries, "given_at": given_at, "step": step},
    }


def test_a_client_state_of_the_same_step_is_exported_as_it_is() -> None:
    assert client_entries(objects({"epoch": 2, "step": 7}, 7, 7), {}) == {"epoch": 2, "step": 7}


def test_an_older_one_follows_what_is_declared() -> None:
    found = client_entries(objects({"step": 5, "name": "run"}, 5, 7), DECLARED)
    assert found == {"step": 7, "name": "run"}


def test_an_older_one_with_an_unknown_entry_is_refused() -> None:
    with pytest.raises(ExportError, match="gave its client_state at step 5.*'epoch'"):
        client_entries(objects({"step": 5, "epoch": 1}, 5, 7), DECLARED)


def test_none_was_ever_given() -> None:
    assert client_entries(objects({}, None, 7), DECLARED) == {}
    assert client_entries({}, {}) == {}


def test_numbers_are_set_by_their_order_if_there_are_any() -> None:
    tree = {"optimizer": {"state": {0: {"step": 9}, 1: {"step": 9}}, "param_groups": []}}
    captured: dict[str, Any] = {"optimizer": {}, "groups": [{}], "numbers": {}}
    fill(tree, captured)
    assert tree["optimizer"]["state"] == {0: {"step": 9}, 1: {"step": 9}}
    fill(tree, captured | {"numbers": {"optimizer/a": {"step": 3}, "optimizer/b": {}}})
    assert tree["optimizer"]["state"] == {0: {"step": 3}, 1: {"step": 9}}


def test_a_form_with_other_states_than_the_snapshot_is_refused() -> None:
    tree = {"optimizer": {"state": {0: {}, 1: {}}, "param_groups": []}}
    captured = {"optimizer": {}, "groups": [{}], "numbers": {"optimizer/0": {}}}
    with pytest.raises(ExportError, match="2 optimizer states were recorded, 1 captured"):
        fill(tree, captured)
