"""Weights that no optimizer owns: unchanged ones of every form pass, changed ones are named."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from deepspeed_ext.frozen import FrozenParameters  # noqa: E402
from megatron_ft.errors import ConfigError  # noqa: E402

FORMS = {
    "large": torch.arange(10_000.0),
    "low precision": torch.ones(7, 9, dtype=torch.bfloat16),
    "nan": torch.full((3,), float("nan")),
    "number": torch.tensor(3),
    "flags": torch.ones(5, dtype=torch.bool),
    "transposed": torch.rand(4, 100).t(),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize("name", [name for name in FORMS if name != "empty"])
def test_only_what_has_changed_is_refused(name: str) -> None:
    live = {form: tensor.clone() for form, tensor in FORMS.items()}
    frozen = FrozenParameters()
    frozen.check(live)
    frozen.check(live)
    live[name].copy_(live[name] == 0)
    with pytest.raises(ConfigError, match=f"1 parameters without an optimizer, {name} first"):
        frozen.check(live)
    frozen.loaded(live)
    frozen.check(live)


def test_without_any_there_is_nothing_to_say() -> None:
    frozen = FrozenParameters()
    frozen.check({})
    frozen.check({})


def test_before_training_a_script_may_set_what_it_likes() -> None:
    frozen, live = FrozenParameters(), {"weight": torch.ones(3)}
    frozen.loaded(live)
    live["weight"] += 1
    frozen.check(live)
    frozen.forget()
    live["weight"] += 1
    frozen.check(live)
    live["weight"] += 1
    with pytest.raises(ConfigError, match="in buffers, or outside of the model"):
        frozen.check(live)
