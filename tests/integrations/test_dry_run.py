"""Scripts that bash runs without their programs: what they launch, and what they cannot do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import dry_run as dry
from nest_megatron.integrations.dry_run import RecordedLaunch, recorder, script_launch
from nest_megatron.integrations.dry_run.recorder import LAUNCHERS
from nest_megatron.integrations.megatron_lm.parser import read_command

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")
#: What stands for every program in the comparison: it writes its words down, one to a line.
_STUB = '#!{bash}\nprintf "%s\\n" "${{0##*/}}" "$@" > "$STUB_OUT.$$"\n'
PROGRAMS = ("torchrun", "python", "python3", "srun", "uv", "mkdir", "pip", "tee")
_READ = ("dirname", "basename", "seq", "cat", "wc", "head", "tail", "cut", "tr", "expr", "date")
MODEL = "--num-layers 2 --hidden-size 64"
LAUNCH = f"torchrun --nproc-per-node 8 pretrain_gpt.py {MODEL}"


def write(folder: Path, text: str, name: str = "train.sh") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return path


def read(path: Path, *args: str) -> RecordedLaunch:
    return script_launch(["bash", str(path), *args])


def refused(path: Path, *args: str) -> str:
    with pytest.raises(UserInputError) as caught:
        read(path, *args)
    return str(caught.value)


def run_by_bash(
    path: Path, args: tuple[str, ...], folder: Path, *, cwd: Path | None = None
) -> list[list[str]]:
    """The words of each program that trains, as bash calls it."""
    stubs, out = folder / "stubs", folder / "called"
    stubs.mkdir()
    for name in PROGRAMS:
        (stubs / name).write_text(_STUB.format(bash=BASH))
        (stubs / name).chmod(0o700)
    (stubs / "nohup").write_text(f'#!{BASH}\n"$@"\n')
    (stubs / "nohup").chmod(0o700)
    for name in _READ:
        (stubs / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(stubs), "STUB_OUT": str(out), "HOME": str(folder)}
    command = [str(BASH), "--norc", str(path), *args]
    subprocess.run(
        command, env=environment, cwd=cwd or folder, capture_output=True, timeout=600, check=False
    )
    calls = [path.read_text().splitlines() for path in folder.glob("called.*")]
    trains = ("-num-layers", "--micro-batch-size", "--use-checkpoint-args")
    return [call for call in calls if any(flag in word for word in call for flag in trains)]


#: What launch scripts do. Each runs in a shell of its own of one script.
SNIPPETS = {
    "variables": 'A=2; B="$A x"; torchrun t.py $M --a $A --b "$B" --c $B',
    "defaults": 'torchrun t.py $M --a ${A:-3} --b ${B-4} --c ${1:-no} --d "${2:-x y}"',
    "assigned default": ": ${A:=5}; torchrun t.py $M --a $A ${A:+--set} ${Z:+--unset}",
    "arrays": 'X=(--a 1 "b c"\n  # comment\n  --d); X+=(--e 2); torchrun t.py $M "${X[@]}" ${X[0]}',
    "array words": 'X=("--fp8 hybrid" "--e f"); torchrun t.py $M ${X[@]} "${#X[@]}" ${X[-1]}',
    "array in a text": 'X=(1 "2 3"); C="a ${X[@]} b"; torchrun t.py $M $C "z${X[@]}z"',
    "element": 'X=(1 2 3); X[1]=9; torchrun t.py $M --x "${X[*]}" --s "${X[@]:1}"',
    "keys": "declare -A T=([a]=1 [b]=2); k=b; T[c]=3; torchrun t.py $M --x ${T[$k]} ${T[c]}",
    "sums": "N=4; G=8; W=$(($N*G)); ((W+=2)); let W=W-1; torchrun t.py $M --w $W $((W>5?1:2))",
    "octal and hexadecimal": "torchrun t.py $M $((010 + 0x1f)) $((2**10)) $((-7/2)) $((-7%3))",
    "if": 'D=fp8; if [[ "$D" == "fp8" ]]; then X=--yes; else X=--no; fi; torchrun t.py $M $X',
    "test": 'N=3; if [ "$N" -gt 2 ] && [ -z "$Z" ]; then X=a; elif true; then X=b; fi'
    "\ntorchrun t.py $M $X",
    "not a file": "if [ ! -f /no/such/file ]; then X=--absent; fi; torchrun t.py $M $X",
    "patterns": "S=llama3_8b; if [[ $S == llama* && ! $S =~ ^gpt ]]; then X=${S#*_}; fi"
    "\ntorchrun t.py $M $X",
    "regex": "[[ a12b =~ ([0-9]+) ]] && X=${BASH_REMATCH[1]}; torchrun t.py $M --x $X",
    "cut": "P=/a/b.c.d"
    "\ntorchrun t.py $M ${P##*/} ${P%.*} ${P%%.*} ${P/b/x} ${P//\\//_} ${P:3:2} ${P: -1}",
    "case of letters": "S=Ab; torchrun t.py $M ${S^^} ${S,,} ${S,} ${#S}",
    "case": 'm=8b; case "$m" in 7b|8b) L=32 ;; *) L=1 ;; esac; torchrun t.py $M --l $L',
    "for": 'X=""; for i in 1 2 {3..5} $(seq 6 7); do X="$X $i"; done; torchrun t.py $M $X',
    "for sum": "X=0; for ((i=0; i<4; i++)); do ((X+=i)); done; torchrun t.py $M --x $X",
    "while": "i=0; while [ $i -lt 3 ]; do i=$((i+1)); [ $i = 2 ] && continue; X+=$i; done"
    "\ntorchrun t.py $M $X",
    "break": "for i in a b c; do for j in 1 2; do [ $i$j = b1 ] && break 2; X=$i$j; done; done"
    "\ntorchrun t.py $M $X",
    "functions": 'f() { local a=$1; echo "--x $a"; }; a=9; torchrun t.py $M $(f 7) --a $a',
    "function with options": 'function f { ARGS="--tp $1 $#"; return 0; }; f 2 3'
    "\ntorchrun t.py $M $ARGS",
    "subshell": "A=1; (A=2); { B=3; }; torchrun t.py $M $A $B",
    "substitution": "D=$(dirname /a/b/c.sh); N=`basename /x/y.py .py`"
    '\ntorchrun t.py $M $D $N "$(echo a  b)"',
    "pipes": 'X=$(echo "A,B" | tr "[:upper:]" "[:lower:]" | cut -d, -f2); torchrun t.py $M $X',
    "eval": "C=\"torchrun t.py $M --x 'a b'\"; eval $C",
    "command in a variable": 'C="torchrun t.py $M --x 1"; $C',
    "here document": "read -r -d '' O <<EOF\n--a $((1+1))\n--b \\$c\nEOF\ntorchrun t.py $M $O",
    "set and shift": 'set -- x "y z" w; shift; torchrun t.py $M "$@" $# "$1"',
    "all arguments": 'torchrun t.py $M "$@" ${@:2}',
    "indirect": "A=5; n=A; torchrun t.py $M ${!n}",
    "options": "set -euo pipefail; false || X=1; ! false; torchrun t.py $M ${X} ${Y:-2}",
    "failures that are no errors": "set -e; tail /no/a || A=1; command tail /no/b || B=2"
    "\nif command cd /no; then :; fi; tee /no/c < /dev/null || C=3; command export D=4"
    '\ntorchrun t.py $M "$A$B$D"',
    "continued": "torchrun \\\n  t.py \\\n  $M `# comment` \\\n  --x 1 2>&1 | tee log.txt",
    "background": "mkdir -p out && nohup torchrun t.py $M --x 1 > log 2>&1 &\nwait",
    "joined": 'X=(1 2 3); S="${X[*]}"; IFS=:; J="${X[*]/2/5}"; unset IFS; torchrun t.py $M "$S" $J',
    "quotes": "torchrun t.py $M --a 'x $y' --b \"\\$z \\\"q\\\"\" --c $'t\\tu' --d \\* --e a\\ b",
    "empty words": 'E=; torchrun t.py $M "" "$E" $E --x ""',
    "fields": 'L=a,b,c; IFS=,; set -- $L; unset IFS; torchrun t.py $M "$@"',
    "unset": "A=1; unset A; torchrun t.py $M --a ${A-none}",
    "printf": "X=$(printf '%03d-%s' 7 z); torchrun t.py $M $X",
    "nested defaults": 'torchrun t.py $M ${A:-${B:-$((2*3))}} "${C:-"q r"}"',
    "export": "export A=1 B=2; declare -i N=3; readonly R=4; torchrun t.py $M $A $B $N $R",
    "script's own folder": 'D=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
    "\ntorchrun t.py $M $D ${0##*/}",
    "python": "python3 -u -m torch.distributed.run --nnodes 2 t.py $M",
    "srun": "srun -N 2 --ntasks-per-node=8 python -u t.py $M --x 1",
    "exit before": 'if [ -n "" ]; then exit 1; fi; torchrun t.py $M; exit 0; torchrun u.py $M',
    "files": "torchrun t.py $M *.none t*.sh",
    "input": "printf '1 2\\n3\\n' > f.txt; N=$(wc -l < train.sh); torchrun t.py $M $N",
    "home": "torchrun t.py $M ~/x --y=~/z",
}


def test_words_are_those_that_bash_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for programs changes nothing of what a script sees."""
    args = ("one", "two three")
    each = "".join(f"(\n{text}\n)\n" for text in SNIPPETS.values())
    path = write(tmp_path, f"M='{MODEL}'\n{each}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    found = dry.dry_run(["bash", str(path), *args], {}, None)
    assert len(found.launches) == len(SNIPPETS)
    by_bash = run_by_bash(path, args, tmp_path)
    assert sorted(map(list, (each.words for each in found.launches))) == sorted(by_bash)


#: How scripts start their launch, and the words of it.
IDIOMS = {
    "echo and eval": (f'C="{LAUNCH}"; echo $C; eval $C', LAUNCH),
    "printf of a percent sign": (f"printf '50%%'; {LAUNCH}", LAUNCH),
    "one launch twice": (f"{LAUNCH}\n{LAUNCH}", LAUNCH),
    "one on each node": (
        f"for i in 1 0; do torchrun --nnodes 2 --node_rank $i t.py {MODEL} & done; wait",
        f"torchrun --nnodes 2 --node_rank 0 t.py {MODEL}",
    ),
    "one on each host of Slurm": (
        "for i in 1 0; do srun -N1 -w node$((2-i)) "
        f"torchrun --nnodes 2 --node_rank $i t.py {MODEL} & done; wait",
        f"srun -N1 -w node2 torchrun --nnodes 2 --node_rank 0 t.py {MODEL}",
    ),
    "one on each host of MPI": (
        f"for h in a b; do mpirun -np 8 --host=$h:8 python t.py {MODEL} & done; wait",
        f"mpirun -np 8 --host=a:8 python t.py {MODEL}",
    ),
    "one on each host by ssh": (
        "export A=1; i=0; for h in a b; do\n"
        f'ssh -p 22 u@$h -o X=y "cd $PWD && A=\\$A torchrun --nnodes 2 --node_rank $i t.py {MODEL}"'
        "\ni=$((i+1)); done",
        f"A= torchrun --nnodes 2 --node_rank 0 t.py {MODEL}",
    ),
    "ssh of a text": (f"sshpass -p x ssh host <<EOF\n{LAUNCH}\nEOF", LAUNCH),
    "pdsh": (f"pdsh -R ssh -w a,b {LAUNCH}", LAUNCH),
    "one of each rank": (
        f"for i in 1 0; do python t.py {MODEL} --rank $i --local_rank=$i & done; wait",
        f"python t.py {MODEL} --rank 0 --local_rank=0",
    ),
    "a pipeline": (f"{LAUNCH} 2>&1 | tee log", LAUNCH),
    "the background": (f"{LAUNCH} > log 2>&1 &", LAUNCH),
    "exec": (f"exec > >(tee -a log) 2>&1\nexec {LAUNCH}", LAUNCH),
    "a program by its path": (
        f"PY=/opt/conda/bin/python; $PY -u t.py {MODEL}",
        f"/opt/conda/bin/python -u t.py {MODEL}",
    ),
    "a program that is looked up": (
        f'X=1 $(which python3) a.py; "$(command -v torchrun)" t.py {MODEL}',
        f"torchrun t.py {MODEL}",
    ),
    "a path that is made": (
        f"$(echo {sys.executable}) t.py {MODEL}",
        f"{sys.executable} t.py {MODEL}",
    ),
    "PATH of its own": (f"export PATH=/usr/bin:$PATH; PATH=/bin:$PATH {LAUNCH}", LAUNCH),
    "wrappers": (f"nohup env A=1 timeout -s INT 9 numactl --all {LAUNCH}", f"A=1 {LAUNCH}"),
    "wrappers of a path": (
        f"nohup /opt/conda/bin/python -u t.py {MODEL}",
        f"/opt/conda/bin/python -u t.py {MODEL}",
    ),
    "a wrapper of the user's that is not here": (
        f"apt install python3; mpirun -np 2 bash -c './bind.sh 0 /opt/bin/python t.py {MODEL}'",
        f"mpirun -np 2 /opt/bin/python t.py {MODEL}",
    ),
    "a program of the user's that is not here": (f"bindpcie --cpu=node -- {LAUNCH}", LAUNCH),
    "a login shell": (f'bash -lc "{LAUNCH}"', LAUNCH),
    "a shell in srun": (f"srun -N 2 bash -c '{LAUNCH}'", f"srun -N 2 {LAUNCH}"),
    "a container": (
        f"docker run --rm image bash -c 'cd /workspace && {LAUNCH}'",
        f"docker run --rm image {LAUNCH}",
    ),
    "ray": (
        f"ray job submit -- python3 train.py {MODEL}",
        f"ray job submit -- python3 train.py {MODEL}",
    ),
    "a script that it writes": (f"cat > in.sh <<EOF\n{LAUNCH}\nEOF\n./in.sh", f"{LAUNCH}"),
    "a batch script that it writes in a folder of its own": (
        "set -euo pipefail; mkdir -p out/jobs; F=out/jobs/a.sbatch; T=$(mktemp)\n"
        f"printf '#SBATCH -N 2\\nsrun {LAUNCH}\\n' | tee $T > /dev/null; cp -f $T $F; sbatch $F",
        f"srun {LAUNCH}",
    ),
    "logs in folders that are not here": (
        "O=/no/such; C='torchrun t.py > /dev/null/x'\n"
        f'{LAUNCH} > "$O/$(date "+%F %T").log" 2> $O/`date`_$(basename "$(pwd)")\\ x.log',
        LAUNCH,
    ),
    "options and arguments of a shell": (
        f"bash -euo pipefail -lc '{LAUNCH} \"$@\"' x '' -il",
        f"{LAUNCH} '' -il",
    ),
    "a variable that shells read": (f"{LAUNCH} --x ${{ENV:-none}}", f"{LAUNCH} --x none"),
    "GPUs that are counted": (
        f"N=$(nvidia-smi -L | wc -l); torchrun --nproc-per-node $N t.py {MODEL}",
        f"torchrun --nproc-per-node 8 t.py {MODEL}",
    ),
    "GPUs that torch counts": (
        "N=`python -c 'import torch; print(torch.cuda.device_count())'`\n"
        f"torchrun --nproc-per-node $N t.py {MODEL}",
        f"torchrun --nproc-per-node 8 t.py {MODEL}",
    ),
    "GPUs that are asked for": (
        "N=$(nvidia-smi --query-gpu=index,count --format=csv,noheader,nounits | tail -1)\n"
        f'torchrun t.py {MODEL} --x "$N"',
        f"torchrun t.py {MODEL} --x '7, 8'",
    ),
    "GPUs that are shown": (
        f"if nvidia-smi | grep -q GPU; then X=yes; fi; torchrun t.py {MODEL} --x $X",
        f"torchrun t.py {MODEL} --x yes",
    ),
    "a text that is trimmed": (
        f"X=$(echo ' a  b ' | xargs); {LAUNCH} --x \"$X\"",
        f"{LAUNCH} --x 'a b'",
    ),
    "a terminal that is kept": (f"script -qc '{LAUNCH}' log; rm -f log", LAUNCH),
    "a terminal that is kept by another order": (f"script log --command='{LAUNCH}'", LAUNCH),
    "hosts of Slurm": (
        f"SLURM_NNODES=3; export SLURM_NNODES; N=$(scontrol show hostnames | wc -l)\n"
        f"torchrun --nnodes $N t.py {MODEL}",
        f"torchrun --nnodes 3 t.py {MODEL}",
    ),
    "everything is left out": (
        "set -euo pipefail; rm -rf x; mkdir -p y && cd y; source /opt/venv/bin/activate\n"
        f"module load cuda; conda activate x; pip install x; ulimit -n 1; sleep 99\n{LAUNCH}",
        LAUNCH,
    ),
    "a redirection in a function": (
        f'f() {{ local a=1; echo $a > "$0.x"; "$@" &> "$0.log"; }}; set -eu; f {LAUNCH}',
        LAUNCH,
    ),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_the_launch_of_a_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, words = IDIOMS[name]
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, text)
    before = sorted(tmp_path.iterdir())
    found = read_command(read(path).words)
    assert found == read_command(words)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"echo -e '\e[0;31mred\e[0m\a'; which srun", "its last words are: red | srun."),
        (
            "echo hello >&2; exit 3",
            "exit code 3; its last words are: hello. Give the training command itself by --from",
        ),
        (f'[ -n "$SIZE" ] || exit 1; {LAUNCH}', "Set what nothing sets: SIZE (line 1)"),
        (f": ${{SIZE:?is needed}}; {LAUNCH}", "SIZE: is needed"),
        (f"set -u; {LAUNCH} --tp $TP", "TP: unbound variable"),
        ("python tools/preprocess_data.py --input x", "no job of Megatron-LM that trains"),
        ("python3 -m verl.trainer.main_ppo x=1", "verl takes its model from its own"),
        ("NPROC_PER_NODE=8 megatron sft --load x", "megatron is the program of ms-swift"),
        (f"if true; then {LAUNCH}", "syntax error"),
        ("x() { x; }; x", "maximum function nesting level"),
        ("rm -rf a; pkill b", "Programs that were not run: rm (line 1), pkill (line 1)"),
        ("ssh host 'rm -rf a'", "Programs that were not run: ssh (line 1)"),
        (
            f"for tp in 1 2; do {LAUNCH} --tensor-model-parallel-size $tp --bf16; done",
            "launches 2 jobs, and one is planned: --tensor-model-parallel-size 1 (line 1); "
            "--tensor-model-parallel-size 2 (line 1)",
        ),
        (
            f"for i in 1 2; do sbatch --export=ALL,TP=$i --wrap '{LAUNCH} --tp $TP'; done",
            "launches 2 jobs, and one is planned: --tp 1 (line 1); --tp 2 (line 1)",
        ),
    ],
)
def test_a_script_without_one_launch_is_refused_with_what_it_lacks(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(write(tmp_path, text))


@pytest.mark.parametrize("name", ["train.sh", "train.job"])
def test_lines_that_end_as_on_windows_are_named(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, "torchrun --nproc-per-node 8 t.py $M --bf16\r\n", name)
    assert "carriage returns" in refused(path)


@pytest.mark.parametrize(
    ("counted", "seen"),
    [
        ("rocm-smi --showid --csv | grep -c card", "8"),
        ("rocm-smi --showproductname | grep -c 'Card Series'", "8"),
        ("rocm-smi -i | grep -c 'Device ID'", "8"),
        ("amd-smi list | grep -c GPU", "8"),
        ("rocm-smi | grep -c MI300X", "8"),
        ("nvidia-smi -L | grep -c GPU", "0"),
    ],
)
def test_the_gpus_of_amd_are_shown_by_their_own_programs(
    counted: str, seen: str, tmp_path: Path
) -> None:
    path = write(tmp_path, f"N=$({counted}); torchrun --nproc-per-node $N t.py {MODEL}")
    cluster = read_cluster(compose(parse(["cluster=mi300x"])))
    assert script_launch(["bash", str(path)], cluster).words[2] == seen
    assert ("rocm-smi" in counted or "amd-smi" in counted) != (read(path).words[2] == "8")


def test_what_was_left_out_is_listed(tmp_path: Path) -> None:
    text = f"rm -f a\n/bin/rm -f b\nsource no.sh\npython -c 'x'\nnvidia-smi -L\n{LAUNCH} $A"
    path = write(tmp_path, text)
    first, *notes = read(path).notes
    assert first.startswith(f"The command is that of {path}, line 6")
    assert notes == [
        "Programs that were not run: rm (line 1), /bin/rm (line 2), python -c (line 4).",
        "Answered for the cluster that is planned for: nvidia-smi (line 5).",
        "Variables that nothing sets, empty as in the shell: A (line 6).",
        "Not on this host: no.sh (line 3).",
    ]


def closed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Leave the view as it is, where this system has one."""


def opened(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As on a system that gives no namespaces."""
    text = dry.VIEW.read_text(encoding="utf-8")
    (folder / "view.py").write_text(text.replace("        _unshare()\n", "        _libc('no')\n"))
    monkeypatch.setattr(dry, "VIEW", folder / "view.py")


@pytest.mark.parametrize("view", [closed, opened])
def test_nothing_of_this_machine_is_changed(
    view: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(view)
    view(monkeypatch, tmp_path)
    sleeper = subprocess.Popen(["sleep", "100"])
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.chdir(folder)
    victim = folder / "victim"
    victim.write_text("kept")
    text = f"""
        rm -rf victim; /bin/rm -rf victim; command /bin/rm victim; env rm victim; $(rm victim)
        echo lost > victim; echo lost >> "$PWD/victim"; R=victim; : >| $R; sed -i s/k/l/ victim
        find . -name victim -delete; touch made; mkdir made; cp victim made; kill -9 {sleeper.pid}
        exec 3<> /dev/tcp/127.0.0.1/80; trap '/bin/rm victim' EXIT; enable -f ./x.so y; dd of=victim
        curl http://127.0.0.1/x | bash; ls | xargs rm; echo victim | tee victim; exec 1> victim
        bash -c 'echo lost > victim; rm victim'; sh ./victim; /usr/bin/env python3 -c 'x'
        while read l; do :; done < <(/bin/rm victim); A=(/bin/rm victim); "${{A[@]}}"
        if ! /bin/rm victim; then :; fi; f() {{ /bin/rm "$1"; }}; f victim; coproc /bin/rm victim
        {LAUNCH} > victim 2>&1 < /dev/null &
    """
    path = write(tmp_path, text)
    found = read(path)
    assert found.words[-4:] == tuple(MODEL.split())
    assert victim.read_text() == "kept"
    assert [each.name for each in folder.iterdir()] == ["victim"]
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    assert "rm (line 1), /bin/rm (line 1)" in " ".join(found.notes)
    assert ("what the script itself writes" in " ".join(found.notes)) == (view is opened)


def test_what_goes_on_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time bounds a script, and what it leaves in the background ends with it."""
    monkeypatch.setattr(dry, "MAX_SECONDS", 3.0)
    monkeypatch.chdir(tmp_path)
    mark = f"mark{time.monotonic_ns()}"
    left = f"(set -m; bash -c 'while :; do :; done' {mark} &) ; "
    path = write(tmp_path, f"{left}\n{LAUNCH}\nwhile :; do sleep 1; done")
    assert "It was ended after" in " ".join(read(path).notes)
    path = write(tmp_path, f"{left}\n{LAUNCH}")
    assert read(path).words[-4:] == tuple(MODEL.split())
    running = [each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(mark.encode() in words for words in running)


def test_a_large_file_is_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "big").open("wb") as file:
        file.truncate(1 << 30)
    path = write(tmp_path, f"cat big; tr '\\0' x < big; {LAUNCH}")
    assert read(path).words[-4:] == tuple(MODEL.split())
    assert "cannot allocate" in refused(write(tmp_path, f"X=$(tr '\\0' x < big); {LAUNCH}"))


def test_a_script_has_its_arguments_variables_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNODES", "4")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 'declare -a MODEL_ARGS=(--num-layers "$LAYERS")', "model.sh")
    write(tmp_path, "torchrun --nnodes $NNODES --nproc_per_node 8 t.py $@", "inner.sh")
    text = """
        export CUDA_DEVICE_MAX_CONNECTIONS=1
        LAYERS=$1
        source "$(dirname "$0")/model.sh"
        bash inner.sh ${MODEL_ARGS[@]} --tensorboard-dir "$PWD"
    """
    found = script_launch(["A=b", "bash", str(write(tmp_path, text)), "12"])
    command = read_command(found.words)
    assert command.ranks.num_ranks == 32
    assert command.values["num_layers"] == 12
    assert command.values["tensorboard_dir"] == str(tmp_path)
    assert command.environment == {"A": "b", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert found.environment["NNODES"] == "4"
    with pytest.raises(UserInputError, match="no such file"):
        script_launch(["bash", str(tmp_path / "absent.sh")])


@pytest.mark.parametrize(
    "words",
    [
        ["sbatch", "-N", "2", "--wrap", "bash in.sh"],
        ["sbatch", "--wrap=bash in.sh"],
        ["sbatch", "--export=ALL,CFG=no.sh", "in.sh"],
        ["sbatch", "-c", "8", "launch"],
        ["bash", "-c", "A=1 bash in.sh"],
        ["env", "CFG=no.sh", "bash", "in.sh"],
        ["bash", "-euo", "pipefail", "launch", "no.sh"],
        ["srun", "-N2", "bash", "in.sh"],
        ["docker", "run", "--rm", "image", "bash", "in.sh"],
        ["timeout", "10", "bash", "in.sh"],
        ["numactl", "-m", "0", "bash", "in.sh"],
        ["./launch"],
    ],
)
def test_a_script_may_be_typed_in_each_way_that_a_script_calls_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, LAUNCH, "in.sh")
    write(tmp_path, f"#!/bin/bash\n{LAUNCH}", "launch").chmod(0o700)
    assert dry.is_script_call(words)
    assert script_launch(words).words[-4:] == tuple(MODEL.split())


@pytest.mark.parametrize("call", ["bash no", "srun -N2 bash no.sh 8", "sbatch -o in.sh no.job"])
def test_a_script_that_is_not_here_is_named(call: str) -> None:
    with pytest.raises(UserInputError, match=r"no(.sh|.job)?': there is no such file"):
        script_launch(call.split())


def test_no_shell_of_a_script_reads_files_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (".bashrc", ".profile"):
        write(tmp_path, "A=read", name)
    for options in ("-ic", "-lic", "--login -i -c"):
        path = write(tmp_path, f"bash {options} '{LAUNCH} --x ${{A-no}}'")
        assert read(path).words[-1] == "no"


def test_a_batch_job_has_the_sizes_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"""
        #!/bin/bash
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=8
        cd $SLURM_SUBMIT_DIR
        run="python -u pretrain_gpt.py {MODEL} --micro-batch-size $SLURM_NNODES"
        srun --output=x_%j.log sh -c "${{run}}"
    """
    path = write(tmp_path, text, "job.slurm")
    found = read(path)
    assert found.header == ("--nodes=4", "--ntasks-per-node=8")
    assert read_command(found.words).values["micro_batch_size"] == 4
    assert found.environment["SLURM_NTASKS"] == "32"
    found = script_launch(["sbatch", "-N", "2", str(path)])
    assert found.environment["SLURM_NNODES"] == "2"
    assert "SLURM_NNODES" not in " ".join(found.words)
    found = script_launch(["sbatch", "-N", "2", str(path), "--nodes", "7", "-n", "9"])
    assert found.header == ("--nodes=4", "--ntasks-per-node=8", "-N", "2")
    text = f"""
        L=2
        sbatch --nodes=2 <<EOF
        #!/bin/bash
        #SBATCH --ntasks-per-node=8
        srun --mpi=pmix -l \\
            bash -x -c "cd /data; export A=1; python t.py {MODEL} --x \\$SLURM_NNODES"
        EOF
    """
    nested = read(write(tmp_path, text, "submit.sh"))
    assert nested.words[:4] == ("A=1", "srun", "--mpi=pmix", "-l")
    assert nested.words[-1] == "2"
    assert nested.header == ("--ntasks-per-node=8", "--nodes=2")


def test_launchers_are_those_that_are_counted() -> None:
    """Each program whose ranks are known is one that a script may launch."""
    from nest_megatron.integrations import launchers

    counted = {name for row in launchers.LAUNCHERS for name in row.names.split() if "." not in name}
    assert counted - {"sbatch", "salloc"} <= set(LAUNCHERS)
    for option, short in recorder._SHORT.items():
        assert launchers.slurm_options([f"{short}=8"]) == {option: "8"}


def test_variables_of_each_rank_are_no_part_of_one_command(tmp_path: Path) -> None:
    inner = (
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; "
        f"python -u pretrain_gpt.py {MODEL}"
    )
    text = f"""
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=8
        srun bash -c '{inner}'
    """
    found = read(write(tmp_path, text, "job.slurm"))
    assert found.words[:4] == ("WORLD_SIZE=32", "srun", "python", "-u")
    assert any("(--nodes=4 --ntasks-per-node=8) are not in the command" in n for n in found.notes)
    assert any("LOCAL_RANK, RANK for each rank" in note for note in found.notes)
    alone = read(write(tmp_path, f"export RANK=0; python pretrain_gpt.py {MODEL}"))
    assert alone.words[:2] == ("RANK=0", "python")


def test_the_rank_of_a_node_and_a_folder_are_told(tmp_path: Path) -> None:
    text = f"mkdir -p sub; cd {tmp_path}; torchrun --nnodes 2 --node_rank=0 t.py {MODEL}"
    notes = read(write(tmp_path, text)).notes
    assert any(f"which starts it in {tmp_path};" in note for note in notes)
    assert "--node_rank is that of the first: each node or rank has its own." in notes


@pytest.mark.parametrize("sizes", ["-np 16 --npernode 8", "-N 8 --n 16"])
def test_a_script_in_mpirun_has_the_variables_of_its_first_rank(sizes: str, tmp_path: Path) -> None:
    inner = f"""
        set -u
        export RANK=$OMPI_COMM_WORLD_RANK
        python t.py {MODEL} --rank $RANK --local-rank $OMPI_COMM_WORLD_LOCAL_RANK \\
            --x $A "$B" $OMPI_COMM_WORLD_SIZE
    """
    path = write(tmp_path, inner, "inner.sh")
    outer = write(tmp_path, f"mpirun {sizes} -x A=1 -x 'B=a b' bash {path}")
    found = read(outer)
    assert found.words[-5:] == ("0", "--x", "1", "a b", "16")
    assert "--rank is that of the first: each node or rank has its own." in found.notes
    assert read_command(found.words).ranks.num_ranks == 16
    assert not any(word.startswith(("RANK=", "OMPI_")) for word in found.words)


@pytest.mark.parametrize(
    ("start", "seen"),
    [
        ("sbatch --export=ALL,A=1 in.sh", "1"),
        ("sbatch --export A=1,B=3 in.sh", "1"),
        ("export A=1; sbatch --export=NONE in.sh", "no"),
        ("export A=1; sbatch --export B,A in.sh", "1"),
        ("export A=1; echo '#SBATCH --export=NONE' > job; cat in.sh >> job; sbatch job", "no"),
        ("srun -N2 --export=ALL,A=1 bash in.sh", "1"),
        ("export A=1; srun --export=B=2 bash in.sh", "no"),
        ("export A=1; env -u A bash in.sh", "no"),
        ("export A=1; env --unset=A ./in.sh", "no"),
        ("export A=1; env -i B=2 bash in.sh", "no"),
        ("export A=1; docker run --gpus all image bash in.sh", "no"),
        ("export A=1; docker run -e A image bash in.sh", "1"),
        ("docker run --env=A=1,2 image bash in.sh", "1,2"),
        ("podman run --env-file a.env image bash in.sh", "1 2"),
        ("uv run --env-file=a.env bash in.sh", "1 2"),
        ("export A=1; ray job submit -- bash in.sh", "no"),
        ("""ray job submit --runtime-env-json='{"env_vars": {"A": "1"}}' -- bash in.sh""", "1"),
        ("export A=1; apptainer exec image bash in.sh", "1"),
        ("export A=1; apptainer exec --cleanenv image bash in.sh", "no"),
        ("SINGULARITYENV_A=1 singularity exec -e image bash in.sh", "1"),
        ("apptainer exec --env B=2,A=1 image bash in.sh", "1"),
        ("mpiexec -n 2 -env A 1 bash in.sh", "1"),
        ("mpiexec -genv B 2 -genv A 1 -n 2 bash in.sh", "1"),
        ("srun --export=ALL,A=1 docker run -e A image bash in.sh", "1"),
        ("srun --export=ALL,A=1 docker run image bash in.sh", "no"),
    ],
)
def test_variables_are_those_that_a_wrapper_passes_on(
    start: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "# of the job\nexport A='1 2'\n", "a.env")
    write(tmp_path, f'{LAUNCH} --x "${{A-no}}"', "in.sh").chmod(0o700)
    assert read(write(tmp_path, start)).words[-1] == seen


def test_a_file_of_variables_that_is_not_here_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"sbatch no.sh\ndocker run --env-file no.env image bash -c '{LAUNCH}'"
    notes = read(write(tmp_path, text)).notes
    assert "Not on this host: no.sh (line 1), no.env (line 2)." in notes


@pytest.mark.parametrize("options", ["-o a.log", "-H -e a.log -w a.log", "--exclude a.log -N2"])
def test_the_value_of_an_option_is_no_batch_script(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "exit 7", "a.log")
    found = script_launch(["sbatch", *options.split(), str(write(tmp_path, LAUNCH)), "8"])
    assert found.words == tuple(LAUNCH.split())


def test_the_host_of_a_job_of_slurm_is_its_first_node(tmp_path: Path) -> None:
    text = f"torchrun --rdzv_endpoint $(hostname):29500 t.py {MODEL}"
    assert "node1:29500" in read(write(tmp_path, f"#SBATCH --nodes=2\n{text}")).words
    own = socket.gethostname()
    assert f"{own}:29500" in read(write(tmp_path, text, "alone.sh")).words


@pytest.mark.parametrize("option", ["--cpus-per-task=72", "-c 72", "-c72"])
def test_a_job_of_slurm_has_its_cpus_and_the_name_of_its_node(option: str, tmp_path: Path) -> None:
    text = f"""
        #!/bin/bash
        #SBATCH --nodes=2 --ntasks-per-node=8 {option}
        set -u
        srun -c $SLURM_CPUS_PER_TASK python t.py {MODEL} --x $SLURMD_NODENAME
    """
    words = read(write(tmp_path, text, "job.slurm")).words
    assert words[:3] == ("srun", "-c", "72")
    assert words[-1] == "node1"
    assert read_command(words).ranks.num_ranks is None


@pytest.mark.parametrize(
    ("options", "text", "seen"),
    [
        ("--job-name=a-b -N1", "$SLURM_JOB_NAME", "a-b"),
        (
            "-Ja.b -p gpu -A c",
            "$SLURM_JOB_NAME $SLURM_JOB_PARTITION $SLURM_JOB_ACCOUNT",
            "a.b gpu c",
        ),
        ("-N1", "$SLURM_JOB_NAME$SLURM_CPUS_ON_NODE", f"name{os.cpu_count()}"),
        ("--array=3-7%2 -N1", "$SLURM_ARRAY_TASK_ID", "3"),
        ("--ntasks-per-node=8 --cpus-per-task=4", "$SLURM_CPUS_ON_NODE", "32"),
        ("--nodes=2-10", "$SLURM_NNODES $SLURM_JOB_NODELIST", "10 node[1-10]"),
    ],
)
@pytest.mark.parametrize("place", ["sbatch", "lines", "srun"])
def test_a_job_of_slurm_has_its_variables(
    place: str, options: str, text: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    header = f"#SBATCH {options}\n" if place == "lines" else ""
    write(tmp_path, f'{header}set -u\n{LAUNCH} --x "{text}"', "in.sh")
    start = {"sbatch": f"sbatch {options}", "lines": "sbatch", "srun": f"srun {options} bash"}[
        place
    ]
    assert read(write(tmp_path, f"{start} in.sh")).words[-1] == seen


def test_a_step_of_slurm_has_the_sizes_of_its_options(tmp_path: Path) -> None:
    seen = "$SLURM_NNODES $SLURM_GPUS_ON_NODE $SLURM_NTASKS $SLURM_JOB_ID"
    step = (
        f"srun -N1-2 --gres=gpu:h100:8,nvme:1 --ntasks-per-node 4 bash -c '{LAUNCH} --x \"{seen}\"'"
    )
    assert read(write(tmp_path, step)).words[-1] == "2 8 8 1"
    job = write(tmp_path, f"#SBATCH --nodes=4 --ntasks=9\nexport SLURM_JOB_ID=5\n{step}", "job.sh")
    assert read(job).words[-1] == "2 8 8 5"


@pytest.mark.parametrize("start", ["sbatch --chdir=sub in.sh", "cd sub; sbatch ../in.sh"])
def test_a_batch_job_runs_in_its_folder(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, f"source a.env; {LAUNCH} --x $A", "in.sh")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "A=1", "a.env")
    found = read(write(tmp_path, start))
    assert found.words[-1] == "1"
    assert found.folder == str(tmp_path / "sub")
    notes = read(write(tmp_path, f"sbatch -D /no --wrap '{LAUNCH}'")).notes
    assert any("Not on this host: /no" in note for note in notes)


def test_the_head_of_a_slurm_job_is_its_first_node_and_its_task_the_first(tmp_path: Path) -> None:
    head = "ip=$(srun --nodes=1 --ntasks=1 -w node1 hostname --ip-address)"
    text = f"#SBATCH --nodes=2\n{head}\nsrun torchrun --rdzv_endpoint $ip:29500 t.py {MODEL}"
    found = read(write(tmp_path, text))
    assert "node1:29500" in found.words
    assert not any("srun" in note for note in found.notes)
    each = f"torchrun --nnodes 2 --node-rank $SLURM_NODEID --master-addr h0 t.py {MODEL}"
    words = read(write(tmp_path, f"srun -N 2 bash -c '{each}'")).words
    assert words[words.index("--node-rank") + 1] == "0"
    nodes = f"srun -N2 bash -c 'torchrun --nnodes $SLURM_NNODES t.py {MODEL}'"
    assert "2" in read(write(tmp_path, nodes)).words


def test_secrets_are_no_part_of_the_command(tmp_path: Path) -> None:
    text = f"export WANDB_API_KEY=abc HF_TOKEN=x TOKENIZERS_PARALLELISM=0\ntorchrun t.py {MODEL}"
    found = read(write(tmp_path, text))
    assert found.words[:2] == ("TOKENIZERS_PARALLELISM=0", "torchrun")
    assert any("may be secret: HF_TOKEN, WANDB_API_KEY" in note for note in found.notes)
