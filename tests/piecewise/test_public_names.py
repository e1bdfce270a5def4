"""Names that users write: Python's, entry points, environment variables, TOML keys, commands; and what a bare
import of the package leaves out."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import pytest
from torch import nn

import boundary_ops
import piecewise
import runners
from piecewise.settings.config import PiecewiseConfig
from piecewise.settings.toml_file import read_tables
from piecewise.tools import cli

ROOT = Path(__file__).resolve().parents[2]

NAMES = {
    "piecewise": "PiecewiseConfig PrefillCase GraphedModule compile enable disable explain handle"
    " assert_graphed capture_window eager_only PiecewiseError ConfigError TraceError TokenDimError"
    " SplitError CaptureError StateError FallbackWarning",
    "runners": "PiecewiseRunner TokenBuckets StepPlan CallStats FallbackReason PiecewiseError ConfigError"
    " CaptureError StateError",
    "boundary_ops": "define register registered lookup unregister declare_rows check_rows BoundaryOp"
    " BoundaryOpError CacheExhaustedError PagedKVCache PrefillBatch CapturedForm CaptureLimits StepMetadata"
    " attn_inplace attn_captured huggingface",
    "boundary_ops.huggingface": "attach cache_of detach",
    "boundary_ops:PagedKVCache": "for_model allocate free num_free_blocks",
    "boundary_ops:PrefillBatch": "build pack",
    "piecewise:PrefillCase": "for_model",
    "piecewise:PiecewiseConfig": "from_toml to_toml from_any",
    "runners:TokenBuckets": "bucket_for",
}
HANDLE = (
    "capture explain report stats verify refresh release suspend resume traffic check_addresses model"
).split()
STATS = "replays eager_calls reasons captured calls_by_bucket".split()
ENTRY_POINTS = [
    ("console_scripts", "piecewise", "piecewise.tools.cli:main"),
    ("torch_dynamo_backends", "piecewise", "piecewise.torch_backend:piecewise_backend"),
    ("pytest11", "piecewise", "piecewise.testing.pytest_plugin"),
]
# Field → its table and keys in a file; the variable is the field's name.
TOML_KEYS = {
    "buckets": ("buckets", "num_tokens", "grid"),
    "max_padding_ratio": ("buckets", "max_padding_ratio"),
    "max_num_tokens": ("limits", "max_num_tokens"),
    "max_num_seqs": ("limits", "max_num_seqs", "max_batch_size"),
    "max_seq_len": ("limits", "max_seq_len"),
    "max_signatures": ("limits", "max_signatures"),
    "decode_batch_sizes": ("decode", "batch_sizes"),
    "warmup_steps": ("capture", "warmup_steps"),
    "capture": ("capture", "capture"),
    "engine": ("capture", "engine"),
    "num_streams": ("capture", "num_streams"),
    "progress": ("capture", "progress"),
    "allow_eager": ("capture", "allow_eager"),
    "disable": ("capture", "disable"),
    "frontend": ("compile", "frontend"),
    "lowering": ("compile", "lowering"),
    "compile_sizes": ("compile", "compile_sizes"),
    "fusions": ("compile", "fusions"),
    "boundary_ops": ("compile", "boundary_ops"),
    "boundary": ("compile", "boundary"),
    "min_coverage": ("compile", "min_coverage"),
    "outputs": ("compile", "outputs"),
    "strict": ("compile", "strict"),
}
# Another value than the default, as Python has it, as a variable and as a file write it.
VALUES = {
    "buckets": ((8, 16), "8, 16", "[8, 16]"),
    "max_padding_ratio": (2.0, "2", "2"),
    "max_num_tokens": (4096, "4096", "4096"),
    "max_num_seqs": (5, "5", "5"),
    "max_seq_len": (4096, "4096", "4096"),
    "max_signatures": (3, "3", "3"),
    "decode_batch_sizes": ((1, 2), "1,2", "[1, 2]"),
    "warmup_steps": (5, "5", "5"),
    "capture": ("lazy", "lazy", "'lazy'"),
    "engine": ("tape", "tape", "'tape'"),
    "num_streams": (2, "2", "2"),
    "progress": (False, "0", "false"),
    "allow_eager": (True, "1", "true"),
    "disable": (True, "1", "true"),
    "frontend": ("trace", "trace", "'trace'"),
    "lowering": ("inductor", "inductor", "'inductor'"),
    "compile_sizes": ((16,), "16", "[16]"),
    "fusions": (("rotary",), "rotary", "['rotary']"),
    "boundary_ops": (("a::b",), "a::b", "['a::b']"),
    "boundary": ("captured", "captured", "'captured'"),
    "min_coverage": (0.5, "0.5", "0.5"),
    "outputs": ("view", "view", "'view'"),
    "strict": (True, "true", "true"),
}


@pytest.mark.parametrize("owner", NAMES)
def test_every_name_is_there(owner):
    for name in NAMES[owner].split():
        assert getattr(resolve_name(owner), name) is not None, name


def test_a_graphed_module_has_its_names():
    graphed = piecewise.compile(nn.Linear(4, 4), buckets=[8])
    assert all(hasattr(graphed, name) for name in HANDLE)
    assert all(hasattr(graphed.stats, name) for name in STATS)
    assert all(hasattr(graphed.report(), name) for name in ("to_json", "to_markdown"))


@pytest.mark.parametrize("package", [piecewise, runners, boundary_ops], ids=lambda each: each.__name__)
def test_names_that_are_imported_late_are_as_good_as_others(package, monkeypatch):
    late = {"piecewise": "compile", "runners": "StepPlan", "boundary_ops": "huggingface"}[package.__name__]
    with monkeypatch.context() as before_its_use:
        before_its_use.delattr(package, late, raising=False)
        assert late in dir(package)
    found: dict = {}
    exec(f"from {package.__name__} import *", found)
    assert set(package.__all__) <= set(found) and set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert found[name] is getattr(package, name)
        if isinstance(found[name], type):
            assert pickle.loads(pickle.dumps(found[name])) is found[name]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize(("group", "name", "target"), ENTRY_POINTS)
def test_entry_points_lead_where_they_say(group, name, target):
    assert callable(resolve_name(target)) or group == "pytest11"  # a plugin is a module
    project = read_tables(ROOT / "pyproject.toml")[0]["project"]
    listed = project["scripts"] if group == "console_scripts" else project["entry-points"][group]
    assert listed == {name: target}


def test_every_field_has_its_key_and_variable():
    assert {item.name for item in fields(PiecewiseConfig)} == set(TOML_KEYS) == set(VALUES)


@pytest.mark.parametrize("name", TOML_KEYS)
def test_a_setting_is_the_same_from_each_source(name, tmp_path, monkeypatch):
    value, as_text, in_toml = VALUES[name]
    needs = {"lowering": "inductor", "buckets": [16]} if name == "compile_sizes" else {}
    wanted = getattr(PiecewiseConfig(**needs, **{name: value}), name)
    assert wanted == value
    monkeypatch.setenv(f"PIECEWISE_{name.upper()}", as_text)
    assert getattr(PiecewiseConfig.from_any(**needs), name) == value
    monkeypatch.delenv(f"PIECEWISE_{name.upper()}")
    table, *keys = TOML_KEYS[name]
    for key in keys:
        written = '"sglang"' if key == "grid" else in_toml
        path = tmp_path / f"{key}.toml"
        path.write_text(f"[{table}]\n{key} = {written}\n")
        found = getattr(PiecewiseConfig.from_any(path, **needs), name)
        assert found == (PiecewiseConfig(buckets="sglang").buckets if key == "grid" else value)


@pytest.mark.parametrize(
    "command",
    ["demo", "explain", "verify", "bench", "config", "buckets plan", "buckets check", "buckets show"],
)
def test_every_command_is_there(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), "--help"])
    assert caught.value.code == 0 and f"usage: piecewise {command}" in capsys.readouterr().out


def test_the_version_is_written_once():
    project, tool = (read_tables(ROOT / "pyproject.toml")[0][name] for name in ("project", "tool"))
    assert "version" not in project and project["dynamic"] == ["version"]
    assert tool["setuptools"]["dynamic"] == {"version": {"attr": "piecewise.__version__"}}
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", piecewise.__version__)
    program = ["-m", "piecewise", "--version"]
    shown = subprocess.run([sys.executable, *program], capture_output=True, text=True, cwd=ROOT).stdout
    assert shown == f"piecewise {piecewise.__version__}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import piecewise, runners\n"
        "dir(piecewise), piecewise.__version__, runners.TokenBuckets([8]), piecewise.ConfigError",
        "import piecewise.__main__; from piecewise.tools.cli import main\n"
        "for command in (['--help'], ['--version'], ['buckets', 'plan', '--help'], ['explain', '--help']):\n"
        "    try: main(command)\n"
        "    except SystemExit: pass",
    ],
    ids=["import", "help"],
)
def test_what_needs_no_torch_loads_none(code):
    program = f"import sys\n{code}\nprint('loaded:', *[m for m in ('torch', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.splitlines()[-1] == "loaded:", result.stderr
