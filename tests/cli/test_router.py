"""`kvd router` as a process, and what it says of wrong flags."""

import asyncio
import contextlib
import re
import resource
import signal
import subprocess
import sys

import aiohttp
import pytest

from kvd.cli.main import main
from kvd.router import limits
from tests.router.scripted import BODY, DONE, PATH, decoded, prefilled, scripted
from tests.support.ports import free_port

SERVERS = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--listen", "8000"], "--listen is '8000'; it must be HOST:PORT"),
        (["--listen", "127.0.0.1:x"], "it must be HOST:PORT"),
        (["--listen", "127.0.0.1:87001"], "the port at most 65535"),
        (["--listen", "127.0.0.1:" + "9" * 5000], "the port at most 65535"),
        (["--listen", "203.0.113.1:8000"], "cannot listen on 203.0.113.1:8000"),
        (["--listen", "é..b:21001"], "cannot listen on é..b:21001"),
        (["--prefill", "localhost:8100"], "'localhost:8100' is no server's URL; it must be like http://host:port"),
        (["--decode", "http://a/v1"], "'http://a/v1' is no server's URL"),
        (["--decode", "http://a:port"], "'http://a:port' is no server's URL"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], said: str, capsys) -> None:
    assert main(["router", *SERVERS, *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.real
async def test_it_routes_until_sigterm() -> None:
    async with scripted(prefilled) as prefill, scripted(decoded) as decode:
        command = ["sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh", sys.executable]
        command += ["-m", "kvd.cli.main", "router", "--listen", "127.0.0.1:0"]
        command += ["--prefill", prefill.url, "--decode", decode.url + "/"]
        router = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        try:
            line = (await router.stderr.readline()).decode()
            url = re.search(r"routing on (http://127.0.0.1:\d+) between 1 prefill and 1 decode", line)[1]
            soft, hard = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
            assert soft == min(hard, limits.OPEN_FILES)
            async with aiohttp.ClientSession() as session:
                async with session.post(url + PATH, json=BODY) as response:
                    assert (await response.read()).endswith(DONE)
                router.send_signal(signal.SIGTERM)
                assert await router.wait() == 0
                assert await router.stderr.read() == b""
        finally:
            if router.returncode is None:
                router.kill()
                await router.wait()


@pytest.mark.real
async def test_a_router_waits_for_the_port_that_its_predecessor_has_and_names_it() -> None:
    command = [sys.executable, "-m", "kvd.cli.main", "router", *SERVERS, "--listen", f"127.0.0.1:{free_port()}"]
    routers: list[asyncio.subprocess.Process] = []
    try:
        for _ in range(2):
            routers.append(await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE))
            line = (await routers[-1].stderr.readline()).decode()
        first, second = routers
        assert f"waiting for port {command[-1].rpartition(':')[2]} of 127.0.0.1, which pid {first.pid} (" in line
        first.kill()
        assert f"routing on http://{command[-1]}" in (await second.stderr.readline()).decode()
    finally:
        for router in routers:
            with contextlib.suppress(ProcessLookupError):
                router.kill()
            await router.wait()
