"""The header that makes a sealed region a safetensors file, for any layout."""

from __future__ import annotations

import numpy as np
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.arena import digest
from megatron_ft.checkpoint import disk_format as ours
from megatron_ft.core.identity import SnapshotId
from megatron_ft.core.shard import TensorSpec, plan_layout

SIZES = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1, "bool": 1, "complex64": 8}
specs = st.builds(
    lambda name, dtype, shape, split: TensorSpec(name, dtype, SIZES[dtype], shape, split=split),
    st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith("__")),
    st.sampled_from(sorted(SIZES)),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from([(0, 1), (0, 3), (2, 3)]),
)


@given(st.lists(specs, max_size=8, unique_by=lambda spec: spec.name), st.binary(max_size=99))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_stock_readers_find_every_byte_of_any_layout(
    tensors: list[TensorSpec], meta: bytes
) -> None:
    layout = plan_layout(tensors)
    room = digest.required_bytes(layout.tensor_bytes, len(meta), 256)
    region = np.random.default_rng(len(meta)).integers(0, 256, room, dtype=np.uint8)
    record = digest.seal(
        region,
        shard_id="dp0",
        snapshot=SnapshotId(1, 1),
        iteration=1,
        tensor_bytes=layout.tensor_bytes,
        meta=meta,
        layout_hash=layout.hash(),
        block_bytes=256,
    )
    header = ours.ShardHeader(record, 256, "job")
    raw = ours.pack_header(header, layout)
    assert len(raw) % 64 == 0 and ours.header_length(raw[:8], "file") == len(raw)
    assert ours.unpack_header(raw, "file") == header
    data = region[: record.used_bytes].tobytes()
    read = dict(safetensors.deserialize(raw + data))
    assert sum(len(entry["data"]) for entry in read.values()) == len(data)
    for entry in layout.entries:
        assert bytes(read[entry.name]["data"]) == data[entry.offset : entry.offset + entry.nbytes]
    assert bytes(read[ours.META]["data"]) == meta
