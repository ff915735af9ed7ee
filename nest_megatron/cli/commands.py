"""The commands and their options. What they do is in the modules that they load when run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    FOLDER,
    INPUT,
    NEXT,
    OUTPUT,
    Command,
    Group,
    job_options,
    json_option,
)
from nest_megatron.cli.compare_commands import compare
from nest_megatron.cli.complete import (
    complete_catalogue,
    complete_free,
)
from nest_megatron.cli.extract_commands import extract
from nest_megatron.cli.nest_commands import nest
from nest_megatron.cli.network_commands import network
from nest_megatron.cli.paper_commands import paper
from nest_megatron.cli.profile_commands import profile, profiles
from nest_megatron.version import __version__


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=(
        "nest-megatron plan model=llama3_70b cluster=dgx_h100 cluster.num_gpus=64",
        "nest-megatron plan --from 'pretrain_gpt.py <your flags>' cluster=dgx_h100",
        "nest-megatron models",
        "nest-megatron clusters",
    ),
)
@click.version_option(__version__, prog_name="nest-megatron")
def cli() -> None:
    """Plans for Megatron training jobs: the fastest layout on a cluster that is expected to fit.

    Exit codes: 0 done, 1 nothing is predicted to fit, 2 bad input, 3 time ended the
    search before it had a plan, 70 a fault of ours, 130 interrupted.
    """


@cli.command(
    cls=Command,
    examples=(
        "nest-megatron plan model=llama3_70b cluster=h100_spine_leaf cluster.num_gpus=1024"
        + NEXT
        + "train.global_batch_size=4096 out=plan.yaml",
        "nest-megatron plan model=./config.json cluster=./mine.yaml parallel.zero_stage=1",
        "nest-megatron plan model=mixtral_8x7b cluster=dgx_h100 search.max_seconds=10 --json",
        "nest-megatron plan --from 'pretrain_gpt.py <your flags>' cluster=dgx_h100 --free all",
        "nest-megatron plan -m model=llama3_8b cluster=dgx_h100 train.global_batch_size=256,512",
    ),
)
@job_options()
@click.option(
    "--from",
    "from_command",
    metavar="COMMAND",
    help="Your own Megatron-LM command, in quotes; - reads it from standard input.",
)
@click.option(
    "--free",
    metavar="NAMES",
    default="",
    shell_complete=complete_free,
    help="With --from: flags of yours that may change, separated by commas, or all.",
)
@click.option(
    "--megatron-version",
    metavar="RELEASE",
    default="0.16.1",
    show_default=True,
    help="With --from: the release whose flags the command uses (0.16.1 or 0.20).",
)
@click.option(
    "--strict",
    is_flag=True,
    help="With --from: refuse flags that Megatron-LM does not have, instead of passing them on.",
)
@click.option("-m", "--multirun", is_flag=True, help="Plan every combination of a,b values.")
@click.option(
    "--shortlist",
    is_flag=True,
    help="Say which plans could be the fastest, and what to measure to know more.",
)
@json_option
def plan(**options: Any) -> int:
    """Find the plan that is expected to be the fastest and to fit in memory.

    Settings are key=value; what is not given is searched. hydra_configs/plan.yaml explains each.
    """
    from nest_megatron.cli.plan import run_plan

    return run_plan(**options, begun_s=click.get_current_context().obj)


@cli.command(
    cls=Command,
    examples=(
        "nest-megatron estimate model=llama3_70b cluster=dgx_h100 cluster.num_gpus=64"
        + NEXT
        + "parallel.tensor_model_parallel_size=4 parallel.pipeline_model_parallel_size=4"
        + NEXT
        + "parallel.context_parallel_size=2 train.micro_batch_size=1",
    ),
)
@job_options()
@json_option
def estimate(**options: Any) -> int:
    """Price one layout: iteration time by term, memory by stage. Nothing is searched.

    What is not given is Megatron's default: degrees of 1, the GPUs that are left replicate, the
    distributed optimizer, an even split of the layers (the fastest split where they do not divide).
    Exits with 1 where the layout is predicted not to fit in memory, with 0 where it may fit.
    """
    from nest_megatron.cli.plan import run_estimate

    return run_estimate(**options)


@cli.command(
    cls=Command,
    examples=(
        "nest-megatron explain plan.yaml",
        "nest-megatron explain plan.yaml --json",
    ),
)
@click.argument("path", type=click.Path(path_type=Path), metavar="PLAN.YAML")
@click.option("--html", type=OUTPUT, help="Write a page to look at and to send around.")
@click.option(
    "--timeline",
    type=OUTPUT,
    help="Write the schedule: a .json trace for Perfetto, or a .png or .svg picture.",
)
@json_option
def explain(path: Path, *, html: Path | None, timeline: Path | None, as_json: bool) -> int:
    """Read a plan file and say why it is what it is."""
    from nest_megatron.cli.explain import run_explain

    return run_explain(path, html=html, timeline=timeline, as_json=as_json)


@cli.command(
    cls=Command,
    examples=(
        "nest-megatron pin plan.yaml",
        "nest-megatron pin plan.yaml --out pinned.yaml --by ada --note 'reviewed for run 7'",
    ),
)
@click.argument("path", type=click.Path(path_type=Path), metavar="PLAN.YAML")
@click.option("--out", type=OUTPUT, help="Write the pinned plan here instead of in its place.")
@click.option("--by", metavar="NAME", help="Who has reviewed it; the user's name if not given.")
@click.option("--note", metavar="TEXT", default="", help="Kept in the file.")
@click.option(
    "--release",
    "--megatron-version",
    "release",
    metavar="RELEASE",
    help="The Megatron-LM release that it may launch (0.16.1 or 0.20); by default the plan's own.",
)
@json_option
def pin(path: Path, **options: Any) -> int:
    """Freeze a reviewed plan: it launches the job that it was made for, and no other.

    Launch with +nest=pinned nest.plan=FILE. The file is refused once a byte of it has changed.
    """
    from nest_megatron.cli.pin import run_pin

    return run_pin(path, **options)


@cli.command(
    cls=Command,
    examples=(
        "nest-megatron validate throughput.csv comm_collectives.csv",
        "nest-megatron validate runs.csv --models models.csv --rows predicted.csv",
        "nest-megatron validate runs.csv --json",
        "nest-megatron validate throughput.csv memory_peak.csv --docs docs",
    ),
)
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE.CSV..."
)
@click.option(
    "--models", type=INPUT, multiple=True, help="Shapes of models that the catalogue lacks (CSV)."
)
@click.option("--rows", type=OUTPUT, help="Write every row with its prediction here (CSV).")
@click.option(
    "--docs", type=FOLDER, help="Write accuracy.md, with pictures, into this folder (matplotlib)."
)
@click.option(
    "--left-out",
    is_flag=True,
    help="Predict each source with constants that were fitted without it.",
)
@json_option
def validate(paths: tuple[Path, ...], **options: Any) -> int:
    """Compare predictions with measured runs: errors, ranking of layouts, memory.

    Reads throughput, peak memory, Megatron's golden values and collectives, told apart by their
    columns (docs/accuracy.md). Each source and regime is scored as planned, with the settings that
    a plan would assume, and as stated. Rows that cannot be predicted are counted by reason.
    """
    from nest_megatron.cli.validate import run_validate

    return run_validate(paths, **options)


@cli.command(
    cls=Command,
    examples=(
        "nest-megatron calibrate throughput.csv memory_peak.csv --out hydra_configs",
        "nest-megatron calibrate comm_collectives.csv --no-cross-validation",
    ),
)
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE.CSV..."
)
@click.option("--out", type=FOLDER, help="Write the constants into this catalogue (hydra_configs).")
@click.option(
    "--cross-validation/--no-cross-validation",
    "validate",
    default=True,
    help="Leave out each source and each model in turn.",
)
@json_option
def calibrate(paths: tuple[Path, ...], **options: Any) -> int:
    """Fit the cost model's constants to measured runs, and those of links to collectives.

    Prints the constants, the errors, and those of sources and models that a fit has not seen.
    """
    from nest_megatron.cli.calibrate import run_calibrate

    return run_calibrate(paths, **options)


@cli.command(
    cls=Command,
    examples=(
        "nest-megatron models",
        "nest-megatron models deepseek_v3",
        "nest-megatron models ./config.json",
    ),
)
@click.argument("name", required=False, shell_complete=complete_catalogue("model"))
@json_option
def models(name: str | None, *, as_json: bool) -> int:
    """List the models of the catalogue, or show one, or that of a file."""
    from nest_megatron.cli.catalogue import run_models

    return run_models(name, as_json=as_json)


@cli.command(
    cls=Command,
    examples=(
        "nest-megatron clusters",
        "nest-megatron clusters h100_spine_leaf",
        "nest-megatron clusters ./mine.yaml",
    ),
)
@click.argument("name", required=False, shell_complete=complete_catalogue("cluster"))
@json_option
def clusters(name: str | None, *, as_json: bool) -> int:
    """List the clusters of the catalogue, or show one, or that of a file."""
    from nest_megatron.cli.catalogue import run_clusters

    return run_clusters(name, as_json=as_json)


cli.add_command(compare)
cli.add_command(profile)
cli.add_command(profiles)
cli.add_command(network)
cli.add_command(extract)
cli.add_command(nest)
cli.add_command(paper)


@cli.command(
    cls=Command,
    examples=(
        'eval "$(nest-megatron completion bash)"                 # in ~/.bashrc',
        'eval "$(nest-megatron completion zsh)"                  # in ~/.zshrc',
        "nest-megatron completion fish > ~/.config/fish/completions/nest-megatron.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the script that completes commands, settings and catalogue names."""
    from nest_megatron.cli.complete import script

    click.echo(script(shell))
    return 0
