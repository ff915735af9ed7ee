"""How many ranks a launch has, by the words of its launcher, by Slurm and by the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron import plan_command
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.dry_run.recorder import STANDS_FOR
from nest_megatron.integrations.launchers import (
    LAUNCHERS,
    LaunchPlace,
    header_options,
    launched_ranks,
    with_variables,
)
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_typed

NODE = LaunchPlace(gpus_per_node=8)
JOB = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --padded-vocab-size 50304 --bf16"
)


def composed(words: list[str]) -> Settings:
    return compose(parse(words))


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        ("torchrun", 1),
        ("torchrun --nproc-per-node=8 --nnodes=2", 16),
        ("torchrun --nproc_per_node 4", 4),
        ("torchrun --nproc-per 8", 8),
        ("torchrun --nproc-per-node=gpu --nnodes=2", 16),
        ("torchrun --nproc-per-node auto", 8),
        ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc-per-node=gpu --nnodes=2", 6),
        ("torchrun --nproc-per-node 8 --nnodes 1:4", 32),
        ("PET_NPROC_PER_NODE=8 torchrun --nnodes 2", 16),
        ("python -m torch.distributed.run --nproc-per-node 2", 2),
        ("python3 -m torch.distributed.launch --nproc_per_node=2 --nnodes=2", 4),
        ("ft_launcher --nproc_per_node 8 --nnodes 2 --ft-param-x 3", 16),
        ("mpirun -np 16", 16),
        ("/opt/ompi/bin/mpirun --allow-run-as-root -np 16 -N 8 -x WORLD=2", 16),
        ("mpiexec -n 16", 16),
        ("mpirun -H a:8,b:8", 16),
        ("mpirun -N 8 -H a:8,b:8", 16),
        ("mpirun --npernode 8 -hosts a,b", 16),
        ("mpirun --map-by ppr:4:node -H a:8,b:8", 8),
        ("srun -N 4 --ntasks-per-node=8 python", 32),
        ("srun -N4 --ntasks-per-node 8 python", 32),
        ("srun -n 64 python", 64),
        ("srun --nodes=2-4 --ntasks-per-node=8 python", 32),
        ("srun --nodelist=n[1-4] --ntasks-per-node=8 python", 32),
        ("srun -G 16 --gpus-per-task=1 python", 16),
        ("srun --gpus=h100:16 --ntasks-per-gpu=1 python", 16),
        ("srun -N 2 --gres=gpu:h100:8 python", 16),
        ("srun -N 2 --gpus-per-node=8 python", 16),
        ("srun -N 2 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8", 16),
        ("srun -N 2 --gpus-per-node=4 torchrun --nnodes 2 --nproc-per-node=gpu", 8),
        ("srun -n16 -N2 docker run -n 3 image python", 16),
        ("deepspeed --num_gpus 8 --num_nodes 2", 16),
        ("deepspeed --num_nodes 1 --num_gpus=4", 4),
        ("deepspeed", 8),
        ("accelerate launch --num_processes 16 --num_machines 2", 16),
        ("uv run torchrun --nproc-per-node 8", 8),
        ("ray job submit -- torchrun --nproc_per_node 4", 4),
        ("apptainer exec --nv x.sif torchrun --nproc_per_node 4", 4),
        ("WORLD_SIZE=16 RANK=3 python", 16),
        ("WORLD_SIZE=16 srun python", 16),
    ],
)
def test_launcher_says_how_many_ranks_there_are(launch: str, ranks: int) -> None:
    assert launched_ranks(launch.split(), NODE).num_ranks == ranks


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        ("", "neither a launcher nor Slurm nor WORLD_SIZE"),
        ("python", "neither a launcher nor Slurm nor WORLD_SIZE"),
        ("flux run -n 16 python", "flux is no launcher that is known"),
        ("srun -N 4 python", "4 nodes, and neither tasks nor GPUs"),
        ("accelerate launch", "--num_processes"),
        ("torchrun --nproc-per-node $GPUS", "--nproc-per-node \\$GPUS is no number"),
        ("torchrun --nnodes 1:$MAX --nproc-per-node 8", "is no number"),
        ("torchrun --nproc-per-node cpu", "cpu is no number"),
        ("deepspeed --include localhost:0,1", "--include names some GPUs"),
        ("deepspeed --hostfile /absent", "--hostfile /absent is not on this host"),
    ],
)
def test_what_is_not_said_is_not_assumed(launch: str, why: str) -> None:
    found = launched_ranks(launch.split(), NODE)
    assert found.num_ranks is None
    with pytest.raises(UserInputError, match=why) as raised:
        read_typed(
            TypedCommand(text=f"{launch} {JOB}", version="0.16"), composed(["cluster=dgx_h100"])
        )
    assert "cluster.num_gpus=" in raised.value.fix


@pytest.mark.parametrize(
    ("header", "launch", "ranks"),
    [
        ("#SBATCH --nodes=2\n#SBATCH --gres=gpu:8", "srun python", 16),
        ("#SBATCH --gres=gpu:8", "python", 8),
        ("#SBATCH -N 4 --ntasks-per-node=8 # all", "srun python", 32),
        ("#SBATCH -N 4 --ntasks-per-node=8", "srun -N 2 python", 16),
        ("#SBATCH -N 4 --ntasks-per-node=8", "srun -n 8 python", 8),
        ("#SBATCH -N 4 --gpus-per-node=4", "torchrun --nnodes $N --nproc-per-node=gpu", 16),
        ("#SBATCH -N 2 --gpus=8", "torchrun --nnodes 2 --nproc-per-node=gpu", 8),
        ("#SBATCH -N 2 --ntasks-per-node=8", "mpirun python", 16),
        ("echo\n#SBATCH -N 2 --ntasks-per-node=8", "srun python", None),
    ],
)
def test_lines_of_a_slurm_script_say_what_its_launcher_does_not(
    header: str, launch: str, ranks: int | None
) -> None:
    place = LaunchPlace(header=header_options(f"#!/bin/bash\n{header}\n"))
    assert launched_ranks(launch.split(), place).num_ranks == ranks


def test_environment_says_it_last_and_is_named() -> None:
    step = {"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "8(x2)"}
    found = launched_ranks(["srun", "python"], LaunchPlace(environment=step))
    assert (found.num_ranks, found.num_nodes) == (16, 2)
    assert any("SLURM_NNODES=2 of the environment" in note for note in found.notes)
    place = LaunchPlace(environment={"WORLD_SIZE": "2"})
    assert launched_ranks(["python"], place).notes == ("WORLD_SIZE=2 of the environment is taken.",)
    assert launched_ranks(["torchrun", "--nproc-per-node=8"], place).num_ranks == 8
    shell = LaunchPlace(environment={"SLURM_NTASKS": "1", "SLURM_NNODES": "1"})
    assert launched_ranks(["python"], shell).num_ranks is None


def test_range_is_planned_for_its_largest_and_assumed_ranks_are_told() -> None:
    words = ["torchrun", "--nnodes=1:4", "--nproc-per-node=8"]
    assert launched_ranks(words).notes == (
        "--nnodes 1:4 is a range; its largest, 4 nodes, is planned.",
    )
    fixed = ["torchrun", "--nnodes=4:4", "--nproc-per-node=8"]
    assert (launched_ranks(fixed).num_ranks, launched_ranks(fixed).notes) == (32, ())
    (note,) = launched_ranks(["srun", "-N", "2", "--gres=gpu:8", "python"]).notes
    assert note == "Slurm is told 16 GPUs and no tasks; a rank on each is assumed."


def test_hosts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two\nworker-1 slots=8\nworker-2 slots=8\n", encoding="utf-8")
    assert launched_ranks(["mpirun", "--hostfile", str(path)]).num_ranks == 16
    assert launched_ranks(["deepspeed", f"--hostfile={path}"]).num_ranks == 16
    assert launched_ranks(["deepspeed", f"--hostfile={path}", "--num_gpus=4"]).num_ranks == 8


@pytest.mark.parametrize("value", ["0", "-1", "x8", "8x", "1.5"])
def test_count_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(UserInputError, match="whole number of at least 1"):
        launched_ranks(["torchrun", f"--nproc_per_node={value}"])


def test_an_option_without_a_value_does_not_take_the_next_option() -> None:
    with pytest.raises(UserInputError, match="--nnodes = '': it must be a whole number"):
        launched_ranks(["torchrun", "--nproc-per-node", "8", "--nnodes", "--node_rank", "0"])


def test_size_of_a_described_cluster_is_taken_and_told(tmp_path: Path) -> None:
    catalogue = composed(["cluster=dgx_h100", "cluster.num_gpus=24"])
    _, cluster = read_typed(TypedCommand(text=JOB, version="0.16"), catalogue)
    assert cluster.num_gpus == 24
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [dgx_h100]\nname: mine\nnum_gpus: 24\n", encoding="utf-8")
    job, cluster = read_typed(TypedCommand(text=JOB, version="0.16"), composed([f"cluster={path}"]))
    assert (cluster.num_gpus, job.num_gpus) == (24, 24)
    assert "Nothing says how many ranks there are; cluster mine has 24 GPUs" in job.notes[-1]
    _, cluster = read_typed(
        TypedCommand(text=f"torchrun {JOB}", version="0.16"), composed([f"cluster={path}"])
    )
    assert cluster.num_gpus == 1


def test_nodes_that_are_not_the_clusters_are_told() -> None:
    words = ["cluster=dgx_h100"]
    launch = "deepspeed --num_gpus 4 --num_nodes 4"
    job, cluster = read_typed(TypedCommand(text=f"{launch} {JOB}", version="0.16"), composed(words))
    assert cluster.num_gpus == 16
    assert job.notes[-1] == (
        "The job has 4 ranks on each of 4 nodes; those of dgx_h100 have 8 GPUs, and the "
        "plan takes whole nodes."
    )
    for launch in ("deepspeed --num_gpus 4", "torchrun --nnodes 2 --nproc-per-node 8"):
        job, _ = read_typed(TypedCommand(text=f"{launch} {JOB}", version="0.16"), composed(words))
        assert not any("whole nodes" in note for note in job.notes)


def test_a_dry_run_records_each_launcher_that_is_a_program_and_starts_ranks() -> None:
    names = {name for launcher in LAUNCHERS for name in launcher.names.split()}
    modules = {
        "torch.distributed.run",
        "torch.distributed.launch",
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        "deepspeed.launcher.runner",
        "accelerate.commands.launch",
    }
    assert names - {*STANDS_FOR} == {*modules, "salloc"}  # salloc gives nodes, srun the ranks


@pytest.mark.parametrize(
    ("launch", "size"),
    [
        ("mpirun --hostfile {file} -N 8", (24, 3)),
        ("mpirun --hostfile {file} -np 12", (12, 3)),
        ("mpirun -H h1,h2:8,h3 -N 8", (24, 3)),
        ("mpirun -H h1,h1,h2,h2", (4, 2)),
        ("deepspeed --include h1@h2 --num_gpus 8", (16, 2)),
    ],
)
def test_hosts_are_counted_with_and_without_slots(
    launch: str, size: tuple[int, int], tmp_path: Path
) -> None:
    file = tmp_path / "hosts"
    file.write_text("h1\nh2\nh3  # the last\n", encoding="utf-8")
    found = launched_ranks(launch.format(file=file).split())
    assert (found.num_ranks, found.num_nodes) == size
    unsaid = launched_ranks(f"mpirun --hostfile {file}".split())
    assert "has hosts without slots=" in unsaid.unsaid


def test_variables_of_a_module_in_a_container_stand_before_its_interpreter() -> None:
    module = ["python3", "-u", "-m", "torch.distributed.run", "t.py"]
    words, before = with_variables(("enroot", "start", "image", *module), {"B": "2"}, {"A": "1"})
    assert (words, before) == (["enroot", "start", "image", "env", "B=2", "A=1", *module], {})


def test_variables_of_a_plan_reach_the_other_hosts_of_open_mpi() -> None:
    """Without ``-x`` it passes none on. The script's stay, ``OMPI_MCA_*`` among them."""
    launch = ["mpirun", "-np", "16", "-x", "PATH", "python", "t.py"]
    words, before = with_variables(launch, {"OMPI_MCA_btl": "tcp"}, {"A": "1"})
    assert words == [*launch[:5], "env", "A=1", *launch[5:]]
    assert before == {"OMPI_MCA_btl": "tcp"}


@pytest.mark.parametrize("export", ["--export=NONE", "--export=A,B", "--export=ALL,B=1"])
def test_variables_of_a_plan_pass_an_export_of_srun(export: str) -> None:
    words, before = with_variables(["srun", export, "python", "t.py"], {}, {"C": "1"})
    assert (words[2] == "env", not before) == ("ALL" not in export, "ALL" not in export)


def test_values_of_options_are_no_variables_and_secrets_are_in_no_file(tmp_path: Path) -> None:
    options = "--ulimit memlock=-1 --mount type=bind,source=/a -e HF_TOKEN=x1y --env=W_KEY=x1y"
    command = f"docker run {options} -e A=1 image torchrun --nproc-per-node 8 {JOB}"
    plan = plan_command(command, cluster="dgx_h100", free=["all"])
    plan.save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text(encoding="utf-8")
    launcher = plan.record.launch["megatron_lm"].launcher
    assert "x1y" not in text
    assert [*launcher[launcher.index("-e") :][:4]] == ["-e", "HF_TOKEN", "--env=W_KEY", "-e"]
    assert launcher.count("memlock=-1") == launcher.count("type=bind,source=/a") == 1
