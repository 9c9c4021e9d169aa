"""Rows about stripes: encode and rebuild end to end, over shared memory, TCP and slow links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.stripe.rank import Plan
from benchmarks.stripe.works import stripe_code
from benchmarks.stripe.world import Measured, measure
from benchmarks.table import Row
from megatron_ft.erasure.world import MPI, TCP
from tests.support.node_network import unavailable

MEBI = 1 << 20
SCHEMES = (("xor", 1, 1), ("xor", 3, 1), ("rs", 2, 2))
MEGABITS = 200
SLOW_MIB = 24
"""Bytes of a member where a link moves 24 MiB in a second."""
PACED_SECONDS = 3.0
"""How long an encode under a cap is made to take, so that little else counts."""
SHARDS = 2


def rows(mib: int, rounds: int) -> Iterator[Row]:
    """All of them; ``mib`` is a member's data."""
    for kind, k, m in SCHEMES:
        yield from _over(MPI, kind, k, m, mib, rounds)
    yield from _over(TCP, "xor", 3, 1, mib, rounds)
    yield _memory("rs", 2, 2, mib)
    if unavailable():
        return
    for transport in (MPI, TCP):
        yield from _slow_links(transport, "xor", 3, 1, rounds)


def _over(transport: str, kind: str, k: int, m: int, mib: int, rounds: int) -> Iterator[Row]:
    """One machine: everything in one world, in turn."""
    code = stripe_code(kind, k, m, mib * MEBI)
    least = code.data_bytes * (code.members - 1) // code.data_members
    paced = f"paced:{int(least / PACED_SECONDS)}"
    ways = ["gather", "direct", *(["ring"] if kind == "xor" else [])]
    lost = [",".join(map(str, range(n + 1))) for n in range(m)]
    rebuilds = [f"{verb}:{those}" for those in lost for verb in ("rebuild", "into")]
    works = ["encode", "kernel", "transfer", "transfer-cached", f"shards:{SHARDS}", *ways]
    works += [*rebuilds, paced if kind == "xor" else "pyeclib"]
    found = measure(Plan(kind, k, m, mib * MEBI, tuple(works), rounds), transport)
    name = f"{kind}:{k}+{m} over {transport}"
    yield from _encode_rows(name, found, least)
    yield from _way_rows(name, found, ways)
    if paced in works:
        yield _cap_row(name, found, paced)
    for those in lost:
        yield from _rebuild_rows(name, found, those)


def _encode_rows(name: str, found: Measured, least: int) -> Iterator[Row]:
    alone = zip(found.seconds("kernel"), found.seconds("transfer"), strict=True)
    slower = [max(both) for both in alone]
    share = _ratio(slower, found.seconds("encode"))
    note = "slower of kernel alone and the same bytes alone; checks included"
    yield Row(f"encode {name}", share, "x yardstick", 0.8, note=note)
    cached = zip(found.seconds("kernel"), found.seconds("transfer-cached"), strict=True)
    share = _ratio([max(both) for both in cached], found.seconds("encode"))
    note = "as many bytes alone, from one chunk into pieces that stay in a cache"
    yield Row(f"the same, transfer in a cache, {name}", share, "x yardstick", note=note)
    bare = _ratio(slower, found.seconds("gather"))
    yield Row(f"the same without digests, {name}", bare, "x yardstick")
    yield _processor_row(name, found)
    sent = [sum(done.to_peers) / least for done in found.one("encode")]
    yield Row(f"encode {name}: bytes", tuple(sent), "x L(N-1)/(N-m)", 1.0, False)
    shards = _ratio(found.seconds("encode"), found.seconds(f"shards:{SHARDS}"))
    yield Row(f"encode {name}, {SHARDS} shards a node", shards, "x speed of one")
    if "pyeclib" in found.plan.works:
        theirs = _ratio(found.cpu_seconds("pyeclib"), found.cpu_seconds("encode"))
        note = "processor seconds of PyECLib's encode(bytes), which sends nothing, over ours"
        yield Row(f"encode {name} against PyECLib", theirs, "x", 3.0, note=note)


def _processor_row(name: str, found: Measured) -> Row:
    """Where there are fewer cores than ranks, these add up instead of hiding each other."""
    works = ("kernel", "transfer", "gather", "encode")
    kernel, transfer, bare, whole = (median(found.cpu_seconds(work)) for work in works)
    parts = {"kernel": kernel, "transfer": transfer, "digests": whole - bare}
    giga = found.plan.size / 1e9
    note = ", ".join(f"{part} {seconds / giga:.2f}" for part, seconds in parts.items())
    alone = zip(found.cpu_seconds("kernel"), found.cpu_seconds("transfer"), strict=True)
    share = _ratio(found.cpu_seconds("encode"), [sum(both) for both in alone])
    title = f"encode {name}: processor time"
    return Row(title, share, "x kernel + transfer", more=False, note=f"s a GB: {note}")


def _way_rows(name: str, found: Measured, ways: Sequence[str]) -> Iterator[Row]:
    """Each way without digests, against ours without them; and the processor time of each."""
    for way in ways[1:]:
        speed = _ratio(found.seconds("gather"), found.seconds(way))
        cpu = _ratio(found.cpu_seconds(way), found.cpu_seconds("gather"))
        note = f"{sum(cpu) / len(cpu):.2f} x its processor time"
        yield Row(f"{way} {name}", speed, "x speed of gather", note=note)


def _cap_row(name: str, found: Measured, paced: str) -> Row:
    rate = int(paced.partition(":")[2])
    sent = max(done.sent for done in found.one(paced))
    off = tuple(100 * abs(sent / seconds / rate - 1) for seconds in found.seconds(paced))
    return Row(f"cap on encode {name}", off, "% off the setting", 10.0, False)


def _rebuild_rows(name: str, found: Measured, lost: str) -> Iterator[Row]:
    title = f"rebuild of {lost.count(',') + 1} lost, {name}"
    yield _against_moving(title, found, lost, note="all cores work: no limit")
    shares = _shares(found, lost)
    yield Row(f"{title}: bytes of a link", shares, "x its even share", 1.02, False)


def _against_moving(
    title: str, found: Measured, lost: str, limit: float | None = None, note: str = ""
) -> Row:
    time = _ratio(found.seconds(f"rebuild:{lost}"), found.seconds(f"into:{lost}"))
    return Row(title, time, "x moving L N/(N-m) alone", limit, False, note)


def _shares(found: Measured, lost: str) -> tuple[float, ...]:
    """What each survivor sent, over an even share of it."""
    gone = {int(number) for number in lost.split(",")}
    sent = [sum(d.to_peers) for d in found.one(f"rebuild:{lost}") if d.rank not in gone]
    even = sum(sent) / len(sent)
    return (max(sent) / even,)


def _memory(kind: str, k: int, m: int, mib: int) -> Row:
    """Memory beside the member for four times the data, over that for one."""
    most = [
        measure(Plan(kind, k, m, size * MEBI, ("encode",), 1, True), MPI).memory
        for size in (mib // 4, mib)
    ]
    growth = tuple(large.most_bytes / small.most_bytes for small, large in zip(*most, strict=True))
    note = f"{max(found.most_bytes for found in most[1]) / MEBI:.1f} MiB"
    name = f"encode {kind}:{k}+{m}, memory beside arenas, 4 x the data"
    return Row(name, growth, "x", 1.1, False, note)


def _slow_links(transport: str, kind: str, k: int, m: int, rounds: int) -> Iterator[Row]:
    """Every node has a link of its own, limited each way; the bound is bytes over its rate."""
    works = ("encode", "gather", "direct", "ring", "rebuild:0", "into:0")
    plan = Plan(kind, k, m, SLOW_MIB * MEBI, works, rounds)
    found = measure(plan, transport, megabits=MEGABITS)
    length = stripe_code(kind, k, m, plan.size).data_bytes
    byte_rate, members = MEGABITS * 1e6 / 8, k + m
    name = f"{kind}:{k}+{m} over {transport}, {MEGABITS} Mbit/s"
    bound = length * (members - 1) / k / byte_rate
    shares = tuple(bound / seconds for seconds in found.seconds("encode"))
    yield Row(f"encode {name}", shares, "x bound", 0.8)
    yield from _way_rows(name, found, works[1:4])
    bound = length * members / k / byte_rate
    shares = tuple(bound / seconds for seconds in found.seconds("rebuild:0"))
    yield Row(f"rebuild of 1 lost, {name}", shares, "x bound", 0.8)
    yield _against_moving(f"rebuild of 1 lost, {name}", found, "0", 1.3)


def _ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(over, under, strict=True))
