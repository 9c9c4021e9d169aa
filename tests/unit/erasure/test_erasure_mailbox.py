"""Pairing of messages with the buffers that wait for them, without a network."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.errors import TransportError
from megatron_ft.erasure.tcp import CREDIT, Mailbox, Receive, Sent

TIMEOUT = 20.0
places = st.tuples(st.integers(0, 2), st.integers(0, 1))


def body(number: int) -> memoryview:
    return memoryview(bytes([number]))


@given(st.lists(st.tuples(st.booleans(), places), max_size=60))
def test_each_buffer_gets_the_next_message_of_its_sender_and_tag(
    steps: list[tuple[bool, tuple[int, int]]],
) -> None:
    """In whatever order messages come and buffers are posted."""
    taken: list[int] = []
    mailbox, sent = Mailbox(taken.append), Counter[tuple[int, int]]()
    posted: dict[tuple[int, int], list[Receive]] = defaultdict(list)
    for arrives, place in steps:
        if arrives:
            mailbox.arrived(*place, body(sent[place]))
            sent[place] += 1
        else:
            posted[place].append(mailbox.post(*place, np.full(1, 255, np.uint8)))
    for place, receives in posted.items():
        for number, receive in enumerate(receives):
            assert receive.done == (number < sent[place])
            assert receive.buffer[0] == (number if receive.done else 255)
    full = [place[0] for place, receives in posted.items() for r in receives if r.done]
    assert Counter(taken) == Counter(full)


@pytest.mark.parametrize("length", [0, 2, 3, 5, 6])
@pytest.mark.parametrize("early", [False, True])
def test_a_message_of_another_length_is_an_error_with_names(length: int, early: bool) -> None:
    mailbox, message = Mailbox(lambda peer: None), memoryview(bytes(length))
    buffer = np.full(4, 7, np.uint8)
    if early:
        mailbox.arrived(3, 77, message)
    receive = mailbox.post(3, 77, buffer)
    if not early:
        mailbox.arrived(3, 77, message)
    with pytest.raises(TransportError, match=f"rank 3 sent {length} bytes with tag 77, 4 were"):
        mailbox.wait(receive)
    assert buffer.tolist() == [7] * 4 and not receive.done
    with pytest.raises(TransportError):
        mailbox.is_done(Sent(1, 1))


def test_who_waits_is_woken_by_a_message_and_by_the_end_of_the_world() -> None:
    mailbox, outcomes = Mailbox(lambda peer: None), list[str]()

    def wait(receive: Receive) -> None:
        try:
            mailbox.wait(receive)
            outcomes.append("received")
        except TransportError as error:
            outcomes.append(str(error))

    receives = [mailbox.post(0, tag, np.zeros(1, np.uint8)) for tag in (1, 2)]
    threads = [threading.Thread(target=wait, args=(receive,)) for receive in receives]
    for thread in threads:
        thread.start()
    mailbox.arrived(0, 1, body(9))
    threads[0].join(TIMEOUT)
    mailbox.fail(TransportError("it is over"))
    threads[1].join(TIMEOUT)
    assert outcomes == ["received", "it is over"]


def test_a_sender_waits_for_a_peer_that_takes_nothing() -> None:
    mailbox = Mailbox(lambda peer: None)
    assert mailbox.is_done(Sent(1, CREDIT)) and not mailbox.is_done(Sent(1, CREDIT + 1))
    thread = threading.Thread(target=mailbox.wait, args=(Sent(1, CREDIT + 1),))
    thread.start()
    mailbox.peer_took(2)
    assert not mailbox.is_done(Sent(1, CREDIT + 1)) and thread.is_alive()
    mailbox.peer_took(1)
    thread.join(TIMEOUT)
    assert not thread.is_alive() and mailbox.is_done(Sent(1, CREDIT + 1))
