"""The store of a build cache: what is written is found, verified, bounded, and safe from others and from crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmforge.base.errors import EnvironmentLacks, InputError, UsageError
from llmforge.cache import Cache, Key, default_folder, default_size

KEY = Key("pass", {"name": "fuse-norms", "graph": "ab"})


def numbers(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


def put(cache: Cache, key: Key = KEY, size: int = 1000) -> Path:
    entry = cache.put(key, lambda folder: (folder / "numbers").write_bytes(numbers(size)) and None)
    assert entry is not None
    return entry.path


def key(index: int) -> Key:
    return Key("pass", {"index": str(index)})


def test_what_was_put_is_found_by_another_process_and_nothing_else_is(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        assert cache.find(KEY) is None
        put(cache)
    with Cache(tmp_path) as cache:
        found = cache.find(KEY)
        assert found is not None
        assert found.read("numbers") == numbers(1000)
        assert cache.find(Key("pass", {"name": "fuse-norms", "graph": "cd"})) is None
        assert cache.find(Key("trace", KEY.parts)) is None
        assert cache.notes == []
        [entry] = cache.entries()
        assert (entry.kind, entry.parts, entry.in_use) == ("pass", KEY.parts, True)
        assert entry.size_bytes > 1000


@pytest.mark.parametrize("file", ["numbers", "record.json"])
def test_any_flipped_bit_is_noticed_and_the_entry_is_made_again(tmp_path: Path, file: str) -> None:
    with Cache(tmp_path) as cache:
        path = put(cache, size=40) / file
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        with Cache(tmp_path) as cache:
            data = bytearray(whole)
            data[bit // 8 % len(data)] ^= 1 << bit % 8
            path.write_bytes(data)
            assert cache.find(KEY) is None, bit
            [note] = cache.notes
            assert "was damaged and is not used" in note
            assert f"{file} has other bytes" in note or "record.json has other bytes" in note
            put(cache, size=40)
        with Cache(tmp_path) as cache:
            found = cache.find(KEY)
            assert found is not None
            assert found.read("numbers") == numbers(40)
            whole = path.read_bytes()  # the time of its record differs


def test_a_file_that_is_cut_off_or_gone_is_damage(tmp_path: Path) -> None:
    for harm in (lambda p: os.truncate(p / "numbers", 999), lambda p: (p / "numbers").unlink()):
        with Cache(tmp_path) as cache:
            harm(put(cache))
        with Cache(tmp_path) as cache:
            assert cache.find(KEY) is None
            assert len(cache.notes) == 1
    with Cache(tmp_path) as cache:
        (put(cache) / "record.json").unlink()
    with Cache(tmp_path) as cache:
        assert cache.find(KEY) is None
        assert "has no record.json" in cache.notes[0]
        put(cache)


def test_the_least_recently_used_go_first_and_what_is_in_use_stays(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        paths = [put(cache, key(i)) for i in range(4)]
    for age, path in enumerate(paths):
        os.utime(path / "record.json", (1000 + age, 1000 + age))
    size = max(entry.size_bytes for entry in Cache(tmp_path).entries())  # times of creation differ in length
    with Cache(tmp_path) as user:
        assert user.find(key(1)) is not None
        os.utime(paths[1] / "record.json", (1, 1))  # the oldest by far, but in use
        with Cache(tmp_path, limit_bytes=2 * size) as evicting:
            evicting.evict()
        assert [path.exists() for path in paths] == [False, True, False, True]
        found = user.find(key(1))
        assert found is not None
        assert found.read("numbers") == numbers(1000)
        with Cache(tmp_path, limit_bytes=0) as evicting:
            evicting.evict()
        assert [path.exists() for path in paths] == [False, True, False, False]
    Cache(tmp_path, limit_bytes=0).close()
    assert Cache(tmp_path).entries() == []
    assert list((tmp_path / "entries").iterdir()) == []


def test_using_an_entry_makes_it_the_youngest(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        paths = [put(cache, key(i)) for i in range(2)]
    for age, path in enumerate(paths):
        os.utime(path / "record.json", (1000 + age, 1000 + age))
    with Cache(tmp_path) as cache:
        cache.find(key(0))
    cache = Cache(tmp_path, limit_bytes=Cache(tmp_path).entries()[0].size_bytes)
    cache.close()
    assert [path.exists() for path in paths] == [True, False]


def test_one_computes_and_the_other_waits(tmp_path: Path) -> None:
    began, waited, computed = threading.Event(), threading.Event(), []

    def build() -> None:
        with Cache(tmp_path, waiting=waited.set) as cache, cache.computing(KEY) as found:
            if found is None:
                began.set()
                assert waited.wait(20)
                computed.append(put(cache))

    threads = [threading.Thread(target=build) for _ in range(2)]
    threads[0].start()
    assert began.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert len(computed) == 1
    assert list((tmp_path / "locks").iterdir()) == []


def test_where_two_publish_the_same_each_keeps_its_own_until_it_is_done(tmp_path: Path) -> None:
    with Cache(tmp_path) as one, Cache(tmp_path) as other:
        first, second = put(one), put(other)
        assert first != second
        assert (second / "numbers").read_bytes() == numbers(1000)
        Cache(tmp_path, limit_bytes=0).close()  # a sweep and an eviction take neither
        assert first.exists()
        assert second.exists()
    assert first.exists()
    assert not second.exists()


_WRITER = """
import sys, time
from pathlib import Path
from llmforge.cache import Cache, Key
cache = Cache(Path(sys.argv[1]))
key = Key("pass", {"name": "fuse-norms", "graph": "ab"})
def write(folder):
    (folder / "numbers").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
with cache.computing(key):
    cache.put(key, write)
"""


def test_what_a_killed_process_held_is_free_and_what_it_wrote_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        Cache(tmp_path).close()
        assert len(list((tmp_path / "entries").iterdir())) == 1  # it lives
        writer.send_signal(signal.SIGKILL)
    with Cache(tmp_path) as cache, cache.computing(KEY) as found:
        assert found is None
        assert list((tmp_path / "entries").iterdir()) == []
        put(cache)
    assert list((tmp_path / "locks").iterdir()) == []


def test_an_entry_that_fails_half_way_is_none(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "numbers").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with Cache(tmp_path) as cache:
        assert cache.put(KEY, write) is None
        assert cache.notes == ["cache: pass could not be kept: No space left on device"]
        with pytest.raises(ValueError, match="a bug"):
            cache.put(KEY, lambda folder: (_ for _ in ()).throw(ValueError("a bug")))
        assert list((tmp_path / "entries").iterdir()) == []


def test_entries_are_named_by_kind_or_by_digest(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        put(cache)
        put(cache, Key("trace", {}))
        assert [entry.kind for entry in cache.named(("trace",))] == ["trace"]
        assert [entry.digest for entry in cache.named((KEY.digest[:12],))] == [KEY.digest]
        with pytest.raises(InputError, match="no entry is called 'passs'") as caught:
            cache.named(("passs",))
        assert caught.value.hint is not None
        [entry] = cache.named(("trace",))
        assert not cache.remove(entry)  # in use
    assert Cache(tmp_path).remove(entry)


def test_where_the_cache_lies_and_how_much_it_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLMFORGE_CACHE", raising=False)
    monkeypatch.delenv("LLMFORGE_CACHE_BYTES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/llmforge/builds")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/she")
    assert default_folder() == Path("/home/she/.cache/llmforge/builds")
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    assert default_size() == 20 * 10**9
    monkeypatch.setenv("LLMFORGE_CACHE_BYTES", "12")
    assert default_size() == 12
    monkeypatch.setenv("LLMFORGE_CACHE_BYTES", "20GB")
    with pytest.raises(UsageError, match="expected a number of bytes"):
        default_size()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentLacks, match="cannot be written") as caught:
        Cache(tmp_path / "file" / "cache")
    assert "--no-cache" in str(caught.value.hint)
