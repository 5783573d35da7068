"""The learning rate of every step, from the recipe alone: what `mlmclm plan` draws is what the run does."""

import math

from megatron_mlmclm.recipe.phase import LrSection, Stretch
from megatron_mlmclm.recipe.schema import Recipe

# What is left of the way from peak to end after a share `t` (0 to 1) of the decay. 1-sqrt: Ettin and the CLM detour.
DECAYS = {
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),
    "1-sqrt": lambda t: 1.0 - math.sqrt(t),
}


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate that optimizer step `step` (from 1) is taken with.

    A phase's own rule, counted from the phase's first step, or one WSD over the whole run. As in Megatron a step's rate
    is set by the steps before it: the first step of a warm-up from 0 has rate 0, and the last of a decay is one short
    of its end.
    """
    stretch = recipe.stretch_at(step)
    if stretch.phase.lr is not None:
        return _in_phase(recipe.optimizer.lr, stretch.phase.lr, stretch, step)
    optimizer = recipe.optimizer
    low = optimizer.min_lr / optimizer.lr
    whole = LrSection(warmup_steps=optimizer.warmup_steps, decay_steps=optimizer.decay_steps, end=low)
    return optimizer.lr * _fraction(whole, step - recipe.first_step, recipe.steps)


def _in_phase(run_peak: float, rule: LrSection, stretch: Stretch, step: int) -> float:
    peak = run_peak if rule.peak is None else rule.peak
    return peak * _fraction(rule, step - stretch.first_step, stretch.steps)


def _fraction(rule: LrSection, done: int, steps: int) -> float:
    """Of the peak, after `done` of `steps` steps."""
    if done < rule.warmup_steps:
        return rule.start + (1.0 - rule.start) * done / rule.warmup_steps
    decayed = done - (steps - rule.decay_steps)
    if decayed <= 0:
        return 1.0
    left = DECAYS[rule.shape](min(1.0, decayed / rule.decay_steps))
    return rule.end + (1.0 - rule.end) * left
