"""`graphkeep run`: the program behaves as under `python`, and the verdict says what to change."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from graphkeep.report._read import read, read_all
from graphkeep.report._run import Run
from graphkeep.report._verdict import verdict

PLAIN = [sys.executable]
OURS = [sys.executable, "-m", "graphkeep", "run"]


def call(command: list[str], folder: Path, **kw: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False, **kw)


def write(folder: Path, source: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def the_run(folder: Path, name: str = "train.py") -> Run:
    (file,) = folder.glob(f"{name}.*.graphkeep")
    return read(file)


LAST = re.compile(r"(?s)verdict: .*?\nwhy: .*?\nnext: .*?\n {9}graphkeep report .*\n\Z")


# --- the program as it was: none of these needs torch, and none imports it -------------------------------------------------

AS_IT_WAS = {
    "arguments": "import sys; print(sys.argv, __name__, __file__, sys.path[0], __spec__, __package__, __doc__, __builtins__)",
    "docstring": '"""Hello."""\nx: int = 1\nprint(__doc__, __annotations__, sorted(globals()))',
    "exit code": "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)",
    "exit with a text": "import sys; sys.exit('no data')",
    "exit with None": "import sys; sys.exit()",
    "exit with True": "import sys; sys.exit(True)",
    "exit deep inside": "import sys\ndef f(n):\n    f(n - 1) if n else sys.exit(5)\nf(20)",
    "os._exit": "import os; print('a', flush=True); os._exit(9)",
    "exception": "def f(x):\n    return 1 / x\nprint('before')\nf(0)",
    "chained exception": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e",
    "exception group": "raise ExceptionGroup('several', [ValueError(1), KeyError('k')])",
    "exception without a text": "class E(Exception):\n    def __str__(self): raise RuntimeError('no text')\nraise E",
    "Ctrl-C": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
    "excepthook of its own": """
        import sys
        sys.excepthook = lambda t, e, tb: print("hook", t, e, tb.tb_frame.f_code.co_name, tb.tb_next)
        1 / 0
        """,
    "syntax error": "def f(:\n",
    "bad indent": "if 1:\nprint(2)",
    "atexit": "import atexit\natexit.register(print, 'last')\nprint('first')",
    "atexit after an exception": "import atexit\natexit.register(print, 'last')\n1 / 0",
    "thread outlives the last line": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(.2), print("thread"))).start()
        print("main")
        """,
    "thread raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T'); t.start(); t.join(); print('ok')",
    "executor": "from concurrent.futures import ThreadPoolExecutor\nprint(list(ThreadPoolExecutor(2).map(abs, [-1, -2])))",
    "warning": "import warnings; warnings.warn('careful')",
    "stdin": "import sys; print(sys.stdin.read().upper())",
    "fork": """
        import os, sys
        pid = os.fork()
        if not pid:
            print("child"); sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
    "fork raises": """
        import os
        pid = os.fork()
        if not pid:
            1 / 0
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """,
    "spawn": """
        import multiprocessing as mp
        def work(q): q.put(__name__)
        if __name__ == "__main__":
            for way in ("spawn", "fork", "forkserver"):
                c = mp.get_context(way); q = c.Queue(); p = c.Process(target=work, args=(q,)); p.start()
                print(way, q.get()); p.join(); print(p.exitcode)
        """,
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, A.__module__)",
    "pickle at exit": """
        import atexit, pickle
        class A: pass
        atexit.register(lambda: print(type(pickle.loads(pickle.dumps(A())))))
        """,
    "main is importable": """
        import sys
        x = 3
        import __main__
        print(__main__.x, sys.modules["__main__"].__dict__ is globals())
        """,
    "closed stdout": "import sys; print('a'); sys.stdout.close()",
    "signal": "import os, signal; print('a', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
    "dies of SIGKILL": "import os, signal; print('a', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "inspect": "import inspect\ndef f():\n    return 1  # here\nprint(inspect.getsource(f))",
    "changes its folder": "import os; os.chdir('/'); print(os.getcwd())",
    "modules": "import sys; print('torch' in sys.modules)",
    "latin-1": None,
    "empty": "",
}


@pytest.mark.skipif(os.name == "nt", reason="signals and fork")
@pytest.mark.parametrize("name", AS_IT_WAS)
def test_a_program_does_the_same(name: str, tmp_path: Path) -> None:
    if name == "latin-1":
        (tmp_path / "train.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint('\xe9')\n")
    else:
        write(tmp_path, AS_IT_WAS[name])
    plain = call([*PLAIN, "train.py", "--lr", "0.1", "-o", "x"], tmp_path, input="text")
    ours = call([*OURS, "train.py", "--lr", "0.1", "-o", "x"], tmp_path, input="text")
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    quiet = name in ("os._exit", "signal", "dies of SIGKILL")
    assert bool(LAST.search(ours.stderr)) != quiet, ours.stderr
    assert LAST.sub("", ours.stderr) == plain.stderr
    (file,) = tmp_path.glob("train.py.*.graphkeep")
    assert read(file).header["argv"] == ["train.py", "--lr", "0.1", "-o", "x"]


PACKAGE = {
    "pkg/__init__.py": "print('init')",
    "pkg/__main__.py": """
        import sys
        from . import other
        print(sys.argv[1:], __spec__.name, __package__, sys.path[0])
        """,
    "pkg/other.py": "print(__name__)",
    "pkg/sub.py": "import sys; print(__name__, __spec__.name, sys.argv)",
}


@pytest.mark.parametrize("module", ["pkg", "pkg.sub", "json.tool"])
def test_a_module_does_the_same(module: str, tmp_path: Path) -> None:
    for name, source in PACKAGE.items():
        write(tmp_path, source, name)
    plain = call([*PLAIN, "-m", module, "-h"], tmp_path)
    ours = call([*OURS, "-m", module, "-h"], tmp_path)
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    assert LAST.sub("", ours.stderr) == plain.stderr


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_and_a_zip_file_with_a_main_do_the_same(packed: bool, tmp_path: Path) -> None:
    source = "import sys, helper; print(sys.argv[0], sys.path[0], __name__, helper.__name__)"
    if packed:
        with zipfile.ZipFile(tmp_path / "app", "w") as file:
            file.writestr("__main__.py", source)
            file.writestr("helper.py", "")
    else:
        write(tmp_path, source, "app/__main__.py")
        write(tmp_path, "", "app/helper.py")
    plain, ours = call([*PLAIN, "app"], tmp_path), call([*OURS, "app"], tmp_path)
    assert ours.stdout == plain.stdout != ""
    assert ours.returncode == plain.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_ends_it_as_it_ends_python(tmp_path: Path) -> None:
    write(tmp_path, "import time\nprint('ready', flush=True); time.sleep(60)")
    ends = []
    for command in (PLAIN, OURS):
        with subprocess.Popen([*command, "train.py"], cwd=tmp_path, stdout=-1, stderr=-1, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            # where in the line it was is a matter of chance
            ends.append((process.returncode, re.sub(r"\n +\^+", "", LAST.sub("", errors))))
    assert ends[0] == ends[1]
    assert ends[0][0] == -signal.SIGINT
    assert the_run(tmp_path).how == "raised"


def test_what_the_program_sets_before_it_imports_torch_counts(tmp_path: Path) -> None:
    write(tmp_path, "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())")
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    assert call([*OURS, "train.py"], tmp_path, env=environment).stdout == "1\n"


def test_the_loader_of_torch_is_its_own_again(tmp_path: Path) -> None:
    write(tmp_path, "import sys, torch\nprint(type(torch.__spec__.loader), type(torch.__loader__), len(sys.meta_path))")
    assert call([*OURS, "train.py"], tmp_path).stdout == call([*PLAIN, "train.py"], tmp_path).stdout


# --- bad input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["nothing.py"], "the script cannot be read: No such file or directory", 2),
        (["."], "this folder has no __main__.py", 2),
        (["-m", "no.such.module"], "there is no module no.such.module", 1),
        (["binary.py"], "no Python source", 2),
        (["-o", "no/such/folder/x.graphkeep", "train.py"], "the data file cannot be written", 1),
        (["-o", ".", "train.py"], "the data file cannot be written", 1),
        (["-o", "train.py", "train.py"], "there is a file that graphkeep has not written", 1),
        (["-o", "binary.py", "train.py"], "there is a file that graphkeep has not written", 1),
        (["--steps", "0", "train.py"], "0 is less than 1", 2),
        (["--fail-on", "nothing", "train.py"], "invalid choice", 2),
        ([], "required", 2),
    ],
)
def test_bad_input_is_said_before_the_program_starts(arguments: list[str], says: str, code: int, tmp_path: Path) -> None:
    write(tmp_path, "print('started')")
    (tmp_path / "binary.py").write_bytes(bytes(range(256)))
    ours = call([*OURS, *arguments], tmp_path)
    assert says in ours.stderr
    assert "Traceback" not in ours.stderr
    assert ours.returncode == code
    assert ours.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["binary.py", "train.py"]


def test_a_data_file_is_overwritten_and_stays_where_the_next_program_does_not_exist(tmp_path: Path) -> None:
    write(tmp_path, "print(1)")
    for _ in range(2):
        assert call([*OURS, "-o", "a.graphkeep", "train.py"], tmp_path).returncode == 0
    assert call([*OURS, "-o", "a.graphkeep", "nothing.py"], tmp_path).returncode == 2
    assert (tmp_path / "a.graphkeep").exists()


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no such device")
def test_a_path_that_cannot_be_read_again_has_no_verdict(tmp_path: Path) -> None:
    write(tmp_path, "print(1)")
    ours = call([*OURS, "-o", "/dev/null", "train.py"], tmp_path)
    assert (ours.returncode, ours.stdout) == (0, "1\n")
    assert ours.stderr == "graphkeep run: /dev/null cannot be read again, so there is no verdict\n"
    call([*OURS, "-o", "/dev/null", "nothing.py"], tmp_path)
    assert not Path("/dev/null").is_file()
    assert Path("/dev/null").exists()


def test_a_run_without_torch_is_said_to_be_one(tmp_path: Path) -> None:
    write(tmp_path, "print(1)")
    ours = call([*OURS, "train.py"], tmp_path)
    assert "verdict: no graph was seen\nwhy:     the program did not import torch\n" in ours.stderr


# --- what is said ------------------------------------------------------------------------------------------------------------

LOOP = """
    import sys, torch
    torch.manual_seed(0)
    def train(steps, keep):
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        skipped = []
        for i in range(steps):
            loss = net(torch.randn(4, 8)).pow(2).mean()
            if keep and i % 2:
                skipped.append(loss)
                continue
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(f"{loss.item():.9f}")
    train(40, "keep" in sys.argv)
    """


@pytest.mark.parametrize("arguments", [[], ["keep"]])
def test_a_leak_in_a_function_is_named_after_the_function_has_returned(arguments: list[str], tmp_path: Path) -> None:
    write(tmp_path, LOOP)
    plain = call([*PLAIN, "train.py", *arguments], tmp_path)
    ours = call([*OURS, "--fail-on", "leak", "train.py", *arguments], tmp_path)
    assert ours.stdout == plain.stdout
    assert ours.returncode == (3 if arguments else 0)
    first, _why, _next, command = ours.stderr.splitlines()
    if arguments:
        assert re.match(r"verdict: GK101 bytes grow: `skipped\[0\.\.\d+\]` \(list, local in train\(\)", first)
        assert "`skipped.append(loss.detach())`" in ours.stderr
    else:
        assert first == "verdict: nothing grows"
    (file,) = tmp_path.glob("*.graphkeep")
    assert command.strip() == f"graphkeep report {file.name}"
    run = read(file)
    assert run.how == "finished"
    assert run.unread == 0
    assert run.steps_done == (20 if arguments else 40)


def test_a_failed_backward_is_the_verdict(tmp_path: Path) -> None:
    source = """
        import torch
        def main():
            w = torch.ones(3, requires_grad=True)
            h = w.exp()
            for _ in range(3):
                h = h.sin()
                h.sum().backward()
        main()
        """
    write(tmp_path, source)
    plain = call([*PLAIN, "train.py"], tmp_path)
    ours = call([*OURS, "train.py"], tmp_path)
    assert ours.returncode == plain.returncode == 1
    assert ours.stderr.startswith("Traceback (most recent call last):\n  File")
    assert "cli" not in ours.stderr.split("RuntimeError")[0]
    assert (
        "verdict: GK201: this loss reaches a part of the graph that has been freed before, through local `h` in main()"
        in ours.stderr
    )
    assert the_run(tmp_path).error.startswith("RuntimeError: Trying to backward")


def test_a_failed_backward_that_the_program_has_caught_is_no_verdict_of_the_run_but_an_error_to_fail_on(tmp_path: Path) -> None:
    source = """
        import torch
        w = torch.ones(3, requires_grad=True)
        y = w.exp().sum()
        y.backward()
        try:
            y.backward()
        except RuntimeError:
            print("caught")
        """
    write(tmp_path, source)
    ours = call([*OURS, "--fail-on", "error", "-q", "train.py"], tmp_path)
    assert (ours.returncode, ours.stdout, ours.stderr) == (3, "caught\n", "")
    assert call([*OURS, "--fail-on", "leak", "-q", "train.py"], tmp_path).returncode == 0


def test_the_programs_own_exit_code_comes_first(tmp_path: Path) -> None:
    write(tmp_path, LOOP + "\n    sys.exit(4)")
    assert call([*OURS, "--fail-on", "leak", "-q", "train.py", "keep"], tmp_path).returncode == 4


def test_after_so_many_steps_the_watch_ends_and_the_program_goes_on(tmp_path: Path) -> None:
    write(tmp_path, LOOP)
    ours = call([*OURS, "--steps", "10", "-o", "a.graphkeep", "train.py", "keep"], tmp_path)
    run = read(tmp_path / "a.graphkeep")
    assert run.how == "steps"
    assert run.steps_done == 10
    assert "GK101" in ours.stderr


def test_memory_that_runs_out_is_the_verdict(tmp_path: Path) -> None:
    source = """
        import torch
        w = torch.ones(1000, requires_grad=True)
        y = w.exp()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        """
    write(tmp_path, source)
    ours = call([*OURS, "train.py"], tmp_path)
    assert "verdict: out of memory: OutOfMemoryError: CUDA out of memory." in ours.stderr
    assert ours.returncode == 1


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_what_was_written_before_a_kill_can_be_read(tmp_path: Path) -> None:
    source = """
        import os, time, torch
        w = torch.ones(1000, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        kept = []
        for i in range(100_000):
            loss = w.exp().sum()
            kept.append(w.exp().sum())
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            if i == 40: print("ready", flush=True)
            time.sleep(0.02)
        """
    write(tmp_path, source)
    with subprocess.Popen([*OURS, "train.py"], cwd=tmp_path, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(2.5)
        process.kill()
        process.communicate()
    run = the_run(tmp_path)
    assert run.how is None
    assert run.steps_done > 30
    assert run.sources
    assert run.unread == 0
    assert run.findings[0].id == "GK103"
    assert re.match(r"`kept\[0\.\.\d+\]` \(list, global of train\.py\)", run.findings[0].what)
    assert run.peak > 4000 * 30


def test_every_rank_has_its_file_and_one_of_them_brings_the_others(tmp_path: Path) -> None:
    source = """
        import gc, os, sys, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        net = DistributedDataParallel(torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        logs = []
        for i in range(20):
            loss = net(torch.full((4, 8), float(dist.get_rank()))).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            if dist.get_rank(): logs.append(loss)
        sys.stdout.write(f"{loss.item():.9f}\\n"); sys.stdout.flush()
        del net, optimizer
        gc.collect(); dist.barrier(); dist.destroy_process_group()
        """
    write(tmp_path, source)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = call([*launch, "train.py"], tmp_path, env=environment)
    ours = call([*launch, "-m", "graphkeep", "run", "train.py"], tmp_path, env=environment)
    assert ours.returncode == plain.returncode == 0, ours.stderr
    assert sorted(ours.stdout.split()) == sorted(plain.stdout.split())
    assert ours.stderr.count("verdict:") == 1
    files = sorted(tmp_path.glob("*.graphkeep"))
    assert [re.sub(r"\d{2,}", "N", f.name) for f in files] == ["train.py.N.rank0.graphkeep", "train.py.N.rank1.graphkeep"]
    runs = read_all([files[1]])
    assert [run.rank for run in runs] == [0, 1]
    assert [[f.id for f in run.findings] for run in runs] == [[], ["GK102"]]
    call([*launch, "-m", "graphkeep", "run", "-q", "-o", "out/a.graphkeep", "train.py"], tmp_path, env=environment)


def test_a_launcher_is_told_to_stand_before_graphkeep(tmp_path: Path) -> None:
    write(tmp_path, "print('child')")
    command = [*OURS, "-m", "torch.distributed.run", "--nproc-per-node", "1", "train.py"]
    ours = call(command, tmp_path)
    assert ours.stdout == "child\n"
    assert "torchrun ... -m graphkeep run train.py" in ours.stderr
    assert verdict(the_run(tmp_path, "torch.distributed.run")).verdict.startswith("no graph was seen")
