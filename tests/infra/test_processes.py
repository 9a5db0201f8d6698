import os
import signal
import subprocess
import sys
import time

import pytest

from infra import processes

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def start(tmp_path):
    running = []

    def start_(code, mark=tmp_path, **options):
        environment = {**os.environ, processes.MARK: str(mark)}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, **options)
        running.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield start_
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def living(*candidates):
    return [process.pid for process in candidates if process.poll() is None]


def test_a_process_is_known_by_its_start_and_gone_after_its_end(start):
    process = start(SLEEP)
    first = processes.started(process.pid)
    assert first is not None
    assert processes.started(process.pid) == first
    assert processes.started(os.getpid()) not in (None, first)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert processes.started(process.pid) is None, "a zombie has ended"
    process.wait()
    assert processes.started(process.pid) is None


def test_marked_finds_exactly_the_processes_of_one_run_even_in_other_sessions(start, tmp_path):
    mine = start(SLEEP)
    detached = start(SLEEP, start_new_session=True)
    start(SLEEP, mark=f"{tmp_path}-2")
    assert processes.marked(tmp_path) == sorted([mine.pid, detached.pid])


def test_marked_spares_the_caller_and_its_ancestors(tmp_path):
    code = (
        "import subprocess, sys, pathlib\n"
        "inner = 'import pathlib, sys; from infra import processes; print(processes.marked(pathlib.Path(sys.argv[1])))'\n"
        "subprocess.run([sys.executable, '-c', inner, sys.argv[1]], check=True)"
    )
    environment = {**os.environ, processes.MARK: str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_terminate_asks_first_and_kills_what_does_not_listen(start):
    gentle, stubborn = start(SLEEP), start(STUBBORN)
    ended = processes.terminate(lambda: living(gentle, stubborn), grace_seconds=0.3)
    assert ended == sorted([gentle.pid, stubborn.pid])
    assert gentle.wait() == -signal.SIGTERM
    assert stubborn.wait() == -signal.SIGKILL


def test_terminate_in_a_hurry_does_not_wait_out_the_grace_period(start):
    stubborn = start(STUBBORN)
    begun = time.monotonic()
    processes.terminate(lambda: living(stubborn), grace_seconds=60.0, hurry=lambda: True)
    assert stubborn.wait() == -signal.SIGKILL
    assert time.monotonic() - begun < 30.0


def test_terminate_without_processes_returns_at_once():
    assert processes.terminate(lambda: [], grace_seconds=60.0) == []
