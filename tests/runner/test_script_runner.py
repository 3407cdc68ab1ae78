"""Running scripts, with real processes: nothing is simulated, and nothing is left running."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from opendataflow_dagster.runner import process_tree
from opendataflow_dagster.runner.process_tree import adopt_orphans
from opendataflow_dagster.runner.script import Ended, Scripts

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a child subreaper")

# What `odf run` is in these tests: one process that runs one script and tells how it ended.
RUNNER = """
import json, os, signal, sys
from opendataflow_dagster.runner.script import Scripts

signal.signal(signal.SIGINT, signal.default_int_handler)
print("before")
with Scripts(stop_grace=float(sys.argv[1])) as scripts:
    ended = scripts.run(sys.argv[2:], dict(os.environ))
print(json.dumps([ended.code, ended.reason, scripts.stopping]))
"""
NUMBERED = {"dataflow_jobid": "loadbob", "dataflow_generation": "1"}
HERE = str(Path(__file__).parents[2])


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    """An environment that marks this test's processes; none of them may outlive it."""
    mark = f"dataflow_test={uuid4()}"
    yield {"PATH": os.environ["PATH"], "PYTHONPATH": HERE, **dict([mark.split("=")])}
    left = carrying(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.fixture
def scripts() -> Iterator[Scripts]:
    with Scripts(stop_grace=0.3) as scripts:
        yield scripts


@pytest.fixture
def runner(env: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that runs one script; what it prints is read from a pipe."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *, stop_grace: float = 5) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RUNNER, str(stop_grace), "sh", "-c", script]
        process = subprocess.Popen(
            command, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "before\n"
        return process

    yield start
    for process in started:
        with process:  # closes the pipe and waits
            process.kill()


def carrying(mark: str) -> list[int]:
    """The processes whose environment holds `mark`, other than this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def outcome(process: subprocess.Popen[str]) -> list:
    return json.loads(process.communicate()[0].splitlines()[-1])


def wait_for(path: Path) -> str:
    """Return the text of a file that a script is writing; it renames the file into place."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)
    return path.read_text()


def write_script(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


# --- the end of a script


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("true", 0, ""),
        ("exit 3", 3, "exit code 3"),
        ("exit 255", 255, "exit code 255"),
        ("kill -KILL $$", 137, "killed by SIGKILL"),
        ("kill -TERM $$", 143, "killed by SIGTERM"),
        ("kill -SEGV $$", 139, "killed by SIGSEGV"),
    ],
)
def test_the_code_is_what_a_shell_would_give(scripts, env, script, code, reason):
    ended = scripts.run(["sh", "-c", script], env)
    assert (ended.code, ended.reason) == (code, reason)
    assert ended.seconds > 0


def test_arguments_and_environment_arrive_exactly(scripts, env, capfd):
    values = ["y z", "", '"', "'", "$(x)", "`x`", "a\nb", "\\", "*", "é€😀", "-n", "a=b;c"]
    code = "import os, sys; print([sys.argv[1:], os.environ['odd']])"
    env["odd"] = "".join(values)
    assert scripts.run([sys.executable, "-c", code, *values], env).code == 0
    assert capfd.readouterr().out == f"{[values, env['odd']]}\n"


def test_only_the_given_environment_arrives(scripts, capfd, monkeypatch):
    monkeypatch.setenv("PASSKEY", "plugh")
    assert scripts.run(["/usr/bin/env"], {"dataid": "1"}).code == 0
    assert capfd.readouterr().out == "dataid=1\n"


def test_output_passes_through_as_it_comes_and_after_our_own(runner, tmp_path):
    go_on = tmp_path / "go on"
    process = runner(f"echo first; while [ ! -e '{go_on}' ]; do sleep 0.01; done; echo last")
    assert read_line(process) == "first"  # though the script still runs, as nobody let it go on
    go_on.touch()
    assert read_line(process) == "last"
    assert outcome(process) == [0, "", None]


def test_a_script_starts_with_default_signals_and_an_empty_mask(scripts, env, capfd):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        code = scripts.run(["sh", "-c", "yes | head -1; kill -PIPE $$"], env).code
        assert scripts.run(["grep", "^Sig[BI]", "/proc/self/status"], env).code == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert code == 128 + signal.SIGPIPE
    printed, complaints = capfd.readouterr()
    assert complaints == ""  # of `yes`, which a broken pipe ends silently
    ignored_or_blocked = [int(line.split()[1], 16) for line in printed.splitlines()[1:]]
    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1]
    assert not any(mask >> (n - 1) & 1 for mask in ignored_or_blocked for n in wanted)


def test_stdin_is_null_for_workers_and_inherited_otherwise(env, tmp_path):
    (tmp_path / "in").write_text("hello\n")
    code = RUNNER.replace("dict(os.environ)", "dict(os.environ), stdin_null=sys.argv[3] == '-e'")
    for option, seen in (("-e", "0"), ("-u", "6")):
        with open(tmp_path / "in") as stdin:
            printed = subprocess.run(
                [sys.executable, "-c", code, "1", "sh", option, "-c", "wc -c"],
                env=env,
                stdin=stdin,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        assert printed.splitlines()[1].strip() == seen


# --- what can't be started


def test_a_name_without_a_slash_is_found_in_the_path_of_the_given_environment(
    scripts, env, tmp_path, capfd
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "shadowed").mkdir()
    write_script(tmp_path / "shadowed" / "tool", "not executable: passed over", 0o644)
    write_script(tmp_path / "bin" / "tool", "#!/bin/sh\necho found $1\n")
    env["PATH"] = f"{tmp_path}/shadowed:{tmp_path}/bin"
    assert scripts.run(["tool", "it"], env).code == 0
    assert capfd.readouterr().out == "found it\n"


@pytest.mark.parametrize("name", ["plain.sh", "-dashed/plain.sh"])
def test_a_script_without_a_first_line_is_run_by_sh(scripts, env, tmp_path, capfd, name):
    (tmp_path / "-dashed").mkdir()
    write_script(tmp_path / name, 'echo "$0:$1:$2"; exit 4\n')
    if name == "plain.sh":
        name = "./plain.sh"
    assert scripts.run([name, "a b", "$(x)"], env).code == 4
    assert capfd.readouterr().out == f"{name}:a b:$(x)\n"


def test_what_cannot_start_says_why(scripts, env, tmp_path):
    write_script(tmp_path / "text.sh", "#!/bin/sh\n", 0o644)
    write_script(tmp_path / "crlf.sh", "#!/bin/sh\r\n")
    (tmp_path / "binary").write_bytes(b"\x7fNOT\0a program")
    (tmp_path / "binary").chmod(0o755)

    def refusal(*argv: str) -> tuple[int, str]:
        ended = scripts.run(list(argv), env)
        assert ended.reason.startswith("cannot start: ")
        return ended.code, ended.reason.removeprefix("cannot start: ")

    assert refusal("./none.sh") == (127, "./none.sh: not found")
    assert refusal("no-such-tool") == (127, "no-such-tool: not found in PATH")
    assert refusal("text.sh") == (
        127,
        "text.sh: not found in PATH; for the file in this folder write ./text.sh",
    )
    assert refusal("./text.sh") == (126, "./text.sh: not executable: run `chmod +x ./text.sh`")
    assert refusal("./crlf.sh") == (
        126,
        "./crlf.sh: its interpreter is missing: '#!/bin/sh\\r'",
    )
    assert refusal("./binary") == (126, "./binary: Exec format error")
    assert refusal("/usr/bin") == (126, "/usr/bin: is a folder")
    assert refusal("true", "a\0b") == (126, "'true': embedded null byte")
    assert refusal("true", "x" * 3_000_000)[0] == 126
    assert refusal("") == (127, ": not found in PATH")


# --- limits and lost claims


def test_a_script_past_its_time_limit_is_ended(scripts, env):
    ended = scripts.run(["sleep", "60"], env, time_limit=0.1)
    assert ended[:2] == (143, "time limit of 0.1 s")
    assert ended.seconds < 30


def test_a_script_that_ignores_the_end_of_its_time_is_killed(scripts, env):
    stubborn = ["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"]
    ended = scripts.run(stubborn, env, time_limit=0.1, grace=0.2)
    assert ended[:2] == (137, "time limit of 0.1 s")


def test_success_after_the_time_limit_is_no_success(scripts, env):
    ended = scripts.run(["sh", "-c", "trap 'exit 0' TERM; sleep 60"], env, time_limit=0.2)
    assert ended[:2] == (143, "time limit of 0.2 s")


def test_a_script_within_its_time_limit_is_left_alone(scripts, env):
    assert scripts.run(["sleep", "0.1"], env, time_limit=30).code == 0


def test_heartbeats_continue_while_the_script_runs(scripts, env, tmp_path):
    beats = []

    def beat() -> None:  # neither True nor False: nothing is known, and the script goes on
        beats.append(time.monotonic())
        if len(beats) == 3:
            (tmp_path / "enough").touch()

    waiting = ["sh", "-c", "while [ ! -e enough ]; do sleep 0.01; done"]
    assert scripts.run(waiting, env, beat=beat, beat_every=0.03).code == 0
    assert len(beats) >= 3


def test_a_lost_claim_ends_the_script(scripts, env):
    ended = scripts.run(["sleep", "60"], env, beat=lambda: False, beat_every=0.05)
    assert ended[:2] == (143, "claim lost")


@pytest.mark.parametrize(
    ("trap", "cleaned"), [("sleep 0.6; touch cleaned; exit", True), ("", False)]
)
def test_an_exception_of_the_beat_is_raised_once_the_script_has_ended(
    scripts, env, tmp_path, trap, cleaned
):
    def beat() -> bool:
        wait_for(tmp_path / "pid")
        raise RuntimeError("no database")

    script = f"trap '{trap}' TERM; echo $$ > new; mv new pid; while :; do sleep 0.05; done"
    grace = 20 if cleaned else 0.2
    with pytest.raises(RuntimeError, match="no database"):
        scripts.run(["sh", "-c", script], env, beat=beat, beat_every=0.05, grace=grace)
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert (tmp_path / "cleaned").exists() is cleaned


def test_an_exit_code_collected_by_another_thread_is_a_failure(scripts, env, tmp_path):
    def thief() -> None:
        os.waitpid(int(wait_for(tmp_path / "pid")), 0)

    thread = threading.Thread(target=thief)
    thread.start()
    # It ends while `run` is busy with the beat, so that only the thief waits for it.
    ended = scripts.run(
        ["sh", "-c", "echo $$ > new; mv new pid; sleep 0.2"],
        env,
        beat=thread.join,
        beat_every=0.01,
    )
    assert ended.code == 1
    assert "unknown" in ended.reason


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_whole_group(runner, tmp_path, number):
    script = (
        "sh -c 'trap \"echo inner; exit\" TERM INT HUP; echo ready; while :; do sleep 0.02; done'"
        "; echo never"
    )
    process = runner(script)
    assert read_line(process) == "ready"
    process.send_signal(number)
    printed = process.communicate()[0].splitlines()
    assert "inner" in printed
    assert "never" not in printed
    assert json.loads(printed[-1]) == [128 + number, f"stopped by {number.name}", number]


def test_a_script_may_end_in_order_when_it_is_stopped(runner):
    trap = "trap 'echo cleaned; exit 5' TERM; echo ready; while :; do sleep 0.02; done"
    process = runner(trap)
    assert read_line(process) == "ready"
    process.terminate()
    assert read_line(process) == "cleaned"
    assert outcome(process) == [5, "stopped by SIGTERM", signal.SIGTERM]


def test_success_after_a_stop_is_no_success(runner):
    process = runner("trap 'exit 0' TERM; echo ready; while :; do sleep 0.02; done")
    assert read_line(process) == "ready"
    process.terminate()
    assert outcome(process) == [143, "stopped by SIGTERM", signal.SIGTERM]


def test_a_script_that_ignores_a_stop_is_killed_after_the_grace(runner):
    process = runner("trap '' TERM; echo ready; while :; do sleep 0.05; done", stop_grace=0.3)
    assert read_line(process) == "ready"
    process.terminate()
    assert outcome(process) == [137, "stopped by SIGTERM", signal.SIGTERM]


def test_a_second_signal_kills(runner):
    script = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.02; done"
    process = runner(script, stop_grace=600)
    assert read_line(process) == "ready"
    process.terminate()
    assert read_line(process) == "heard"
    time.sleep(0.3)  # two at once are one: that is how `timeout` sends them
    process.terminate()
    assert outcome(process) == [137, "stopped by SIGTERM", signal.SIGTERM]


def test_a_stopped_process_receives_the_signal(runner):
    process = runner("echo ready; kill -STOP $$; exit 9", stop_grace=600)
    assert read_line(process) == "ready"
    process.terminate()
    code, reason, _ = outcome(process)
    assert (code, reason) in [(143, "stopped by SIGTERM"), (9, "stopped by SIGTERM")]


def test_nothing_starts_after_a_signal_and_handlers_are_restored(env, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with Scripts() as scripts:
        os.kill(os.getpid(), signal.SIGTERM)
        ended = scripts.run(["touch", "started"], env)
        assert scripts.stopping == signal.SIGTERM
    assert ended == Ended(143, "stopped by SIGTERM", 0.0, began=False)
    assert not (tmp_path / "started").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_while_the_script_is_being_started_is_not_lost(env, monkeypatch):
    spawn = os.posix_spawn

    def spawn_then_signal(*args, **options) -> int:
        pid = spawn(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return pid

    with Scripts() as scripts:
        monkeypatch.setattr(os, "posix_spawn", spawn_then_signal)
        ended = scripts.run(["sleep", "60"], env)
    assert ended[:2] == (143, "stopped by SIGTERM")


@pytest.fixture
def interruptible():
    """Python's own handler of SIGINT: a Spark that another test started has one of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@linux
def test_orphans_are_adopted_until_the_last_of_several_runs_is_over(interruptible):
    first, second = Scripts(), Scripts()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert adopt_orphans()
    second.__exit__()
    assert not adopt_orphans(False)
    with pytest.raises(KeyboardInterrupt):  # not by the first, which the second has found
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@linux
def test_a_stop_reaches_the_scripts_of_all_threads(env):
    with Scripts() as scripts, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(scripts.run, ["sleep", "60"], env) for _ in range(4)]
        while len(carrying(f"dataflow_test={env['dataflow_test']}")) < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert [each.result()[:2] for each in running] == [(143, "stopped by SIGTERM")] * 4


def test_leaving_by_an_exception_ends_the_scripts_of_the_threads(env, tmp_path):
    ready = ["sh", "-c", "echo > new; mv new ready; exec sleep 60"]

    def leave(pool: ThreadPoolExecutor) -> None:
        with Scripts() as scripts:
            running.append(pool.submit(scripts.run, ready, env))
            wait_for(tmp_path / "ready")
            raise KeyError

    running: list[Future[Ended]] = []
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyError):
            leave(pool)
        assert running[0].result()[:2] == (143, "stopped by SIGTERM")


def test_scripts_of_a_thread_without_handlers(env):
    def run() -> Ended:
        with Scripts() as scripts:
            return scripts.run(["sh", "-c", "exit 3"], env)

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result().code == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_sigchld_loses_no_exit_code(env):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Scripts() as scripts:
            assert scripts.run(["sh", "-c", "exit 3"], env).code == 3
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


# --- what a script leaves behind


@pytest.mark.parametrize("trap", ["", "trap '' TERM HUP; "])
def test_a_background_child_is_ended_with_its_script(scripts, env, tmp_path, trap):
    script = f"sh -c '{trap}echo $$ > new; mv new pid; while :; do sleep 0.05; done' & "
    ended = scripts.run(["sh", "-c", script + "while [ ! -e pid ]; do sleep 0.01; done"], env)
    assert ended[:2] == (0, "")
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_child_that_still_writes_the_last_lines_may_end_by_itself(scripts, env, tmp_path):
    script = "mkfifo pipe; (cat pipe; sleep 0.03; echo last) > log & exec > pipe; echo first"
    assert scripts.run(["sh", "-c", script], env).code == 0
    assert (tmp_path / "log").read_text() == "first\nlast\n"


DAEMON = "setsid sh -c 'trap \"\" TERM; echo $$ > new; mv new pid; while :; do sleep 0.05; done' &"
ORPHAN = f"({DAEMON})"  # its parent ends at once, and so it is ours while its script still runs
DAEMON_IS_UP = "while [ ! -e pid ]; do sleep 0.01; done"


@linux
@pytest.mark.parametrize("daemon", [DAEMON, ORPHAN])
def test_a_daemon_that_left_the_group_is_killed(scripts, env, tmp_path, daemon):
    script = f"{daemon}\n{DAEMON_IS_UP}"
    assert scripts.run(["sh", "-c", script], env | NUMBERED).code == 0
    assert not is_running(int((tmp_path / "pid").read_text()))


@linux
@pytest.mark.parametrize("moment", ["_children", "_orphans"])
def test_the_child_of_a_daemon_that_ends_while_it_is_listed_is_killed(
    scripts, env, tmp_path, monkeypatch, moment
):
    """A process that ends leaves us its children, and the last listing doesn't have them."""
    inner = "setsid sh -c 'echo $$ > new; mv new inner; exec sleep 60' & "
    (tmp_path / "daemon").write_text(f"trap '' TERM; {inner} wait")
    listed = getattr(process_tree, moment)

    def listed_just_before_the_end(*args):
        found = listed(*args)
        monkeypatch.setattr(process_tree, moment, listed)
        listed_now = found if moment == "_children" else found[0]
        # Not the other children of this process: the server and the Java of other tests.
        for pid in set(listed_now) & set(carrying(f"dataflow_test={env['dataflow_test']}")):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return found

    script = "(setsid sh ./daemon &); while [ ! -e inner ]; do sleep 0.01; done"
    monkeypatch.setattr(process_tree, moment, listed_just_before_the_end)
    assert scripts.run(["sh", "-c", script], env | NUMBERED).code == 0
    assert not is_running(int((tmp_path / "inner").read_text()))


# Each process lives for a moment only: it starts the next one, and ends.
CHAIN = """
import os, signal, time
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("up", "w").close()
end = time.monotonic() + 60
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
"""


@linux
def test_a_daemon_that_forks_and_ends_without_pause_is_killed(scripts, env, tmp_path):
    (tmp_path / "chain.py").write_text(CHAIN)
    script = f"{sys.executable} -S chain.py & while [ ! -e up ]; do sleep 0.01; done"
    assert scripts.run(["sh", "-c", script], env | NUMBERED).code == 0
    assert carrying(f"dataflow_test={env['dataflow_test']}") == []


@linux
def test_leftovers_of_one_script_are_not_those_of_another(scripts, env, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    ended: dict[str, Ended] = {}

    def run(folder: Path, rest: str) -> None:
        script = f"cd {folder}; {ORPHAN}; {DAEMON_IS_UP}; {rest}"
        mine = env | NUMBERED | {"dataid": folder.name}  # the same job, another chunk
        ended[folder.name] = scripts.run(["sh", "-c", script], mine, stdin_null=True)

    waits = "while [ ! -e stop ]; do sleep 0.01; done"
    threads = [
        threading.Thread(target=run, args=(one, "")),
        threading.Thread(target=run, args=(other, waits)),
    ]
    for thread in threads:
        thread.start()
    wait_for(other / "pid")
    threads[0].join()
    assert ended["one"].code == 0
    assert not is_running(int((one / "pid").read_text()))
    assert is_running(int((other / "pid").read_text()))
    (other / "stop").touch()
    threads[1].join()
    assert not is_running(int((other / "pid").read_text()))


@linux
def test_children_that_are_not_a_scripts_are_left_alone(scripts, env):
    with subprocess.Popen(["sleep", "60"], env=env, start_new_session=True) as own:
        assert scripts.run(["sh", "-c", "sleep 60 &"], env | NUMBERED).code == 0
        assert own.poll() is None
        own.terminate()


@linux
def test_many_runs_leak_no_file_descriptor_and_no_process(scripts, env):
    before = len(os.listdir("/proc/self/fd"))
    started = time.perf_counter()
    for _ in range(200):
        assert scripts.run(["/bin/true"], env | NUMBERED).code == 0
    print(f"{(time.perf_counter() - started) * 5:.2f} ms per run of /bin/true")
    assert len(os.listdir("/proc/self/fd")) == before


# --- without pidfd and /proc, as on macOS


def test_it_works_without_pidfds(env, monkeypatch, tmp_path):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with Scripts() as scripts:
        assert scripts.run(["sh", "-c", "sleep 0.1; exit 3"], env).code == 3
        ended = scripts.run(["sleep", "60"], env, time_limit=0.1)
        assert ended[:2] == (143, "time limit of 0.1 s")


# --- on a terminal


class Shell:
    """A process that leads a session on a terminal of its own, as a shell does, and runs jobs."""

    def __init__(self, env: dict[str, str], script: str) -> None:
        self.terminal, slave = pty.openpty()
        code = (
            "import os, signal, subprocess, sys\n"
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "signal.signal(signal.SIGTTOU, signal.SIG_IGN)\n"
            f"os.close(os.open({os.ttyname(slave)!r}, os.O_RDWR))\n"  # becomes our terminal
            "job = subprocess.Popen(sys.argv[1:], process_group=0)\n"
            "os.tcsetpgrp(0, job.pid)\n"
            "while True:\n"
            "    _, status = os.waitpid(job.pid, os.WUNTRACED)\n"
            "    if not os.WIFSTOPPED(status):\n"
            "        break\n"
            "    print('suspended', os.tcgetpgrp(0) == job.pid, flush=True)\n"
            "    os.tcsetpgrp(0, os.getpgrp())\n"
            "    sys.stdin.readline()\n"  # `fg`
            "    os.tcsetpgrp(0, job.pid)\n"
            "    os.killpg(job.pid, signal.SIGCONT)\n"
            "print('foreground', os.tcgetpgrp(0) == job.pid, flush=True)\n"
        )
        runner = RUNNER.replace(
            "signal.signal(signal.SIGINT, signal.default_int_handler)",
            "[signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGTTOU)]",
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, sys.executable, "-c", runner, "1", "sh", "-c", script],
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def expect(self, text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert select.select([self.terminal], [], [], max(left, 0))[0], self.seen
            self.seen += os.read(self.terminal, 1000).decode()
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


def test_a_script_may_ask_on_the_terminal(env):
    with Shell(env, "read answer; echo you said $answer") as shell:
        shell.expect("before")
        shell.type("yes\n")
        shell.expect("you said yes")
        shell.expect('[0, "", null]')
        shell.expect("foreground True")


# Who has read from the terminal has it: from then on, keys reach the script.
LENT = "read go; echo ready; read answer; echo you said $answer"


def test_ctrl_c_reaches_the_script_and_counts_as_a_stop(env):
    with Shell(env, LENT) as shell:
        shell.type("go\n")
        shell.expect("ready")
        shell.type("\x03")
        shell.expect('[130, "stopped by SIGINT", 2]')
        shell.expect("foreground True")


def test_ctrl_z_suspends_both_until_fg(env):
    with Shell(env, LENT) as shell:
        shell.type("go\n")
        shell.expect("ready")
        shell.type("\x1a")
        shell.expect("suspended True")
        shell.type("fg\n")
        shell.type("yes\n")
        shell.expect("you said yes")
        shell.expect('[0, "", null]')
        shell.expect("foreground True")
