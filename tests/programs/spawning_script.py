"""Spawns a process before it imports Megatron, then looks how Megatron's loop is wrapped."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any


def modules(queue: Any) -> None:
    watching = [type(finder).__name__ for finder in sys.meta_path].count("AfterImport")
    queue.put((watching, "torch" in sys.modules, "megatron" in sys.modules))


def main() -> None:
    assert not {"torch", "megatron", "megatron_ft.megatron"} & set(sys.modules)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=modules, args=(queue,))
    child.start()
    print("child", queue.get(timeout=60))
    child.join()
    from megatron.training import arguments, checkpointing, pretrain, training  # noqa: F401

    names = ["setup_model_and_optimizer", "train", "checkpoint_and_decide_exit"]
    found = [getattr(training, name) for name in names] + [arguments.add_megatron_arguments]
    for one in found[:3]:
        wrapped = hasattr(one, "__wrapped__") and not hasattr(one.__wrapped__, "__wrapped__")
        assert wrapped, "each is wrapped once"
    own = pretrain.__wrapped__.__globals__
    assert own is vars(training), "called by name in the module that is wrapped"
    import megatron_ft.megatron

    megatron_ft.megatron.install()
    assert found[:3] == [getattr(training, name) for name in names], "wrapped again"
    sys.argv += ["--inmem-snapshot", "--inmem-snapshot-interval", "7"]
    args = arguments.parse_args(ignore_unknown_args=True)
    print("parsed", args.inmem_snapshot, args.inmem_snapshot_interval)


if __name__ == "__main__":
    main()
