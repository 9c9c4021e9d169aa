"""Megatron's own training loop on host memory: a GPT with the distributed optimizer.

python -m benchmarks.frameworks.megatron_loop OUT CAPTURES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.frameworks.save_calls import WARM_UP, SaveCalls
from megatron_ft.cli.demo import cpu_device, pretrain_gpt, stdlib_corpus
from megatron_ft.cli.demo.demo_model import ENVIRONMENT, demo_arguments

LAYERS = 40
"""484 parameters, with their masters and what Adam keeps of each 1,936 tensors."""

UNSAVED = 12
"""Iterations beside those of captures: until the first permits are there, and if one is missed."""

CORPUS_BYTES = 1 << 20


def main() -> None:
    """Train as long as enough snapshots take."""
    out, captures = Path(sys.argv[1]), int(sys.argv[2])
    os.environ.update(ENVIRONMENT, CUDA_VISIBLE_DEVICES="")
    cpu_device.install()
    import megatron.core

    calls = SaveCalls(captures)
    corpus = stdlib_corpus.build(out.parent / "corpus", CORPUS_BYTES)
    sys.argv[1:] = ["--inmem-snapshot"] + demo_arguments(
        iterations=WARM_UP + captures + UNSAVED,
        data_path=corpus,
        layers=LAYERS,
        micro_batch=1,
        global_batch=1,
        cache_path=out.parent / "indices",
    )
    pretrain_gpt.main()
    # Behind a plus it names the commit of whatever folder it runs in.
    release = megatron.core.__version__.partition("+")[0]
    calls.write(out, f"megatron-core {release}, bf16, distributed optimizer, on the CPU")


if __name__ == "__main__":
    main()
