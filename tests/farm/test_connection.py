"""The connection to Ray: a head that goes away, an address where nothing is, and what Ray prints."""

from __future__ import annotations

import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmforge.base.errors import UsageError
from llmforge.farm import cluster, connection
from llmforge.farm.cluster import ClusterLost, Farm


class FakeRay:
    """As much of Ray as a connection asks for without a task."""

    def __init__(self, port: int) -> None:
        self.asked = 0
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
        self.util = SimpleNamespace(scheduling_strategies=strategies)
        self.placed: dict[str, Any] = {}
        self._context = SimpleNamespace(get_node_id=lambda: "here", gcs_address=f"127.0.0.1:{port}")

    def get_runtime_context(self) -> Any:
        return self._context

    def remote(self, what: object) -> Any:
        def options(**given: Any) -> Any:
            self.placed |= given
            return SimpleNamespace(remote=lambda *_: None)

        return SimpleNamespace(options=options)

    def nodes(self) -> list[dict[str, Any]]:
        self.asked += 1
        named = {"n1": "host-1", "n2": "10.0.0.2", "n3": "10.0.0.3", "n4": "gone"}
        return [
            {
                "NodeID": each,
                "NodeName": name,
                "NodeManagerHostname": "vm",
                "Alive": each != "n4",
                "Resources": {each: 1},
            }
            for each, name in named.items()
        ]


@pytest.fixture
def head() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_head_that_goes_away_is_lost_soon_and_not_asked(head: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_LOST_S", 0.5)
    monkeypatch.setattr(cluster, "_PAUSE_S", 0.05)
    ray = FakeRay(head.getsockname()[1])
    farm = Farm(ray, "10.0.0.1:6379")
    assert [*farm.nodes()] == [{"n1": 1}, {"n2": 1}, {"n3": 1}]
    assert farm.nodes({"n1"}) == [{"n2": 1}, {"n3": 1}]
    head.close()
    asked, began = ray.asked, time.monotonic()
    for _ in range(2):  # it stays lost
        with pytest.raises(ClusterLost, match=r"10\.0\.0\.1:6379 does not answer") as caught:
            farm.nodes()
    assert farm.lost
    assert "run the same command" in str(caught.value.hint)
    assert ray.asked == asked
    assert time.monotonic() - began < 5
    assert farm.states() == {}


def test_a_question_that_hangs_with_its_head_is_given_up(head: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_LOST_S", 0.5), ("_PAUSE_S", 0.05), ("_LOOK_S", 0.1)):
        monkeypatch.setattr(cluster, name, seconds)
    ray, hangs = FakeRay(head.getsockname()[1]), threading.Event()
    farm = Farm(ray, "10.0.0.1:6379")

    def nodes() -> list[dict[str, Any]]:
        head.close()  # it is lost after it was seen, and Ray waits for it
        hangs.wait(60)
        return []

    monkeypatch.setattr(ray, "nodes", nodes)
    began = time.monotonic()
    with pytest.raises(ClusterLost, match="does not answer any more"):
        farm.nodes()
    hangs.set()
    assert time.monotonic() - began < 10


def test_what_ray_raises_is_raised(head: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(head.getsockname()[1])
    monkeypatch.setattr(ray, "nodes", lambda: [][1])
    with pytest.raises(IndexError):
        Farm(ray, "10.0.0.1:6379").nodes()


def test_nodes_have_names(head: socket.socket) -> None:
    ray = FakeRay(head.getsockname()[1])
    farm = Farm(ray, "10.0.0.1:6379", out={"n1": "the disk is full"})
    assert farm.names() == {"n1": "host-1", "n2": "vm (n2)", "n3": "vm (n3)"}
    assert farm.states() == {"host-1": "the disk is full", "vm (n2)": "", "vm (n3)": ""}
    assert farm.name("n9") == "n9"
    assert farm.is_alive("n1")
    assert not farm.is_alive("n4")
    assert farm.nodes() == [{"n2": 1}, {"n3": 1}]
    assert ray.placed["scheduling_strategy"] == ("here", False)  # the board is on the driver's node


def test_an_address_where_nothing_is(head: socket.socket) -> None:
    port = head.getsockname()[1]
    head.close()
    ray = SimpleNamespace(init=lambda *_, **__: pytest.fail("Ray would wait for minutes"))
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", f"[::1]:{port}"):
        with pytest.raises(UsageError, match="no Ray cluster at"):
            connection._connect(ray, address, None)


def test_a_wheel_is_handed_over_unpacked(head: socket.socket, tmp_path: Path) -> None:
    """Ray would let pip install a wheel, with all that it requires."""
    wheel, seen = tmp_path / "llmforge-1.whl", list[set[str]]()

    def init(address: str, runtime_env: dict[str, Any], **_: object) -> None:
        folders = [Path(each) for each in runtime_env["py_modules"]]
        seen.append({f"{folder.name}/{file.name}" for folder in folders for file in folder.iterdir()})

    address = f"127.0.0.1:{head.getsockname()[1]}"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("llmforge/__init__.py", "llmforge-1.dist-info/METADATA"):
            archive.writestr(name, "")
    connection._connect(SimpleNamespace(init=init), address, wheel)
    assert seen == [{"llmforge/__init__.py", "llmforge-1.dist-info/METADATA"}]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(UsageError, match="is no wheel of llmforge"):
        connection._connect(SimpleNamespace(init=init), address, wheel)
    for content in (b"no zip", None):
        wheel.write_bytes(content) if content is not None else wheel.unlink()
        with pytest.raises(UsageError, match="cannot be read"):
            connection._connect(SimpleNamespace(init=init), address, wheel)


def test_what_ray_prints_is_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    with connection._output_apart():
        print("(raylet) a worker died")
    print("{}")
    assert capsys.readouterr() == ("{}\n", "(raylet) a worker died\n")
