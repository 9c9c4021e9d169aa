"""DLRover's master and agent around a program; run in a network of its own.

python -m benchmarks.peers.dlrover_job JOB RANKS MODULE ARGUMENT...

The master is started here: `dlrover-run --standalone` would do it, but passes torch 2.13's
process handler one argument too few.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from megatron_ft.core.process_tools import free_port

RESTARTS = 8
END_SECONDS = 10.0


def main() -> int:
    """The agent's exit status."""
    job, ranks, module, *arguments = sys.argv[1:]
    port = free_port()
    os.environ |= {
        "ELASTIC_JOB_NAME": job,
        "NODE_NUM": "1",
        "NODE_RANK": "0",
        "DLROVER_MASTER_ADDR": f"127.0.0.1:{port}",
    }
    master = [sys.executable, "-m", "dlrover.python.master.main", "--platform", "local"]
    master += ["--port", str(port), "--node_num", "1", "--job_name", job]
    agent = [str(Path(sys.executable).with_name("dlrover-run")), "--nnodes=1"]
    agent += [f"--nproc_per_node={ranks}", f"--max_restarts={RESTARTS}", "--monitor-interval=1"]
    agent += ["-m", module, *arguments]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    leader, workers = subprocess.Popen(master, start_new_session=True), subprocess.Popen(agent)
    try:
        return workers.wait()
    finally:
        # The agent ends its trainers when it is asked to.
        workers.terminate()
        workers.wait(timeout=END_SECONDS)
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()


if __name__ == "__main__":
    sys.exit(main())
