"""Hosts on this machine, each with an address, a name, processes, a home and a /srv of its own, behind one switch.

They see the files of this machine otherwise. It takes root and Linux's namespaces, and changes nothing outside of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .nodes import ROOT, environ, output

_NET = "10.77.0"  # of the switch alone
SWITCH = f"{_NET}.254"
# The first process of a host, to which those come whose parents have ended.
_FIRST = """\
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.2)
"""
_NAMESPACES = (
    "setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child",
    "--mount-proc",
)  # fmt: skip


def can_be_made() -> bool:
    """Whether this process may make them."""
    if any(shutil.which(name) is None for name in ("ip", "nsenter", "setpriv", "unshare")):
        return False
    made = "ip link add sw type bridge && ip link add p1 type veth peer name p2 && mount -t tmpfs tmpfs /srv"
    return subprocess.run([*_NAMESPACES, "sh", "-ec", made], capture_output=True, check=False).returncode == 0


@dataclass
class Host:
    """One of them; what it keeps is in `folder`."""

    folder: Path
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] = field(init=False)
    pid: int = field(init=False)  # of its first process, as this machine counts
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("home", "srv"):
            (self.folder / name).mkdir(parents=True)
        self.process = subprocess.Popen([*_NAMESPACES, sys.executable, "-c", _FIRST])
        until = time.monotonic() + 60
        while not (children := psutil.Process(self.process.pid).children()):
            assert time.monotonic() < until
            time.sleep(0.05)
        self.pid = children[0].pid

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def srv(self) -> Path:
        """Its /srv."""
        return self.folder / "srv"

    def begin(self, script: str) -> subprocess.Popen[str]:
        """Start a script of its shell, in its home."""
        return subprocess.Popen(
            ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "--pid", "sh", "-ec", f"cd ~\n{script}"],
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={name: value for name, value in environ(self.home, **self.env).items() if name != "RAY_AUTH_MODE"},
        )  # fmt: skip

    def run(self, script: str, seconds: float = 1200) -> str:
        """Run a script, and return what it printed."""
        process = self.begin(script)
        stdout, stderr = output(process, seconds)
        assert process.returncode == 0, (script, stdout, stderr)
        return stdout

    def serve(self, log: Path, *module: str) -> None:
        """Start a module of Python, which runs until `close`."""
        command = ["nsenter", "-t", str(self.pid), "--net", "--pid", sys.executable, "-m", *module]
        with log.open("wb") as stream:
            self.servers.append(subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT))

    def close(self) -> None:
        """End all that runs there."""
        for process in (self.process, *self.servers):
            process.kill()
            process.wait()


class Hosts:
    """So many of them, called host-1 and so on; `ssh` and `scp` go from each to each."""

    def __init__(self, folder: Path, count: int, env: Mapping[str, str]) -> None:
        (folder / "bin").mkdir(parents=True)
        self.folder = folder
        names = [f"host-{number}" for number in range(1, count + 1)]
        lines = [f"{_NET}.{number} {name}\n" for number, name in enumerate(names, 1)]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]), encoding="utf-8")
        self._program("llmforge", f'exec {sys.executable} -m llmforge "$@"')
        self._program("ssh", f'cd "{folder}/$1/home"\nshift\nexec "$@"')
        self._program("scp", f'exec cp --preserve=mode "$1" "{folder}/${{2%%:*}}/home/${{2#*:}}"')
        path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        given = {**env, "PATH": path, "RAY_TMPDIR": "/srv", "PIP_NO_INDEX": "1"}
        self.switch = Host(folder / "switch", given)
        self.hosts: dict[str, Host] = {}
        try:
            self.switch.run(f"ip link set lo up; ip link add sw type bridge; ip addr add {SWITCH}/24 dev sw")
            self.switch.run("ip link set sw up")
            for number, name in enumerate(names, 1):
                self._add(name, number, given)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def _program(self, name: str, script: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        file.chmod(0o755)

    def _add(self, name: str, number: int, env: Mapping[str, str]) -> None:
        host = self.hosts[name] = Host(self.folder / name, env)
        plug = f"ip link add p{number} type veth peer name eth0 netns {host.pid}; ip link set p{number} master sw up"
        connect = f"nsenter -t {self.switch.pid} --net sh -ec '{plug}'"
        subprocess.run(["sh", "-ec", connect], check=True)
        host.run(
            f"hostname {name}; ip link set lo up; ip addr add {_NET}.{number}/24 dev eth0; ip link set eth0 up\n"
            f"mount --bind {self.folder / 'hosts'} /etc/hosts; mount --bind {host.srv} /srv"
        )

    def close(self) -> None:
        for host in (*self.hosts.values(), self.switch):
            host.close()
