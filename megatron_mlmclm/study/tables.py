"""Plans as tables: a timeline of one run, the budgets of several side by side."""

from rich import box
from rich.table import Table

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.budget import KINDS, Cost, settle
from megatron_mlmclm.recipe.phase import PartSection, PhaseSection
from megatron_mlmclm.recipe.schema import ComputeSection
from megatron_mlmclm.recipe.shown import labelled, masked, percent, turn
from megatron_mlmclm.study.memory import rank_state
from megatron_mlmclm.study.plan import PhasePlan, Plan

LEFT = ("phase", "attention", "recipe")


def timeline(each: Plan) -> Table:
    """One row a phase, one below it for each of its parts, and one of totals."""
    table = _table(each.name, "phase", "steps", "attention", "masked", "lr", "tokens", "predicted", "FLOPs")
    table.caption = "\n".join(_notes(each))
    for phase in each.phases:
        table.add_row(*_row(phase))
        for part in phase.stretch.phase.parts:
            table.add_row(
                f"  {labelled(part)}", turn(part, phase.stretch.phase), _attention(part), masked(part.mask_ratio)
            )
    table.add_section()
    table.add_row("all", f"{each.steps:,}", "", "", "", *_amounts(each.cost))
    return table


def comparison(plans: list[Plan]) -> Table:
    """Budgets side by side, each with what it is of the first recipe's."""
    table = _table("budgets, and each as a multiple of the first recipe's", "recipe")
    for kind in KINDS:
        table.add_column(kind.removesuffix(" tokens"), justify="right")
        table.add_column("of first", justify="right")
    for each in plans:
        row = [each.name]
        for kind, amount in zip(KINDS, _amounts(each.cost), strict=True):
            row += [amount, f"{each.cost.of(kind) / plans[0].cost.of(kind):.3f}"]
        table.add_row(*row)
    return table


def equalised(first: Plan, other: Plan, kind: str) -> str:
    """One line: how many steps the last phase of `other` would need for the budget of `first`."""
    last = other.phases[-1].stretch
    key = f"phases.{last.ordinal}"
    length = {"steps": None, "tokens": None, "samples": None}
    phases = [*other.recipe.phases[:-1], last.phase.model_copy(update=length)]
    compute = ComputeSection(equal=kind, to=first.name)
    try:
        found = settle(other.recipe.model_copy(update={"phases": phases, "compute": compute}), other.rows, first.cost)
    except UserError as error:
        return f"{other.name}: {error}"
    steps = found.phases[-1].steps
    return f"{other.name}: {key}.steps={steps:,} (now {last.steps:,}) gives it the {kind} of {first.name}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=heading != "phase")
    return table


def _row(phase: PhasePlan) -> tuple[str, ...]:
    what, steps = phase.stretch.phase, f"{phase.stretch.steps:,}"
    kind = ("", "") if what.parts else (_attention(what), masked(what.mask_ratio))
    shown = dict.fromkeys(_rate(rate) for rate in phase.rates)
    return labelled(what), steps, *kind, " to ".join(shown), *_amounts(phase.cost)


def _attention(part: PartSection) -> str:
    return f"prefix {'-'.join(percent(share) for share in part.prefix)}" if part.prefix else part.direction


def _notes(each: Plan) -> list[str]:
    weights, recipe = each.parameters, each.recipe
    notes = [
        f"{weights.total / 1e6:,.1f}M parameters ({weights.layers / 1e6:,.1f}M without embedding and head);"
        f" {each.tokens_per_step:,} tokens a step",
        _split(each.cost),
        _held(each),
    ]
    if recipe.start:
        counts = "" if recipe.start.hf else f", data: {recipe.start.data}; steps count from there"
        notes.append(f"starts from {recipe.start.source}{counts}")
    if each.filled:
        notes.append(f"as many {recipe.compute.equal} as {recipe.compute.to}")
    for phase in each.phases:
        said = _said(phase.stretch.phase)
        if said:
            notes.append(f"phases.{phase.stretch.ordinal}: {'; '.join(said)}")
    return notes


def _split(cost: Cost) -> str:
    """FLOPs of a token that is read: the head's are those of the share that is predicted."""
    parts = {"body": cost.body, "attention": cost.attention, "head": cost.head}
    shares = [f"{name} {amount(flops / cost.tokens)} ({flops / cost.flops:.0%})" for name, flops in parts.items()]
    return f"FLOPs a token: {', '.join(shares)}"


def _held(each: Plan) -> str:
    """What the rank with most of the model holds."""
    state, parallel = rank_state(each.recipe, each.rows), each.recipe.parallel
    sharded = " over all data parallel ranks" if parallel.use_distributed_optimizer else ""
    return (
        f"bytes a rank: weights {amount(state.weights)}, gradients {amount(state.gradients)}, optimizer"
        f" {amount(state.optimizer)}{sharded}; logits of all positions would take {amount(state.logits)}"
    )


def on_this_machine(each: Plan, ceiling: float) -> str:
    """One line: how fast it multiplies matrices, FLOP/s, and how long that takes for the plan's FLOPs."""
    hours = each.flops / ceiling / 3600
    time = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"
    rate = f"{amount(ceiling)} FLOP/s in {each.recipe.precision}"
    return f"{each.name}: one rank on this machine multiplies matrices at {rate}: {time} at an MFU of 100%"


def _said(phase: PhaseSection) -> list[str]:
    """What of a phase the columns do not show."""
    said = []
    if phase.batch:
        said.append(f"{phase.batch.global_batch_size:,} sequences a step")
    if phase.by == "batches":
        said.append("one objective a batch")
    if phase.optimizer == "reset":
        said.append("optimizer reset")
    if phase.freeze:
        said.append(f"frozen: {', '.join(phase.freeze)}")
    if phase.data != "continue":
        names = "replay" if phase.data == "replay" else ", ".join(source.path for source in phase.data)
        said.append(f"data: {names}")
    return said


def _rate(rate: float) -> str:
    """5e-4, 2.5e-7, 0."""
    return f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-") if rate else "0"


def _amounts(cost: Cost) -> tuple[str, ...]:
    return tuple(amount(cost.of(kind)) for kind in KINDS)


def amount(number: float) -> str:
    """99.09e9, 12.29e6, 820; 3.82e20 from 1e15 on, where FLOPs are."""
    if number >= 1e15:
        return f"{number:.2e}".replace("e+", "e")
    unit = next((unit for unit in (12, 9, 6, 3) if number >= 10**unit), 0)
    return f"{number / 10**unit:.4g}" + (f"e{unit}" if unit else "")
