"""Names of parameter groups that are the same in every life of the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ft.core.errors import LayoutMismatchError
from megatron_ft.trainer import inner_optimizer


def group_names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """A name for each group of an optimizer, in order.

    Groups of experts are numbered by what DeepSpeed calls them (``ep_size_4``), because it
    makes them in the order of a set of strings, which every process has in an order of its
    own; all others by their number.
    """
    seen: Counter[str] = Counter()
    names = []
    for group in groups:
        family = f"{group['name']}." if group.get("moe") else ""
        names.append(f"{family}{seen[family]}")
        seen[family] += 1
    return names


def group_scalars(inner: Any) -> dict[str, dict[str, Any]]:
    """Everything in an optimizer's parameter groups but the parameters, by the group's name."""
    names = group_names(inner.param_groups)
    return dict(zip(names, inner_optimizer.group_scalars(inner), strict=True))


def load_group_scalars(inner: Any, scalars: Mapping[str, dict[str, Any]]) -> None:
    """Set what :func:`group_scalars` gave; LayoutMismatchError if there are other groups."""
    names = group_names(inner.param_groups)
    if set(names) != set(scalars):
        raise LayoutMismatchError(
            f"the optimizer has parameter groups {sorted(names)}, the snapshot "
            f"{sorted(scalars)}; build the same optimizer as in the run that saved it"
        )
    inner_optimizer.load_group_scalars(inner, [scalars[name] for name in names])
