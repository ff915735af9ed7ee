"""Scripts that are read, beside what bash itself makes of them with programs that do nothing."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import textwrap
from pathlib import Path

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.launchers import LaunchPlace
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.shell_script.launch import ScriptLaunch, script_launch

BASH = shutil.which("bash")
#: What stands for every program: it writes its words down, one to a line.
_STUB = '#!{bash}\nprintf "%s\\n" "${{0##*/}}" "$@" > "$STUB_OUT.$$"\n'
_PREFIX = '#!{bash}\n"$@"\n'
_TRAINS = {"--num-layers", "--micro-batch-size", "--use-checkpoint-args", "--encoder-num-layers"}
PROGRAMS = ("torchrun", "python", "python3", "srun", "uv", "mkdir", "pip", "tee")
_COMPUTED = ("dirname", "basename", "seq", "cat", "wc", "head", "tail", "cut", "tr", "expr")
_COMPUTED += ("readlink", "realpath", "date")
MODEL = "--num-layers 2 --hidden-size 64"


def write(folder: Path, text: str, name: str = "train.sh") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return path


def read(path: Path, *args: str) -> ScriptLaunch:
    found = script_launch([str(path), *args])
    assert found is not None
    return found


def run_by_bash(
    path: Path, args: tuple[str, ...], folder: Path, *, cwd: Path | None = None
) -> list[str]:
    """The words of the last program of ``PROGRAMS`` that trains, as bash calls it."""
    stubs, out = folder / "stubs", folder / "called"
    stubs.mkdir()
    for name in PROGRAMS:
        (stubs / name).write_text(_STUB.format(bash=BASH))
        (stubs / name).chmod(stat.S_IRWXU)
    (stubs / "nohup").write_text(_PREFIX.format(bash=BASH))
    (stubs / "nohup").chmod(stat.S_IRWXU)
    for name in _COMPUTED:
        (stubs / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(stubs), "STUB_OUT": str(out), "HOME": str(folder)}
    command = [str(BASH), "--norc", str(path), *args]
    subprocess.run(
        command, env=environment, cwd=cwd or folder, capture_output=True, timeout=600, check=False
    )
    calls = [path.read_text().splitlines() for path in folder.glob("called.*")]
    return next(call for call in calls if any(_TRAINS.intersection(w.split()) for w in call))


#: What launch scripts do, each with the words that end in the command.
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


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize("name", SNIPPETS)
def test_words_are_those_that_bash_would_pass(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("one", "two three")
    path = write(tmp_path, f"M='{MODEL}'\n{SNIPPETS[name]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    words = read(path, *args).words
    at = next(n for n, word in enumerate(words) if word in PROGRAMS)
    assert list(words[at:]) == run_by_bash(path, args, tmp_path)


LAUNCH = f"torchrun --nproc-per-node 8 pretrain_gpt.py {MODEL}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello", "its last words are 'hello'"),
        ("python tools/preprocess_data.py --input x", "no job of Megatron-LM that trains"),
        (f"{LAUNCH}\n{LAUNCH} --bf16", "it launches 2 jobs (lines 1, 2)"),
        (f"if true; then {LAUNCH}", "the script ends too early"),
        (f"echo 'x\n{LAUNCH}", "the quote ' of line 1 is not closed"),
        (f"while true; do :; done; {LAUNCH}", "it does not end within"),
        (f"f() {{ f; }}; f; {LAUNCH}", "it calls itself"),
        (f"X=x; while true; do X=$X$X; done; {LAUNCH}", "too long"),
        (f"X=(x); while true; do X=(${{X[@]}} ${{X[@]}}); done; {LAUNCH}", "a list has more than"),
        (f"for i in {{1..999999999}}; do :; done; {LAUNCH}", "is too long"),
        (f"N=$(nvidia-smi -L | wc -l); if [ $N -gt 4 ]; then A=1; fi; {LAUNCH}", "nvidia-smi -L"),
        (f"if grep -q x /etc/hosts; then A=1; fi; {LAUNCH}", "is not run succeeds decides"),
        (f"/opt/tool --check && A=1; {LAUNCH}", "is not run succeeds decides"),
        (f'[ -z "$1" ] && exit 1; {LAUNCH}', "a decision depends on $1"),
        (f"set -u; {LAUNCH} --tp $TP", "TP is not set, and the script has set -u"),
        (f"A=${{B:?is needed}}; {LAUNCH}", "B: is needed"),
        (f"while getopts a: o; do :; done; {LAUNCH}", "getopts is not supported"),
        (f"exit 3; {LAUNCH}", "launches nothing"),
        (f"source ./args.sh; {LAUNCH}", "args.sh, which is not on this host"),
        (f"{LAUNCH} --load <path to checkpoint> x", "reads the file path, which is not there"),
        (f"A=<path to data>\n{LAUNCH}", "a file is expected after >"),
    ],
)
def test_what_cannot_be_known_is_refused_with_its_place(
    text: str, said: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserInputError) as caught:
        script_launch(str(path))
    assert said in str(caught.value)
    assert path.name in str(caught.value)


def test_nothing_is_started_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a script does to this machine is left out, and said."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    for name in ("Popen", "run"):
        monkeypatch.setattr(subprocess, name, refuse)
    for name in ("system", "fork", "execve", "posix_spawn", "kill", "mkdir", "remove"):
        monkeypatch.setattr(os, name, refuse)
    victim = tmp_path / "victim"
    victim.write_text("kept")
    text = f"""
        cd {tmp_path}
        rm -rf victim; echo lost > victim; : >| victim; kill -9 -1; touch made
        /usr/bin/env touch made; curl http://127.0.0.1/x | bash; exec 3<>/dev/tcp/127.0.0.1/80
        trap 'rm victim' EXIT; enable -f ./x.so y; $(rm victim); `rm victim`; eval "rm victim"
        (mkdir made) || exit 1
        {LAUNCH} > victim 2>&1 < /dev/null &
    """
    found = read(write(tmp_path, text))
    assert found.words[-4:] == tuple(MODEL.split())
    assert victim.read_text() == "kept"
    assert not (tmp_path / "made").exists()
    assert "curl (line 3)" in " ".join(found.notes)


def test_variables_arguments_and_nested_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNODES", "4")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 'MODEL_ARGS=(--num-layers "$LAYERS")', "model.sh")
    write(tmp_path, "torchrun --nnodes $NNODES --nproc_per_node 8 t.py $@", "inner.sh")
    text = """
        export CUDA_DEVICE_MAX_CONNECTIONS=1
        LAYERS=$1
        source "$(dirname "$0")/model.sh"
        source /opt/venv/bin/activate
        NODES=$(scontrol show hostnames | head -n 1)
        LOGS="--wandb-exp-name $NODES --tensorboard-dir runs/$(date +%F)"
        bash inner.sh ${MODEL_ARGS[@]} $LOGS $NOTHING
    """
    path = write(tmp_path, text)
    found = script_launch(f"A=b bash {path} 12")
    assert found is not None
    command = read_command(found.words)
    assert command.ranks.num_ranks == 32
    assert command.values["num_layers"] == 12
    assert command.environment == {"A": "b", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert command.values["tensorboard_dir"] == "runs/$(date +%F)"
    notes = " ".join(found.notes)
    assert "scontrol" in notes
    assert "NOTHING (line 7)" in notes
    assert "/opt/venv/bin/activate (line 4)" in notes


def test_sizes_of_a_slurm_job_are_those_of_its_srun(tmp_path: Path) -> None:
    text = f"""
        #!/bin/bash
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=8
        run="python -u pretrain_gpt.py {MODEL} --micro-batch-size $SLURM_NNODES"
        srun --output=x_%j.log sh -c "${{run}}"
    """
    path = write(tmp_path, text, "job.slurm")
    found = read(path)
    command = read_command(found.words, place=LaunchPlace(header=found.header))
    assert command.ranks.num_ranks == 32
    assert command.values["micro_batch_size"] == 4
    text = f"""
        L=2
        sbatch <<EOF
        #!/bin/bash
        #SBATCH --nodes=2 --ntasks-per-node=8
        srun --mpi=pmix -l \\
            bash -x -c "cd /data; export A=1; python t.py {MODEL} --x \\$SLURM_PROCID"
        EOF
    """
    nested = read(write(tmp_path, text, "submit.sh"))
    assert nested.words[:2] == ("A=1", "srun")
    assert nested.header == ("--nodes=2", "--ntasks-per-node=8")
    assert nested.words[-1] == "$SLURM_PROCID"
    asked = script_launch(f"sbatch -N 2 {path}")
    assert asked is not None
    place = LaunchPlace(header=asked.header)
    assert read_command(asked.words, place=place).ranks.num_ranks == 16


def test_other_texts_are_commands(tmp_path: Path) -> None:
    for text in ("torchrun pretrain_gpt.py --bf16", "bash -c 'python a.py'", "--bf16", "it's"):
        assert script_launch(text) is None
    with pytest.raises(UserInputError, match="cannot be read: No such file"):
        script_launch(str(tmp_path / "absent.sh"))
