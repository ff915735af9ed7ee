"""Stand for a program in a recorded dry run: write its words down, or pass on to what it starts.

A program by itself, which imports nothing of the package: ``recorder.py NAME WORD...``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

FOLDER = Path(os.environ.get("NEST_DRY_RUN", "/nonexistent"))
PROGRAMS = FOLDER / "bin"
_names = re.compile(r"\S+").findall
SHELLS = _names("bash sh dash zsh ksh")
#: Programs that start the one behind their own options, which runs here in the same way.
WRAPPERS = _names(
    "env nohup time timeout nice ionice stdbuf setsid taskset chrt numactl sudo sshpass "
    "unbuffer script"
)
#: Those that start one where ``run`` is said, and what they start.
RUNNERS = _names("conda mamba micromamba poetry pdm pipenv")
LAUNCHERS = _names("""
    torchrun python python3 pytorchrun srun mpirun mpiexec mpiexec.hydra orterun prterun deepspeed
    accelerate accelerate-launch ft_launcher ray uv uvx docker podman nerdctl apptainer singularity
    enroot nsys ncu
""")
#: Programs that show the GPUs of AMD, and of NVIDIA.
OF_AMD, OF_NVIDIA = ("rocm-smi", "amd-smi"), ("nvidia-smi",)
_OTHERS = (*OF_AMD, *OF_NVIDIA, *_names("sbatch scontrol hostname ssh pdsh"))
STANDS_FOR = (*SHELLS, *WRAPPERS, *RUNNERS, *LAUNCHERS, *_OTHERS)
_PYTHON = re.compile(r"python[\d.]*")
_PROGRAM = re.compile(r"\S\.py(\s|$|\"|')")
_SHELL_LINE = re.compile(rb"#!\s*\S*?(/env\s+)?(bash|sh|dash|zsh|ksh)\b")
#: Other spellings of options of Slurm.
_SHORT = {
    "--nodes": "-N",
    "--ntasks": "-n",
    "--cpus-per-task": "-c",
    "--gpus": "-G",
    "--gpus-per-node": "--gres",
}
#: Variables of a job of Slurm with the options that say them.
_OF_A_JOB = {
    "SLURM_JOB_NAME": ("--job-name", "-J"),
    "SLURM_JOB_PARTITION": ("--partition", "-p"),
    "SLURM_JOB_ACCOUNT": ("--account", "-A"),
    "SLURM_CLUSTER_NAME": ("--clusters", "-M"),
}
#: Words of programs by which what they start has none of their variables, but for those of _STAYS.
_HIDES = {
    "env": ("-", "-i", "--ignore-environment"),
    "ray": ("submit",),
    **dict.fromkeys(("docker", "podman", "nerdctl"), ("run", "exec")),
    **dict.fromkeys(("apptainer", "singularity"), ("-e", "-C", "--cleanenv", "--containall")),
}
_STAYS = re.compile("NEST_DRY_RUN|BASH_|LC_|(LANG|PATH|PWD|HOME|USER)$")
#: Prefixes of variables that these containers' programs have without them.
_INSIDE = ("APPTAINERENV_", "SINGULARITYENV_")
#: Options of programs that have their value in the next word.
_VALUED = {
    **dict.fromkeys(SHELLS, re.compile("-[a-z]*[oO]|--rcfile|--init-file")),
    "ssh": re.compile("-[BbcDEeFIiJLlmOoPpQRSWw]"),
    "pdsh": re.compile("-[fglMnoRtuwXx]"),
    "sbatch": re.compile(
        "-[^HhkOQsVvW]|--(?!(contiguous|exclusive|get-user-env|help|hold|ignore-pbs|no-kill|"
        "no-requeue|overcommit|oversubscribe|parsable|quiet|reboot|requeue|spread-job|test-only|"
        "usage|use-min-nodes|verbose|version|wait)$)[a-z-]+"
    ),
}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def main(words: list[str]) -> None:
    """Do what is done for a program that is called by these words."""
    name = _name(words[0])
    name = "python" if _PYTHON.fullmatch(name) else name
    if name in SHELLS:
        _run_shell(words[1:])
    if name == "sbatch":
        _write(words, script=_batch_script(words))
    elif name in (*OF_AMD, *OF_NVIDIA):
        (_answer if name in OF_NVIDIA else _answer_of_amd)(name, words[1:])
    elif name == "scontrol":
        if words[1:3] in (["show", "hostnames"], ["show", "hostname"]):
            text = os.environ.get("SLURM_NNODES", "1")
            nodes = min(int(text), 4096) if text.isdigit() else 1
            print(*(f"node{at}" for at in range(1, nodes + 1)), sep="\n")
            _note(name, "answered")
        else:
            _note(name)
    elif name in ("ssh", "pdsh"):
        _run_remote(words)
    elif name == "hostname":
        _say_hostname(is_batch="SLURM_NNODES" in os.environ)
    elif name in WRAPPERS or (name in RUNNERS and words[1:2] == ["run"]):
        _pass_on(words)
    elif name == "python" and "-c" in words[1:3]:
        if counts := "device_count" in " ".join(words):
            print(_settings()["gpus_per_node"])
        _note(f"{name} -c", "answered" if counts else "skipped")
    elif name in LAUNCHERS or words[0].endswith(".py"):
        _launch(words)
    elif name not in STANDS_FOR and (PROGRAMS / name).exists():  # /usr/bin/cat
        os.execv(PROGRAMS / name, words)
    elif _is_shell_script(words[0]):
        _run_shell(words)
    elif {"python", "python3", "torchrun"} & {*map(_name, words)}:  # a wrapper of the user's
        _pass_on(words)
    else:
        _note(words[0])


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _launch(words: list[str]) -> None:
    if at := shell_at(words, 1):  # srun ... bash -c TEXT, docker run ... train.sh
        place, before = _around()
        around = json.dumps([place, [*before, *words[:at]]])
        rest = words[at + (_name(words[at]) in SHELLS) :]
        environment = dict(os.environ)
        if _name(words[0]) == "srun":
            text, sizes, names = " ".join(words[: at + 1]), {}, _settings()["slurm"]
            for option in names:
                spelled = rf"\s(?:{option}[=\s]|{_SHORT.get(option, option)})"
                if said := re.findall(rf"{spelled}\s*\S*?(\d+)(?=[\s,(])", text):
                    sizes[option] = said[-1]
            environment = slurm_variables(words[:at], sizes, names, environment)
        environment["NEST_DRY_RUN_AROUND"] = around
        starts = (n for n in range(1, at) if _name(words[n]) in STANDS_FOR)
        for start, end in pairwise([0, *starts, at]):
            environment = passed_on(words[start:end], environment)
        _run_shell(rest, environment)
    if "-m" in words or any(map(_PROGRAM.search, words)):
        _write(words)
    elif any(_name(word) == "hostname" for word in words[1:]):  # srun -w HEAD hostname -i
        _say_hostname(is_batch=_name(words[0]) == "srun" or "SLURM_NNODES" in os.environ)
    else:
        _note(" ".join(words[:2]))


def _run_remote(words: list[str]) -> None:
    """Run what ``ssh`` or ``pdsh`` runs on other hosts, with none of the variables here."""
    name, rest = _name(words[0]), words[options_end(words) :]
    if name == "ssh":  # options stand behind the host, too
        rest = rest[options_end([name, *rest[1:]]) :]
    text = " ".join(rest)
    if not rest or re.search(r"python|torchrun|\b(ba)?sh\b", text):  # without words, its input
        _run_shell(["-c", text] if rest else [], passed_on(["env", "-i"], os.environ))
    _note(name)


def _say_hostname(*, is_batch: bool) -> None:
    """The first node of a job of Slurm, which does not run here; else this host."""
    print("node1" if is_batch else os.uname().nodename)
    if is_batch:
        _note("hostname", "answered")


def _around() -> tuple[str, list[str]]:
    """The place of the launcher around this program, or its own; and that launcher's words."""
    text = os.environ.get("NEST_DRY_RUN_AROUND")
    place, before = json.loads(text) if text else (os.environ.get("NEST_DRY_RUN_AT", ""), [])
    return place, before


def shell_at(words: Sequence[str], start: int = 0) -> int | None:
    """Where a shell or a script of the shell stands, before any program of Python.

    >>> shell_at(["srun", "-N2", "bash", "x.sh"]), shell_at(["torchrun", "t.py", "bash"])
    (2, None)
    """
    for at, word in enumerate(words[start:], start):
        if _PROGRAM.search(word) or re.match("-m [a-zA-Z]", " ".join(words[at : at + 2])):
            return None
        if _name(word) in SHELLS or _is_shell_script(word):
            return at
    return None


def _is_shell_script(path: str) -> bool:
    if not os.path.isfile(path):  # noqa: PTH113 - it takes a long text
        return False
    with open(path, "rb") as file:  # noqa: PTH123
        line = file.readline(200)
    named = path.endswith((".sh", ".bash", ".slurm", ".sbatch"))
    return bool(_SHELL_LINE.match(line)) or (named and not line.startswith(b"#!"))


def _run_shell(words: list[str], environment: Mapping[str, str] = os.environ) -> NoReturn:
    """Go on as bash, which reads what stands for programs first, and no file of the user's."""
    at = options_end(["bash", *words]) - 1
    own = (re.sub("[il]", "", w) if re.fullmatch("-[a-zA-Z]+", w) else w for w in words[:at])
    words = [*(word for word in own if word not in ("-", "--login")), *words[at:]]
    start = {"BASH_ENV": str(FOLDER / "shell.bash"), "PATH": str(PROGRAMS)}
    os.execve(_settings()["bash"], ["bash", *words], {**environment, **start})


def slurm_variables(
    words: Sequence[str],
    sizes: Mapping[str, str],
    names: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
) -> dict[str, str]:
    """The environment of the first task of a job or step of Slurm.

    Args:
        words: its options.
        sizes: what those say whose variables have these names.
        environment: in which it is submitted.
    """
    if not words:
        return {**environment}
    counts = re.findall(r"\d+", sizes.get("--nodes") or environment.get("SLURM_NNODES", ""))
    nodes = max(counts, key=int, default="1")
    tasks, cpus = sizes.get("--ntasks-per-node", ""), sizes.get("--cpus-per-task", "")
    if tasks.isdigit():
        sizes = {"--ntasks": str(int(nodes) * int(tasks)), **sizes}
    on_node = int(cpus) * int(tasks or 1) if cpus.isdigit() else os.cpu_count()
    made_up = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "1"),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), f"node[1-{nodes}]"),
        **dict.fromkeys(("SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE"), str(on_node)),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0"),
        "SLURM_SUBMIT_DIR": environment.get("PWD") or str(Path.cwd()),
    }
    for variable, flags in _OF_A_JOB.items():
        made_up[variable] = [variable.rpartition("_")[2].lower(), *values(words, *flags)][-1]
    for text in values(words, "--array", "-a"):
        made_up |= {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": re.split(r"\D", text)[0]}
    said = {**sizes, "--nodes": nodes}.items()
    return {
        **made_up,
        **environment,
        **{name: text for option, text in said for name in names[option]},
    }


def passed_on(words: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of what a program starts, by the words before it.

    >>> passed_on(["env", "-i", "A=1"], {"B": "2"}), passed_on(["sbatch", "--export=B"], {"B": "2"})
    ({'A': '1'}, {'B': '2'})
    """
    name, names = _name(words[0]), [*words]  # docker -e A=1, -e A
    exports = ",".join([*values(words, "--export")][-1:])
    names += exports.split(",")
    names += (part for text in values(words, "--env") for part in re.split(r",(?=\w+=)", text))
    for path in values(words, "--env-file"):
        try:
            names += shlex.split(Path(path).read_text("utf-8"), comments=True)
        except (OSError, ValueError):
            _note(path, "absent")
    for text in values(words, "--runtime-env-json"):
        names += map("=".join, json.loads(text).get("env_vars", {}).items())
    for at, word in enumerate(words):
        if word in ("-env", "-genv"):
            names.append("=".join(words[at + 1 : at + 3]))
    if name in ("apptainer", "singularity"):
        inside = (f"{variable}={text}" for variable, text in environment.items())
        names += (each.partition("ENV_")[2] for each in inside if each.startswith(_INSIDE))
    some = exports and "ALL" not in names
    hides = some or set(words).intersection(_HIDES.get(name, ()))
    found = {
        variable: text
        for variable, text in environment.items()
        if not hides
        or variable in names
        or _STAYS.match(variable)
        or (some and variable.startswith("SLURM"))
    }
    for variable in values(words, "-u", "--unset"):
        found.pop(variable, None)
    assigned = map(_ASSIGNMENT.fullmatch, names)
    return found | {each[1]: each[2] for each in assigned if each}


def values(words: Sequence[str], *flags: str) -> Iterator[str]:
    """What options say, behind ``=`` or in the next word."""
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag in flags:
            yield value if equals else following
        elif word[:2] in flags:  # -Jname
            yield word[2:]


def options_end(words: Sequence[str]) -> int:
    """Where the options end of a program that words call.

    >>> options_end(["sbatch", "-o", "out.log", "-N2", "--hold", "--nodes", "2", "train.sh"])
    7
    """
    at = 1
    while words[at:] and words[at].startswith("-"):
        at += 2 if _VALUED[_name(words[0])].fullmatch(words[at]) else 1
    return at


def _pass_on(words: list[str]) -> None:
    """Go on as the program that a wrapper starts, with the variables that stand before it."""
    if _name(words[0]) == "script":
        for text in values(words, "-c", "-qc", "-ec", "-qec", "-eqc", "--command"):
            _run_shell(["-c", text])
    for at, word in enumerate(words[1:], 1):
        if os.access(PROGRAMS / _name(word), os.F_OK) or ("/" in word and os.access(word, os.X_OK)):
            variables = passed_on(words[:at], os.environ)
            os.execve(PROGRAMS / ".recorder", ["/", *words[at:]], variables)
    _note(" ".join(words[:2]))


def _batch_script(words: list[str]) -> list[str]:
    """The words that run what ``sbatch`` is given, from a copy as Slurm makes one."""
    copy = FOLDER / f"batch-{os.getpid()}.sh"
    copy.touch()
    call = ["bash", str(copy)]
    at = options_end(words)
    if text := [*values(words[:at], "--wrap")]:
        copy.write_text(text[0], encoding="utf-8")
    elif words[at:]:
        if Path(words[at]).is_file():
            shutil.copyfile(words[at], copy)
        else:
            _note(words[at], "absent")
        call += words[at + 1 :]
        del words[at:]  # what follows is the script's
    else:
        copy.write_bytes(sys.stdin.buffer.read())
    return call


def _write(words: list[str], script: list[str] | None = None) -> None:
    """Write a launch down: the words and the variables."""
    place, before = _around()
    record = {
        "words": [word.removeprefix(f"{PROGRAMS}/") for word in (*before, *words)],
        "place": place,
        "environment": dict(os.environ),
        "script": script,
    }
    path = FOLDER / "launches" / f"{time.time_ns():020}-{os.getpid()}"
    path.write_text(json.dumps(record))
    path.rename(path.with_suffix(".json"))


def _note(name: str, kind: str = "skipped") -> None:
    with (FOLDER / kind).open("a", encoding="utf-8") as file:
        file.write(f"{name}\0{os.environ.get('NEST_DRY_RUN_AT', '')}\0")


def _settings() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "settings.json").read_bytes()))


def _answer(name: str, words: list[str]) -> None:
    """Answer for the GPUs of a node of the cluster that is planned for."""
    settings = _settings()
    count = int(settings["gpus_per_node"])
    asked = dict(word.partition("=")[::2] for word in words)
    query = asked.get("--query-gpu")
    one = next((word for flag, word in pairwise(words) if flag in ("-i", "--id")), None)
    gpus = range(count) if one is None else [int(part) for part in one.split(",") if part.isdigit()]
    listed = {"-L", "--list-gpus"} & set(words)
    if listed:
        print(*(f"GPU {n}: {settings['gpu']} (UUID: GPU-{n})" for n in gpus), sep="\n")
    elif query:
        form = asked.get("--format", "")
        unit = "" if "nounits" in form else " MiB"
        memory = f"{settings['memory_mib']}{unit}"
        known = {
            "name": settings["gpu"],
            "gpu_name": settings["gpu"],
            "count": str(count),
            "memory.total": memory,
            "memory.free": memory,
            "memory.used": f"0{unit}",
        }
        fields = [field.strip() for field in query.split(",")]
        if "noheader" not in form:
            print(*fields, sep=", ")
        for n in gpus:
            row = {**known, "index": str(n), "uuid": f"GPU-{n}"}
            print(*(row.get(field, "[N/A]") for field in fields), sep=", ")
    elif not words:
        rows = (f"{n}  NVIDIA {settings['gpu']}  0MiB / {settings['memory_mib']}MiB" for n in gpus)
        print("NVIDIA-SMI", *rows, sep="\n")
    _note(name, "answered" if query or listed or not words else "skipped")


def _answer_of_amd(name: str, words: list[str]) -> None:
    """Answer for the GPUs of such a node of AMD's."""
    settings = _settings()
    row = "GPU: {}" if name == "amd-smi" else "GPU[{}]\t: Card Series, Device ID, Unique ID: {}"
    if "--csv" in words:
        print("device,Card Series")
        row = "card{},{}"
    for n in range(int(settings["gpus_per_node"])):
        print(row.format(n, settings["gpu"]))
    _note(name, "answered")


if __name__ == "__main__":
    main(sys.argv[1:])
