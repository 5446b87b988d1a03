"""Errors: what programs and people can do with them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import pytest

import jaxguard
from jaxguard import errors

FIELDS: dict[str, dict[str, Any]] = {
    "SlotTimeout": {"waited_s": 1.5, "holders": (3, 4)},
    "WorkerDied": {
        "pid": 7,
        "exit_code": None,
        "signal": 9,
        "output": "last words",
        "trial": 3,
        "devices": ("cpu:0",),
        "phase": "running",
    },
    "WorkerTimeout": {"pid": 7, "timeout_s": 2.0, "stacks": "File ...", "trial": 3, "devices": (), "phase": "running"},
    "RemoteError": {"type": "m.E", "text": "gone", "traceback": "Traceback ..."},
}
BUILT_IN_PARENTS = {"SlotTimeout": TimeoutError, "WorkerTimeout": TimeoutError}

every_error = pytest.mark.parametrize("name", errors.__all__)


def make(name: str) -> Any:
    """Make one with all of its fields."""
    return getattr(errors, name)("no slot – pid 7 – wait", **FIELDS.get(name, {}))


@every_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles_with_its_fields(name: str, protocol: int) -> None:
    """Type, text and fields survive pickle, in each protocol."""
    error = make(name)
    again = pickle.loads(pickle.dumps(error, protocol))

    assert type(again) is type(error)
    assert str(again) == str(error) == "no slot – pid 7 – wait"
    assert again.args == error.args
    assert {field: getattr(again, field) for field in FIELDS.get(name, {})} == FIELDS.get(name, {})


@every_error
def test_every_error_survives_copy_and_cloudpickle(name: str) -> None:
    """What joblib and `copy` do to an exception leaves it whole."""
    for again in (copy.copy(make(name)), copy.deepcopy(make(name)), pickle.loads(cloudpickle.dumps(make(name)))):
        assert (type(again), str(again), vars(again)) == (type(make(name)), str(make(name)), vars(make(name)))


@every_error
def test_every_error_is_caught_by_its_parents(name: str) -> None:
    """`except JaxguardError` catches them all, and `except TimeoutError` the two that are about time."""
    for parent in (jaxguard.JaxguardError, BUILT_IN_PARENTS.get(name, Exception)):
        with pytest.raises(parent, match="no slot – pid 7 – wait"):
            raise make(name)


@every_error
def test_an_error_says_its_public_place(name: str) -> None:
    """Users see, and pickles name, `jaxguard.SlotTimeout` and its like."""
    cls = getattr(errors, name)

    assert cls.__module__ == "jaxguard"
    assert getattr(jaxguard, name) is cls
    assert b"jaxguard.errors" not in pickle.dumps(cls, 0), "a pickle names the public place"


@every_error
def test_the_fields_of_this_file_are_all_there_are(name: str) -> None:
    """Each field that an error declares is tested here, and has a value where nothing is given."""
    cls = getattr(errors, name)
    declared = {field for field in vars(cls) if not field.startswith("_")}

    assert declared == set(FIELDS.get(name, {}))
    assert all(hasattr(cls("text"), field) for field in declared)


@every_error
def test_an_unknown_field_is_refused(name: str) -> None:
    """A field that the class does not declare is a mistake of the raiser, and named."""
    with pytest.raises(TypeError, match=f"{name} has no field 'colour'"):
        getattr(errors, name)("text", colour="red")


def test_notes_survive() -> None:
    """What `add_note` added to an error is still there after pickle, as for any other exception."""
    error = make("SlotTimeout")
    error.add_note("while tuning the head")

    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while tuning the head"]
