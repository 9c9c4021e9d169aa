"""The demo's training program in a script that calls ``run_resilient`` itself.

It parses the flags of Megatron inside of that, too.

python -m tests.programs.resilient_megatron <Megatron flags> [--trace-dir DIRECTORY]
"""

from __future__ import annotations

from functools import partial

from megatron_ft import run_resilient
from megatron_ft.cli.demo import pretrain_gpt

if __name__ == "__main__":
    pretrain_gpt.pretrain = partial(run_resilient, pretrain_gpt.pretrain)
    pretrain_gpt.main()
