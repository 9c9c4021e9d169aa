"""The bugs: what is planted, which test of the suite has to notice, and what it says.

A check is of a kind that was there before the bug: it compares bytes after a crash or a
loss, walks the protocol's model, or flips bits.  None of them looks for one bug alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.protocol.planted_bugs.planting import Edit

ORACLE = "tests/unit/trainer/test_capture_oracle.py"
MODEL = "tests/protocol/test_protocol_model.py::test_no_interleaving_loses_a_snapshot[xor:3]"


TORN = "tests/unit/trainer/test_torn.py"
RESHAPE = "tests/protocol/test_reshape_explored.py"


@dataclass(frozen=True)
class Bug:
    """``planted`` in words, as ``edits``, the test that is its ``check``, what that ``says``.

    ``kind`` names the check for readers; ``says`` is a regular expression.
    """

    name: str
    planted: str
    edits: tuple[Edit, ...]
    kind: str
    check: str
    says: str


BUGS = (
    Bug(
        "1 no fence",
        "the fence lets the optimizer step at once",
        (Edit("        arrived = wait(self._timeout_seconds)\n", "        arrived = True\n"),),
        "bit-exact oracle of captures",
        ORACLE,
        "the snapshot of iteration 2 is not the state at its end",
    ),
    Bug(
        "2 commit word before the data",
        "a record's commit word is stored first, and covers its version only",
        (
            Edit(
                "        Store(at + ENVELOPE_BYTES, payload),\n"
                "        Store(at, tag),\n"
                "        Store(at + _TAG.size, _commit_word(tag, payload)),\n",
                "        Store(at, tag),\n"
                "        Store(at + _TAG.size, _commit_word(tag, payload)),\n"
                "        Store(at + ENVELOPE_BYTES, payload),\n",
            ),
            Edit("hashlib.blake2b(tag + payload, digest", "hashlib.blake2b(tag, digest"),
        ),
        "records cut at every byte",
        "tests/unit/arena/test_arena_record.py::test_a_write_cut_at_any_byte_leaves_the_old_record_or_the_new",
        r"cut after \d+ of \d+ bytes the record is neither old nor new",
    ),
    Bug(
        "2 commit word before the data",
        "a shard is sealed before its tensors are copied",
        (
            Edit(
                "            record = self._seal(run, arrivals) "
                "if self._copy(run, arrivals) else None\n",
                "            record = self._seal(run, arrivals)\n"
                "            self._copy(run, arrivals)\n",
            ),
        ),
        "bit-exact oracle of captures",
        ORACLE,
        r"\d+ of its blocks of \d+ bytes do not match their digests",
    ),
    Bug(
        "2 commit word before the data",
        "others hear of a slot's new state before its header is stored",
        (
            Edit(
                "        for shard_id, slots in self.shards.items():\n"
                "            for slot, header in slots.take_changes():\n",
                "        self.effects += self._after\n"
                "        self._after = []\n"
                "        for shard_id, slots in self.shards.items():\n"
                "            for slot, header in slots.take_changes():\n",
            ),
        ),
        "model walk",
        MODEL,
        r"I2: [\d.]+ must be served without \[[^]]*\], got [\d.]+",
    ),
    Bug(
        "3 parity overwritten before the global commit",
        "the last protected snapshot makes room before a newer one is protected everywhere",
        (
            Edit(
                "    return any(not o.local_only and _newer(o, slot) for o in others)\n",
                "    return True\n",
            ),
        ),
        "model walk",
        MODEL,
        r"I1: \w+ reuses [\d.]+; no newer one is protected everywhere",
    ),
    Bug(
        "3 parity overwritten before the global commit",
        "the newest snapshot makes room if it is local and an older one is protected",
        (
            Edit(
                "    if slot.local_only or give_up_protected:\n",
                "    if slot.local_only and any(not o.local_only for o in others):\n"
                "        return True\n"
                "    if slot.local_only or give_up_protected:\n",
            ),
        ),
        "model walk",
        MODEL.replace("xor:3", "replica"),
        r"I2b: [\d.]+ must be served without \[\], got [\d.]+",
    ),
    Bug(
        "3 parity overwritten before the global commit",
        "all slots keep their parity in one place",
        (
            Edit(
                "        return self.data_offset(slot) + round_up(self.data_bytes, PAGE_BYTES)\n",
                "        return self.data_offset(0) + round_up(self.data_bytes, PAGE_BYTES)\n",
            ),
        ),
        "arena's regions",
        "tests/unit/arena/test_arena_format.py::test_regions_are_disjoint_aligned_and_inside",
        r"the region that starts at \d+ lies in another one",
    ),
    Bug(
        "4 wrong padding",
        "what lies in a slot behind its shard is coded as it is, and not as zeros",
        (Edit("        spare[used:] = 0\n", ""),),
        "every loss of odd lengths",
        "tests/unit/erasure/test_erasure_verbs.py::test_any_lengths_and_losses",
        r"shard \w+, block \d+: its rebuilt (data|parity)",
    ),
    Bug(
        "5 stale arena accepted",
        "what was rolled back counts as the job's past",
        (
            Edit(
                "    limit: SnapshotId | None = None\n    for ancestor in reversed(lineage):\n",
                "    return True\n    for ancestor in reversed(lineage):\n",
            ),
        ),
        "model: an old node returns",
        "tests/protocol/test_protocol_model.py::test_what_was_rolled_back_does_not_come_back_with_a_node",
        r"rule 1: [\d.]+ was rolled back and is served",
    ),
    Bug(
        "6 digest unchecked",
        "blocks are not compared with their digests at encode, rebuild and scrub",
        (
            Edit(
                "        bad = _differing(found, self._table[first : first + found.size], first)\n",
                "        bad: list[int] = []\n",
            ),
        ),
        "flipped bits",
        "tests/unit/cli/test_bit_flips.py::test_every_flipped_bit_is_found",
        r"\('[\w ]+', Counter\(\{.*'missed': [1-9]\d*",
    ),
    Bug(
        "6 digest unchecked",
        "blocks are not compared with their digests at restore",
        (
            Edit(
                "        return wrong_blocks(piece, first, self._table[first:stop], "
                "self.block_bytes)\n",
                "        return []\n",
            ),
            Edit(
                "        table = self._table[first:stop]\n",
                "        table = np.empty_like(self._table[first:stop])\n"
                "        digest_blocks(piece, self.block_bytes, table)\n",
            ),
        ),
        "flipped bits",
        "tests/unit/trainer/test_capture_manager.py::test_one_flipped_bit_is_found_and_no_object_is_loaded",
        r"DID NOT RAISE .*CorruptBlockError\S*",
    ),
    Bug(
        "7 single slot",
        "captures always take slot 0, the last snapshot or not",
        (
            Edit(
                "        index = oldest_reusable(made, spared)\n",
                "        ready = self.slots[0].state in (SlotState.FREE, SlotState.COMMITTED)\n"
                "        index = 0 if ready else None\n",
            ),
            Edit(
                "        if promise.slot not in reusable("
                "slots, spared, give_up_protected=give_up):\n",
                "        if promise.slot:\n",
            ),
        ),
        "model walk",
        MODEL,
        r"I1: \w+ reuses [\d.]+; no newer one is protected everywhere|I2b: [\d.]+ must be served",
    ),
    Bug(
        "8 a copy still running when the optimizer steps",
        "a fence that has waited in vain gives nothing up",
        (Edit("        if run.stop(reason):\n", "        if not reason:\n"),),
        "bit-exact oracle of captures",
        ORACLE,
        "the snapshot of iteration 2 is not the state at its end",
    ),
    Bug(
        "9 encoder of an old world writing late",
        "an SMP welcomes a new world's encoder while that of the old one lives",
        (
            Edit(
                '            if w.role == role and (role == "encoder" or w.who == who)'
                " and w.pid != pid\n",
                '            if w.role == role == "trainer" and w.who == who and w.pid != pid\n',
            ),
            Edit(
                "        assert not self.world\n        self.world = world\n",
                "        self.world = world\n",
            ),
        ),
        "a real SMP, its encoder suspended and woken",
        "tests/unit/smp/test_smp.py::test_an_encoder_of_an_old_world_writes_nothing_when_it_wakes",
        "parity of an old world over a newer one",
    ),
    Bug(
        "10 off-by-one in rotation",
        "encoders send parity, and its digests, one member too far",
        (
            Edit("receive(home, link.member - j,", "receive(home, link.member - j - 1,"),
            Edit("send(output, link.member + j,", "send(output, link.member + j + 1,"),
            Edit(
                "(mine[j].view(np.uint8), link.member - j,",
                "(mine[j].view(np.uint8), link.member - j - 1,",
            ),
            Edit(
                "(computed[j].view(np.uint8), link.member + j,",
                "(computed[j].view(np.uint8), link.member + j + 1,",
            ),
        ),
        "every loss of odd lengths",
        "tests/unit/erasure/test_erasure_verbs.py::test_any_lengths_and_losses",
        r"shard \w+[^;\n]*: its [^;\n]*",
    ),
    Bug(
        "11 drain without fsync order",
        "a file gets its name before its bytes are on the disk",
        (
            Edit(
                "                unsynced = 0\n        self.sync(descriptor)\n",
                "                unsynced = 0\n",
            ),
        ),
        "power loss at every step of a drain",
        "tests/unit/checkpoint/test_disk_checkpoint.py::test_a_power_loss_at_any_step_leaves_a_checkpoint",
        "no checkpoint is left",
    ),
    Bug(
        "11 drain without fsync order",
        "names of files are not made durable before the older checkpoint goes",
        (
            Edit(
                "            raise\n        self.sync_folder(path.parent)\n", "            raise\n"
            ),
        ),
        "power loss at every step of a drain",
        "tests/unit/checkpoint/test_disk_checkpoint.py::test_a_power_loss_at_any_step_leaves_a_checkpoint",
        "no checkpoint is left",
    ),
    Bug(
        "12 reshape from unproven bytes",
        "blocks of an old shard are used without a look at their digests",
        (
            Edit(
                "        if left.size and (bad := self._check.bad("
                "int(left[0]), int(left[-1]) + 1)):\n",
                "        if bad := list[int]():\n",
            ),
        ),
        "any layout out of any other, in worlds of encoders",
        "tests/unit/erasure/test_reshape_world.py",
        "test_a_shard_with_wrong_bytes_is_named_and_nothing_is_sealed",
    ),
    Bug(
        "13 the older layout is given up too early",
        "sources are freed before a snapshot of the new layout is as safe",
        (
            Edit(
                '(commit.level == "protected" or (captured and not parity))',
                '(commit.level == "protected" or parity)',
            ),
        ),
        "a reshape that ends after each of its steps",
        RESHAPE,
        "without n[01] nothing is served",
    ),
    Bug(
        "13 the older layout is given up too early",
        "a recovery from the new layout frees the older one at once",
        (Edit('return memory, "hold" if record.sources else "drop"', 'return memory, "drop"'),),
        "a reshape that ends after each of its steps",
        RESHAPE,
        "without n[01] nothing is served",
    ),
    Bug(
        "14 captured tensors change outside of a fence",
        "neither version counters nor the sample are compared",
        (
            Edit(
                "        return list(map(_VERSION, tensors))\n",
                "        return [0 for _ in tensors]\n",
            ),
            Edit(
                "[name for sample in run.samples for name in sample.miscaptured(region)]",
                "list[str]()",
            ),
        ),
        "copies at the last moment",
        f"{TORN}::test_what_forward_changes_is_captured_at_the_boundary[counted-0]",
        r"\['model/teacher'\] of iteration 1 were sealed torn",
    ),
    Bug(
        "14 captured tensors change outside of a fence",
        "the sample is not compared",
        (
            Edit(
                "[name for sample in run.samples for name in sample.miscaptured(region)]",
                "list[str]()",
            ),
        ),
        "copies at the last moment",
        f"{TORN}::test_what_forward_changes_is_captured_at_the_boundary[by_numpy-9]",
        r"\['model/teacher'\] of iteration 1 were sealed torn",
    ),
    Bug(
        "14 captured tensors change outside of a fence",
        "a fence counts for all boundaries behind it",
        (Edit("fenced, self._fenced = self._fenced, False", "fenced = self._any_fence"),),
        "copies at the last moment",
        f"{TORN}::test_behind_an_iteration_without_a_fence_a_copy_waits",
        "the copy runs on behind an iteration without a fence",
    ),
)
