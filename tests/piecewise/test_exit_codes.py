"""What the exit code of each command says: five codes, each from every command that can give it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import piecewise.tools.buckets.plan
from piecewise.tools import cli
from piecewise.tools.demo import demo
from piecewise.tools.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]

CASES = """
import time
import torch
from torch import nn
import boundary_ops
import piecewise

def mix(x, out):
    out.copy_(x.cumsum(0))
    if broken and len(x) not in (4, 8):
        out[0] += out.data_ptr() % 1000 + 1

SCHEMA = "exit_code_test::mix(Tensor x, Tensor(a!) out) -> ()"
mix_ = boundary_ops.define(SCHEMA, mix, token_args={"x": 0, "out": 0})
broken = False

class Model(nn.Module):
    def __init__(self, raises=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.raises, self.size = raises, 0

    def forward(self, x):
        x = self.first(x) + self.size
        if self.raises is not None:
            raise self.raises("no such thing")
        out = torch.empty_like(x)
        mix_(x, out)
        return self.second(out)

def inputs(num_tokens):
    return (torch.ones(num_tokens, 8),), {}

def of(model):
    return piecewise.PrefillCase(model, inputs)

def right():
    return of(Model())

def different():
    global broken
    broken = True
    return of(Model())

def changing():
    model = Model()
    def change(num_tokens):
        model.size = model.size + 1
        return inputs(num_tokens)
    return piecewise.PrefillCase(model, change)

def factory_raises():
    raise RuntimeError("no weights here")

def factory_exits():
    raise SystemExit(0)

def factory_breaks_a_rule():
    return of(Model(boundary_ops.define("nonsense", mix)))

def inputs_raise():
    def make_inputs(num_tokens):
        raise KeyError("no such request")
    return piecewise.PrefillCase(Model(), make_inputs)

def forward_raises():
    return of(Model(ValueError))

def forward_exits():
    return of(Model(SystemExit))

def forward_has_no_memory():
    return of(Model(torch.OutOfMemoryError))

def forward_breaks_a_rule():
    return of(Model(piecewise.ConfigError))

class OwnError(BaseException):
    __slots__ = ()

def raises_an_error_of_its_own():
    raise OwnError("of its own")

def slow():
    print("loaded", flush=True)
    time.sleep(60)
"""

ON_IMPORT = {
    "exit_import_raises": "raise RuntimeError('no weights here')",
    "exit_import_exits": "import sys\nsys.exit(0)",
    "exit_import_is_no_python": "def case(:",
    "exit_import_lacks_another": "import a_package_nobody_has",
}
COMMANDS = {
    "explain": ("explain", "SPEC", "--tokens", "8"),
    "verify": ("verify", "SPEC", "--buckets", "4,8"),
    "bench": ("bench", "SPEC", "--tokens", "4", "--rounds", "1", "--variants", "graphed"),
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIECEWISE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("specs")
    (folder / "exit_cases.py").write_text(CASES)
    for name, text in ON_IMPORT.items():
        (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def run(*argv) -> int:
    return cli.main(list(map(str, argv)))


def run_on(command: str, spec: str, *more) -> int:
    return run(*(spec if part == "SPEC" else part for part in COMMANDS[command]), *more)


def process(specs, *argv, **options):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{specs}", **options.pop("env", {})}
    command = [sys.executable, "-m", "piecewise", *argv]
    # What runs the tests in the background may ignore interrupts, and a child would inherit that.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("command", COMMANDS)
def test_0_where_all_is_right(specs, command, capsys):
    assert run_on(command, "exit_cases:right") == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("exit_import_raises:case", "RuntimeError: no weights here"),
        ("exit_import_exits:case", "SystemExit: 0"),
        ("exit_import_is_no_python:case", "SyntaxError"),
        ("exit_import_lacks_another:case", "a_package_nobody_has"),
        ("exit_cases:factory_raises", "RuntimeError: no weights here"),
        ("exit_cases:factory_exits", "SystemExit: 0"),
        ("exit_cases:factory_breaks_a_rule", "boundary_ops.errors."),
        ("exit_cases:raises_an_error_of_its_own", "OwnError: of its own"),
        ("exit_cases:inputs_raise", "KeyError: 'no such request'"),
        ("exit_cases:forward_raises", "ValueError: no such thing"),
        ("exit_cases:forward_exits", "SystemExit: no such thing"),
        ("exit_cases:forward_has_no_memory", "OutOfMemoryError: no such thing"),
        ("exit_cases:forward_breaks_a_rule", "ConfigError: no such thing"),
    ],
)
def test_3_with_the_traceback_where_the_user_s_code_raises(specs, command, spec, says, capsys):
    assert run_on(command, spec) == 3
    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told and says in told
    # The line of the user's that raised; what was tried before it is nobody's to read.
    assert f"{spec.partition(':')[0]}.py" in told and "During handling" not in told
    if "breaks" in spec and "factory" in spec:
        assert "Rule:" in told and "Fix:" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_2_with_rule_and_fix_and_no_traceback_where_something_cannot_be_used(
    specs, command, capsys, tmp_path, monkeypatch
):
    def refused(*argv) -> str:
        assert run_on(command, *argv) == 2
        told = capsys.readouterr().err
        assert "piecewise: " in told and "Rule:" in told and "Fix:" in told and "Traceback" not in told
        return told

    assert "no module" in refused("exit_nowhere:case")
    assert "no 'nothing'" in refused("exit_cases:nothing")
    assert "no such file" in refused("exit_cases:right", "--config", tmp_path / "missing.toml")
    assert "not a regular file" in refused("exit_cases:right", "--config", tmp_path)
    broken = tmp_path / "broken.toml"
    for content in (b"[buckets\n", b"\xff\xfe", b"[buckets]\nnum_tokens = [8, 4]\n"):
        broken.write_bytes(content)
        refused("exit_cases:right", "--config", broken)
    assert "duplicate" in refused("exit_cases:right", "--buckets", "8,8")
    monkeypatch.setenv("PIECEWISE_NUM_STREAMS", "many")
    assert "PIECEWISE_NUM_STREAMS" in refused("exit_cases:right")


# Every option that names a file to write, with a command whose work would show.
OUTPUTS = [
    (("verify", "exit_cases:slow", "--buckets", "4"), "--json"),
    (("bench", "exit_cases:slow", "--tokens", "4"), "--out"),
    (("bench", "exit_cases:slow", "--tokens", "4"), "--plot"),
    (("bench", "--host-overhead", "--calls", "1"), "--out"),
    (("buckets", "plan", "--traffic", "TRAFFIC"), "--output"),
    (("buckets", "plan", "--traffic", "TRAFFIC"), "--plot"),
]


@pytest.fixture
def traffic(tmp_path):
    (tmp_path / "traffic.txt").write_text("3\n5\n")
    return tmp_path / "traffic.txt"


@pytest.mark.parametrize(("argv", "option"), OUTPUTS)
def test_2_before_the_work_where_its_result_could_not_be_written(specs, argv, option, capsys, traffic):
    folder, file = traffic.parent, traffic.parent / "file"
    file.write_text("")

    def refused(path) -> str:
        assert run(*(traffic if part == "TRAFFIC" else part for part in argv), option, path) == 2
        captured = capsys.readouterr()
        assert f"{option} {path}" in captured.err and "Fix:" in captured.err
        # `slow` would have said so, and slept.
        assert "Traceback" not in captured.err and not captured.out
        return captured.err

    for path in (folder, file / "report.json", "/proc/report.json", f"{folder}/new/", folder / ("x" * 300)):
        refused(path)
    # One rule for all: a folder is not made.
    message = refused(folder / "no such" / "report.png")
    assert f"there is no folder {folder}/no such" in message and f"mkdir -p '{folder}/no such'" in message
    if option == "--plot":
        pytest.importorskip("matplotlib")
        for name, ending in (("plan.xyz", "'.xyz'"), ("plan", "''"), (".png", "''")):
            assert f"the ending {ending}; known are ." in refused(folder / name)
    assert sorted(each.name for each in folder.iterdir()) == ["file", "traffic.txt"]


def full(*args):
    raise OSError(28, "No space left on device")


def test_a_plot_is_written_whole_in_any_known_format(capsys, traffic, monkeypatch):
    pytest.importorskip("matplotlib")
    for name, start in (("a.PNG", b"\x89PNG"), ("b.svg", b"<?xml"), ("c.pdf", b"%PDF")):
        image = traffic.parent / name
        assert run("buckets", "plan", "--traffic", traffic, "--no-progress", "--plot", image) == 0
        assert image.read_bytes().startswith(start)
    with (traffic.parent / "stream").open("wb") as stream:
        plot = ("--plot", f"/dev/fd/{stream.fileno()}")
        assert run("buckets", "plan", "--traffic", traffic, "--no-progress", *plot) == 0
    assert (traffic.parent / "stream").read_bytes().startswith(b"\x89PNG")
    # The plan was printed before; the picture that was there stays.
    monkeypatch.setattr(Path, "replace", full)
    capsys.readouterr()
    assert (
        run("buckets", "plan", "--traffic", traffic, "--no-progress", "--plot", traffic.parent / "b.svg") == 2
    )
    captured = capsys.readouterr()
    assert "num_tokens = [3, 5]" in captured.out and "No space left" in captured.err
    assert (traffic.parent / "b.svg").read_bytes().endswith(b"</svg>\n")
    assert not list(traffic.parent.glob(".piecewise*"))


def test_a_report_that_cannot_be_written_in_the_end_is_printed(specs, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "replace", full)
    for argv, option, table in (
        (COMMANDS["verify"], "--json", "Graphed equals eager"),
        (COMMANDS["bench"], "--out", "| tokens | graphed"),
        (("bench", "--host-overhead", "--calls", "1"), "--out", "whole call"),
    ):
        argv = ("exit_cases:right" if part == "SPEC" else part for part in argv)
        assert run(*argv, option, tmp_path / "report.json") == 2
        captured = capsys.readouterr()
        assert f"{option} {tmp_path}/report.json" in captured.err and "No space left" in captured.err
        # The table comes first, then the whole report.
        shown, _, report = captured.out.partition("\n{")
        assert table in shown and json.loads("{" + report)
        assert not list(tmp_path.iterdir())


def test_the_host_overhead_is_written_as_json(capsys, tmp_path):
    out = tmp_path / "host.json"
    assert run("bench", "--host-overhead", "--calls", "2", "--out", out) == 0
    found = json.loads(out.read_text())
    assert (found["schema"], found["calls"]) == ("piecewise.host-overhead/1", 2)
    assert found["environment"]["torch"] == torch.__version__ and found["environment"]["device"]
    printed = capsys.readouterr().out
    assert found["environment"]["device"] in printed
    for result, layers in zip(found["results"], (2, 32), strict=True):
        assert result["num_layers"] == layers and result["whole_us"] > 0
        shown = f"{result['state_us']:.1f} ({result['num_entries']} entries)"
        assert next(line for line in printed.splitlines() if shown in line).startswith(f"{layers} layers")
    for option, value in (("--plot", "host.png"), ("--config", "x.toml"), ("--tokens", "4")):
        assert run("bench", "--host-overhead", option, value) == 2
        assert f"{option}: expected to be used with SPEC" in capsys.readouterr().err


def test_a_report_may_go_to_the_standard_output(specs, tmp_path, traffic):
    printed = tmp_path / "printed"
    for argv, start, end in (
        (
            ("buckets", "plan", "--traffic", str(traffic), "-o", "/dev/stdout"),
            "num_tokens = [3, 5]\n[buckets]",
            "",
        ),
        (("bench", "--host-overhead", "--calls", "1", "--out", "/dev/stdout"), "\n{", "\n}\n"),
    ):
        with printed.open("w") as file:
            ended = process(specs, *argv, stdout=file)
            _, told = ended.communicate()
        assert ended.returncode == 0, told
        text = printed.read_text()
        assert start in text and "\x00" not in text and text.endswith(end or f"written to {argv[-1]}\n")


def test_a_report_may_go_to_a_device_and_leaves_it_one(specs, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run_on("verify", "exit_cases:right", "--json", pipe) == 0
        assert json.loads(os.read(reader, 1 << 16))["ok"] is True
    finally:
        os.close(reader)
    assert pipe.is_fifo() and not list(tmp_path.glob("*.partial"))


def test_4_where_nothing_was_replayed_or_measured(specs, capsys, monkeypatch, tmp_path):
    report = tmp_path / "report.json"
    assert run_on("verify", "exit_cases:changing", "--json", report) == 4
    assert "NOTHING COMPARED" in capsys.readouterr().out
    assert json.loads(report.read_text())["num_compared"] == 0
    assert run_on("bench", "exit_cases:changing", "--out", report) == 4
    assert "nothing was measured" in capsys.readouterr().err
    assert json.loads(report.read_text())["results"] == []
    # Eager was measured, but no call of those that were asked for was replayed.
    argv = ("bench", "exit_cases:changing", "--tokens", "4", "--rounds", "1")
    assert run(*argv, "--variants", "eager,graphed") == 4
    assert run(*argv, "--variants", "eager") == 0
    if not torch.cuda.is_available():
        assert run(*argv, "--variants", "reduce-overhead") == 4
    monkeypatch.setenv("PIECEWISE_DISABLE", "1")
    capsys.readouterr()
    assert run(*argv, "--variants", "eager,graphed") == 4
    assert "switched off, by PIECEWISE_DISABLE" in "".join(capsys.readouterr())
    assert run("bench", "--host-overhead", "--calls", "1") == 4
    assert "NOTHING MEASURED" in capsys.readouterr().out


def test_1_where_verify_finds_a_difference(specs, capsys):
    assert run_on("verify", "exit_cases:different") == 1
    assert "DIFFERENT" in capsys.readouterr().out
    sys.modules.pop("exit_cases")


def test_the_codes_of_the_demo(capsys, monkeypatch):
    if not torch.cuda.is_available():
        assert run("demo", "--model", "random", "--device", "cuda") == 2
        assert "--device cuda" in capsys.readouterr().err

    def broken(*args, **options):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(demo, "load_demo_model", broken)
        assert run("demo", "--model", "random", "--buckets", "8") == 3
        assert "OutOfMemoryError: none left" in capsys.readouterr().err
    monkeypatch.setattr(demo.SideBySide, "capture", lambda self, ids: "captured nothing")
    assert run("demo", "--model", "random", "--buckets", "8", "--no-progress") == 4
    assert "NOT REPLAYED: 8 tokens ran eagerly (not_captured)" in capsys.readouterr().out


def test_the_codes_of_the_bucket_commands(capsys, monkeypatch, tmp_path):
    file, traffic = tmp_path / "buckets.toml", tmp_path / "traffic.txt"
    traffic.write_text("3\n5\n")
    assert run("buckets", "plan", "--traffic", traffic, "-o", file, "--no-progress") == 0
    assert run("buckets", "check", file) == run("buckets", "show", file) == 0
    file.write_text("[buckets]\nnum_tokens = [4, 64]\n[limits]\nmax_num_seqs = 2\nmax_seq_len = 9\n")
    assert run("buckets", "check", file) == 1
    assert run("buckets", "show", file) == 0
    for name in ("check", "show"):
        assert run("buckets", name, tmp_path / "missing.toml") == 2
    assert run("buckets", "plan", "--traffic", tmp_path / "missing.txt") == 2
    assert "Traceback" not in capsys.readouterr().err

    def broken(*args, **options):
        raise MemoryError

    monkeypatch.setattr(piecewise.tools.buckets.plan, "read_requests", broken)
    assert run("buckets", "plan", "--traffic", traffic) == 3
    assert "MemoryError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", ["", *COMMANDS, "demo", "config", "buckets", "buckets plan", "buckets check", "buckets show"]
)
def test_help_lists_every_code(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*argv.split(), "--help")
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    codes = printed.split("Exit codes: ")[1]
    assert all(f"{code.value}, " in codes for code in ExitCode)


def test_the_process_ends_with_the_code_whoever_reads_it(specs):
    """The reader has gone, the disk is full, the encoding lacks a letter: the comparison is what counts."""
    verify = ["verify", "exit_cases:different", "--buckets", "4,8"]
    read, write = os.pipe()
    os.close(read)
    gone = process(specs, *verify, stdout=write)
    os.close(write)
    _, told = gone.communicate()
    assert (gone.returncode, told) == (1, "")

    with open("/dev/full", "w") as full:
        unwritten = process(specs, *verify, stdout=full)
        _, told = unwritten.communicate()
        assert unwritten.returncode == 2 and "the standard output" in told and "Traceback" not in told
        helped = process(specs, "--help", stdout=full)
        _, told = helped.communicate()
        assert helped.returncode == 2 and "the standard output" in told and "Traceback" not in told

    ascii_only = process(
        specs, "bench", "--host-overhead", "--calls", "1",
        stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    printed, told = ascii_only.communicate()
    assert ascii_only.returncode == 0 and "Host time per call, ?s" in printed, told


def test_a_process_whose_user_code_ends_it_does_not_end_well(specs):
    ended = process(specs, "verify", "exit_import_exits:case", stdout=subprocess.DEVNULL)
    _, told = ended.communicate()
    assert ended.returncode == 3 and "SystemExit: 0" in told


def test_an_interrupted_process_says_so(specs):
    slow = process(specs, "verify", "exit_cases:slow", stdout=subprocess.PIPE)
    assert slow.stdout.readline() == "loaded\n"
    slow.send_signal(signal.SIGINT)
    _, told = slow.communicate()
    assert slow.returncode == 130 and told == "piecewise: interrupted\n"


def test_commands_run_under_the_settings_of_a_project_but_for_models_of_our_own(
    specs, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text("[tool.piecewise]\nlimits.max_num_tokens = 4\nbuckets.num_tokens = [2, 4]\n")
    out = tmp_path / "bench.json"
    bench = ("bench", "exit_cases:right", "--rounds", "1", "--variants", "graphed", "--out", out)
    # Its buckets are captured, and the usual sizes end at its limit.
    assert run(*bench) == 0
    found = json.loads(out.read_text())
    assert found["variants"]["graphed"]["capture"]["captured"] == [2, 4] and found["sizes"] == [4]
    assert run(*bench, "--tokens", "3", "--buckets", "3") == 0
    assert json.loads(out.read_text())["variants"]["graphed"]["capture"]["captured"] == [3]
    # A limit is named with its place.
    assert run("verify", "exit_cases:right", "--buckets", "8") == 2
    limit = f"{project}:2: [tool.piecewise.limits] max_num_tokens = 4"
    assert f"buckets[0]: expected at most {limit}, got 8" in capsys.readouterr().err
    assert run("bench", "--host-overhead", "--calls", "1") == 0
    assert run("demo", "--model", "random", "--buckets", "8", "--no-progress") == 0
