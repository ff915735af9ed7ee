"""``nest-megatron extract``; what it does is in ``cli/extract.py`` and ``extract_module.py``."""

from __future__ import annotations

from typing import Any

import click

from nest_megatron.cli.command_kinds import FOLDER, NEXT, OUTPUT, Command, json_option
from nest_megatron.cli.complete import complete_override


@click.command(
    cls=Command,
    examples=(
        "nest-megatron extract model=llama3_70b parallel.tensor_model_parallel_size=8",
        "nest-megatron extract model=deepseek_v3 parallel.tensor_model_parallel_size=8"
        + NEXT
        + "parallel.expert_model_parallel_size=8 parallel.expert_tensor_parallel_size=1"
        + NEXT
        + "--layer moe --closed-form --draw moe.svg",
        "nest-megatron extract --from 'pretrain_gpt.py <your flags>' --unfused",
        "nest-megatron extract --module my_model:build --input 1,2048 --dtype int64"
        + NEXT
        + "--draw chain.svg",
    ),
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override)
@click.option(
    "--layer",
    type=click.Choice(["all", "embedding", "dense", "moe", "mtp", "head"]),
    default="all",
    show_default=True,
    help="Which layer of the model; all is one of each kind.",
)
@click.option(
    "--implementation",
    type=click.Choice(["local", "transformer_engine"]),
    default="local",
    show_default=True,
    help="Megatron's --transformer-impl: whose layers are built.",
)
@click.option(
    "--unfused",
    is_flag=True,
    help="Attention in two products, which keeps its scores; fused attention keeps none.",
)
@click.option(
    "--from",
    "from_command",
    metavar="COMMAND",
    help="Your own Megatron-LM command, in quotes, instead of model; - reads standard input.",
)
@click.option(
    "--megatron-version",
    metavar="RELEASE",
    default="0.16.1",
    show_default=True,
    help="With --from: the release whose flags the command uses (0.16.1 or 0.20).",
)
@click.option(
    "--closed-form",
    is_flag=True,
    help="Print the formulas that the planner uses (Transformer Engine's layers); needs no torch.",
)
@click.option(
    "--module",
    metavar="PACKAGE.MODULE:NAME",
    help="A model of your own: NAME takes nothing and returns a torch.nn.Module.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[KEYWORD=]1,2048",
    help="With --module: the shape of an input; as often as there are inputs.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="TYPE",
    help="With --module: number type, one for all inputs or one each (float32 if not given).",
)
@click.option(
    "--draw", type=OUTPUT, help="Write a picture: .svg or .png, one for each layer that is printed."
)
@click.option("--config-dir", type=FOLDER, help="A folder with your own model/ files.")
@json_option
def extract(**options: Any) -> int:
    """Show the work of one layer on one rank, as megatron-core's own modules do it.

    Operators with their FLOPs and traffic, collectives with their groups, and bytes kept for the
    backward pass, forward and backward; no GPU is needed. With --module, any PyTorch model is
    traced with torch.fx into its chain of blocks, without memory for its weights.
    """
    from nest_megatron.cli.extract import run_extract

    return run_extract(**options)
