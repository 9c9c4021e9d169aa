"""One snapshot from permit to commit, and every way in which it can end otherwise."""

from __future__ import annotations

import pytest

from megatron_ft.core.errors import (
    ControlPlaneError,
    MegatronFTError,
    PinnedError,
    TransitionRefusedError,
    WorldGoneError,
)
from megatron_ft.core.identity import SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.supervisor.cycle import (
    Action,
    CyclePhase,
    KillWorld,
    Send,
    SnapshotCycle,
    SnapshotEnded,
)
from megatron_ft.supervisor.schedule import Schedule
from tests.protocol.model.memory import record_of
from tests.support.cycle_driver import ORDERS, PLACES, WORLD, Driver, to_all

FIRST = SnapshotId(7, 1)


def level_of(actions: list[Action]) -> str:
    assert to_all(actions, m.Commit)
    (level,) = {a.message.level for a in actions}  # type: ignore[union-attr]
    return str(level)


def test_from_permit_to_commit() -> None:
    d = Driver()
    granted = d.propose(progress=10)
    assert to_all(granted, m.Grant)
    assert granted[0].message == m.Grant(7, FIRST, 12)  # type: ignore[union-attr]
    assert d.seal("dp0", "dp1") == []
    assert to_all(d.seal("dp2"), m.Encode)
    assert d.encoded("dp0", "dp1") == []
    commits = d.encoded("dp2")
    assert level_of(commits) == "protected"
    assert d.confirm(commits, "n0", "n1") == []
    (ended,) = d.confirm(commits, "n2")
    assert isinstance(ended, SnapshotEnded) and (ended.snapshot, ended.level) == (
        FIRST,
        "protected",
    )


@pytest.mark.parametrize("word", ["commit", "abort"])
def test_an_answer_on_the_snapshot_before_says_nothing_of_this_one(word: str) -> None:
    """It was sent again, and both were answered."""
    d = Driver()

    def decided() -> list[Action]:
        d.propose()
        if word == "abort":
            return d.cycle.give_up("test")
        d.seal()
        return d.encoded()

    old = decided()
    d.confirm(old)
    new = decided()
    assert d.confirm(old) == []
    (ended,) = d.confirm(new)
    assert isinstance(ended, SnapshotEnded) and ended.snapshot == SnapshotId(7, 2)


def test_a_refusal_of_the_permit_before_gives_nothing_up() -> None:
    d = Driver()
    d.propose()
    d.confirm(d.cycle.give_up("test"))
    d.propose()
    late = m.Refused(TransitionRefusedError("late"))
    assert d.cycle.answered("n0", m.Grant(7, FIRST, 12), late) == []
    assert d.cycle.phase == CyclePhase.CAPTURING


def test_ids_count_up_and_there_is_one_at_a_time() -> None:
    d = Driver()
    d.propose()
    assert d.propose() == []
    d.confirm(d.cycle.give_up("test"))
    d.propose()
    assert d.cycle.snapshot == SnapshotId(7, 2)


@pytest.mark.parametrize("progress, iteration", [(0, 5), (3, 5), (4, 10), (5, 10), (-1, 5)])
def test_the_iteration_is_a_multiple_of_the_interval_ahead(progress: int, iteration: int) -> None:
    d = Driver(interval=5)
    d.propose(progress)
    assert d.cycle.iteration == iteration


def test_permits_follow_trainers_even_below_the_restored_iteration() -> None:
    d = Driver()
    d.cycle.schedule.first = 150
    d.propose(progress=-1)
    assert d.cycle.iteration == 152
    d.confirm(d.cycle.give_up("the trainers start from an older checkpoint"))
    d.propose(progress=100)
    assert d.cycle.iteration == 101 + d.cycle.schedule.lead


@pytest.mark.parametrize("d", [Driver(), Driver(parity=False)], ids=["no world", "no parity"])
def test_without_encoders_it_is_local(d: Driver) -> None:
    d.propose(world="" if d.cycle.stripes else WORLD)
    assert level_of(d.seal()) == "local"


def test_a_miss_aborts_everywhere_and_lengthens_the_lead() -> None:
    d = Driver()
    d.propose()
    d.seal("dp0")
    aborts = d.cycle.handle("n1", m.Missed("dp1", FIRST))
    assert to_all(aborts, m.Abort) and d.cycle.schedule.lead == 2
    assert d.seal("dp2") == []
    (ended,) = d.confirm(aborts)
    assert isinstance(ended, SnapshotEnded) and ended.level == "aborted" and "dp1" in ended.reason


def test_it_is_ready_when_no_trainer_may_still_write() -> None:
    """Sooner, a permit would be refused where one captures; later, time would be lost."""
    d = Driver()
    d.propose()
    aborts = d.cycle.handle("n1", m.Missed("dp1", FIRST))
    d.cycle.handle("n0", m.Missed("dp0", FIRST))
    d.confirm(aborts)
    assert d.cycle.phase == CyclePhase.IDLE and not d.cycle.ready
    d.cycle.handle("n2", m.SlotFreed("dp2", SnapshotId(7, 0)))
    assert not d.cycle.ready
    d.cycle.handle("n2", m.SlotFreed("dp2", FIRST))
    assert d.cycle.ready
    d.propose()
    assert not d.cycle.ready
    d.confirm(d.confirm(d.seal()) or d.encoded())
    assert d.cycle.ready


def test_the_lead_is_bounded_and_shrinks_after_calm() -> None:
    d = Driver(parity=False)
    for _ in range(Schedule.MOST_LEAD + 3):
        d.propose()
        d.confirm(d.cycle.handle("n1", m.Missed("dp1", d.cycle.snapshot)))
    assert d.cycle.schedule.lead == Schedule.MOST_LEAD
    for _ in range(Schedule.CALM):
        d.propose()
        d.confirm(d.seal())
    assert d.cycle.schedule.lead == Schedule.MOST_LEAD - 1


def test_where_every_iteration_is_wanted_the_one_under_way_is_permitted() -> None:
    d = Driver(parity=False)
    d.cycle = SnapshotCycle(7, PLACES, (), Schedule(1))
    d.propose(progress=4)
    assert d.cycle.iteration == 5
    d.confirm(d.cycle.handle("n1", m.Missed("dp1", d.cycle.snapshot)))
    for _ in range(Schedule.CALM):
        d.propose(progress=8)
        assert d.cycle.iteration == 10, "it came too late once"
        d.confirm(d.seal())
    d.propose(progress=8)
    assert d.cycle.iteration == 9


def test_an_abandoned_capture_aborts_but_says_nothing_of_the_lead() -> None:
    d = Driver()
    d.propose()
    assert to_all(d.cycle.handle("n1", m.Abandoned("dp1", FIRST, "slow")), m.Abort)
    assert d.cycle.schedule.lead == 1


def test_reports_on_another_snapshot_change_nothing() -> None:
    d = Driver()
    d.propose()
    other = SnapshotId(6, 9)
    for body in (
        m.Missed("dp1", other),
        m.Abandoned("dp1", other, ""),
        m.Sealed(record_of(other, "dp1", 12)),
        m.OrderFailed(other, WORLD, "", "dp1"),
        m.Encoded(other, WORLD, "dp1", b"", (), 0, 0.0),
    ):
        assert d.cycle.handle("n1", body) == []
    assert d.cycle.answered("n1", m.Abort(7, other, ""), m.Ok()) == []
    assert d.cycle.phase == CyclePhase.CAPTURING


def test_a_refused_permit_aborts() -> None:
    d = Driver()
    (grant, *_) = d.propose()
    assert isinstance(grant, Send)
    refused = m.Refused(TransitionRefusedError("no free slot"))
    assert to_all(d.cycle.answered("n0", grant.message, refused), m.Abort)


def test_a_trainer_that_dies_while_capturing_aborts_and_later_does_not() -> None:
    d = Driver()
    d.propose()
    gone = m.WriterGone("trainer", "dp1", 1)
    assert to_all(d.cycle.handle("n1", gone), m.Abort)
    assert Driver().encoding().cycle.handle("n1", gone) == []


def test_a_dead_encoder_means_local_after_all_are_dead() -> None:
    d = Driver().encoding()
    assert d.encoders_die("n1") == [KillWorld(WORLD, "the encoder on n1 died")]
    assert d.encoded() == [], "what arrives now may be from before"
    assert d.encoders_die("n0") == []
    assert level_of(d.encoders_die("n2")) == "local"


def test_encoders_that_die_while_capturing_cost_only_the_parity() -> None:
    d = Driver()
    d.propose()
    assert d.encoders_die("n0") == []
    assert level_of(d.seal()) == "local"


def test_a_world_that_comes_up_while_capturing_is_used() -> None:
    d = Driver()
    d.propose(world="")
    d.cycle.world_changed("w8")
    encodes = d.seal()
    assert to_all(encodes, m.Encode)
    assert {a.message.world for a in encodes} == {"w8"}  # type: ignore[union-attr]


def test_another_world_that_dies_is_nobodys_business() -> None:
    d = Driver().encoding()
    assert d.cycle.handle("n1", m.WriterGone("encoder", "w6", 1)) == []


def test_corrupt_bytes_abort_when_the_encoders_are_dead() -> None:
    d = Driver().encoding()
    failed = m.OrderFailed(FIRST, WORLD, "wrong bytes", "dp1")
    assert d.cycle.handle("n1", failed) == [KillWorld(WORLD, "wrong bytes")]
    assert to_all(d.encoders_die(), m.Abort)


@pytest.mark.parametrize("corrupt", [("dp1", ""), ("", "dp1")])
def test_others_that_fail_as_well_make_corrupt_bytes_no_better(corrupt: tuple[str, str]) -> None:
    """All members of a stripe end when one does; the bytes must not be committed without parity."""
    d = Driver().encoding()
    for node, shard in zip(("n1", "n2"), corrupt, strict=True):
        d.cycle.handle(node, m.OrderFailed(FIRST, WORLD, "a member has left", shard))
    assert to_all(d.encoders_die(), m.Abort)


def test_another_failure_of_the_order_keeps_the_data() -> None:
    d = Driver().encoding()
    d.cycle.handle("n1", m.OrderFailed(FIRST, WORLD, "mpi", ""))
    assert level_of(d.encoders_die()) == "local"


def test_giving_up() -> None:
    d = Driver()
    assert d.cycle.give_up("idle") == []
    d.propose()
    assert to_all(d.cycle.give_up("slow"), m.Abort)
    assert Driver().encoding().cycle.give_up("slow") == [KillWorld(WORLD, "slow")]


def test_a_refused_encode_ends_the_world() -> None:
    d = Driver().encoding()
    request = m.Encode(7, FIRST, WORLD, ORDERS)
    refused = m.Refused(TransitionRefusedError("is CAPTURING"))
    assert d.cycle.answered("n1", request, refused) == [KillWorld(WORLD, "is CAPTURING")]
    assert d.encoders_die("n0", "n2") == []
    assert level_of(d.encoders_die("n1")) == "local"


def test_a_node_whose_encoder_is_gone_unheard_of_is_not_waited_for() -> None:
    """Its SMP was restarted, and the event was lost with the old one."""
    d = Driver().encoding()
    request = m.Encode(7, FIRST, WORLD, ORDERS)
    d.cycle.answered("n1", request, m.Refused(WorldGoneError("w7 is gone")))
    assert level_of(d.encoders_die("n0", "n2")) == "local"


def test_an_smp_restarted_while_capturing_aborts() -> None:
    d = Driver()
    d.propose()
    assert to_all(d.cycle.smp_restarted("n1"), m.Abort)


def test_an_smp_restarted_while_encoding_has_no_encoder() -> None:
    d = Driver().encoding()
    (kill,) = d.cycle.smp_restarted("n1")
    assert isinstance(kill, KillWorld)
    assert level_of(d.encoders_die("n0", "n2")) == "local"


@pytest.mark.parametrize("abort", [False, True])
def test_an_smp_restarted_while_it_was_told_is_told_again(abort: bool) -> None:
    d = Driver().encoding() if not abort else Driver()
    if abort:
        d.propose()
    words = d.cycle.give_up("test") if abort else d.encoded()
    d.confirm(words, "n0")
    assert d.cycle.smp_restarted("n0") == [], "it has confirmed, so it is in its headers"
    assert d.cycle.smp_restarted("n1") == [w for w in words if getattr(w, "node", "") == "n1"]
    assert d.confirm(words, "n1") == []
    assert isinstance(d.confirm(words, "n2")[0], SnapshotEnded)


def test_an_smp_restarted_between_snapshots_changes_nothing() -> None:
    assert Driver().cycle.smp_restarted("n1") == []


def test_a_suspended_encoder_that_outlived_its_smp_delays_the_commit() -> None:
    """The new SMP refuses to commit over it until it is dead, then hears the word again."""
    d = Driver().encoding()
    d.cycle.smp_restarted("n1")
    commits = d.encoders_die("n0", "n2")
    d.confirm(commits, "n0", "n2")
    (mine,) = [c for c in commits if getattr(c, "node", "") == "n1"]
    assert isinstance(mine, Send)
    refused = m.Refused(TransitionRefusedError("is ENCODING"))
    assert d.cycle.answered("n1", mine.message, refused) == []
    again = d.encoders_die("n1")
    assert again == [mine]
    assert isinstance(d.confirm(again)[0], SnapshotEnded)


def test_an_interval_that_is_not_fixed_counts_from_where_training_went_back_to() -> None:
    d = Driver()
    d.cycle.schedule = Schedule(20, fixed=False)
    d.propose(100)
    d.confirm(d.cycle.handle("n0", m.Missed("dp0", d.cycle.snapshot)))
    d.propose(50)
    assert d.cycle.iteration == 70


OLDER = SnapshotId(6, 3)


def test_a_local_snapshot_gets_parity_where_it_lies() -> None:
    d = Driver()
    sent = d.cycle.protect(OLDER, 8, WORLD)
    assert to_all(sent, m.Encode) and d.cycle.snapshot == OLDER
    sent = d.encoded()
    assert level_of(sent) == "protected"
    (ended,) = d.confirm(sent)
    assert ended == SnapshotEnded(OLDER, 8, "protected", again=True)
    d.propose()
    assert d.cycle.snapshot == FIRST


def test_what_was_committed_is_never_aborted_when_its_parity_fails() -> None:
    d = Driver()
    d.cycle.protect(OLDER, 8, WORLD)
    (kill,) = d.cycle.handle("n0", m.OrderFailed(OLDER, WORLD, "bad bytes", "dp0"))
    assert isinstance(kill, KillWorld)
    sent = d.encoders_die()
    assert level_of(sent) == "local"
    (ended,) = d.confirm(sent)
    assert isinstance(ended, SnapshotEnded) and ended.again and d.cycle.phase == CyclePhase.IDLE


def test_without_stripes_nothing_is_protected_later() -> None:
    assert Driver(parity=False).cycle.protect(OLDER, 8, WORLD) == []


def test_a_capture_that_never_ends_is_given_up_after_its_time() -> None:
    """The daemons live; what one of them should have told was lost, or its trainer hangs."""
    d = Driver()
    d.propose(progress=10)
    d.seal("dp0", "dp2")
    assert d.cycle.overdue(12, 50.0, 300.0) == [], "its iteration is not passed yet"
    assert d.cycle.overdue(13, 400.0, 300.0) == [], "its time begins now"
    assert d.cycle.overdue(13, 699.0, 300.0) == []
    aborts = d.cycle.overdue(14, 701.0, 300.0)
    assert to_all(aborts, m.Abort)
    (ended,) = d.confirm(aborts)
    assert isinstance(ended, SnapshotEnded) and ended.level == "aborted"
    assert "dp1" in ended.reason and "dp0" not in ended.reason and "300 s" in ended.reason


def test_each_capture_has_its_own_time() -> None:
    d = Driver()
    d.propose(progress=10)
    d.cycle.overdue(13, 400.0, 300.0)
    d.confirm(d.confirm(d.seal()) or d.encoded())
    d.propose(progress=13)
    assert d.cycle.overdue(17, 701.0, 300.0) == []
    assert d.cycle.overdue(17, 1000.0, 300.0) == []
    assert to_all(d.cycle.overdue(17, 1002.0, 300.0), m.Abort)


def refuse(d: Driver, error: type[MegatronFTError]) -> None:
    """The first node refuses the permit that is under way."""
    grant = m.Grant(7, d.cycle.snapshot, d.cycle.iteration, False)
    d.confirm(d.cycle.answered("n0", grant, m.Refused(error("no"))))
    assert d.cycle.phase == CyclePhase.IDLE


@pytest.mark.parametrize("fixed", [True, False])
def test_a_refusal_that_lasts_is_tried_again_when_its_iteration_is_reached(fixed: bool) -> None:
    """An arena's file is gone: asked four times a second, the schedule would run away."""
    d = Driver()
    d.cycle.schedule.fixed = fixed
    d.propose(progress=10)
    refuse(d, ControlPlaneError)
    assert d.propose(progress=10) == [] and d.propose(progress=11) == []
    assert to_all(d.propose(progress=12), m.Grant)
    assert d.cycle.iteration == 14


def test_a_refusal_does_not_delay_training_that_has_gone_back() -> None:
    d = Driver()
    d.propose(progress=10)
    refuse(d, ControlPlaneError)
    assert to_all(d.propose(progress=3), m.Grant)


@pytest.mark.parametrize("error", [TransitionRefusedError, PinnedError])
def test_what_may_end_at_any_moment_is_tried_again_at_once(error: type[MegatronFTError]) -> None:
    d = Driver()
    d.propose(progress=10)
    refuse(d, error)
    assert to_all(d.propose(progress=10), m.Grant)


def test_a_slot_that_a_stuck_trainer_keeps_is_not_asked_for_all_the_time() -> None:
    d = Driver()
    d.propose(progress=10)
    d.cycle.overdue(13, 0.0, 300.0)
    d.confirm(d.cycle.overdue(13, 301.0, 300.0))
    d.propose(progress=13)
    refuse(d, TransitionRefusedError)
    assert d.propose(progress=14) == []
    d.propose(progress=16)
    d.confirm(d.confirm(d.seal()) or d.encoded())
    d.propose(progress=18)
    refuse(d, TransitionRefusedError)
    assert to_all(d.propose(progress=18), m.Grant), "one was committed: it is stuck no more"


def test_wrong_bytes_of_a_local_snapshot_are_named_when_it_gets_no_parity() -> None:
    d = Driver()
    d.cycle.protect(FIRST, 12, WORLD)
    d.cycle.handle("n1", m.OrderFailed(FIRST, WORLD, "wrong bytes", "dp1"))
    d.cycle.handle("n2", m.OrderFailed(FIRST, WORLD, "a member has left", ""))
    (ended,) = d.confirm(d.encoders_die())
    assert isinstance(ended, SnapshotEnded) and ended.level == "local" and ended.corrupt == {"dp1"}
