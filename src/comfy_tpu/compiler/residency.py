"""The registry of weights on the devices, in bytes; the least recently used are evicted first.

Users never unload models by hand: weights are loaded when a run uses them, and evict weights that are not in use.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

import jax

from comfy_tpu.config import ResidencyConfig
from comfy_tpu.errors import DeviceMemoryError, is_out_of_memory, see
from comfy_tpu.parallel.report import ShardingReport

logger = logging.getLogger(__name__)

Arrays = Any
"""Any pytree of jax.Array, such as a dict of weights. The registry owns them: it deletes them to free memory."""


@dataclasses.dataclass(frozen=True)
class ResidentEntry:
    key: Hashable
    label: str
    bytes_per_device: int
    """Bytes on the device that holds most of the entry."""
    in_use: bool
    sharding: ShardingReport | None = None
    """How its weights are split; None where nobody said."""
    model: str = ""
    part: str = ""
    """The names of the model and of its component for a display; empty where nobody said."""


@dataclasses.dataclass(frozen=True)
class ResidencyEvent:
    kind: Literal["loaded", "evicted"]
    entry: ResidentEntry


ResidencyCallback = Callable[[ResidencyEvent], None]


@dataclasses.dataclass(eq=False)
class _Entry:
    key: Hashable
    label: str
    reserved: int
    """Bytes per device that were announced; counted until the arrays are loaded."""
    loader: int | None
    """The thread that is loading the arrays; None once they are loaded."""
    arrays: Arrays = None
    held: dict[jax.Device, int] = dataclasses.field(default_factory=dict)
    users: int = 0
    evict_at_release: bool = False
    sharding: ShardingReport | None = None
    model: str = ""
    part: str = ""

    @property
    def in_use(self) -> bool:
        return self.users > 0 or self.loader is not None

    @property
    def bytes_per_device(self) -> int:
        return self.reserved if self.loader is not None else max(self.held.values(), default=0)

    def view(self) -> ResidentEntry:
        return ResidentEntry(
            self.key, self.label, self.bytes_per_device, self.in_use, self.sharding, self.model, self.part
        )


class Residency:
    """The weights on the devices. Every method may be called from any thread."""

    def __init__(self, config: ResidencyConfig, *, devices: Sequence[jax.Device] | None = None) -> None:
        self._config = config
        self._devices = devices
        self._budget: int | None = None
        self._entries: collections.OrderedDict[Hashable, _Entry] = collections.OrderedDict()  # oldest use first
        self._changed = threading.Condition()
        self._pins: collections.Counter[int] = collections.Counter()  # thread -> entries it keeps on the devices
        self._callbacks: list[ResidencyCallback] = []
        self._abandoned: collections.deque[Hashable] = collections.deque()

    @property
    def budget_bytes(self) -> int:
        """Bytes that weights may take on each device. The devices are asked at the first use of the property."""
        if self._budget is None:
            self._budget = _budget_bytes(self._config, self._devices or jax.local_devices())
        return self._budget

    @contextlib.contextmanager
    def use(
        self,
        key: Hashable,
        *,
        label: str,
        nbytes_per_device: int,
        load: Callable[[], Arrays],
        sharding: ShardingReport | None = None,
        model: str = "",
        part: str = "",
    ) -> Iterator[Arrays]:
        """The arrays of a key, loaded if they are not on the devices, and kept there until the with block ends.

        nbytes_per_device is what load will take, at most, on one device. Do not keep the arrays after the block:
        they may be deleted. load must not use the registry itself. `sharding` is logged after a load, and shown;
        `model` and `part` are for displays.
        """
        self._evict_abandoned()
        thread = threading.get_ident()
        facts = {"sharding": sharding, "model": model, "part": part}
        entry, events = self._acquire(key, label, nbytes_per_device, load, thread, facts)
        try:
            self._notify(events)
            yield entry.arrays
        finally:
            self._release(entry, thread)

    def entries(self) -> tuple[ResidentEntry, ...]:
        """Entries that are on the devices or being loaded, least recently used first."""
        self._evict_abandoned()
        with self._changed:
            return tuple(entry.view() for entry in self._entries.values())

    def bytes_per_device(self) -> dict[jax.Device, int]:
        """Bytes of the arrays held, by device."""
        self._evict_abandoned()
        with self._changed:
            total: collections.Counter[jax.Device] = collections.Counter()
            for entry in self._entries.values():
                total.update(entry.held)
            return dict(total)

    def evict(self, key: Hashable) -> bool:
        """Frees a key now, or as soon as it is no longer in use. Returns False if the key is not in the registry."""
        with self._changed:
            entry = self._entries.get(key)
            events = self._evict_or_mark([entry]) if entry else []
        self._notify(events)
        return entry is not None

    def abandon(self, key: Hashable) -> None:
        """Evicts a key when the registry is next used. For finalizers: they run in any thread at any line, which may be
        one of this file."""
        self._abandoned.append(key)

    def _evict_abandoned(self) -> None:
        while self._abandoned:
            with contextlib.suppress(IndexError):  # another thread was faster
                self.evict(self._abandoned.popleft())

    def take(self, key: Hashable) -> Arrays | None:
        """The arrays of a key, which are the caller's from now on; None if they are not here, or in use."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is None or entry.in_use:
                return None
            del self._entries[key]
            self._changed.notify_all()
        self._notify([ResidencyEvent("evicted", entry.view())])
        return entry.arrays

    def __contains__(self, key: Hashable) -> bool:
        self._evict_abandoned()
        with self._changed:
            return key in self._entries

    def clear(self) -> None:
        """Frees all entries; an entry in use is freed when its use ends."""
        with self._changed:
            events = self._evict_or_mark(list(self._entries.values()))
        self._notify(events)

    def add_callback(self, callback: ResidencyCallback) -> Callable[[], None]:
        """Calls `callback` after every load and eviction. Returns a function that removes the callback."""
        with self._changed:
            self._callbacks.append(callback)

        def stop() -> None:
            with self._changed, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return stop

    def _acquire(
        self,
        key: Hashable,
        label: str,
        nbytes: int,
        load: Callable[[], Arrays],
        thread: int,
        facts: dict[str, Any],
    ) -> tuple[_Entry, list[ResidencyEvent]]:
        """The entry, pinned, and the events that callbacks are still to receive."""
        if nbytes > self.budget_bytes:
            raise DeviceMemoryError(self._too_large(label, nbytes))
        with self._changed:
            while True:
                entry = self._entries.get(key)
                if entry is None:
                    victims = self._find_evictable(nbytes)
                    if victims is not None:
                        break
                    # Whoever holds something and waits for more can wait for ever: two such threads, or this one
                    # for itself. Only a thread with empty hands waits for the others.
                    if self._pins[thread]:
                        raise DeviceMemoryError(
                            f"{label} needs {_gb(nbytes)} on each device beside what is in use: {self._inventory()}; "
                            f"weights may take {_gb(self.budget_bytes)}. Use one model after the other, or split over "
                            f"more devices{see('out-of-memory')}"
                        )
                elif entry.loader is None:
                    self._pin(entry, thread)
                    return entry, []
                elif entry.loader == thread:
                    raise RuntimeError(f"the load function of {label} uses the registry; it must only load")
                self._changed.wait()
            events = self._evict_or_mark(victims)
            entry = self._entries[key] = _Entry(key, label, reserved=nbytes, loader=thread, **facts)
            self._pin(entry, thread)
        try:
            self._notify(events)
            return entry, self._fill(entry, load)
        except BaseException:
            with self._changed:
                del self._entries[key]
                self._unpin(entry, thread)
                self._changed.notify_all()
            raise

    def _fill(self, entry: _Entry, load: Callable[[], Arrays]) -> list[ResidencyEvent]:
        arrays, failure = _try_load(load)
        if failure:
            logger.warning("loading %s ran out of device memory; evicting what is not in use: %s", entry.label, failure)
            with self._changed:
                events = self._evict_or_mark([other for other in self._entries.values() if not other.in_use])
            self._notify(events)
            arrays, failure = _try_load(load)
        if failure:
            raise DeviceMemoryError(
                f"{entry.label} needs {_gb(entry.reserved)} on each device and the devices have no room, even after "
                f"evicting what was not in use. Now there: {self._inventory()}. Close other programs on these devices, "
                f"split over more devices, or lower ResidencyConfig.weights_fraction ({failure}){see('out-of-memory')}"
            )
        held = _bytes_by_device(arrays)
        largest = max(held.values(), default=0)
        if largest > self.budget_bytes:
            _delete(arrays)
            raise DeviceMemoryError(self._too_large(entry.label, largest))
        with self._changed:
            entry.arrays, entry.held, entry.loader = arrays, held, None
            # More than was announced? Then others go after all; what is in use cannot.
            events = self._evict_or_mark(self._find_evictable(0) or [])
            self._changed.notify_all()
        if entry.sharding is not None:
            logger.info("%s is loaded; %s", entry.label, entry.sharding.summary())
        return [*events, ResidencyEvent("loaded", entry.view())]

    def _release(self, entry: _Entry, thread: int) -> None:
        with self._changed:
            self._unpin(entry, thread)
            self._entries.move_to_end(entry.key)
            events = self._evict_or_mark([entry]) if entry.evict_at_release and not entry.in_use else []
            # Over the budget only where a load took more than it announced while others were in use.
            events += self._evict_or_mark(self._find_evictable(0) or [])
            self._changed.notify_all()
        self._notify(events)
        self._evict_abandoned()

    # The rest is called with the lock held, except _notify: a callback may use the registry.

    def _pin(self, entry: _Entry, thread: int) -> None:
        entry.users += 1
        self._pins[thread] += 1

    def _unpin(self, entry: _Entry, thread: int) -> None:
        entry.users -= 1
        self._pins[thread] -= 1
        if not self._pins[thread]:
            del self._pins[thread]

    def _find_evictable(self, nbytes: int) -> list[_Entry] | None:
        """Entries to evict for nbytes more on each device, least recently used first; None if they do not suffice."""
        left = list(self._entries.values())
        victims = []
        for entry in self._entries.values():
            if _total(left) + nbytes <= self.budget_bytes:
                break
            if not entry.in_use:
                left.remove(entry)
                victims.append(entry)
        return victims if _total(left) + nbytes <= self.budget_bytes else None

    def _evict_or_mark(self, entries: Sequence[_Entry]) -> list[ResidencyEvent]:
        events = []
        for entry in entries:
            if entry.in_use:
                entry.evict_at_release = True
                continue
            del self._entries[entry.key]
            events.append(ResidencyEvent("evicted", entry.view()))
            _delete(entry.arrays)
            logger.info("evicted %s, %s on each device", entry.label, _gb(entry.bytes_per_device))
        self._changed.notify_all()
        return events

    def _notify(self, events: Sequence[ResidencyEvent]) -> None:
        for event in events:
            for callback in tuple(self._callbacks):
                try:
                    callback(event)
                except Exception:
                    # A display that fails must not fail the run, nor leave its weights pinned for ever.
                    logger.exception("a residency callback failed on %s", event)

    def _too_large(self, label: str, nbytes: int) -> str:
        return (
            f"{label} needs {_gb(nbytes)} on each device but weights may take {_gb(self.budget_bytes)}; split it over "
            "more devices (a larger mesh, or sp and tp instead of dp), use a smaller dtype, or raise "
            f"ResidencyConfig.weights_fraction{see('out-of-memory')}"
        )

    def _inventory(self) -> str:
        with self._changed:
            parts = [
                f"{entry.label} {_gb(entry.bytes_per_device)}{' (in use)' if entry.in_use else ''}"
                for entry in self._entries.values()
                if entry.loader is None
            ]
        return ", ".join(parts) or "nothing"


def _try_load(load: Callable[[], Arrays]) -> tuple[Arrays, str]:
    """The arrays, or the reason why they did not fit. The error is dropped: its traceback would keep arrays alive."""
    try:
        return load(), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)


def _leaves(arrays: Arrays) -> list[jax.Array]:
    # By identity: tied weights may appear twice but take their memory once.
    return list({id(leaf): leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)}.values())


def _bytes_by_device(arrays: Arrays) -> dict[jax.Device, int]:
    held: collections.Counter[jax.Device] = collections.Counter()
    for leaf in _leaves(arrays):
        # Not from addressable_shards: those make, and keep, one more array object per shard.
        nbytes = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        held.update(dict.fromkeys(leaf.sharding.addressable_devices, nbytes))
    return dict(held)


def _delete(arrays: Arrays) -> None:
    for leaf in _leaves(arrays):
        leaf.delete()


def _total(entries: Sequence[_Entry]) -> int:
    """Bytes on the fullest device. Entries that are loading count on every device: their placement is not known yet."""
    held: collections.Counter[jax.Device] = collections.Counter()
    for entry in entries:
        held.update(entry.held)
    return max(held.values(), default=0) + sum(entry.reserved for entry in entries if entry.loader is not None)


def _budget_bytes(config: ResidencyConfig, devices: Sequence[jax.Device]) -> int:
    if config.budget_bytes is not None:
        return config.budget_bytes
    return int(config.weights_fraction * min(_memory_limit(device, devices) for device in devices))


def _memory_limit(device: jax.Device, devices: Sequence[jax.Device]) -> int:
    if device.platform == "cpu":
        # Virtual devices share the machine's memory.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit:
        raise DeviceMemoryError(f"{device} does not tell how much memory it has; set ResidencyConfig.budget_bytes")
    return limit


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


@functools.cache
def shared_residency() -> Residency:
    """The registry of this process, for models that are opened without a registry of their own."""
    return Residency(ResidencyConfig())
