"""The first process of a sandbox: it starts the program, and ends every process of the sandbox when the harness ends.

Linux ends all processes of a PID namespace when the first one ends. The parent-death signal alone is not enough: it is
cleared when a process changes its user. This process keeps the read end of the pipe of questions, whose only write end
belongs to the harness. The kernel reports a hang-up there as soon as the harness is gone, however it ended.

It runs as ``python supervisor.py SECONDS CORES MODULE ARGUMENTS`` and imports the standard library only.
"""

from __future__ import annotations

import os
import runpy
import select
import sys


def wait(child: int, harness: int, seconds: float) -> int:
    """Wait until the child or the harness process ends, or `seconds` pass; return this process's exit code."""
    poll = select.poll()
    child_handle = os.pidfd_open(child)
    poll.register(child_handle, select.POLLIN)
    poll.register(harness, 0)  # without events only a hang-up is reported
    if child_handle not in dict(poll.poll(1e3 * seconds)):
        return 1
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def main() -> None:
    """Run the program named on the command line in a child process, and kill it when the harness dies."""
    seconds, cores, module, *arguments = sys.argv[1:]
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    child = os.fork()
    if child == 0:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    os.closerange(1, 3)  # the harness sees the end of the answers when the program ends
    os._exit(wait(child, 0, float(seconds)))


if __name__ == "__main__":
    main()
