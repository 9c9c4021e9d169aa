"""The position of DeepSpeed's curriculum sampler (data efficiency), batch by batch.

DeepSpeed saves numpy's global generator in the place of the sampler's own, so a restored sampler
draws other samples than an uninterrupted run would.  With workers it saves how far they have read,
not how far training is.  Here the sampler's own generator is kept, and a state for each batch.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ft.core.errors import SnapshotUnavailableError

_SUFFIXES = (".bin", ".idx")
_KEPT_BYTES = 64 << 20
"""Copies of a cluster that are kept: as many as fit, and always the newest."""


class CurriculumSampler:
    """Stands for a DeepSpeedDataSampler as a loader's ``data_sampler``."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._ahead: deque[dict[str, Any]] = deque()
        self._current: dict[str, Any] | None = None
        self._digests: dict[str, tuple[Any, str]] = {}
        if sampler.global_rank == 0:
            sampler.reshuffle_clusters = self._keeping_a_copy(sampler.reshuffle_clusters)

    def __iter__(self) -> Iterator[list[int]]:
        self._ahead.clear()
        for indices in self._sampler:
            # The sampler counts a batch only when it is asked for the next one.
            self._ahead.append(self._take(self._sampler.micro_batch_times_data_parallel_size))
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def handed_out(self) -> None:
        """The oldest batch that is on its way went to training."""
        self._current = self._ahead.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that went to training."""
        return self._take() if self._current is None else self._current

    def load_state_dict(self, position: Mapping[str, Any]) -> None:
        """Continue there, in the next pass.

        SnapshotUnavailableError if a file with a cluster of samples is not what it was.
        """
        from deepspeed.runtime.data_pipeline.constants import CURRICULUM_LEARNING_NP_RNG_STATE

        sampler = self._sampler
        if sampler.global_rank == 0:
            self._bring_back_clusters(position["clusters"])
            sampler.data_clusters, sampler.data_cluster_sizes = [], []
        # numpy's own generator is restored elsewhere; here it stays as it is.
        numpy_state = {CURRICULUM_LEARNING_NP_RNG_STATE: np.random.get_state()}
        sampler.load_state_dict({**copy.deepcopy(position["sampler"]), **numpy_state})
        sampler.np_rng.bit_generator.state = position["generator"]
        for metric, state in position["schedulers"].items():
            sampler.curriculum_schedulers[metric].state.update(copy.deepcopy(state))
        self._ahead.clear()
        self._current = dict(position)

    def _take(self, uncounted: int = 0) -> dict[str, Any]:
        from deepspeed.runtime.data_pipeline import constants

        sampler = self._sampler
        state = sampler.state_dict()
        del state[constants.CURRICULUM_LEARNING_NP_RNG_STATE]
        state = copy.deepcopy(state)
        state[constants.CURRICULUM_LEARNING_CONSUMED_SAMPLES] += uncounted
        current = constants.CURRICULUM_LEARNING_CURRENT_DIFFICULTY
        schedulers = sampler.curriculum_schedulers.items()
        return {
            "sampler": state,
            "generator": sampler.np_rng.bit_generator.state,
            "schedulers": {name: {current: one.state[current]} for name, one in schedulers},
            "clusters": self._cluster_digests(),
        }

    def _cluster_digests(self) -> dict[str, str]:
        if self._sampler.global_rank:
            return {}
        clusters = self._sampler.data_clusters
        names = self._sampler.data_cluster_paths
        for name, cluster in zip(names, clusters, strict=False):
            if self._digests.get(name, (None, ""))[0] is not cluster:
                self._digests[name] = (cluster, _digest(cluster[0]))
        return {name: self._digests[name][1] for name, _ in zip(names, clusters, strict=False)}

    def _folder(self) -> Path:
        from deepspeed.runtime.data_pipeline import constants

        config = self._sampler.data_efficiency_config[constants.DATA_SAMPLING]
        curriculum = config[constants.CURRICULUM_LEARNING]
        return Path(curriculum[constants.CURRICULUM_LEARNING_CLUSTER_PATH])

    def _keeping_a_copy(self, reshuffle: Any) -> Any:
        # The order that a snapshot may have to go back to is overwritten in its file.
        def reshuffle_clusters(index: int) -> None:
            name = self._sampler.data_cluster_paths[index]
            digest = self._cluster_digests()[name]
            _copy_cluster(self._folder() / name, self._folder() / _copy_name(name, digest))
            _forget_old_copies(self._folder(), name)
            reshuffle(index)

        return reshuffle_clusters

    def _bring_back_clusters(self, digests: Mapping[str, str]) -> None:
        for name, digest in digests.items():
            path, kept = self._folder() / name, self._folder() / _copy_name(name, digest)
            if _digest_of_file(path) == digest:
                continue
            if _digest_of_file(kept) != digest:
                raise SnapshotUnavailableError(
                    f"the curriculum's cluster {path} is not the one that the snapshot was taken "
                    "with: restart from a checkpoint, or put the files of that folder back"
                )
            _copy_cluster(kept, path)


def _copy_name(name: str, digest: str) -> str:
    return f"{name}.was-{digest}"


def _forget_old_copies(folder: Path, name: str) -> None:
    copies = sorted(folder.glob(_copy_name(name, "*.bin")), key=lambda p: -p.stat().st_mtime_ns)
    total = 0
    for position, copied in enumerate(copies):
        total += copied.stat().st_size
        if position and total > _KEPT_BYTES:
            for suffix in _SUFFIXES:
                copied.with_suffix(suffix).unlink(missing_ok=True)


def _copy_cluster(source: Path, target: Path) -> None:
    for suffix in _SUFFIXES:
        temporary = Path(f"{target}{suffix}.tmp")
        shutil.copyfile(f"{source}{suffix}", temporary)
        temporary.replace(f"{target}{suffix}")


def _digest(samples: Any) -> str:
    return hashlib.blake2b(samples.tobytes(), digest_size=16).hexdigest()


def _digest_of_file(path: Path) -> str:
    from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset

    if not all(Path(f"{path}{suffix}").is_file() for suffix in _SUFFIXES):
        return ""
    cluster = MMapIndexedDataset(str(path), skip_warmup=True)
    # Named, because what it gives is a view of a mapping that ends with it.
    return _digest(cluster[0])
