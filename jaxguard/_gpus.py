"""The GPUs of this host as devices that can be held, and CUDA's rules for choosing among them.

Identity is physical. A GPU is known by its UUID, and held at its PCI address: the driver tells the UUID of a card only
when somebody has used it, the address always. A MIG slice is a device like a card.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from . import _driver


@dataclass(frozen=True, slots=True)
class Device:
    """One device that can be held."""

    id: str
    """Physical identity: the UUID or PCI address of a GPU, the UUID of a MIG slice, `cpu:0` and so on for CPU slots."""
    index: int
    """Position among the devices that this process may use."""
    kind: str
    """Model name of the GPU, or `cpu`."""
    memory_bytes: int | None
    """Memory of the device, where known."""
    lock: str = field(repr=False)
    """Name of what is locked to hold the device: unique among all devices of the host."""
    line: str = field(repr=False)
    """Name of the line in which requests for it wait."""
    card: int = field(default=-1, repr=False)
    """CUDA's number of the card, in the order of PCI addresses."""
    card_id: str = field(default="", repr=False)
    """UUID of the card, where known."""
    card_kind: str = field(default="", repr=False)
    """Model name of the card."""
    address: str = field(default="", repr=False)
    """Address of the card on the PCI bus."""
    alias: str = field(default="", repr=False)
    """Another name of a MIG slice."""
    mode: str = field(default="", repr=False)
    """`exclusive` where the driver lets one process at a time compute on the card."""

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def is_slice(self) -> bool:
        return self.id.startswith("MIG-")


def everywhere() -> list[Device]:
    """All GPUs and MIG slices of the host, in CUDA's order."""
    found: list[Device] = []
    for number, card in enumerate(_driver.cards()):
        whole = Device(
            id=card.uuid or card.address,
            index=len(found),
            kind=card.kind,
            memory_bytes=card.memory_bytes,
            lock=f"gpu/{card.address or card.uuid}",
            line=f"gpu/{card.address or card.uuid}",
            card=number,
            card_id=card.uuid,
            card_kind=card.kind,
            address=card.address,
            mode=card.mode,
        )
        if not card.mig:
            found.append(whole)
            continue
        for part in card.slices:
            found.append(
                replace(
                    whole,
                    id=part.uuid,
                    index=len(found),
                    kind=part.kind,
                    memory_bytes=part.memory_bytes,
                    lock=f"mig/{part.uuid}",
                    line=f"mig/{part.uuid}",
                    alias=part.alias,
                )
            )
    return found


def masked(found: list[Device], mask: str) -> list[Device]:
    """Narrow by CUDA's rules: in the mask's order, and the first entry that names no device ends the list.

    A card in MIG mode stands for its slices. Source: CUDA C++ Programming Guide, environment variables; NVIDIA MIG
    User Guide, CUDA_VISIBLE_DEVICES.
    """
    chosen: list[Device] = []
    for raw in mask.split(","):
        entry = raw.strip()
        if re.fullmatch(r"[0-9]{1,9}", entry):
            named = [device for device in found if device.card == int(entry)]
        elif entry.startswith("MIG-"):
            named = by_id(found, entry)
        else:
            named = [device for device in found if entry and device.card_id.startswith(entry)]
            named = named if len({device.card for device in named}) == 1 else []
        if not named or any(device in chosen for device in named):
            break
        chosen += named
    return chosen


def is_ambiguous(found: list[Device], mask: str, order: str | None) -> bool:
    """Say whether only CUDA knows what a mask means: it counts different cards by speed, unless it is told not to."""
    numbers = any(re.fullmatch(r"[0-9]{1,9}", entry.strip()) for entry in mask.split(","))
    models = {device.card: device.card_kind for device in found}
    some = numbers and {device.card for device in masked(found, mask)} != set(models)
    return some and len(set(models.values())) > 1 and order != "PCI_BUS_ID"


def by_id(found: Sequence[Device], entry: str) -> list[Device]:
    """The devices that an id, or the beginning of one, names."""
    exact = [device for device in found if entry and entry in {device.id, device.alias}]
    return exact or [device for device in found if entry and device.id.startswith(entry)]
