"""Parts of a recipe in a few words, for tables and model cards."""

from megatron_mlmclm.recipe.phase import MaskRatio, MixPart, PartSection, PhaseSection, RatioSchedule


def percent(share: float) -> str:
    """A share in at most three digits: 40%, 6.25%."""
    return f"{100 * share:.3g}%"


def masked(ratio: MaskRatio | None) -> str:
    """A masking ratio: 40%, 30% to 15%, 10%-90%; nothing where nothing is masked."""
    if ratio is None:
        return ""
    if isinstance(ratio, RatioSchedule):
        moves = [ratio.at[step] for step in sorted(ratio.at)] if ratio.at else [ratio.start, ratio.end]
        return " to ".join(percent(value) for value in moves)
    return "-".join(percent(value) for value in ratio) if isinstance(ratio, tuple) else percent(ratio)


def labelled(part: PartSection) -> str:
    """Its name, with the objective behind it, or the objective alone."""
    return f"{part.name} ({part.objective})" if part.name else part.objective


def turn(part: MixPart, phase: PhaseSection) -> str:
    """What of a phase a part gets: a share of it, or some steps of each period."""
    if part.share is not None:
        return percent(part.share / sum(other.share for other in phase.parts))
    return f"{part.steps:,} in {sum(other.steps for other in phase.parts):,}"
