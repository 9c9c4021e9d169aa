"""Layouts whose training program or optimizer is another one; see megatron_plugins."""

from __future__ import annotations

from tests.support.megatron_layouts import DISTRIBUTED, EP2, PP2, Flags, Layout, words

EXTERNAL = (*DISTRIBUTED, *words("--dataloader-type external"))
PRECISION_AWARE = words(
    "--use-precision-aware-optimizer --use-distributed-optimizer "
    "--exp-avg-dtype fp16 --exp-avg-sq-dtype fp16"
)
# Every step is skipped until after the snapshot.
NO_STEP = words("--fp16 --initial-loss-scale 16777216 --loss-scale-window 2 --hysteresis 1")


def program(name: str, flags: Flags = DISTRIBUTED, plugin: str = "") -> Layout:
    """A layout whose training program is changed by a plugin; its name by default."""
    plugin = plugin or name.replace("-", "_")
    return Layout(name, 2, flags, plugins=(f"tests.programs.megatron_plugins:{plugin}",))


PROGRAMS = [
    program("freeze-positions"),
    program(
        "cyclic-data", (*DISTRIBUTED, *words("--dataloader-type cyclic")), "quiet_data_loaders"
    ),
    program("extra-state"),
    program("savable-loader", EXTERNAL),
    program("apex-adam"),
    program("capturable-adam"),
    program("transformer-engine-adam"),
    program("precision-aware", ("--bf16", *PRECISION_AWARE), "transformer_engine_adam"),
    program("offloaded-optimizer", (*DISTRIBUTED, "--bf16")),
    program("perturb-weights", (*NO_STEP, "--use-distributed-optimizer")),
]

MORE_PROGRAMS = [
    program("savable-loader-pp2", (*PP2, *EXTERNAL), "savable_loader"),
    program("apex-adam-replicated", ("--bf16",), "apex_adam"),
    program("transformer-engine-adam-ep2", (*EP2, *DISTRIBUTED), "transformer_engine_adam"),
    program("precision-aware-fp32-params", PRECISION_AWARE, "transformer_engine_adam"),
    program(
        "perturb-weights-replicated",
        NO_STEP,
        "perturb_weights",
    ),
]
