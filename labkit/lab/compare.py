"""Whether two answers are the same, and in words where they first differ. Refuses to know which of them is right.

Numbers, sequences, mappings, numpy arrays and torch tensors are compared by value; neither numpy's nor torch's rules
leak out: the answer is a sentence or None, and nothing here raises for a value of a strange type.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

#: Most that one value shows of itself.
MAX_SHOWN = 300
#: A list and a tuple with the same entries count as the same answer.
_SEQUENCES = (list, tuple, range)

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = _short.maxdict = 40
_short.maxstring = _short.maxother = MAX_SHOWN
_short.maxlong = 60
_short.maxlevel = 4


def difference(expected: Any, got: Any, rel: float = 1e-6, abs_: float = 1e-9) -> str | None:
    """Where `got` first differs from `expected`, as the end of the sentence "Yours …"; None where they are the same.

    Whole numbers must be whole numbers (16.0 and True are not 16); where a float is expected a whole number does.
    Floats, arrays and tensors agree within `rel` or `abs_`; NaN agrees with NaN. Shapes must agree. A list may stand
    for a tuple.
    """
    try:
        return _difference(expected, got, rel, abs_, "")
    except Exception as error:  # a learner's object may fail in its own __eq__, __len__ or __iter__
        return f"could not be compared: {type(error).__name__}: {error}"


def same(expected: Any, got: Any) -> bool:
    """What a checker asks unless an exercise brings its own rule."""
    return difference(expected, got) is None


def close(rel: float = 1e-4, abs_: float = 1e-6) -> Callable[[Any, Any], bool]:
    """`same` with another tolerance, for an exercise: `same=close(1e-3)`."""
    return lambda expected, got: difference(expected, got, rel, abs_) is None


def shown(value: Any) -> str:
    """A value in one short, repeatable piece of text: no memory addresses, long things cut."""
    try:
        if _is_array(value):
            array = _numpy(value)
            numbers_ = _short.repr(array.tolist())
            kind = "tensor" if hasattr(value, "detach") else "array"
            shape = "×".join(map(str, array.shape)) or "scalar"
            text = f"{kind} [{shape}] {numbers_}"
        else:
            text = _short.repr(value)
    except Exception:  # a broken __repr__ must not hide the rest of a card
        text = f"<{type(value).__name__}>"
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _difference(expected: Any, got: Any, rel: float, abs_: float, where: str) -> str | None:
    if _is_array(expected) or _is_array(got):
        return _array_difference(expected, got, rel, abs_, where)
    if isinstance(expected, enum.Enum) or isinstance(got, enum.Enum):
        return None if expected is got else _plain(expected, got, where)
    if expected is None or isinstance(expected, (bool, str, bytes)):
        if type(expected) is not type(got):
            return _kind(expected, got, where)
        return None if expected == got else _plain(expected, got, where)
    if isinstance(expected, numbers.Real):
        return _number_difference(expected, got, rel, abs_, where)
    if isinstance(expected, _SEQUENCES):
        if not isinstance(got, _SEQUENCES):
            return _kind(expected, got, where)
        return _sequence_difference(expected, got, rel, abs_, where)
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping):
            return _kind(expected, got, where)
        for key in expected:
            if key not in got:
                return f"has no entry {shown(key)}{_at(where)}"
            found = _difference(expected[key], got[key], rel, abs_, f"{where}[{shown(key)}]")
            if found:
                return found
        extra = [key for key in got if key not in expected]
        return f"has an entry {shown(extra[0])} too many{_at(where)}" if extra else None
    if isinstance(expected, Set):
        if not isinstance(got, Set):
            return _kind(expected, got, where)
        missing, extra = sorted(map(shown, expected - got)), sorted(map(shown, got - expected))
        if missing:
            return f"lacks {missing[0]}{_at(where)}"
        return f"has {extra[0]} too many{_at(where)}" if extra else None
    if dataclasses.is_dataclass(expected) and type(expected) is type(got):
        for field in dataclasses.fields(expected):
            a, b = getattr(expected, field.name), getattr(got, field.name)
            found = _difference(a, b, rel, abs_, f"{where}.{field.name}")
            if found:
                return found
        return None
    by_identity = getattr(type(expected), "__eq__", None) == object.__eq__
    if type(expected) is type(got) and by_identity and hasattr(expected, "__dict__"):
        return _difference(vars(expected), vars(got), rel, abs_, where)
    if expected == got:
        return None
    return _plain(expected, got, where) if type(expected) is type(got) else _kind(expected, got, where)


def _number_difference(expected: Any, got: Any, rel: float, abs_: float, where: str) -> str | None:
    if isinstance(got, bool) or not isinstance(got, numbers.Real):
        return _kind(expected, got, where)
    if isinstance(expected, numbers.Integral):
        if not isinstance(got, numbers.Integral):
            return _kind(expected, got, where)
        return None if expected == got else _plain(expected, got, where)
    a, b = float(expected), float(got)
    same_ = (math.isnan(a) and math.isnan(b)) or a == b or math.isclose(a, b, rel_tol=rel, abs_tol=abs_)
    return None if same_ else _plain(expected, got, where)


def _sequence_difference(
    expected: Sequence[Any], got: Sequence[Any], rel: float, abs_: float, where: str
) -> str | None:
    for i, (a, b) in enumerate(zip(expected, got, strict=False)):
        found = _difference(a, b, rel, abs_, f"{where}[{i}]")
        if found:
            return found
    if len(expected) != len(got):
        return f"has {_entries(len(got))}{_at(where)}, expected {'is' if len(expected) == 1 else 'are'} {len(expected)}"
    return None


def _array_difference(expected: Any, got: Any, rel: float, abs_: float, where: str) -> str | None:
    if not _is_array(got) or not _is_array(expected):
        return _kind(expected, got, where)
    if hasattr(expected, "detach") is not hasattr(got, "detach"):
        return _kind(expected, got, where)
    import numpy as np

    a, b = _numpy(expected), _numpy(got)
    if a.shape != b.shape:
        return f"has the shape {list(b.shape)}{_at(where)}, expected is {list(a.shape)}"
    if (a.dtype.kind in "iub") != (b.dtype.kind in "iub") and a.dtype.kind in "iub":
        return f"holds {b.dtype}{_at(where)}, expected is {a.dtype}"
    if a.dtype.kind in "fc" or b.dtype.kind in "fc":
        agree = np.isclose(b.astype("float64"), a.astype("float64"), rtol=rel, atol=abs_, equal_nan=True)
    else:
        agree = a == b
    if bool(np.all(agree)):
        return None
    first = tuple(int(i) for i in np.argwhere(~np.asarray(agree))[0])
    at = where + (str(list(first)) if first else "")
    count = int(np.size(agree) - np.count_nonzero(agree))
    more = f"; {count} of {a.size} entries differ" if a.size > 1 else ""
    return f"is {shown(b[first].item())}{_at(at)}, expected is {shown(a[first].item())}{more}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "tolist") and hasattr(value, "ndim")


def _numpy(value: Any) -> Any:
    """A numpy array or scalar; of a tensor a copy on the host, bfloat16 widened, as numpy has none."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return np.asarray(value)


def _entries(n: int) -> str:
    return f"{n} {'entry' if n == 1 else 'entries'}"


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _plain(expected: Any, got: Any, where: str) -> str:
    return f"is {shown(got)}{_at(where)}, expected is {shown(expected)}"


def _kind(expected: Any, got: Any, where: str) -> str:
    return f"is {_a(got)}, {shown(got)}{_at(where)}; expected is {_a(expected)}, {shown(expected)}"


def _a(value: Any) -> str:
    if value is None:
        return "nothing"
    name = {"int": "whole number", "bool": "truth value", "str": "text", "ndarray": "array", "Tensor": "tensor"}.get(
        type(value).__name__, type(value).__name__
    )
    return name if name == "text" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
