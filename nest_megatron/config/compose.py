"""Compose a job with Hydra: the catalogue, the user's files and overrides in one checked record."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nest_megatron.catalogue_files import GROUPS as CATALOGUE_GROUPS
from nest_megatron.catalogue_files import catalogue_entry, catalogue_names, catalogue_root
from nest_megatron.cluster.records import Cluster, cluster_from_mapping
from nest_megatron.config.defaults import naming_defaults
from nest_megatron.config.hydra_loader import compose_config
from nest_megatron.config.overrides import (
    GROUPS,
    Setting,
    check_choice,
    first_line,
    hydra_form,
    is_path,
    refuse_resolvers,
    type_limit,
    unreadable,
)
from nest_megatron.config.schema import SECTIONS, PlanConfig
from nest_megatron.documents import DESCRIPTION, check_yaml, read_json
from nest_megatron.errors import UserInputError, nearest, require_known, typed_setting
from nest_megatron.files import expanded, read_text
from nest_megatron.plain import to_plain

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: What describes a model, a cluster or an accelerator, by name.
Fields = Mapping[str, Any]

_OWN_ENTRY = "_described"
_LEVELS = "cluster.levels."
_LEVEL = re.compile(r"cluster\.levels\.([^.]+)\.")
#: A model's name on a hub of models: OWNER/MODEL.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.(?:json|ya?ml)$)[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Settings(PlanConfig):
    """What a user says of a job and how it is planned, checked by Hydra, and where it is from.

    Args:
        given: the keys that the command line set, each with its value as typed; ``None`` for a
            description and for what a launcher says.
        notes: what was not read of a file.
        defaults: the settings among them that are the site's.
        describes_cluster: its cluster is a description of the user's, and not the catalogue's.
    """

    given: Mapping[str, str | None] = dataclasses.field(compare=False)
    notes: tuple[str, ...] = ()
    defaults: tuple[Setting, ...] = ()
    describes_cluster: bool = False

    def __post_init__(self) -> None:
        """Freeze the descriptions that Hydra composed."""
        for name in GROUPS:
            if (fields := getattr(self, name)) is not None:
                object.__setattr__(self, name, MappingProxyType(dict(fields)))


def compose(
    overrides: Sequence[Setting],
    config_dir: Path | None = None,
    *,
    described: Mapping[str, Fields] = MappingProxyType({}),
) -> Settings:
    """Compose checked overrides over ``hydra_configs/plan.yaml``.

    Args:
        config_dir: a folder of the user's own groups, searched beside the catalogue.
        described: the model or the cluster as its fields, by group, instead of a name or a file.

    Raises:
        UserInputError: for a value of the wrong type, an unknown name or an unreadable file.
    """
    with naming_defaults(overrides):
        notes = []
        for setting in overrides:  # a power of two may be meant
            size = (setting.value or "").removesuffix("k")
            if setting.key.endswith(".seq_length") and size.isdecimal() and size != setting.value:
                kibi = f"{size}Ki is {1024 * int(size):,}"
                notes.append(f"{setting} is {1000 * int(size):,} tokens; {kibi}.")
        folder = None if config_dir is None else _existing_folder(config_dir)
        chosen = _with_undivided_levels(overrides)
        chosen = _with_numbered_levels(chosen, folder, described)
        chosen, described = _with_other_accelerator(chosen, folder, described)
        given = {**dict.fromkeys(described), **{each.key: each.value for each in chosen}}
        cluster = given.get("cluster") or ""
        own = folder is not None and (folder / "cluster" / f"{cluster}.yaml").is_file()
        return Settings(
            **_load(chosen, folder, described, notes),
            given=MappingProxyType(given),
            notes=tuple(notes),
            defaults=tuple(each for each in overrides if each.origin is not None),
            describes_cluster="cluster" in described or is_path(cluster) or own,
        )


def _load(
    overrides: Sequence[Setting],
    folder: Path | None,
    described: Mapping[str, Fields],
    notes: list[str],
) -> Mapping[str, Any]:
    """The fields of ``PlanConfig`` with overrides; ``notes`` of files are added to those there."""
    if "model" not in described and all(each.key != "model" for each in overrides):
        overrides = _with_model_as_flags(overrides)
    entries = dict(described)
    if not _OF_HUGGING_FACE.isdisjoint(entries.get("model", ())):
        name = str(entries["model"].get("model_type", "model"))
        entries["model"] = _of_hugging_face(entries["model"], name, "the configuration", notes)
    words = [f"{group}={_OWN_ENTRY}" for group in described]
    for each in overrides:
        if each.key in GROUPS and each.value is not None and is_path(each.value):
            path = expanded(Path(each.value.strip("'\"")), each.key)
            is_model = each.key == "model"
            fields = _model_file(path, notes) if is_model else read_mapping("cluster", path)
            entries[each.key] = fields  # of a file is an entry of its group
            words.append(f"{each.key}={_OWN_ENTRY}")
        else:
            words.append(hydra_form(each, folder))
    for word in words:
        key, _, value = word.partition("=")
        refuse_resolvers(key, [key, value])
    for group, fields in entries.items():
        refuse_resolvers(group, fields)
        _check_included(group, fields, folder)
    for each in overrides if folder is not None else ():
        group = each.key.rpartition(".")[2]
        name = each.value or "null"
        if group in CATALOGUE_GROUPS and not (name.startswith(("{", "null")) or is_path(name)):
            _check_included(group, {"defaults": [{f"/{group}": name}]}, folder)
    if folder is None:
        return _composed_of_catalogue(tuple(words), json.dumps(entries, default=to_plain))
    return _composed(folder, words, entries)


def _with_model_as_flags(settings: Sequence[Setting]) -> Sequence[Setting]:
    """Fields of the model as flags, where no model is named that has them but that of a command."""
    fields = [s for s in settings if s.key.startswith("model.") and s.value is not None]
    if not fields:
        return settings
    words = [s.value or "" for s in settings if s.key == "flags"]
    for setting in fields:
        name = setting.key.removeprefix("model.").replace("_", "-")
        words.append(shlex.join([f"--{name}", setting.value or ""]))
    others = [s for s in settings if s not in fields and s.key != "flags"]
    return [*others, Setting(key="flags", value=" ".join(words))]


def _with_numbered_levels(
    overrides: Sequence[Setting],
    folder: Path | None,
    described: Mapping[str, Fields],
) -> Sequence[Setting]:
    """Settings of network levels that are named (``cluster.levels.leaf.latency_s``), by number.

    Raises:
        UserInputError: for a name that no level of the cluster has.
    """
    named = [s for s in overrides if (found := _LEVEL.match(s.key)) and not found[1].isdecimal()]
    if not named:
        return overrides
    others, described = _with_other_accelerator(
        [each for each in overrides if each not in named], folder, described
    )
    levels = (_load(others, folder, described, [])["cluster"] or {}).get("levels")
    names = [str(level.get("name")) for level in levels or () if isinstance(level, Mapping)]
    keys = {}
    for key in (setting.key for setting in named):
        name, rest = key.removeprefix(_LEVELS).split(".", 1)
        require_known(key, name, names, "the cluster has no such network level")
        keys[key] = f"{_LEVELS}{names.index(name)}.{rest}"
    return [dataclasses.replace(each, key=keys.get(each.key, each.key)) for each in overrides]


def _with_undivided_levels(overrides: Sequence[Setting]) -> Sequence[Setting]:
    """The catalogue's cluster in the place of a plan file's, where its oversubscription is given.

    A plan file holds what the oversubscription of its cluster leaves of the bandwidth.

    Raises:
        UserInputError: for a cluster that is not as the catalogue has it: what was divided is not
            known.
    """
    given = {setting.key: setting.value for setting in overrides}
    asked, source = given.get("cluster.oversubscription"), given.get("cluster")
    if asked is None or source is None or not is_path(source):
        return overrides
    path = expanded(Path(source.strip("'\"")), "cluster")
    loaded = _loaded("cluster", path)
    if "schema" not in loaded:
        return overrides
    of_plan = cluster_from_mapping(_of_own_file("cluster", path, loaded))
    name, size = of_plan.name, of_plan.num_gpus
    if name in catalogue_names("cluster") and catalogue_cluster(name, size) == of_plan:
        own = {"cluster": name, "cluster.num_gpus": str(size)}
        kept = (setting for setting in overrides if setting.key != "cluster")
        return [*(Setting(key=key, value=value) for key, value in own.items()), *kept]
    raise UserInputError(
        "cluster.oversubscription",
        asked,
        "the plan's file holds the bandwidth that its cluster's oversubscription leaves",
        "Change the bandwidth of the level, or name the cluster (cluster=NAME, or its own file).",
    )


def catalogue_cluster(name: str, num_gpus: int | None = None) -> Cluster:
    """A cluster of the catalogue, which needs none of Hydra's composition."""
    entry = catalogue_entry("cluster", name)
    for choice in entry.pop("defaults", ()):
        if isinstance(choice, dict):
            entry["accelerator"] = catalogue_entry("accelerator", next(iter(choice.values())))
    return cluster_from_mapping(entry, num_gpus=num_gpus)


def _with_other_accelerator(
    settings: Sequence[Setting],
    config_dir: Path | None,
    described: Mapping[str, Fields],
) -> tuple[Sequence[Setting], Mapping[str, Fields]]:
    """The cluster of a file that holds its accelerator's fields, with one of the catalogue."""
    given = {setting.key: setting.value for setting in settings}
    path, name = given.get("cluster"), given.get("cluster.accelerator")
    if not path or not is_path(path) or not name or name.startswith(("{", "null")):
        return settings, described
    fields = read_mapping("cluster", expanded(Path(path.strip("'\"")), "cluster"))
    if "defaults" in fields:
        return settings, described
    check_choice("accelerator", name, config_dir)
    others = {key: value for key, value in fields.items() if key != "accelerator"}
    chosen = {"defaults": [{"/accelerator@accelerator": name}, "_self_"]}
    kept = [s for s in settings if s.key not in ("cluster", "cluster.accelerator")]
    return kept, {**described, "cluster": {**chosen, **others}}


def _existing_folder(named: Path) -> Path:
    """The user's folder of groups, from / on."""
    folder = expanded(named, "--config-dir")
    if not folder.is_dir():
        raise UserInputError(
            "--config-dir",
            str(named),
            "there is no such folder",
            "Name a folder with model/, cluster/ or accelerator/ inside.",
        )
    for group in CATALOGUE_GROUPS:
        for name in catalogue_names(group):
            if (own := folder / group / f"{name}.yaml").is_file():
                raise UserInputError(
                    "--config-dir",
                    str(own),
                    f"the catalogue has the {group} {name}",
                    "Give the file another name.",
                )
    return folder.resolve()


def _check_included(group: str, fields: Fields, config_dir: Path | None) -> None:
    """Refuse a description that includes anything but entries of the catalogue or of the user.

    Hydra reads what ``defaults`` names, wherever it lies; files of the user are checked here, once
    each, as the first one.
    """
    seen: set[Path] = set()
    left = [*_included(group, fields)]
    while left:
        group, name = left.pop()
        check_choice(group, name, config_dir)
        path = Path() if config_dir is None else config_dir / group / f"{name}.yaml"
        if path not in seen and path.is_file():
            seen.add(path)
            left += _included(group, read_mapping(group, path))


def _included(group: str, fields: Fields) -> Iterator[tuple[str, str]]:
    """Group and name of what a description's ``defaults`` includes."""
    entries = fields.get("defaults", ())
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise UserInputError(
            f"{group} defaults",
            str(entries),
            "defaults must be a list",
            "For example - /accelerator@accelerator: NAME.",
        )
    for entry in entries:
        pairs = entry.items() if isinstance(entry, Mapping) else [(f"/{group}", entry)]
        for key, name in pairs:
            words = str(key).split() or [""]
            of = words[-1].partition("@")[0]
            if name == "_self_" and not isinstance(entry, Mapping):
                continue
            if of.removeprefix("/") not in CATALOGUE_GROUPS or not of.startswith("/"):
                raise UserInputError(
                    f"{group} defaults",
                    str(entry),
                    f"a description includes entries of /{', /'.join(CATALOGUE_GROUPS)}",
                    "For example - /accelerator@accelerator: h100_sxm_80gb.",
                )
            yield of.removeprefix("/"), str(name)


@functools.lru_cache(maxsize=64)
def _composed_of_catalogue(overrides: tuple[str, ...], described: str) -> Mapping[str, Any]:
    """The same of the catalogue alone, whose files stay as they are; ``described`` is JSON."""
    return _composed(None, overrides, json.loads(described))


def _composed(
    folder: Path | None, overrides: Sequence[str], described: Mapping[str, Fields]
) -> Mapping[str, Any]:
    from omegaconf import OmegaConf

    # the types of values, in a node that overrides may change although its record is frozen
    schema: DictConfig = OmegaConf.structured(PlanConfig)
    OmegaConf.set_readonly(schema, None)
    entries: dict[tuple[str | None, str], Any] = {(None, "plan_schema"): schema}
    try:
        entries |= {(group, _OWN_ENTRY): fields for group, fields in described.items()}
        with importlib.resources.as_file(catalogue_root()) as catalogue:
            folders = [each for each in (catalogue.resolve(), folder) if each is not None]
            config = compose_config("plan", overrides, folders, entries)
        OmegaConf.set_readonly(config, True)
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except Exception as error:  # Hydra asserts on what it does not expect in a user's file
        raise _plain_error(error, overrides) from error
    plain["assume_harmless"] = tuple(plain["assume_harmless"])
    return {**plain, **{name: config[name] for name in SECTIONS}}


def _plain_error(error: Exception, overrides: Sequence[str]) -> UserInputError:
    """Hydra's error in our words: the override it is about, and the first line of the cause."""
    from hydra.errors import OverrideParseException

    if isinstance(error, OverrideParseException):
        key, _, value = error.override.lstrip("+~").partition("=")
        return unreadable(key, value, error)
    what, wrong = "settings", None
    for override in reversed(overrides):  # the first that the error is about
        key, _, value = override.lstrip("+~").partition("=")
        if override in str(error) or f"full_key: {key}" in str(error):
            what, wrong = typed_setting(key), value
        group, _, inner = key.partition(".")
        if inner and group in GROUPS and "root: NoneType" in str(error):  # there is no such node
            return UserInputError(
                typed_setting(key),
                value,
                f"no {group} is named whose field it could be",
                f"Name one: {typed_setting(group)}=NAME.",
            )
    if "list index out of range" in str(error.__cause__ or error):
        return UserInputError(
            what, wrong, "the list has no such entry", "Count from 0, or use its name."
        )
    return UserInputError(
        what,
        wrong,
        type_limit(error.__cause__ or error),
        "Correct the value; docs/settings.md explains each setting.",
    )


#: Keys of which every Hugging Face configuration has one.
_OF_HUGGING_FACE = frozenset({"model_type", "architectures", "text_config"})


def _model_file(path: Path, notes: list[str]) -> Fields:
    """A model's description from a Hugging Face ``config.json``, its folder, or a YAML file."""
    if path.is_dir():
        path = path / "config.json"
    if not path.exists() and _HUB_NAME.fullmatch(str(path)):
        limit = "there is no such file, and nothing is fetched from a hub"
        fix = f"Give its config.json (hf download {path} config.json prints the path), or a name "
        names = nearest(path.name.lower().replace("-", "_"), catalogue_names("model"), count=2)
        fix += f"of the catalogue. {names}"
        raise UserInputError("model", str(path), limit, fix)
    if path.suffix != ".json":
        return read_mapping("model", path)
    parsed = read_json(path, "model")
    if not isinstance(parsed, dict):
        raise _bad_file("model", path, "it is not a JSON object")
    if _OF_HUGGING_FACE.isdisjoint(parsed):
        return read_mapping("model", path)  # JSON is YAML
    generic = path.stem in ("config", "")
    name = path.resolve().parent.name if generic else path.stem
    return _of_hugging_face(parsed, name, str(path), notes)


def _of_hugging_face(parsed: Fields, name: str, where: str, notes: list[str]) -> Fields:
    """A model's description from the fields of a Hugging Face configuration."""
    from nest_megatron.model.hugging_face import read_hf_model

    read = read_hf_model(parsed, name)
    notes += read.notes
    if read.unread:
        unread = ", ".join(read.unread)
        notes.append(f"Not read of {where}: {unread}; the model is planned without.")
    return record_fields(read.spec)


def record_fields(record: object) -> Fields:
    """A model's or a cluster's record, or its fields in a file, as those of its description."""
    fields = to_plain(record)
    pattern = fields.pop("moe_layer_pattern", None)
    return {**fields, "moe_layer_freq": pattern} if pattern else fields


def read_mapping(group: str, path: Path) -> Fields:
    """What a YAML file of the user describes: a model, a cluster or an accelerator.

    Of a plan file it is the model, or the cluster, that the plan was made for.
    """
    loaded = _loaded(group, path)
    return _of_own_file(group, path, loaded) if "schema" in loaded else loaded


def _loaded(group: str, path: Path) -> Fields:
    """A YAML file of the user as it stands."""
    return _parsed(group, path, read_text(path, group, most=DESCRIPTION.num_bytes))


@functools.lru_cache(maxsize=16)
def _parsed(group: str, path: Path, text: str) -> Fields:
    from omegaconf import DictConfig, OmegaConf

    check_yaml(text, group, name=str(path), limits=DESCRIPTION)
    try:
        loaded = OmegaConf.create(text)
    except Exception as error:  # OmegaConf asserts on what it does not expect
        raise _bad_file(group, path, first_line(error)) from error
    if not isinstance(loaded, DictConfig) or not loaded:
        raise _bad_file(group, path, "it is not a mapping")
    if not all(isinstance(key, str) for key in loaded):
        raise _bad_file(group, path, "a name of a field is no text")
    fix = f"Write the value itself into {path.name}."
    fields: Any = OmegaConf.to_container(loaded, resolve=False)
    refuse_resolvers(group, fields, fix)
    return dict(fields)


def _of_own_file(group: str, path: Path, loaded: Fields) -> Fields:
    """A model or a cluster of a file that this program wrote for something else."""
    described = loaded.get(group)
    if isinstance(described, Mapping) and "layout" in loaded:
        return record_fields(described)
    limit, fix = f"it is a file of ours that describes no {group}", "Name another file."
    if "samples" in loaded and group == "cluster":
        limit = "it is a network profile, which knows no accelerator"
        fix = f"`nest-megatron network import {path} --cluster NAME --out FILE` makes a cluster."
    raise UserInputError(group, str(path), limit, fix)


def _bad_file(group: str, path: Path, limit: str) -> UserInputError:
    return UserInputError(group, str(path), limit, "Correct the file.")
