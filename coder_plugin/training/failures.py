"""One rank's failure ends the run on all ranks, with that rank's reason.

A rank that raised, was killed or stalls leaves the others waiting in a collective operation, for as long as the process
group's timeout. So while a run lives, a thread on each rank looks at the process group's key-value store, which torchrun,
accelerate launch and SLURM (``MASTER_ADDR``, ``MASTER_PORT``) all have:

- a rank that raises writes its error there, and ends;
- a rank whose process is gone is noticed by the other ranks of its machine at once, and by those of other machines when its
  connections close, or after ``SILENCE`` seconds;
- a rank that stalls is the one that has begun the fewest collective operations when nothing has happened for
  ``--rank-timeout`` seconds.

Every rank prints the reason and ends. A thread cannot raise in the main thread while that waits inside a collective, so a
process whose main thread has not ended after ``GRACE`` seconds is ended where it is, its loading processes before it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from coder_plugin import distributed
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo

POLL = 0.5  # seconds between two looks at the store
BEAT = 5.0  # seconds between two signs of life
SILENCE = 60.0  # seconds without a sign of life after which a rank is taken for dead
GRACE = 5.0  # seconds in which the main thread may end by itself; also how long it waits for another rank's reason
#: Added to the process group's timeout, so that this module's message comes before that of gloo or NCCL.
MARGIN = 60

Method = TypeVar("Method", bound=Callable[..., Any])


class RankError(CoderError):
    """Another rank has failed; the message is its reason."""


class PeerError(CoderError):
    """This rank cannot go on because another failed, whose own error says why."""


class Watch:
    """The thread that looks for failures of other ranks, and this rank's word to them. All ranks start it together.

    Args:
        timeout: seconds after which a rank that does nothing has stalled.
    """

    started = 0

    def __init__(self, timeout: float) -> None:
        Watch.started += 1
        self.timeout, self.rank = timeout, distributed.rank()
        places = distributed.gather_objects((_machine(), os.getpid()))
        own = _machine()
        self.mates = {rank: pid for rank, (machine, pid) in enumerate(places) if machine == own and rank != self.rank}
        store: Any = dist.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):  # a connection of its own: the main thread's requests may wait long
            store = store.clone()
        self.store: Any = dist.PrefixStore(f"coder_plugin/ranks/{Watch.started}", store)
        self.reason: str | None = None
        self.known, self.closed, self.handled = threading.Event(), threading.Event(), threading.Event()
        self.main = threading.main_thread().ident
        self.beats: dict[int, tuple[Any, float]] = {}
        self.moved, self.collectives, self.sent = time.monotonic(), -1, -BEAT
        self.thread = threading.Thread(target=self._run, name="coder_plugin-ranks", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop looking: this rank has nothing more to do with the others."""
        self.closed.set()
        self.thread.join(timeout=GRACE)
        with contextlib.suppress(Exception):  # the store may be gone with the rank that holds it
            self._send(closed=True)

    def failed(self, error: BaseException) -> str | None:
        """Report this rank's error to the others. Returns another rank's reason, if the error only follows from that."""
        self.handled.set()
        follows = _follows_from_another(error)
        if follows and self.known.wait(GRACE):
            return self.reason
        where = f" ({self._places()})" if follows else ""
        reason = self._report(self.rank, f"rank {self.rank} failed: {describe(error)}{where}")
        _record(error)
        time.sleep(2 * POLL)  # this process may hold the store: let the others read it
        return reason if follows and reason != self.reason else None

    def _report(self, rank: int, reason: str) -> str:
        """Write a reason, unless there is one already. Returns the one that stands."""
        with contextlib.suppress(Exception):
            stands = self.store.compare_set("failure", "", json.dumps({"rank": rank, "reason": reason}))
            reason = json.loads(stands)["reason"]
        return reason

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        unreachable = None
        while not self.closed.wait(POLL):
            try:
                reason = self._look()
                unreachable = None
            except Exception as error:  # the store's connection: RuntimeError or one of torch.distributed's
                reason, now = self._dead_mate(read_state=False), time.monotonic()
                unreachable = now if unreachable is None else unreachable
                if reason is None and now - unreachable > 2 * GRACE:
                    reason = f"rank 0 or the launcher has ended: its key-value store does not answer ({describe(error)})"
            if reason is not None and not self.closed.is_set():
                self._end(reason)
                return

    def _look(self) -> str | None:
        """A reason to end, or None."""
        now = time.monotonic()
        if self.store.check(["failure"]):
            return json.loads(self.store.get("failure"))["reason"]
        if distributed.collectives() != self.collectives:
            self.collectives, self.moved = distributed.collectives(), now
        if now - self.sent >= min(BEAT, self.timeout / 4):
            self.sent = now
            self._send()
            if (silent := self._silent(now)) is not None:
                return self._report(self.rank, silent)
        if (dead := self._dead_mate()) is not None:
            return self._report(self.rank, dead)
        if now - self.moved >= self.timeout and (stalled := self._stalled()) is not None:
            return self._report(self.rank, stalled)
        return None

    def _send(self, *, closed: bool = False) -> None:
        state = {"collectives": distributed.collectives(), "place": _place(self.main), "beat": time.time(), "closed": closed}
        self.store.set(f"state/{self.rank}", json.dumps(state))

    def _state(self, rank: int) -> dict[str, Any]:
        key = f"state/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else {}

    def _dead_mate(self, *, read_state: bool = True) -> str | None:
        for rank, pid in self.mates.items():
            if not _is_alive(pid) and not (read_state and self._state(rank).get("closed")):
                if read_state and self.store.check(["failure"]):  # it said why
                    return json.loads(self.store.get("failure"))["reason"]
                return (
                    f"rank {rank} failed: its process {pid} on {platform.node()} is gone without a word: it was killed "
                    "(the kernel's log, dmesg, tells whether for want of memory) or crashed"
                )
        return None

    def _silent(self, now: float) -> str | None:
        """Rank 0 listens to all ranks, the others to rank 0: as many requests as ranks."""
        for rank in range(distributed.world_size()) if self.rank == 0 else [0]:
            state = {} if rank == self.rank else self._state(rank)
            beat = state.get("beat")
            if beat is None or state["closed"]:
                self.beats.pop(rank, None)
            elif rank not in self.beats or self.beats[rank][0] != beat:
                self.beats[rank] = beat, now
            elif now - self.beats[rank][1] > SILENCE:
                return f"rank {rank} failed: no sign of life for {SILENCE:g} s; it was at {state['place']}"
        return None

    def _stalled(self) -> str | None:
        """Which ranks keep the others waiting. None if all are equally far: they are all busy, or wait in an operation that
        is not counted here, which ends with the process group's timeout."""
        self._send()
        begun = {rank: state["collectives"] for rank, state in self._states().items()}
        behind = [rank for rank, number in begun.items() if number == min(begun.values())]
        if len(behind) == len(begun):
            return None
        who = f"rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind[:4]))}{' …' * (len(behind) > 4)}"
        return (
            f"{who} stalled: nothing was done for {self.timeout:g} s ({self._places(behind)}) and the others wait; if that is "
            "work that takes so long, raise --rank-timeout"
        )

    def _states(self) -> dict[int, dict[str, Any]]:
        return {rank: state for rank in range(distributed.world_size()) if (state := self._state(rank))}

    def _places(self, ranks: Sequence[int] | None = None) -> str:
        """Where some ranks last were."""
        with contextlib.suppress(Exception):  # the store may be gone
            states = self._states()
            return "; ".join(f"rank {rank} at {states[rank]['place']}" for rank in (ranks or list(states))[:4])
        return "the other ranks do not answer"

    def _end(self, reason: str) -> None:
        self.reason = reason
        self.known.set()
        if self.handled.wait(GRACE):
            return  # the main thread has an error of its own, and ends
        echo(f"coder-plugin: error: {reason}", file=sys.stderr)
        sys.stderr.flush()
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(2)


_watch: Watch | None = None


def start(timeout: float) -> None:
    """Start looking for failures of other ranks, until the method ends that :func:`ends_all_ranks` decorates."""
    global _watch
    if _watch is None and distributed.world_size() > 1:
        _watch = Watch(timeout)


def ends_all_ranks(method: Method) -> Method:
    """An exception in the method on one rank ends all ranks, once :func:`start` was called.

    On the other ranks the method raises :class:`RankError`, with the first rank's reason; where it waits in a collective
    operation, the process prints the reason and ends with status 2.
    """

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        with _ending():
            return method(*args, **options)

    return run  # type: ignore[return-value]


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    global _watch
    outer = _watch
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        reason = None if _watch is None or outer is not None else _watch.failed(error)
        if reason is not None:
            raise RankError(reason) from error
        raise
    finally:
        if outer is None and _watch is not None:
            _watch.close()
            _watch = None


def process_group_timeout(rank_timeout: float) -> timedelta:
    """How long gloo and NCCL wait: a little longer than this module, whose message says more."""
    return timedelta(seconds=rank_timeout + MARGIN)


def describe(error: BaseException) -> str:
    """An error in one line: what it says, and where it was raised if it is none of a user's."""
    text = " ".join(str(error).split())[:600] or "no message"
    if isinstance(error, CoderError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


def _follows_from_another(error: BaseException) -> bool:
    """Whether the error says no more than that another rank has failed."""
    if isinstance(error, (PeerError, dist.DistError)):
        return True
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return type(error) is RuntimeError and any(word in str(error) for word in words)


def _record(error: BaseException) -> None:
    """Let torchrun's summary name this rank's error."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(Exception):
            get_error_handler().record_exception(error)


def _machine() -> str:
    """What two processes share if they see each other's process ids."""
    with contextlib.suppress(OSError):
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")  # its parent has not collected it yet
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _place(thread: int | None) -> str:
    """Where a thread is: its innermost frame, and the innermost one of this package."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "an unknown place"
    stack = list(reversed(traceback.extract_stack(frame)))
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    own = next((each for each in stack if each.filename.startswith(package)), None)
    frames = [stack[0], *([own] if own is not None and own is not stack[0] else [])]
    return ", called from ".join(f"{each.filename}:{each.lineno} in {each.name}" for each in frames)
