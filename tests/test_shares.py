"""Shares: what `gpus=` may say, and that what is promised together never exceeds a card."""

from __future__ import annotations

import fractions
import itertools
import uuid
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_devices import Driver, Script, four_cards, no_cards  # noqa: F401 - fixtures

import jaxguard
from jaxguard import _descriptors, _devices, _environment, _leases, _locks, _shares, gpu_slot, slot_count
from jaxguard._gpus import Device

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("gpus", "meant"), [(1, 1), (2.0, 2), (0, 0), (0.0, 0), (numpy.int64(3), 3), (fractions.Fraction(1, 4), 0.25)]
)
def test_every_kind_of_number(gpus: Any, meant: float) -> None:
    """Whole numbers may come as floats, shares as fractions."""
    assert _shares.checked(gpus) == meant
    assert type(_shares.checked(gpus)) is type(meant)


@pytest.mark.parametrize("gpus", [-1, -0.5, 1.5, 2.25, float("nan"), float("inf")])
def test_what_is_neither_whole_nor_a_share(gpus: float) -> None:
    """It is refused at decoration, with what is valid."""
    for guard in (jaxguard.isolated_jax_worker, jaxguard.gpu_slot, slot_count):
        with pytest.raises(ValueError, match=r"gpus must be 0 .*, a whole number, or a share of one GPU .*, not"):
            guard(gpus=gpus)  # type: ignore[operator]


@pytest.mark.parametrize("parts", range(2, 9))
def test_halves_to_eighths_are_exact(parts: int) -> None:
    """So many parts fill a card, and one more does not fit."""
    assert _shares.units(1 / parts) * parts == _shares.UNITS
    assert _shares.per_device(1 / parts) == parts


@given(gpus=st.floats(0.002, 0.999))
def test_no_share_gets_less_than_it_asks(gpus: float) -> None:
    """Rounding is never in another's favour: so many sharers fit as the share says, or one less."""
    assert _shares.units(gpus) >= _shares.UNITS * gpus - 1e-5
    assert _shares.per_device(gpus) * gpus <= 1 + 1e-6


def test_slots_are_counted_in_shares(driver: Driver) -> None:
    """The right `n_jobs` for shares is cards times parts."""
    assert slot_count(gpus=0.5) == 8
    assert slot_count(gpus=1 / 3) == 12
    assert slot_count(gpus=0.4) == 8
    assert slot_count(gpus=0.6, devices=[1, 2]) == 2


# ---------------------------------------------------------------------------------------- memory


@given(cuts=st.lists(st.integers(1, 99), max_size=6, unique=True), gigabytes=st.integers(80, 200))
def test_the_sharers_memory_fits_the_card(cuts: list[int], gigabytes: int) -> None:
    """All pools of unequal sharers, and what CUDA needs for each process, are no more than the card."""
    total = gigabytes << 30
    ends = [0, *sorted(cuts), 100]
    parts = [(after - before) / 100 for before, after in itertools.pairwise(ends)]
    parts = [part for part in parts if part * total > _shares.CONTEXT_BYTES + 1e-3 * total and part < 1]
    pools = [_shares.memory_fraction(part, total) * total for part in parts]
    assert all(pool > 0 for pool in pools)
    assert sum(pools) + len(pools) * _shares.CONTEXT_BYTES <= total + 1


def test_a_share_that_leaves_no_memory(driver: Driver) -> None:
    """It is said with numbers, before anybody waits for the slot."""
    driver.give_nvml(**{f"_{number}": {"total": 4 << 30} for number in range(4)})
    driver.enter()
    with pytest.raises(ValueError, match=r"gpus=0.125 leaves no memory: it is 0.5 of 4.0 GiB, less than CUDA"):
        gpu_slot(gpus=1 / 8).__enter__()
    driver.give_nvml()
    with pytest.raises(ValueError, match="leaves no memory"):
        jaxguard.isolated_jax_worker(gpus=1e-9)(print)()


def test_a_card_whose_memory_is_not_known(driver: Driver) -> None:
    """Without NVML a tenth is left for CUDA."""
    with gpu_slot(gpus=0.5) as slot:
        assert slot.env["XLA_CLIENT_MEM_FRACTION"] == "0.45"
        assert slot.share == 0.5


def test_a_whole_card_is_left_to_jax(driver: Driver) -> None:
    """Whoever has a card alone has JAX's own rule, which grows to all of it."""
    driver.give_nvml()
    driver.enter()
    with gpu_slot() as slot:
        assert "XLA_CLIENT_MEM_FRACTION" not in slot.env
        assert slot.share == 1.0


def test_the_name_is_the_one_that_jaxlib_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """jaxlib's own function for its options takes the fraction from this variable, and refuses both names at once."""
    client = pytest.importorskip("jaxlib.xla_client")
    options = getattr(client, "generate_pjrt_gpu_plugin_options", None)
    if options is None:
        pytest.skip("this jaxlib reads its options elsewhere")
    monkeypatch.setenv(_environment.MEMORY, "0.25")
    assert options()["memory_fraction"] == 0.25
    monkeypatch.setenv(_environment._MEMORY_OF_OLD, "0.5")
    with pytest.raises(ValueError, match="specified together"):
        options()


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_users_own_fraction_wins(driver: Driver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is kept as it is, under either name, and nothing is set beside it."""
    monkeypatch.setenv(name, ".3")
    with gpu_slot(gpus=0.5) as slot:
        assert not any("MEM_FRACTION" in word for word in slot.env)

    @jaxguard.isolated_jax_worker(gpus=0.5)
    def told() -> dict[str, str]:
        import os

        return {word: value for word, value in os.environ.items() if "MEM_FRACTION" in word}

    assert told() == {name: ".3"}


@pytest.mark.parametrize("value", ["0", "-0.1", "1.01", "half", "nan"])
def test_a_users_fraction_is_checked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """More than 0 and at most 1, in the environment and in `env=`."""
    name = "XLA_CLIENT_MEM_FRACTION"
    with pytest.raises(ValueError, match=r"XLA_CLIENT_MEM_FRACTION='.*' is not valid"):
        jaxguard.isolated_jax_worker(env={name: value})(print)()
    monkeypatch.setenv(name, "0.5")
    with pytest.raises(ValueError, match="are both set, and JAX refuses that"):
        jaxguard.isolated_jax_worker(env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"})(print)()


def test_a_worker_has_its_fraction_before_jax(driver: Driver) -> None:
    """The variable is in the environment of workers of both ways."""
    driver.give_nvml()
    driver.enter()

    def told() -> str | None:
        import os

        return os.environ.get("XLA_CLIENT_MEM_FRACTION")

    for env in ({}, {"OMP_DYNAMIC": "FALSE"}):
        assert jaxguard.isolated_jax_worker(gpus=0.25, env=env)(told)() == "0.2406"
        assert jaxguard.isolated_jax_worker(env=env)(told)() is None


# ---------------------------------------------------------------------------------------- units of a card


def cards(*names: str) -> tuple[Device, ...]:
    return tuple(Device(name, index, "gpu", None, name, name) for index, name in enumerate(names))


@given(sizes=st.lists(st.integers(1, 840), min_size=1, max_size=12), drop=st.lists(st.integers(0, 11), max_size=8))
def test_units_never_exceed_the_card_and_never_get_lost(sizes: list[int], drop: list[int]) -> None:
    """Whatever is taken and given back, a request gets units exactly when so many are free, in gaps or not."""
    name = f"GPU-{uuid.uuid4()}"
    device = cards(name)
    held: list[_leases.Lease] = []
    watch = _locks.open_locks()
    try:
        for number, size in enumerate(sizes):
            free = 840 - sum(lease.units for lease in held)
            lease = _leases.try_take(device, 1, size)
            assert (lease is not None) == (size <= free)
            if lease is not None:
                held.append(lease)
            if number in drop and held:
                held.pop(len(held) // 2).close()
            assert _locks.units_held(watch, name) == sum(lease.units for lease in held) <= 840
    finally:
        for lease in held:
            lease.close()
        assert _locks.units_held(watch, name) == 0
        _descriptors.close(watch)


def test_shares_spread_before_they_pack() -> None:
    """Two halves go to two free cards; the third joins one of them; a whole card is taken only if it is free."""
    one, two = (f"GPU-{uuid.uuid4()}" for _ in range(2))
    both = cards(one, two)
    held = [_leases.try_take(both, 1, 420) for _ in range(2)]
    assert {lease.devices[0].id for lease in held if lease} == {one, two}
    assert _leases.try_take(both, 1) is None
    third = _leases.try_take(both, 1, 420)
    assert third is not None
    assert third.offset == 420
    for lease in (*held, third):
        lease.close()  # type: ignore[union-attr]
    whole = _leases.try_take(both, 2)
    assert whole is not None
    whole.close()


SHARE = """
import uuid, sys
from jaxguard import _leases
from jaxguard._gpus import Device
device = Device(sys.argv[1], 0, "gpu", None, sys.argv[1], sys.argv[1])
kept = []
for line in sys.stdin:
    units = int(line)
    lease = _leases.try_take((device,), 1, units)
    kept.append(lease)
    print("refused" if lease is None else "held")
"""


def test_programs_share_a_card_exactly() -> None:
    """Mixed shares of several programs: a half, a third and a sixth fill a card; nothing more fits; a death frees."""
    name = f"GPU-{uuid.uuid4()}"
    with Script(SHARE, name) as half, Script(SHARE, name) as third, Script(SHARE, name) as sixth:
        for script, units in ((half, 420), (third, 280), (sixth, 140)):
            script.tell(str(units))
            assert script.hear() == "held"
        sixth.tell("1")
        assert sixth.hear() == "refused"
        third.kill()
        sixth.tell("281")
        assert sixth.hear() == "refused"
        sixth.tell("280")
        assert sixth.hear() == "held"


# ---------------------------------------------------------------------------------------- devices=


def test_devices_are_counted_within_the_callers_list(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """`devices=[0]` under CUDA_VISIBLE_DEVICES=2,3 is card 2: a neighbour's card is never meant."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with gpu_slot(devices=[0]) as slot:
        assert [device.id for device in slot.devices] == [driver.ids[2]]
        assert slot.devices[0].index == 0
    with gpu_slot(devices=[driver.ids[3][:13]]) as slot:
        assert [device.id for device in slot.devices] == [driver.ids[3]]
    with pytest.raises(jaxguard.NoDevices, match=r"devices= names 2, which is not there: this process may use 2 "):
        slot_count(devices=[2])
    with pytest.raises(jaxguard.NoDevices, match="is not there"):
        gpu_slot(devices=[driver.ids[0]]).__enter__()
    with pytest.raises(jaxguard.NoDevices, match="names a device twice"):
        slot_count(devices=[0, driver.ids[2]])
    with pytest.raises(jaxguard.NoDevices, match="which fits 2"):
        slot_count(devices=["GPU-"])


def test_devices_choose_cpu_slots(slots: Callable[[int], None]) -> None:
    """The same for CPU slots, by position and by name."""
    slots(3)
    with gpu_slot(devices=[2]) as slot, pytest.raises(jaxguard.SlotTimeout):
        assert slot.devices[0].id == "cpu:2"
        jaxguard.isolated_jax_worker(devices=["cpu:2"], slot_timeout=0)(print)  # at rest
        import threading

        errors: list[BaseException] = []

        def other() -> None:
            try:
                jaxguard.isolated_jax_worker(devices=["cpu:2"], slot_timeout=0)(print)()
            except jaxguard.SlotTimeout as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        raise errors[0]


@pytest.mark.parametrize("devices", [0, "GPU-1f", [None], [0.5], [True], b"GPU-2"], ids=repr)
def test_devices_are_indices_and_ids(devices: Any) -> None:
    """Anything else is refused by type, at decoration."""
    with pytest.raises(TypeError, match="devices must be a sequence of indices or ids"):
        jaxguard.isolated_jax_worker(devices=devices)


@pytest.mark.parametrize("devices", [[], [0, 0], [-1], [""], ["a", "a"], [-2]], ids=repr)
def test_devices_are_named_once(devices: Any) -> None:
    """None, twice, or a negative index is refused, at decoration."""
    with pytest.raises(ValueError, match="devices must"):
        jaxguard.gpu_slot(devices=devices)


# ---------------------------------------------------------------------------------------- cores


def test_cores_near_the_card(tmp_path: Any, empty_host: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards share the cores that the system calls near; where it says nothing, all cores."""
    for number, near in enumerate(["0-7", "0-7", "8-11,14", "8-11,14"]):
        empty_host.add(f"00a0:{number:02x}:00.0", f"GPU-{uuid.uuid4()}", near=near)
    empty_host.enter()
    monkeypatch.setattr(_environment, "cores", lambda: list(range(16)))
    devices = _devices.usable()
    shares = [_environment.cores_of((device,), 1) for device in devices]

    assert shares == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 14], [9, 11]]
    assert _environment.cores_of(devices[:2], 2) == list(range(8))
    assert _environment.cores_of(devices[:1], 0.5, None, 420) == [4, 6], "the second half"
    monkeypatch.setattr(_environment, "cores", lambda: [12, 13])
    assert [_environment.cores_of((device,), 1) for device in devices] == [[12], [13], [12], [13]], "none of them near"


def test_cpus_overrides_the_share(slots: Callable[[int], None]) -> None:
    """So many cores, the slot's own first; PJRT_NPROC and the libraries' threads say the same."""
    slots(1)
    mine = _environment.cores()

    def told() -> Any:
        import os

        names = ("PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return len(os.sched_getaffinity(0)), [os.environ[name] for name in names]

    assert jaxguard.isolated_jax_worker(cpus=1)(told)() == (1, ["1"] * 3)
    assert jaxguard.isolated_jax_worker(told)() == (len(mine), [str(len(mine))] * 3)
    assert jaxguard.isolated_jax_worker(cpus=1, env={"PJRT_NPROC": "7", "OMP_NUM_THREADS": "5"})(told)() == (
        1,
        ["7", "5", "1"],
    ), "a user's own settings win"
    with pytest.raises(ValueError, match=rf"cpus={len(mine) + 1} asks for more cores .* may use {len(mine)} "):
        jaxguard.isolated_jax_worker(cpus=len(mine) + 1)(told)()


@pytest.mark.parametrize("cpus", [True, "2", 1.5])
def test_cpus_is_a_whole_number(cpus: Any) -> None:
    """Anything else is refused by type, at decoration; less than one by value."""
    with pytest.raises(TypeError, match="cpus must be a whole number of cores"):
        jaxguard.isolated_jax_worker(cpus=cpus)
    with pytest.raises(ValueError, match="cpus must be 1 core or more"):
        jaxguard.isolated_jax_worker(cpus=0)


@given(count=st.integers(1, 64), cpus=st.integers(1, 64), slot=st.integers(0, 63), slots_=st.integers(1, 64))
def test_any_number_of_cores(count: int, cpus: int, slot: int, slots_: int) -> None:
    """As many as asked for, no more than there are, none twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXGUARD_DEVICES", f"cpu:{slots_}@cores")
        patch.setattr(_environment, "cores", lambda: list(range(count)))
        device = _devices.usable()[slot % slots_]
        if cpus > count:
            with pytest.raises(ValueError, match="asks for more cores"):
                _environment.cores_of((device,), 1, cpus)
        else:
            chosen = _environment.cores_of((device,), 1, cpus)
            assert len(set(chosen)) == cpus
            assert set(chosen) <= set(range(count))
