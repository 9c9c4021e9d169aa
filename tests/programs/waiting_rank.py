"""Run by test_erasure_transports.py: does a rank sleep that only waits?"""

from __future__ import annotations

import resource
import time

import numpy as np

from megatron_ft.erasure.world import join_world

SECONDS = 0.5

if __name__ == "__main__":
    world = join_world()
    transport, word = world.transport(), np.zeros(1, np.uint8)
    if transport.rank == 0:
        pending = [transport.irecv(word, 1, 1)]
        # Giving way to others while still able to run counts as involuntary.
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        transport.waitall(pending)
        print(f"slept {resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before} times")
    else:
        time.sleep(SECONDS)
        transport.waitall([transport.isend(word, 0, 1)])
    world.leave()
