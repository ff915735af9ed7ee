"""Compose a job: the catalogue, the user's files and overrides in one checked record."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from nest_megatron.catalogue_files import GROUPS as CATALOGUE_GROUPS
from nest_megatron.catalogue_files import catalogue_entry, catalogue_names
from nest_megatron.cluster.records import Cluster, cluster_from_mapping
from nest_megatron.config.defaults import naming_defaults
from nest_megatron.config.overrides import (
    ACCELERATOR_CHOICE,
    GROUPS,
    Setting,
    check_choice,
    first_line,
    is_path,
    refuse_resolvers,
    type_limit,
    typed_value,
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

_NAMED_LEVEL = re.compile(r"cluster\.levels\.(?!\d+\.)([^.]+)\.")
#: A model's name on a hub of models: OWNER/MODEL.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.(?:json|ya?ml)$)[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Settings(PlanConfig):
    """What a user says of a job and how it is planned, checked, and where it is from.

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
        """Freeze the descriptions."""
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
    from omegaconf import OmegaConf

    with naming_defaults(overrides):
        notes = []
        for setting in overrides:  # a power of two may be meant
            size = (setting.value or "").removesuffix("k")
            if setting.key.endswith(".seq_length") and size.isdecimal() and size != setting.value:
                notes.append(
                    f"{setting} is {1000 * int(size):,} tokens; {size}Ki is {1024 * int(size):,}."
                )
        folder = None if config_dir is None else _existing_folder(config_dir)
        chosen = _with_undivided_levels(overrides)
        settings = chosen
        if "model" not in described and all(each.key != "model" for each in chosen):
            settings = _with_model_as_flags(chosen)
        given = {**dict.fromkeys(described), **{each.key: each.value for each in chosen}}
        with _in_our_words(settings):
            entries = _entries(settings, folder, described, notes)
            config = cast("DictConfig", OmegaConf.merge(_base(), entries))
            for each in sorted(settings, key=lambda each: _NAMED_LEVEL.match(each.key) is not None):
                setting = _numbered(each, config)
                if setting is not each:
                    given[setting.key] = given.pop(each.key)
                _update(config, setting)
            _keep_left_bandwidth(config, given, entries.get("cluster", {}))
            OmegaConf.set_readonly(config, True)
            plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        plain["assume_harmless"] = tuple(plain["assume_harmless"])
        cluster = given.get("cluster") or ""
        own = folder is not None and (folder / "cluster" / f"{cluster}.yaml").is_file()
        return Settings(
            **{**plain, **{name: config[name] for name in SECTIONS}},
            given=MappingProxyType(given),
            notes=tuple(notes),
            defaults=tuple(each for each in overrides if each.origin is not None),
            describes_cluster="cluster" in described or is_path(cluster) or own,
        )


@contextlib.contextmanager
def _in_our_words(settings: Sequence[Setting], about: Setting | None = None) -> Iterator[None]:
    """Raise OmegaConf's errors in our words: the setting, and the first line of the cause.

    Args:
        settings: of which the error names one, if ``about`` is not it.
    """
    try:
        yield
    except UserInputError:
        raise
    except Exception as error:  # OmegaConf asserts on what it does not expect in a user's file
        named = (each for each in settings if f"full_key: {each.key}\n" in f"{error}\n")
        what, value = "settings", None
        if (wrong := about or next(named, None)) is not None:
            what, value = typed_setting(wrong.key), wrong.value
        limit, fix = type_limit(error), "Correct the value; docs/settings.md explains each setting."
        if "list index out of range" in limit:
            limit, fix = "the list has no such entry", "Count from 0, or use its name."
        raise UserInputError(what, value, limit, fix) from error


@functools.cache
def _base() -> DictConfig:
    """What ``hydra_configs/plan.yaml`` says, with the types of values."""
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(PlanConfig)
    OmegaConf.set_readonly(schema, None)  # settings may change it although its record is frozen
    stated = catalogue_entry("", "plan")
    del stated["defaults"]
    return cast("DictConfig", OmegaConf.merge(schema, stated))


def _numbered(setting: Setting, config: DictConfig) -> Setting:
    """A setting of a network level that is named (``cluster.levels.leaf.latency_s``), by number.

    Raises:
        UserInputError: for a name that no level of the cluster has.
    """
    if (found := _NAMED_LEVEL.match(setting.key)) is None:
        return setting
    levels = (config.cluster or {}).get("levels") or ()
    names = [str(each.get("name")) for each in levels if isinstance(each, Mapping)]
    require_known(setting.key, found[1], names, "the cluster has no such network level")
    key = f"cluster.levels.{names.index(found[1])}.{setting.key[found.end() :]}"
    return dataclasses.replace(setting, key=key)


def _update(config: DictConfig, setting: Setting) -> None:
    """Change a configuration by a setting, if it chooses no entry of a group."""
    from omegaconf import OmegaConf

    key = setting.key.removeprefix("accelerator@")
    group = key.partition(".")[0]
    if group in GROUPS and key != group and config[group] is None:
        raise UserInputError(
            typed_setting(key),
            setting.value,
            f"no {group} is named whose field it could be",
            f"Name one: {typed_setting(group)}=NAME.",
        )
    if (key == group and group in GROUPS) or _is_accelerator(setting):
        return
    with _in_our_words((), setting):
        if setting.value is None:
            parent, _, name = key.rpartition(".")
            del OmegaConf.select(config, parent)[name]
        else:
            OmegaConf.update(config, key, typed_value(setting, key), force_add=group in GROUPS)


def _is_accelerator(setting: Setting) -> bool:
    """Whether a setting chooses an accelerator of the catalogue, or of the user's folder."""
    if (value := setting.value) is None:
        return False
    by_name = setting.key == "cluster.accelerator" and not value.startswith(("{", "null"))
    return by_name or setting.key == ACCELERATOR_CHOICE


def _entries(
    settings: Sequence[Setting],
    folder: Path | None,
    described: Mapping[str, Fields],
    notes: list[str],
) -> Mapping[str, Fields]:
    """The model and the cluster that are described or named, what they include in its place."""
    found, accelerator = dict(described), None
    if not _OF_HUGGING_FACE.isdisjoint(found.get("model", ())):
        name = str(found["model"].get("model_type", "model"))
        found["model"] = _of_hugging_face(found["model"], name, "the configuration", notes)
    for each in settings:
        refuse_resolvers(each.key, [each.key, each.value])
        if _is_accelerator(each):
            accelerator = each.value
        elif each.key not in GROUPS:
            continue
        elif each.value is None:
            found.pop(each.key, None)
        elif not is_path(each.value):
            found[each.key] = _entry(each.key, each.value, folder)
        else:
            path = expanded(Path(each.value.strip("'\"")), each.key)
            if each.key == "model":
                found[each.key] = _model_file(path, notes)
            else:
                found[each.key] = read_mapping(each.key, path)
    for group, fields in found.items():
        refuse_resolvers(group, fields)
        found[group] = _with_included(group, fields, folder, accelerator)
    return found


def _entry(group: str, name: str, folder: Path | None) -> Fields:
    """A file of the catalogue, or of the user's folder of groups, by its name."""
    check_choice(group, name, folder)
    if folder is not None and (own := folder / group / f"{name}.yaml").is_file():
        return read_mapping(group, own)
    return catalogue_entry(group, name)


def _with_included(
    group: str, fields: Fields, folder: Path | None, accelerator: str | None
) -> Fields:
    """A description with what its ``defaults`` include, in their order.

    Args:
        accelerator: the name of another one than the description's.
    """
    from omegaconf import DictConfig, OmegaConf

    own = {name: value for name, value in fields.items() if name != "defaults"}
    if group == "cluster" and accelerator is not None and "defaults" not in fields:
        own.pop("accelerator", None)
        fields = {"defaults": [{"/accelerator@accelerator": accelerator}]}
    found: Any = DictConfig({})
    for of, package, name in _included(group, fields):
        part: Fields = own
        if of:
            chosen = accelerator if of == package == "accelerator" else None
            entry = _entry(of, name if chosen is None else chosen, folder)
            part = _with_included(of, entry, folder, accelerator)
        if package == "_here_":
            found = OmegaConf.merge(found, part)
        else:
            OmegaConf.update(found, package, part, force_add=True)
    return cast(Fields, found)


def _with_model_as_flags(settings: Sequence[Setting]) -> Sequence[Setting]:
    """Fields of the model as flags, where no model is named that has them but that of a command."""
    fields = [s for s in settings if s.key.startswith("model.") and s.value is not None]
    if not fields:
        return settings
    words = [s.value or "" for s in settings if s.key == "flags"]
    for setting in fields:
        name = setting.key.removeprefix("model.").replace("_", "-")
        if setting.value in ("false", "False"):
            raise UserInputError(
                setting.key,
                setting.value,
                "a command says it by the absence of a flag, or by one that turns it off",
                f"Drop --{name}, or use --set.",
            )
        words.append(shlex.join([f"--{name}", f"{setting.value}"]).removesuffix(" true"))
    return [
        *(s for s in settings if s not in fields and s.key != "flags"),
        Setting(key="flags", value=" ".join(words)),
    ]


def _with_undivided_levels(overrides: Sequence[Setting]) -> Sequence[Setting]:
    """The catalogue's cluster in the place of a plan file's, where its oversubscription is given.

    A plan file holds what that of its cluster leaves of the bandwidth. It stays where its cluster
    is not as the catalogue has it: what was divided is not known.
    """
    given = {setting.key: setting.value for setting in overrides}
    source = given.get("cluster")
    if "cluster.oversubscription" not in given or source is None or not is_path(source):
        return overrides
    path = expanded(Path(source.strip("'\"")), "cluster")
    loaded = _loaded("cluster", path)
    if "schema" not in loaded:
        return overrides
    of_plan = cluster_from_mapping(_of_own_file("cluster", path, loaded))
    name, size = of_plan.name, of_plan.num_gpus
    if name not in catalogue_names("cluster") or catalogue_cluster(name, size) != of_plan:
        return overrides
    return [
        Setting(key="cluster", value=name),
        Setting(key="cluster.num_gpus", value=str(size)),
        *(setting for setting in overrides if setting.key != "cluster"),
    ]


def _keep_left_bandwidth(
    config: DictConfig, given: Mapping[str, str | None], described: Fields
) -> None:
    """Have no oversubscription divide a bandwidth of the outermost level that is typed.

    Args:
        given: settings, with levels by number.
        described: the cluster before them; of a record or a plan its oversubscription is ``None``.

    Raises:
        UserInputError: for an oversubscription of a bandwidth that is what one leaves.
    """
    level = f"cluster.levels.{len((config.cluster or {}).get('levels') or ()) - 1}"
    rates = ("cluster.levels", level, f"{level}.bandwidth_bytes_per_s")
    asked = given.get("cluster.oversubscription")
    typed = given.keys() & rates
    if asked and (typed or described.get("oversubscription", 1) is None):
        raise UserInputError(
            "cluster.oversubscription",
            asked,
            "the bandwidth of the outermost level is given as what an oversubscription leaves",
            "Give that bandwidth alone, or name the cluster (cluster=NAME, or its own file).",
        )
    if typed:
        config.cluster.oversubscription = None


def catalogue_cluster(name: str, num_gpus: int | None = None) -> Cluster:
    """A cluster of the catalogue, which needs none of Hydra's composition."""
    entry = catalogue_entry("cluster", name)
    for choice in entry.pop("defaults", ()):
        if isinstance(choice, dict):
            entry["accelerator"] = catalogue_entry("accelerator", next(iter(choice.values())))
    return cluster_from_mapping(entry, num_gpus=num_gpus)


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


def _included(group: str, fields: Fields) -> Iterator[tuple[str, str, str]]:
    """Group, place and name of what a description's ``defaults`` includes; of itself no group."""
    entries = fields.get("defaults", ())
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise UserInputError(
            f"{group} defaults",
            str(entries),
            "defaults must be a list",
            "For example - /accelerator@accelerator: NAME.",
        )
    for entry in entries if "_self_" in entries else (*entries, "_self_"):
        if entry == "_self_":
            yield "", "_here_", ""
            continue
        pairs = entry.items() if isinstance(entry, Mapping) else [(f"/{group}@_here_", entry)]
        for key, name in pairs:
            of, _, package = str(key).partition("@")
            if of not in [f"/{known}" for known in CATALOGUE_GROUPS]:
                raise UserInputError(
                    f"{group} defaults",
                    str(entry),
                    f"a description includes entries of /{', /'.join(CATALOGUE_GROUPS)}",
                    "For example - /accelerator@accelerator: h100_sxm_80gb.",
                )
            yield of[1:], package or of[1:], str(name)


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
    name = path.resolve().parent.name if path.stem in ("config", "") else path.stem
    return _of_hugging_face(parsed, name, str(path), notes)


def _of_hugging_face(parsed: Fields, name: str, where: str, notes: list[str]) -> Fields:
    """A model's description from the fields of a Hugging Face configuration."""
    from nest_megatron.model.hugging_face import read_hf_model

    read = read_hf_model(parsed, name)
    notes += read.notes
    if read.unread:
        notes.append(
            f"Not read of {where}: {', '.join(read.unread)}; the model is planned without."
        )
    return record_fields(read.spec)


def record_fields(record: object) -> Fields:
    """A model's or a cluster's record, or its fields in a file, as those of its description."""
    fields = to_plain(record)
    if "levels" in fields:
        return {**fields, "oversubscription": None}
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
