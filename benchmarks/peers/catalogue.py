"""The ways of saving that are compared, and how each is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.peer import Peer

STORAGE = "storage as fast as memory"
ALONE, SUPERVISED, DLROVER = "alone", "megatron-ft run", "dlrover-run"


@dataclass(frozen=True)
class Way:
    """A way to save: ``home`` is ``module:class`` in this package, imported where it runs."""

    label: str
    home: str
    launcher: str = ALONE
    installed: bool = False
    """Whether it needs the peers' own environment."""
    protect: str = ""
    """What `megatron-ft run` protects with."""
    peer: bool = True
    """Whether it is another project's, which we compare ourselves with."""
    note: str = ""

    @property
    def make(self) -> Callable[[Path], Peer]:
        """The class; raises what its import raises."""
        module, name = self.home.split(":")
        made: Callable[[Path], Peer] = getattr(import_module(f"benchmarks.peers.{module}"), name)
        return made


WAYS = {
    "none": Way("no saves", "torch_own:Nothing", peer=False, note="two equal phases: the noise"),
    "ours": Way(
        "**megatron-ft**, xor:2",
        "ours:MegatronFt",
        SUPERVISED,
        protect="xor:2",
        peer=False,
        note="digests on",
    ),
    "ours-none": Way(
        "**megatron-ft**, none",
        "ours:MegatronFt",
        SUPERVISED,
        protect="none",
        peer=False,
        note="to its node's memory only, digests on; safe: from the loss of trainers",
    ),
    "torch.save": Way("torch.save", "torch_own:TorchSave", note=STORAGE),
    "dcp": Way("DCP save", "dcp:DcpSave", note=STORAGE),
    "dcp-thread": Way("DCP async_save, thread", "dcp:DcpThread", note=STORAGE),
    "dcp-process": Way("DCP async_save, process", "dcp:DcpProcess", note=STORAGE),
    "torch_checkpointing": Way(
        "torch_checkpointing 0.1.1, async",
        "torch_checkpointing:TorchCheckpointing",
        installed=True,
        note=STORAGE,
    ),
    "nvrx-async": Way(
        "nvidia-resiliency-ext 0.4.1, local, replicated, async",
        "nvidia_resiliency_ext:AsyncReplicated",
        installed=True,
    ),
    "nvrx-async-cpu": Way(
        "the same, its torch.cuda.synchronize() left out",
        "nvidia_resiliency_ext:AsyncReplicatedOnCpu",
        installed=True,
        note="loads its own file, not the copy",
    ),
    "nvrx-sync": Way(
        "nvidia-resiliency-ext 0.4.1, local, replicated, sync",
        "nvidia_resiliency_ext:Replicated",
        installed=True,
        note="loads its own file, not the copy",
    ),
    "dlrover": Way(
        "DLRover 0.6.1, flash checkpoint",
        "dlrover:FlashCheckpoint",
        DLROVER,
        installed=True,
        note=f"in training to its node's memory only; safe: {STORAGE}",
    ),
    "lm-resiliency": Way(
        "lm-resiliency 0.2.0, partner copy",
        "lm_resiliency:InMemoryPartner",
        installed=True,
        note="loads what a survivor has flushed",
    ),
}
