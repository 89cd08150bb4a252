"""What the commands print as tables."""

from rich.console import Console
from rich.table import Table

from ..train.runs import DryRun


def print_dry_run(plan: DryRun, console: Console | None = None) -> None:
    """Parameters, memory per device and steps of a run."""
    console = console or Console()
    memory, options, count = plan.memory, plan.settings.options, plan.processes
    console.print(f"{options.model}, objective {plan.settings.objective}")
    console.print(f"parameters: {memory.parameters:,}, of which {memory.trained:,} train")
    of_batch = f"{plan.settings.training['per_device_train_batch_size']} x {plan.settings.training['max_length']} tokens"
    table = Table("GiB per device", title=f"Memory, estimated for passes of {of_batch}", title_justify="left")
    shown = [(1, False), *([(count, False), (count, True)] if count > 1 else [])]
    for processes, sharded in shown:
        table.add_column("1 process" if processes == 1 else f"{processes}, {'FSDP' if sharded else 'DDP'}", justify="right")
    for name in ("weights", "gradients", "optimizer"):
        size = getattr(memory, name)
        copies = 2 if name == "gradients" else 1  # DDP's buckets
        table.add_row(name, *(_gib(size if n == 1 else size // n if sharded else size * copies) for n, sharded in shown))
    if count > 1:
        table.add_row("gathered", *(_gib(memory.largest_unit if sharded else 0) for _, sharded in shown))
    for name, label in (
        ("kept", "kept by passes"),
        ("activations", "activations"),
        ("working", "working memory"),
        ("loss", "chunk of logits"),
    ):
        table.add_row(label, *(_gib(getattr(memory, name)) for _ in shown))
    table.add_section()
    table.add_row("total", *(_gib(memory.total(processes, sharded)) for processes, sharded in shown))
    console.print(table)
    console.print(f"rows per step: {plan.rows_per_step}", end="")
    console.print("" if plan.rows is None else f", rows per epoch: {plan.rows}, steps per epoch: {plan.steps_per_epoch}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size >= 2**30 / 100 or not size else f"{size / 2**30:.4f}"
