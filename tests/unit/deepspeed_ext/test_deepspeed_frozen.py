"""Weights that no optimizer owns: unchanged ones of every form pass, changed ones are named."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from deepspeed_ext.state_parts import LOOKED_AT, FrozenParameters  # noqa: E402
from megatron_ft.core.errors import ConfigError  # noqa: E402

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
    with pytest.raises(ConfigError, match=f"^{name}, a parameter without an optimizer"):
        frozen.check(live)
    with pytest.raises(ConfigError, match=f"^{name}, a parameter"):
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


def test_of_thousands_each_is_looked_at_within_some_checks() -> None:
    """Training waits for each, so not all are looked at every time."""
    live = {f"layer{number}": torch.ones(3) for number in range(100)}
    for changed in live:
        frozen = FrozenParameters()
        frozen.check(live)
        live[changed] += 1
        with pytest.raises(ConfigError, match=f"^{changed}, a parameter"):
            for _ in range(-(-len(live) // LOOKED_AT)):
                frozen.check(live)
        for _ in range(-(-len(live) // LOOKED_AT)):
            # Also those that look at others.
            with pytest.raises(ConfigError, match=f"^{changed}, a parameter"):
                frozen.check(live)


def test_another_form_is_a_change() -> None:
    frozen = FrozenParameters()
    frozen.check({"weight": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"^weight, a parameter"):
        frozen.check({"weight": torch.ones(4)})


class LateTensor(torch.Tensor):
    """Says that it is on a device; fails whoever asks for its value."""

    waited = False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __bool__(self) -> bool:
        LateTensor.waited = True
        return super().__bool__()


def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is said when the next snapshot is taken: by then the device is done."""
    find = torch.Tensor.any
    monkeypatch.setattr(torch.Tensor, "any", lambda self: find(self).as_subclass(LateTensor))
    live, frozen = {"weight": torch.ones(3)}, FrozenParameters()
    frozen.check(live)
    live["weight"] += 1
    frozen.check(live)
    assert not LateTensor.waited
    with pytest.raises(ConfigError, match=r"^weight, a parameter"):
        frozen.check(live)
