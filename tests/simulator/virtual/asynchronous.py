"""What coroutines of a daemon need of asyncio's loop, over the virtual loop of its process."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, copy_context
from typing import Any, cast

from tests.simulator.virtual.loop import Handle, Process


class AsyncLoop:
    """Runs coroutines in virtual time. What runs on a thread takes `thread_seconds()`, and happens at their end."""

    def __init__(self, process: Process, thread_seconds: Callable[[], float]) -> None:
        self._process = process
        self._thread_seconds = thread_seconds
        self._self = cast(asyncio.AbstractEventLoop, self)

    def run(self, work: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
        """Starts `work`, and calls back with its result; if the process is killed, neither goes on."""
        task = self.create_task(work)
        task.add_done_callback(lambda ended: done(ended.result()))

    def time(self) -> float:
        return self._process.time()

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:
        return self._process.call_soon(self._call, context or copy_context(), callback, args)

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        return self._process.call_later(delay, self._call, context or copy_context(), callback, args)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:
        return self.call_later(max(0.0, when - self.time()), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._self)

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self._self, **more)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs `func` a little later, as if on a thread."""
        assert executor is None
        future = self.create_future()

        def run() -> None:
            result = func(*args)
            if not future.done():
                future.set_result(result)

        self.call_later(self._thread_seconds(), run)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raises what a callback raised; a task that was pending when its process was killed is nobody's fault."""
        if "exception" in context:
            raise context["exception"]

    def _call(self, context: Context, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._self)
        try:
            context.run(callback, *args)
        finally:
            asyncio._set_running_loop(before)
