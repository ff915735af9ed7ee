"""Fields of a framework's configuration by dotted path: read, compared, and set all or nothing.

Works on plain objects and on Fiddle's ``Config`` and ``Partial`` alike, and loads neither.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Any

from nest_megatron.cost_model.targets import Target
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError
from nest_megatron.layout.diff import Change
from nest_megatron.plain import to_plain

#: Where the configurations of frameworks hold what a plan reads and writes.
FIELDS = packaged(__package__, "recipe_fields.toml")
#: A field that is not there.
ABSENT: Any = object()
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


#: A field as a plan wants it: path (``trainer.callbacks[2].tp_comm_overlap``), value and reason.
FieldValue = tuple[str, Any, str]


class Configuration:
    """A framework's configuration, and where it has what a plan reads and writes (``FIELDS``).

    Attributes:
        root: the configuration.
        target: the framework and its release.
        items: item of a plan -> its field.
        model, data, ddp: configurations of the model, of the data and of data parallelism.
        incompatible: other options that only go with some layouts -> their fields.
        pipeline_types: fields of the number format between stages; the first is written.
        seq_length: what user buffers are tuned for.
        rampup_batch_size, iterations: how the batch grows, and the number of steps of the run.
        called: what the configuration is called in errors, in front of a path.
    """

    items: Mapping[str, str]
    model: str
    data: str
    ddp: str
    incompatible: Mapping[str, str]
    pipeline_types: tuple[str, str]
    ckpt_format: str
    async_save: str
    seq_length: str
    rampup_batch_size: str
    iterations: str
    called: str

    def __init_subclass__(cls, framework: str = "") -> None:
        if not framework:
            return
        table = FIELDS[framework]
        for name, text in table["fields"].items():
            setattr(cls, name, text)
        for name, paths in table["paths"].items():
            setattr(cls, name, tuple(paths.split()))
        for kind in ("items", "incompatible"):
            rows = ((part, name) for part, names in table[kind].items() for name in names.split())
            setattr(cls, kind, {name: f"{part}.{name}" for part, name in rows})

    def __init__(self, root: Any, target: Target) -> None:
        self.root, self.target = root, target

    def find(self, path: str) -> Any:
        """The value at a path, or ``ABSENT``."""
        return find(self.root, path)

    def whole(self, path: str) -> int:
        """A whole number of at least 1 at a path; ``UserInputError`` if there is none."""
        value = self.find(path)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise UserInputError(
            f"{self.called}.{path}" if self.called else path,
            None if value is ABSENT else value,
            "it must be a whole number of at least 1",
            f"Set it in the {self.called or 'configuration'}.",
        )


def attribute(holder: Any, name: str) -> Any:
    """An attribute, or ``ABSENT``.

    Fiddle gives a parameter's default where nothing is set, but refuses to call a dataclass
    field's default factory; it is called here.
    """
    try:
        return getattr(holder, name)
    except AttributeError:
        return ABSENT
    except ValueError:
        return getattr(holder.__fn_or_cls__, "__dataclass_fields__", {})[name].default_factory()


def value_or(holder: Any, name: str, default: Any = None) -> Any:
    """An attribute, or a default where it is absent or ``None``."""
    found = attribute(holder, name)
    return default if found is ABSENT or found is None else found


def find(root: Any, path: str) -> Any:
    """The value at a path, or ``ABSENT`` if any step of it is not there."""
    for name, index in _STEP.findall(path):
        if name:
            root = attribute(root, name)
        else:
            is_there = isinstance(root, Sequence) and int(index) < len(root)
            root = root[int(index)] if is_there else ABSENT
        if root is ABSENT:
            break
    return root


def classes_of(holder: Any) -> tuple[type, ...]:
    """An object's class and its bases; for a Fiddle buildable, those of what it builds."""
    built = getattr(holder, "__fn_or_cls__", type(holder))
    found: tuple[type, ...] = getattr(built, "__mro__", (built,))
    return found


def class_names(holder: Any) -> tuple[str, ...]:
    """Names of an object's class and its bases."""
    return tuple(base.__name__ for base in classes_of(holder))


def changed_fields(
    holder: Any, classes: Collection[str], known: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Fields that are not known and differ from what a class makes of them, with their values.

    Args:
        classes: names of those whose defaults count, the first among the bases of the holder's own;
            a field that they do not have differs where it is neither empty nor off.
        known: fields to pass over.
    """
    bases = classes_of(holder)
    defaults: dict[str, Field[Any]] = next(
        (vars(base).get("__dataclass_fields__", {}) for base in bases if base.__name__ in classes),
        {},
    )
    own = getattr(bases[0], "__dataclass_fields__", {})
    set_here = getattr(holder, "__arguments__", None) or getattr(holder, "__dict__", {})
    for name in dict.fromkeys((*own, *set_here)):
        value = attribute(holder, name)
        if name in known or name.startswith("_") or value is ABSENT:
            continue
        default = _default(defaults[name]) if name in defaults else None
        if value != default and (value or default):
            yield name, value


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def shown(value: Any) -> str:
    """A value in a few letters: of a configuration inside, its kind alone.

    >>> shown(["mlp"]), shown(type("Sizes", (), {})())
    ("['mlp']", 'Sizes')
    >>> shown([type("Callback", (), {})()])
    '[Callback]'
    """
    if isinstance(value, list | tuple) and not all(map(_is_plain, value)):
        return f"[{', '.join(map(shown, value))}]"
    return str(value) if _is_plain(value) else class_names(value)[0]


def _is_plain(value: Any) -> bool:
    plain = value is None or isinstance(value, bool | int | float | str | list | tuple)
    return plain or type(value).__module__ == "torch"


def changes(root: Any, wanted: Iterable[FieldValue]) -> tuple[Change, ...]:
    """What differs from what is wanted; nothing is set. A field that does not exist is refused."""
    found = []
    for path, value, reason in wanted:
        before = find(root, path)
        if before is not ABSENT:
            if not _is_same(path, before, value):
                found.append(Change(field=path, before=before, after=value, reason=reason))
        # what a framework does that has no such field: one rank, off, or unset
        elif not (
            value is None or value is False or (value in (1, "no_shard") and value is not True)
        ):
            raise UserInputError(
                path,
                value,
                "the installed framework has no such field, and the plan needs it",
                "Upgrade the framework, or plan again with this choice fixed at its default.",
            )
    return tuple(found)


def carry_out(root: Any, changed: tuple[Change, ...]) -> tuple[Change, ...]:
    """Set every field, or none: where one is refused, those before it get their values back."""
    done: list[Change] = []
    for change in changed:
        try:
            _set(root, change.field, change.after)
        except (AttributeError, TypeError, ValueError) as error:
            for earlier in reversed(done):
                _set(root, earlier.field, earlier.before)
            raise UserInputError(
                change.field,
                change.after,
                f"the configuration refuses it: {str(error).splitlines()[0]}",
                "Report it with the framework's version; nothing was changed.",
            ) from error
        done.append(change)
    return changed


def _set(root: Any, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(find(root, parent), name, value)


def _is_same(path: str, before: Any, value: Any) -> bool:
    old, new = to_plain(before), to_plain(value)
    if path.rpartition(".")[2] == "recompute_modules" and isinstance(old, list):
        return isinstance(new, list) and set(old) == set(new)  # in whatever order
    return bool(old == new)
