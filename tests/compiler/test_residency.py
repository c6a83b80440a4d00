import collections
import gc
import os
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from comfy_tpu.compiler.residency import Residency, ResidencyEvent
from comfy_tpu.config import ResidencyConfig
from comfy_tpu.errors import DeviceMemoryError, is_out_of_memory
from comfy_tpu.parallel.mesh import make_placement

KB = 1024
TIMEOUT = 300
"""Seconds after which a thread is not coming any more, however busy the machine is."""


def registry(budget=100 * KB):
    return Residency(ResidencyConfig(budget_bytes=budget))


class Model:
    """A model of so many KB on each of eight devices, that counts how often it is loaded."""

    def __init__(self, key, kilobytes=60):
        self.key = key
        self.nbytes = kilobytes * KB
        self.loads = 0

    def load(self):
        self.loads += 1
        placement = make_placement("sp=8")
        half = self.nbytes // 2
        split = jax.device_put(jnp.zeros((8, half), jnp.uint8), placement.sharding("sp"))
        return {"split": split, "whole": jax.device_put(jnp.zeros(half, jnp.uint8), placement.sharding())}

    def use(self, residency, **changes):
        options = {"label": f"model {self.key}", "nbytes_per_device": self.nbytes, "load": self.load, **changes}
        return residency.use(self.key, **options)


def live_bytes():
    gc.collect()
    held = collections.Counter()
    for array in jax.live_arrays():
        if not array.is_deleted():
            for device, index in array.sharding.addressable_devices_indices_map(array.shape).items():
                held[device] += np.broadcast_to(np.int8(0), array.shape)[index].size * array.dtype.itemsize
    return held


@pytest.fixture(autouse=True)
def quick_collections():
    """What other tests of the process left is not looked at: hundreds of thousands of objects a collection."""
    gc.freeze()
    yield
    gc.unfreeze()


def labels(residency):
    return [entry.label for entry in residency.entries()]


def test_second_use_loads_nothing():
    residency, a = registry(), Model("a")
    with a.use(residency) as first:
        pass
    with a.use(residency) as second:
        assert second["split"] is first["split"]
        assert not second["split"].is_deleted()
    assert a.loads == 1


def test_two_models_that_do_not_fit_together():
    residency, a, b = registry(), Model("a"), Model("b")
    with a.use(residency) as old:
        float(old["whole"].sum())
    with b.use(residency) as new:
        assert float(new["split"].sum()) == 0
        assert all(leaf.is_deleted() for leaf in old.values())
        assert labels(residency) == ["model b"]
    with a.use(residency) as back:
        assert float(back["split"].sum()) == 0
        assert all(leaf.is_deleted() for leaf in new.values())
    assert (a.loads, b.loads) == (2, 1)
    assert labels(residency) == ["model a"]


def test_bytes_on_the_registry_are_bytes_held():
    before = live_bytes()
    residency = registry()
    models = [Model("a", 40), Model("b", 30), Model("c", 50), Model("a", 40)]
    for model in models:
        with model.use(residency):
            assert residency.bytes_per_device() == dict(live_bytes() - before)
        assert max(residency.bytes_per_device().values()) <= 100 * KB
    assert residency.bytes_per_device() == dict.fromkeys(jax.devices(), 90 * KB)
    residency.clear()
    assert residency.bytes_per_device() == {}
    assert live_bytes() == before


def test_the_least_recently_used_goes_first():
    residency = registry()
    a, b, c, d = Model("a", 30), Model("b", 30), Model("c", 30), Model("d", 30)
    for model in (a, b, c, a, d):
        with model.use(residency):
            pass
    assert labels(residency) == ["model c", "model a", "model d"]


def test_no_more_goes_than_must():
    residency = registry()
    for model in (Model("a", 20), Model("b", 40), Model("c", 30), Model("d", 30)):
        with model.use(residency):
            pass
    assert labels(residency) == ["model b", "model c", "model d"]


def test_what_is_in_use_stays():
    residency, a, b, c = registry(), Model("a", 40), Model("b", 40), Model("c", 50)
    with b.use(residency):
        pass
    with a.use(residency) as arrays:
        with c.use(residency):
            assert [(e.label, e.in_use) for e in residency.entries()] == [("model a", True), ("model c", True)]
        assert not arrays["split"].is_deleted()


def test_one_thread_that_wants_more_than_fits_is_told():
    residency, a, b = registry(), Model("a"), Model("b")
    message = (
        r"model b needs 0.00 GB on each device beside what is in use: model a 0.00 GB \(in use\); weights may take"
    )
    with a.use(residency):
        with pytest.raises(DeviceMemoryError, match=message), b.use(residency):
            pass
        assert labels(residency) == ["model a"]
    with b.use(residency):
        pass


def test_larger_than_the_budget_is_refused_before_loading():
    residency, a, b = registry(), Model("a"), Model("b", 101)
    with a.use(residency):
        pass
    message = "model b needs .* but weights may take .*; split it over more devices"
    with pytest.raises(DeviceMemoryError, match=message), b.use(residency):
        pass
    assert b.loads == 0
    assert labels(residency) == ["model a"]


def test_estimate_that_was_too_low():
    residency, a, b, c = registry(), Model("a", 50), Model("b", 60), Model("c", 120)
    with a.use(residency) as old:
        with b.use(residency, nbytes_per_device=1):
            assert not old["split"].is_deleted()
        assert labels(residency) == ["model a"]
    with b.use(residency, nbytes_per_device=1):
        assert old["split"].is_deleted()
    before = live_bytes()
    with pytest.raises(DeviceMemoryError, match="model c needs"), c.use(residency, nbytes_per_device=1):
        pass
    assert live_bytes() == before


def test_load_that_raises_leaves_nothing():
    residency, a = registry(), Model("a")

    def fail():
        raise OSError("disk is gone")

    for error, load in ((OSError, fail), (KeyboardInterrupt, lambda: (_ for _ in ()).throw(KeyboardInterrupt))):
        with pytest.raises(error), a.use(residency, load=load):
            pass
        assert residency.entries() == ()
        assert residency.bytes_per_device() == {}
    with a.use(residency) as arrays:
        assert set(arrays) == {"split", "whole"}


def test_body_that_raises_releases():
    residency, a, b = registry(), Model("a"), Model("b")
    with pytest.raises(ValueError, match="in the model"), a.use(residency):
        raise ValueError("in the model")
    assert [entry.in_use for entry in residency.entries()] == [False]
    with b.use(residency):
        assert labels(residency) == ["model b"]


class Full:
    """A device that is full for the first so many loads."""

    def __init__(self, model, times):
        self.model, self.times, self.tries = model, times, 0

    def __call__(self):
        self.tries += 1
        if self.tries <= self.times:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes")
        return self.model.load()


def test_full_device_is_tried_again_with_everything_evicted():
    residency = registry()
    a, b, c = Model("a", 10), Model("b", 10), Model("c", 10)
    with a.use(residency):
        pass
    with b.use(residency) as kept:
        load = Full(c, times=1)
        with c.use(residency, load=load):
            assert labels(residency) == ["model b", "model c"]
        assert not kept["split"].is_deleted()
    assert load.tries == 2


def test_device_that_stays_full():
    residency, a, b = registry(), Model("a", 10), Model("b", 10)
    load = Full(b, times=9)
    message = (
        r"model b needs .* no room, .*Now there: model a 0.00 GB \(in use\). Close other programs.*RESOURCE_EXHAUSTED"
    )
    with a.use(residency), pytest.raises(DeviceMemoryError, match=message), b.use(residency, load=load):
        pass
    assert load.tries == 2
    assert labels(residency) == ["model a"]


def test_only_full_devices_are_retried():
    residency, a = registry(), Model("a")
    tries = []

    def load():
        tries.append(1)
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError), a.use(residency, load=load):
        pass
    assert len(tries) == 1
    assert not is_out_of_memory(KeyError("RESOURCE_EXHAUSTED"))


def test_evict_and_clear():
    residency, a, b = registry(), Model("a", 10), Model("b", 10)
    for model in (a, b):
        with model.use(residency):
            pass
    assert residency.evict("a")
    assert labels(residency) == ["model b"]
    assert not residency.evict("a")
    with b.use(residency) as arrays:
        residency.clear()
        assert not arrays["split"].is_deleted()
        assert labels(residency) == ["model b"]
    assert arrays["split"].is_deleted()
    assert residency.entries() == ()


def test_take():
    residency, model = registry(), Model("a")
    events = []
    residency.add_callback(events.append)
    assert residency.take("a") is None
    with model.use(residency) as arrays:
        assert residency.take("a") is None, "it is in use"
        assert "a" in residency
    taken = residency.take("a")
    assert taken is arrays
    assert not taken["split"].is_deleted(), "they are the caller's now"
    assert "a" not in residency
    assert residency.bytes_per_device() == {}
    assert [event.kind for event in events] == ["loaded", "evicted"]
    with model.use(residency):
        assert model.loads == 2


def test_clear_during_a_load():
    residency, a = registry(), Model("a")

    def load():
        residency.clear()
        return a.load()

    with a.use(residency, load=load) as arrays:
        assert not arrays["split"].is_deleted()
    assert arrays["split"].is_deleted()
    assert residency.entries() == ()


def test_listeners():
    residency, a, b = registry(), Model("a"), Model("b")
    events = []

    def listener(event: ResidencyEvent):
        events.append((event.kind, event.entry.label, event.entry.bytes_per_device, len(residency.entries())))

    stop = residency.add_callback(listener)
    for model in (a, b):
        with model.use(residency):
            pass
    stop()
    residency.clear()
    assert events == [
        ("loaded", "model a", 60 * KB, 1),
        ("evicted", "model a", 60 * KB, 1),
        ("loaded", "model b", 60 * KB, 1),
    ]


def test_listener_that_fails_does_not_fail_the_run(caplog):
    residency, a = registry(), Model("a")
    residency.add_callback(lambda event: 1 / 0)
    with a.use(residency) as arrays:
        assert not arrays["split"].is_deleted()
    assert "a residency callback failed" in caplog.text
    assert [entry.in_use for entry in residency.entries()] == [False]


def test_load_that_uses_the_registry_is_told():
    residency, a = registry(), Model("a")

    def load():
        with a.use(residency):
            pass

    message = "the load function of model a uses the registry; it must only load"
    with pytest.raises(RuntimeError, match=message), a.use(residency, load=load):
        pass
    assert residency.entries() == ()


def announce_waits(residency, monkeypatch):
    """An event that is set when a thread is about to wait for the registry."""
    waiting = threading.Event()
    real = residency._changed.wait
    monkeypatch.setattr(residency._changed, "wait", lambda: (waiting.set(), real(TIMEOUT)))
    return waiting


def start(function):
    failures = []

    def run():
        try:
            function()
        except BaseException as error:  # noqa: BLE001  told to the main thread by join
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(TIMEOUT)
        assert not thread.is_alive()
        assert failures == []

    return join


def test_two_threads_load_the_same_key_once(monkeypatch):
    residency, a = registry(), Model("a")
    waiting = announce_waits(residency, monkeypatch)
    started = threading.Event()
    seen = []

    def load():
        started.set()
        assert waiting.wait(TIMEOUT)
        return a.load()

    def first():
        with a.use(residency, load=load) as arrays:
            seen.append(arrays)

    def second():
        assert started.wait(TIMEOUT)
        with a.use(residency) as arrays:
            seen.append(arrays)

    joins = [start(first), start(second)]
    for join in joins:
        join()
    assert a.loads == 1
    assert seen[0] is seen[1]


def test_waiter_loads_itself_when_the_other_load_fails(monkeypatch):
    residency, a = registry(), Model("a")
    waiting = announce_waits(residency, monkeypatch)

    def load():
        assert waiting.wait(TIMEOUT)
        raise OSError("disk is gone")

    def second():
        with a.use(residency):
            pass

    joins = []

    def begin():
        joins.append(start(second))
        return load()

    with pytest.raises(OSError, match="disk is gone"), a.use(residency, load=begin):
        pass
    joins[0]()
    assert a.loads == 1


def test_thread_with_empty_hands_waits_for_room(monkeypatch):
    residency, a, b = registry(), Model("a"), Model("b")
    waiting = announce_waits(residency, monkeypatch)
    order = []

    def second():
        with b.use(residency):
            order.append("b in use")

    with a.use(residency) as arrays:
        join = start(second)
        assert waiting.wait(TIMEOUT)
        order.append("a done")
        assert not arrays["split"].is_deleted()
        assert b.loads == 0
    join()
    assert order == ["a done", "b in use"]
    assert labels(residency) == ["model b"]


def test_what_is_still_loading_takes_its_room_already(monkeypatch):
    residency, a, b = registry(), Model("a"), Model("b")
    waiting = announce_waits(residency, monkeypatch)
    joins = []

    def second():
        with b.use(residency):
            pass

    def load():
        joins.append(start(second))
        assert waiting.wait(TIMEOUT)
        return a.load()

    with a.use(residency, load=load):
        assert b.loads == 0
    joins[0]()
    assert b.loads == 1
    assert labels(residency) == ["model b"]


def test_loads_of_different_keys_run_side_by_side():
    residency, a, b = registry(), Model("a", 40), Model("b", 40)
    both = threading.Barrier(2)

    def user(model):
        def load():
            both.wait(TIMEOUT)  # broken, unless both are loading at once
            return model.load()

        def run():
            with model.use(residency, load=load):
                pass

        return run

    for join in [start(user(a)), start(user(b))]:
        join()
    assert sorted(labels(residency)) == ["model a", "model b"]


def test_many_threads_never_overfill_nor_lose_count():
    before = live_bytes()
    residency = registry()
    models = [Model(key, 40) for key in range(4)]

    def run(offset):
        def body():
            for step in range(12):
                with models[(step * (offset + 1) + offset) % 4].use(residency) as arrays:
                    assert not arrays["split"].is_deleted()
                    assert max(residency.bytes_per_device().values()) <= 100 * KB

        return body

    for join in [start(run(offset)) for offset in range(4)]:
        join()
    assert residency.bytes_per_device() == dict(live_bytes() - before)
    assert not any(entry.in_use for entry in residency.entries())
    assert not residency._pins


def test_tied_arrays_count_once():
    residency = registry()
    array = jnp.zeros(KB, jnp.uint8)
    with residency.use("k", label="k", nbytes_per_device=KB, load=lambda: {"a": array, "b": [array]}):
        assert residency.bytes_per_device() == {jax.devices()[0]: KB}


def test_budget():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert Residency(ResidencyConfig(weights_fraction=0.5)).budget_bytes == pytest.approx(total / 16, rel=1e-6)
    tpus = [SimpleNamespace(platform="tpu", memory_stats=lambda n=n: {"bytes_limit": n}) for n in (1000, 800)]
    assert Residency(ResidencyConfig(weights_fraction=0.5), devices=tpus).budget_bytes == 400
    mute = [SimpleNamespace(platform="tpu", memory_stats=lambda: None)]
    with pytest.raises(
        DeviceMemoryError, match="does not tell how much memory it has; set ResidencyConfig.budget_bytes"
    ):
        _ = Residency(ResidencyConfig(), devices=mute).budget_bytes
