"""Steps at URLs: the commit, what a kill leaves, faults of the store, several ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint.storage_faults import Dead, DyingObjects
from checkpoint.test_io import (
    MODEL,
    STATE,
    assert_equal,
    blank,
    labelled,
    layout_of,
    wholes,
)
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from penteract.checkpoint.difference import compare_steps
from penteract.checkpoint.examine import inspect, read_manifest, verify
from penteract.checkpoint.format import CheckpointError, SaveError, StoreError
from penteract.checkpoint.io import Record, load, lock, read_tensor, save
from penteract.checkpoint.remote import Objects, Place, Remote, place
from penteract.checkpoint.reshard import reshard
from penteract.checkpoint.saving import start_save
from penteract.checkpoint.steps import (
    find_step,
    go_back,
    latest_good,
    pin,
    pointed,
    retain,
    steps,
    unpin,
)
from penteract.checkpoint.storage import HashedFile
from penteract.checkpoint.writing import Staging
from penteract.cli import main
from penteract.mesh import single
from penteract.testing import run_ranks, world_axis

ONE = single("world")


def put(directory: str, step: int, start: int = 1) -> Place:
    return save(directory, Record(step), wholes({"w": labelled((4, 4), start=start)}), axis=ONE)


def names(directory: str) -> list[str]:
    return sorted(path.name for path in place(directory).iterdir())


def tensor_file(step: Place) -> Remote:
    (name,) = read_manifest(step).files
    file = step / name
    assert isinstance(file, Remote)
    return file


def flip(file: Remote) -> Remote:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    Objects().put(file, bytes(content))
    return file


def test_what_a_save_leaves_and_what_is_read_of_it(url: str) -> None:
    assert latest_good(url) is None
    one = put(url, 1)
    two = put(url, 2)
    assert (str(one), two.name) == (f"{url}/step-00000001", "step-00000002")
    assert names(url) == ["latest", "step-00000001", "step-00000002"]
    assert [name[:11] for name in names(str(one))] == ["manifest.js", "rank-00000-"]
    assert latest_good(url, hashes=True) == find_step(url) == pointed(url) == two
    assert find_step(f"{one}/") == one
    assert torch.equal(read_tensor(one, "w"), labelled((4, 4)))
    assert inspect(one)[0] == "step 1: 1 tensors, 16 elements, 64 bytes in 1 files"
    assert [verify(step) for step in (one, two)] == [[], []]


def test_death_at_every_operation_of_going_back(url: str) -> None:
    """The newest step is a whole one of before or after it; then going back once more does it."""
    for last in range(100):
        folder = f"{url}/{last}"
        one, two, three, _ = (put(folder, step) for step in (1, 2, 3, 4))
        pin(three)
        files, state = DyingObjects(last), {"windows": [2]}
        try:
            go_back(two, state, files=files)
        except Dead:
            newest = latest_good(folder, hashes=True, fall_back=True)
            assert newest is not None
            assert newest != one
            again = go_back(two, state)
        else:
            again = []
        assert [number for number, _ in steps(folder)] == [1, 2], last
        assert latest_good(folder, hashes=True) == pointed(folder) == two
        assert read_manifest(two).state == state
        kept = [name for name in names(folder) if name.startswith("rewound-")]
        assert any(verify(place(folder) / name) == [] for name in kept)
        if files.done < last:
            break
    assert last > 5
    assert not again


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_death_at_every_operation_leaves_a_whole_step(url: str, again: bool, pinned: bool) -> None:
    """The old or the new one, never a half one, and nothing older than the old one."""
    new = 2 if again else 3
    changed = {"w": labelled((4, 4), start=99)}

    def attempt(directory: str, last: int) -> DyingObjects:
        put(directory, 1)
        put(directory, 2)
        if pinned:
            pin(place(directory) / "step-00000002")
        files = DyingObjects(last)
        save(directory, Record(new), wholes(changed), axis=ONE, files=files)
        return files

    count = attempt(f"{url}/count", 10**9).done
    assert count >= 6 + again
    outcomes = []
    for last in range(count):
        directory = f"{url}/{last}"
        with pytest.raises(Dead):
            attempt(directory, last)
        found = latest_good(directory, hashes=True)
        assert found is not None, last
        held = blank(wholes(changed))
        number = load(found, held).step
        is_new = torch.equal(held[0][1], changed["w"])
        assert is_new or torch.equal(held[0][1], labelled((4, 4))), last
        assert number == (new if is_new else 2)
        outcomes.append(is_new)
        put(directory, 4)
        assert set(names(directory)) <= {"latest", *(f"step-0000000{n}" for n in range(1, 5))}
        for step in (n for n in names(directory) if n != "latest"):
            path = place(directory) / step
            assert verify(path) == []
            said = {"manifest.json", *read_manifest(path).files}
            assert set(names(str(path))) - {"pinned"} == said
        assert (place(directory) / "step-00000002" / "pinned").exists() == pinned
        assert latest_good(directory) == place(directory) / "step-00000004"
    # The commit is one moment: old before it, new after it.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_a_removal_that_is_cut_short_leaves_no_half_step(url: str) -> None:
    for last in range(9):
        directory = f"{url}/{last}"
        for step in (1, 2, 3):
            put(directory, step)
        files = DyingObjects(last)
        try:
            retain(directory, 1, files=files)
        except Dead:
            left = [n for n in names(directory) if n.startswith("step")]
            whole_ones = [n for n in left if (place(directory) / n / "manifest.json").exists()]
            assert not [f for n in whole_ones for f in verify(place(directory) / n)]
            put(directory, 4)
            left = [n for n in names(directory) if n.startswith("step")]
            assert left == [*whole_ones, "step-00000004"]
        else:
            assert last == files.done
            assert names(directory) == ["latest", "step-00000003"]
            return
    raise AssertionError("never done")


def test_files_of_another_attempt_are_never_taken(url: str) -> None:
    """Neither where the step was not finished nor where it was; what is not ours stays."""
    step = place(f"{url}/step-00000001")
    for name in ("rank-00000-ab12cd34.safetensors", "rank-00007-ab12cd34.safetensors"):
        Objects().put(step / name, b"half a file")
    assert latest_good(url) is None
    put(url, 1)
    assert len(names(str(step))) == 2
    for name in ("rank-00000.safetensors", "rank-00003-ab12cd34.safetensors", "notes"):
        Objects().put(step / name, b"half a file")
    assert latest_good(url, hashes=True) == step
    put(url, 2)
    assert verify(step) == []
    assert {*names(str(step))} == {"manifest.json", "notes", *read_manifest(step).files}


def test_damage_is_named_and_the_one_before_continues(url: str) -> None:
    one = put(url, 1)
    file = flip(tensor_file(put(url, 2)))
    assert latest_good(url) == file.parent  # lengths and headers only
    with pytest.raises(CheckpointError, match=f"{file}: its content has changed"):
        latest_good(url, hashes=True)
    assert latest_good(url, hashes=True, fall_back=True) == one
    Objects().put(file, file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{file}: .*truncated"):
        latest_good(url)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file}: cannot be read .No such file"):
        load(file.parent, wholes({"w": torch.zeros(4, 4)}))
    put(url, 2, start=5)  # the run that fell back comes there again
    assert latest_good(url, hashes=True) == file.parent
    assert len(names(str(file.parent))) == 2
    (file.parent / "manifest.json").unlink()
    assert latest_good(url) == one


def test_which_steps_stay(url: str) -> None:
    for step in range(1, 8):
        put(url, step)
    pin(place(f"{url}/step-00000002"))
    Objects().put(tensor_file(place(f"{url}/step-00000006")), b"short")
    tensor_file(place(f"{url}/step-00000003")).unlink()
    gone = retain(url, 2, keep_every=4)
    assert [path.name[-1] for path in gone] == ["1", "3"]
    assert [name[-1] for name in names(url)] == ["t", "2", "4", "5", "6", "7"]
    unpin(place(f"{url}/step-00000002"))
    unpin(place(f"{url}/step-00000002"))
    assert [path.name[-1] for path in retain(url, 1)] == ["2", "4", "5", "6"]
    assert names(url) == ["latest", "step-00000007"]
    with pytest.raises(CheckpointError, match="is not a complete step"):
        pin(place(f"{url}/step-00000001"))


def test_saving_in_the_background(url: str) -> None:
    staging, removed = Staging(), []
    tensor = labelled((4, 4))
    for step in (1, 2, 3):
        saving = start_save(
            url, Record(step), wholes({"w": tensor}), staging=staging, axis=ONE,
            then=lambda: removed.extend(retain(url, 2)),
        )  # fmt: skip
        tensor += 1
        saving.wait(20)
    assert removed == [place(f"{url}/step-00000001")]
    assert latest_good(url, hashes=True) == saving.path
    assert torch.equal(read_tensor(saving.path, "w"), labelled((4, 4)) + 2)


# --- faults of the store


class Gone(Exception):
    """As a package of a store may raise: no OSError."""


@pytest.mark.parametrize("operation", ["open", "pipe_file", "find"])
@pytest.mark.parametrize("background", [False, True])
def test_a_store_that_fails_is_a_save_error(
    url: str, operation: str, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, held = put(url, 1), wholes({"w": labelled((4, 4))})

    def fail(*_: object, **__: object) -> None:
        raise Gone("the wire is cut")

    def act() -> None:
        if background:
            start_save(url, Record(2), held, staging=Staging(), axis=ONE).wait(20)
        else:
            save(url, Record(2), held, axis=ONE)

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.get_filesystem_class(url.split(":")[0]), operation, fail)
        with pytest.raises(SaveError, match=rf"{url}/step-00000002.*cannot save .the wire is cut"):
            act()
    assert latest_good(url, hashes=True) == one
    put(url, 3)
    assert names(url) == ["latest", "step-00000001", "step-00000003"]


def test_a_store_that_cannot_be_asked_has_no_damage(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a run would go on from an older step, or from its seed."""
    put(url, 1)
    file = tensor_file(put(url, 2))
    system = fsspec.get_filesystem_class(url.split(":")[0])

    def failing(real: Any, where: str) -> Any:
        def fail(self: Any, path: str, *more: Any, **how: Any) -> Any:
            if path.endswith(where):
                raise Gone("the wire is cut")
            return real(self, path, *more, **how)

        return fail

    for operation, where in (
        ("info", "checkpoints"), ("ls", "checkpoints"), ("info", "manifest.json"),
        ("cat_file", "manifest.json"), ("info", file.name), ("cat_file", file.name),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(system, operation, failing(getattr(system, operation), where))
            with pytest.raises(StoreError, match="the wire is cut"):
                latest_good(url, fall_back=True)
            assert main(["checkpoint", "verify", url]) == 1, "not the user's fault"
            assert "the wire is cut" in capsys.readouterr().err


def test_a_store_that_cannot_be_written_to_is_found_at_the_start(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock(url), lock(url):  # nothing is held
        assert (place(url) / ".lock").read_bytes().startswith(b"pid ")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("403")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(CheckpointError, match=f"{url}: cannot write there .403"), lock(url):
        pass


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://bucket/run", "Install s3fs"),
        ("nowhere://x", "fsspec knows no protocol 'nowhere'"),
        ("memory://", "need PROTOCOL://PATH"),
        ("memory://a/*", "without any of"),
        ("simplecache::memory://a", "need PROTOCOL://PATH"),
    ],
)
def test_urls_that_lead_nowhere(
    text: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    assert main(["checkpoint", "inspect", text]) == 2
    assert f"penteract: {text}: " in (err := capsys.readouterr().err)
    assert said in err
    assert main(["generate", text]) == 2
    with pytest.raises(CheckpointError, match=said):
        save(text, Record(1), wholes({"w": torch.zeros(1)}), axis=ONE)


def test_of_an_upload_that_is_given_up_nothing_more_is_sent(url: str) -> None:
    path = place(f"{url}/step-00000001/rank-00000-ab.safetensors")
    sent: list[Any] = []

    class Upload(AbstractBufferedFile):
        def _upload_chunk(self, final: bool = False) -> bool:
            sent.append(final)
            return True

    class Sending(Objects):
        def create(self, path: Any) -> Any:
            with path.system() as (fs, name):
                return Upload(fs, name, "wb", block_size=1 << 20)

    def give_up() -> None:
        with HashedFile(path, Sending()) as file:
            file.write(b"x" * 100)
            raise KeyError

    with pytest.raises(KeyError):
        give_up()
    assert sent == []
    with HashedFile(path, Sending()) as file:
        file.write(b"x" * 100)
        file.finish()
    assert sent == [True]


def test_a_path_is_a_path(tmp_path: Path) -> None:
    for path in (tmp_path, Path("runs/a"), Path("c:/x")):
        assert place(str(path)) == place(path) == path


# --- on fsspec's own local disk, which several processes see


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_save_and_others_load(tmp_path: Path, asynchronous: bool) -> None:
    url = f"file://{tmp_path}/run"

    def body(sharded: bool, step: int) -> None:
        axis = world_axis()
        held = layout_of(axis.rank, axis.size, sharded)
        if asynchronous:
            start_save(url, Record(step), held, staging=Staging(), axis=axis).wait(20)
        else:
            save(url, Record(step), held, axis=axis)
        path = latest_good(url, hashes=True, axis=axis)
        assert path is not None
        assert path.name == f"step-{step:08d}"

    def back(sharded: bool) -> None:
        axis = world_axis()
        for step in (1, 2):
            held = blank(layout_of(axis.rank, axis.size, sharded))
            load(f"{url}/step-{step:08d}", held, axis=axis)
            assert_equal(held, MODEL | STATE)

    run_ranks(body, 2, True, 1)
    run_ranks(body, 3, True, 2)
    run_ranks(back, 1, False)
    run_ranks(back, 3, True)
    assert len(list((tmp_path / "run/step-00000002").glob("rank-*"))) == 3


def test_one_rank_that_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"

    class Broken(Objects):
        def write(self, file: Any, data: memoryview) -> None:
            raise ConnectionError(5, "the wire is cut")

    def body() -> str:
        axis = world_axis()
        files = Broken() if axis.rank else Objects()
        held = layout_of(axis.rank, axis.size, True)
        with pytest.raises(SaveError) as caught:
            save(url, Record(1), held, axis=axis, files=files)
        return str(caught.value)

    said, other = run_ranks(body, 2)
    assert said == other
    assert said.startswith(f"rank 1: {url}/step-00000001/rank-00001-")
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_step_moves_between_a_disk_and_a_url(tmp_path: Path, url: str) -> None:
    local = save(tmp_path / "a", Record(3), wholes(MODEL), axis=ONE)
    there = reshard(local, place(url), files=2)
    with pytest.raises(CheckpointError, match="is there already"):
        reshard(local, place(url))
    (there / "manifest.json").unlink()  # as if it had not been finished
    there = reshard(local, place(url), files=2)
    assert len(names(str(there))) == 3
    back = reshard(there, tmp_path / "b")
    for a, b in ((local, there), (there, back)):
        assert compare_steps(a, b).none
