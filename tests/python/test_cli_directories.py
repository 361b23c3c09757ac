"""The commands about a directory of checkpoints: ls, verify, doctor and recover."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import holdfast as command
from command_line import refused

import holdfast
import holdfast.dcp

ATTEMPT = "00112233445566778899aabbccddeeff"
COMMANDS = ("ls", "show", "diff", "verify", "doctor", "recover", "convert", "top")

_TRAIN = """
import sys, torch, holdfast
directory, resumed, *steps = sys.argv[1:]
if resumed:
    holdfast.load(f"{directory}/{resumed}")
for step in steps:
    holdfast.save_async({"w": torch.full((1000,), float(step))}, f"{directory}/step-{step}", step=int(step)).wait(60)
"""


def train(directory: Path, resumed: str, *steps: int) -> None:
    """Saves in a process of its own, as a run that was started anew does."""
    subprocess.run([sys.executable, "-c", _TRAIN, directory, resumed, *map(str, steps)], check=True, timeout=200)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was rolled back from step 30 to step 20, with all that may lie beside."""
    path = tmp_path_factory.mktemp("run")
    train(path, "", 10, 20, 30)
    train(path, "step-20", 25)
    state = {"w": torch.ones(5000), "step": 3}
    holdfast.dcp.async_save(state, checkpoint_id=path / "dcp-40").result()
    dcp.save(state, checkpoint_id=path / "stock-50", no_dist=True)
    dcp.save(state, checkpoint_id=path / "stock-60", no_dist=True)
    (path / "stock-60" / ".metadata").unlink()
    shutil.copytree(path / "step-10", path / "lost")
    (path / "lost" / "model-00000-of-00001.safetensors").unlink()
    shutil.copytree(path / "step-10", path / "bad")
    manifest = path / "bad" / "rank-00000-of-00001.manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":10', b'"step":11'))
    (path / "bad" / "holdfast.commit.json").unlink()
    (path / f"step-70.partial-{ATTEMPT}").mkdir()
    (path / f".step-5.retired-{ATTEMPT}").mkdir()
    (path / "logs").mkdir()
    (path / "train.log").write_text("step 1\n")
    (path / "latest").symlink_to("step-25")
    return path


def test_ls_lists_what_is_complete_and_why_the_rest_is_not(run: Path) -> None:
    done = command("ls", "--json", run, torch=False)
    assert done.status == 0, done
    found = {entry["name"]: entry for entry in done.json["checkpoints"]}
    assert {name: entry["state"] for name, entry in found.items()} == {
        "step-10": "complete",
        "step-20": "complete",
        "step-30": "abandoned",
        "step-25": "newest",
        "dcp-40": "complete",
        "stock-50": "newest",
        "stock-60": "incomplete",
        "lost": "incomplete",
        "bad": "damaged",
        f"step-70.partial-{ATTEMPT}": "unfinished",
        f".step-5.retired-{ATTEMPT}": "retired",
    }
    assert "model-00000-of-00001.safetensors" in found["lost"]["reason"]
    assert ".metadata" in found["stock-60"]["reason"]
    assert "recover" in found[f"step-70.partial-{ATTEMPT}"]["reason"]
    newest = holdfast.find_newest(run)
    entry = found["step-25"]
    for key in ("step", "path", "saved_at", "bytes", "world_size", "attempt", "parent"):
        assert entry[key] == newest[key], key
    assert found["step-20"]["parent_name"] == "step-10" and found["step-20"]["parent"] == found["step-10"]["attempt"]
    assert (found["dcp-40"]["format"], found["dcp-40"]["step"], found["dcp-40"]["world_size"]) == ("dcp", 40, 1)
    assert found["stock-50"]["bytes"] > 20000


def test_ls_prints_a_row_for_each_newest_first(run: Path) -> None:
    done = command("ls", run)
    assert done.status == 0 and not done.error
    head, *rows = done.out.splitlines()
    assert head.split() == ["NAME", "STEP", "AGE", "SIZE", "RANKS", "FORMAT", "PARENT", "STATE"]
    names = [row.split()[0] for row in rows]
    places = [names.index(name) for name in ("dcp-40", "step-25", "step-30", "step-20", "step-10")]
    assert places == sorted(places) and len(rows) == 11
    assert "latest" not in names and "logs" not in names


def test_ls_of_one_checkpoint_lists_that_one(run: Path) -> None:
    (entry,) = command("ls", "--json", run / "step-20").json["checkpoints"]
    assert (entry["name"], entry["step"]) == ("step-20", 20)


def test_ls_of_an_empty_directory_has_the_head_alone(tmp_path: Path) -> None:
    assert command("ls", tmp_path).out.splitlines() == ["NAME  STEP  AGE  SIZE  RANKS  FORMAT  PARENT  STATE"]
    assert command("ls", "--json", tmp_path).json["checkpoints"] == []


def test_ls_sees_a_save_that_is_under_way(tmp_path: Path) -> None:
    save = holdfast.save_async({"w": torch.ones(100)}, tmp_path / "step-1", rank=0, world_size=2, attempt=ATTEMPT)
    try:
        (entry,) = command("ls", "--json", tmp_path).json["checkpoints"]
        assert (entry["state"], entry["step"]) == ("saving", None), entry
    finally:
        save.cancel()
        assert save.durable.exception() is not None


_AS_NOBODY = "import os, sys; os.setuid(65534); from holdfast.cli import main; sys.exit(main())"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_ls_by_another_user_says_what_it_may_not_read() -> None:
    with tempfile.TemporaryDirectory() as name:
        train(Path(name), "", 1, 2)
        os.chmod(name, 0o755)
        os.chmod(f"{name}/step-2", 0)
        os.mkdir(f"{name}/step-3.partial-{ATTEMPT}")
        done = subprocess.run([sys.executable, "-c", _AS_NOBODY, "ls", name], capture_output=True, text=True,
                              timeout=60)  # fmt: skip
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("the installation cannot be read by another user")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert done.returncode == 0 and "newest" in rows["step-1"], done
    assert "unreadable: list" in rows["step-2"] and "Permission denied" in rows["step-2"]
    assert "unfinished" in rows[f"step-3.partial-{ATTEMPT}"]


def test_verify_walks_a_directory(run: Path) -> None:
    done = command("verify", run, torch=False)
    assert done.status == 1, done
    assert f"{run}/step-25: sound" in done.out and f"{run}/bad: corrupt" in done.out
    assert f"{run}/lost: incomplete" in done.out and "stock-60" in done.out
    assert command("verify", run / "step-10", run / "dcp-40").status == 0
    assert command("verify", run / "lost").status == 2
    assert command("verify", run / "nowhere").status == 3
    assert command("verify").status == 64


def test_doctor_reports_the_machine(tmp_path: Path) -> None:
    done = command("doctor", "--quick", "--json", tmp_path, torch=False)
    assert done.status == 0 and done.json["worker_program_found"], done
    assert command("doctor", "--quick", tmp_path / "nowhere").status == 1


def test_recover_does_what_a_dry_run_says(tmp_path: Path) -> None:
    train(tmp_path, "", 1, 2)
    complete = f"step-2.partial-{holdfast.find_newest(tmp_path)['attempt']}"
    (tmp_path / "step-2").rename(tmp_path / complete)
    incomplete = f"step-3.partial-{ATTEMPT}"
    (tmp_path / incomplete).mkdir()
    before = sorted(os.listdir(tmp_path))

    def states() -> dict[str, str]:
        return {e["name"]: e["state"] for e in command("ls", "--json", tmp_path).json["checkpoints"]}

    assert states() == {"step-1": "newest", complete: "unfinished", incomplete: "unfinished"}
    dry = command("recover", "--dry-run", "--json", tmp_path, torch=False).json
    assert (dry["would_promote"], dry["would_remove"], dry["kept"]) == ([complete], [incomplete], [])
    assert sorted(os.listdir(tmp_path)) == before
    assert f"would promote: {complete}\n" in command("recover", "-n", tmp_path).out
    done = command("recover", "--json", tmp_path, torch=False).json
    assert (done["promoted"], done["removed"]) == (["step-2"], [incomplete])
    assert states() == {"step-1": "complete", "step-2": "newest"}
    assert command("recover", tmp_path).out == "nothing to recover\n"


def test_a_dry_run_and_ls_keep_what_recover_keeps(tmp_path: Path) -> None:
    for name in (f"step-4.partial-{ATTEMPT}", f".step-1.retired-{ATTEMPT}"):  # of a user's own
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("x")
    with_folder = tmp_path / f"step-5.partial-{ATTEMPT}"
    (with_folder / "folder").mkdir(parents=True)
    (with_folder / "holdfast.commit.json.tmp").touch()
    before = sorted(os.listdir(tmp_path))
    reasons = {e["name"]: e["reason"] for e in command("ls", "--json", tmp_path, torch=False).json["checkpoints"]}
    dry = command("recover", "-n", tmp_path, torch=False)
    assert dry.out == command("recover", tmp_path, torch=False).out and dry.out.count("kept: ") == 3, dry
    assert sorted(os.listdir(tmp_path)) == before == sorted(reasons)
    assert all("no mark of a save" in reason or "folder" in reason for reason in reasons.values()), reasons


def test_a_dry_run_names_a_dcp_checkpoint_that_may_be_completed(tmp_path: Path) -> None:
    holdfast.dcp.save({"w": torch.ones(5)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    (tmp_path / "step-1" / ".metadata").unlink()
    assert command("recover", "-n", tmp_path).out == "may promote: step-1\n"
    of_itself = command("recover", "-n", tmp_path / "step-1", torch=False)
    assert of_itself.out == "may promote: step-1\n"
    assert command("recover", tmp_path).out == "promoted: step-1\n"


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: os.truncate(file, 100)], ids=["gone", "short"])
def test_recover_says_what_a_dcp_checkpoint_lacks(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    holdfast.dcp.save({"w": torch.ones(50)}, checkpoint_id=path, no_dist=True)
    (path / ".metadata").unlink()
    damage(path / "__0_0.distcp")
    for options, directory in ((["-n"], tmp_path), (["-n"], path), ([], tmp_path)):
        run = command("recover", *options, directory)
        assert run.out.startswith("kept: step-1: all manifests are there, and __0_0.distcp is gone or not as they say"), run
        assert run.out.endswith("nothing to recover\n")


def test_ls_names_a_parent_of_the_other_format(tmp_path: Path) -> None:
    train(tmp_path, "", 1)
    program = (
        "import sys, torch, holdfast, holdfast.dcp; holdfast.load(sys.argv[1] + '/step-1');"
        "w = holdfast.dcp.StorageWriter(sys.argv[1] + '/step-2', step=2);"
        "holdfast.dcp.save({'w': torch.ones(2)}, storage_writer=w, no_dist=True)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=200)
    found = {e["name"]: e["parent_name"] for e in command("ls", "--json", tmp_path, torch=False).json["checkpoints"]}
    assert found == {"step-1": None, "step-2": "step-1"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_exit_statuses(name: str) -> None:
    told = command(name, "--help", torch=False)
    assert told.status == 0, told
    assert f"sage: holdfast {name} " in told.out
    assert "xamples:\n" in told.out and "xit status:" in told.out


def test_the_command_explains_itself() -> None:
    told = command("--help", torch=False)
    assert told.status == 0
    for name in COMMANDS:
        assert f"\n  {name} " in told.out
    assert "exit status:" in told.out
    assert command("--version").out == f"holdfast {holdfast.__version__}\n"
    assert command().status == 2 and "Traceback" not in command().error
    assert "invalid choice: 'lss'" in command("lss").error
    assert command("ls", "--no-such-option").status == 2


def test_users_errors_are_one_line(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for name in ("ls", "recover"):
        refused(command(name, tmp_path / "nowhere"), f"holdfast {name}: ", "nowhere", "No such file or directory")
        refused(command(name, file), f"holdfast {name}: ", str(file), "Not a directory")
    refused(command("ls", "bad\x1b[31m\n"), "bad\\x1b[31m\\n")


def test_a_pipe_in_the_place_of_a_file_holds_nothing_up(tmp_path: Path) -> None:
    for directory, name in (("dcp-1", ".metadata"), ("step-1", "holdfast.commit.json")):
        (tmp_path / directory).mkdir()
        os.mkfifo(tmp_path / directory / name)
    found = command("ls", "--json", tmp_path, torch=False, timeout=60).json["checkpoints"]
    assert {entry["state"] for entry in found} <= {"incomplete", "damaged", "unreadable"} and len(found) == 2, found
    assert command("show", tmp_path / "dcp-1", torch=False, timeout=60).status == 2


def test_a_name_in_a_directory_moves_no_cursor(tmp_path: Path) -> None:
    holdfast.save_async({"w": torch.ones(10)}, tmp_path / "step\x1b[31m").wait(60)
    assert "step\\x1b[31m" in command("ls", tmp_path).out
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff.partial-" + ATTEMPT.encode())
    done = command("ls", tmp_path)
    assert done.status == 0 and "bad\\udcff" in done.out, done
    assert command("ls", "--json", tmp_path).status == 0


@pytest.mark.parametrize("name", ["ls", "verify"])
def test_a_closed_pipe_is_quiet(run: Path, name: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "holdfast", name, run], stdout=write, stderr=subprocess.PIPE,
                          timeout=60)  # fmt: skip
    os.close(write)
    assert done.returncode in (141, -signal.SIGPIPE) and done.stderr == b"", done


def test_ctrl_c_ends_without_a_traceback(tmp_path: Path) -> None:
    """Another recovery's lock keeps this one waiting."""
    import fcntl

    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        waiting = subprocess.Popen([sys.executable, "-m", "holdfast", "recover", tmp_path], stderr=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(3)
        waiting.send_signal(signal.SIGINT)
        _, error = waiting.communicate(timeout=60)
        assert (waiting.returncode, error) == (-signal.SIGINT, b""), "130 in a shell"
    finally:
        os.close(fd)


@pytest.mark.parametrize("command_line", ["show {}", "diff {} {}", "top --once {}", "doctor {}", "recover {}", "convert {} x"])
@pytest.mark.parametrize("url", ["s3://key:SECRET@bucket/run", "https://host/run?sig=SECRET", "s3://bucket/run"])
def test_a_url_is_refused_without_its_credentials(command_line: str, url: str) -> None:
    done = command(*command_line.replace("{}", url).split())
    assert done.status == 2 and "no URLs" in done.error and "SECRET" not in done.error, done
