"""Files are written whole: the old content or the new, through links, and into streams that are open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from piecewise.settings.config import PiecewiseConfig
from piecewise.settings.whole_file import check_replaceable, replace_file

ROOT = Path(__file__).resolve().parents[3]


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_new_file_gets_the_process_s_mode_and_an_old_one_keeps_its_own(tmp_path):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "new", "é")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_bytes() == "é".encode()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    (tmp_path / "new").chmod(0o604)
    replace_file(tmp_path / "new", b"\x00")
    assert (tmp_path / "new").read_bytes() == b"\x00"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o604 and names(tmp_path) == ["new"]


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("old")
    (tmp_path / "link").symlink_to("kept/file")
    replace_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "kept" / "file").read_text() == "new"
    assert names(tmp_path) == ["kept", "link"] and names(tmp_path / "kept") == ["file"]


def test_a_failure_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("no/file", FileNotFoundError, "there is no folder .*no"),
        ("folder", IsADirectoryError, "it is a folder"),
        ("new/", IsADirectoryError, "it is a folder"),
        ("file/below", NotADirectoryError, "Not a directory"),
        ("loop", OSError, "symbolic links"),
        ("x" * 300, OSError, "name too long"),
        ("kept", PermissionError, "may not be written to"),
    ],
)
def test_what_cannot_be_written_is_known_before(tmp_path, monkeypatch, name, error, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "kept").write_text("old")
    (tmp_path / "loop").symlink_to("loop")
    # The superuser may write everything.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "kept")
    before = names(tmp_path)
    with pytest.raises(error, match=says):
        check_replaceable(f"{tmp_path}/{name}")
    assert names(tmp_path) == before
    for fine in ("file", "new"):
        check_replaceable(tmp_path / fine)
    assert names(tmp_path) == before and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_stream_that_is_open_gets_the_content_where_it_stands(tmp_path, name, mode):
    code = (
        "from piecewise.settings.whole_file import check_replaceable, replace_file\n"
        f"print('before'); check_replaceable({name!r}); replace_file({name!r}, 'content\\n'); print('after')"
    )
    command = [sys.executable, "-c", code]
    path = tmp_path / "out"
    with path.open(mode) as file:
        subprocess.run(command, stdout=file, check=True, cwd=ROOT)
    assert path.read_text() == "before\ncontent\nafter\n" and names(tmp_path) == ["out"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert piped.stdout == "before\ncontent\nafter\n"


def test_settings_are_written_into_a_stream_as_into_a_new_file(tmp_path):
    code = (
        "from piecewise.settings.config import PiecewiseConfig\n"
        "print('# read'); PiecewiseConfig(buckets=[8]).to_toml('/dev/stdout', only=['buckets'])"
    )
    path = tmp_path / "out.toml"
    with path.open("w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True, cwd=ROOT)
    assert path.read_text() == "# read\n[buckets]\nnum_tokens = [8]\n"
    assert PiecewiseConfig.from_toml(path).buckets == (8,)
