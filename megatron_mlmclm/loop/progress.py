"""The line on the terminal and metrics.jsonl. Both are the last rank's job: it alone has the loss."""

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from megatron_mlmclm.aside import write_file
from megatron_mlmclm.loop.validation import Evaluation
from megatron_mlmclm.phases import TOTAL, Phase, StepResult
from megatron_mlmclm.recipe import Recipe
from megatron_mlmclm.recipe.budget import phase_cost


class Progress:
    """Writes metrics.jsonl (one JSON object per step or evaluation) and, every `log_interval` steps, a line.

    `ceiling`: FLOP/s that all ranks could do together. MFU is the share of it that the model's own arithmetic took,
    that of an average step of the phase: nothing that is computed twice counts, and the head at predicted tokens only.
    """

    def __init__(self, recipe: Recipe, terminal: TextIO, vocab_size: int, ceiling: float) -> None:
        self._recipe = recipe
        self._terminal = terminal
        self._vocab_size = vocab_size
        self._ceiling = ceiling
        self._step_flops = 0.0
        self._path = Path(recipe.output) / "metrics.jsonl"
        self._step_seconds: float | None = None
        self._phase: Phase | None = None

    def start(self, step: int, phase: Phase) -> None:
        """Before a step: at the first one of this process, forget what an earlier process wrote beyond it."""
        if self._phase is None:
            self._keep_before(step)
        if self._phase is not phase:
            self._say(f"phase {phase.ordinal}: {phase.name}, attention {_attention(phase)}, from step {step}")
            section, steps = self._recipe.phases[phase.ordinal], phase.samples // phase.batch
            self._step_flops = phase_cost(self._recipe, section, steps, self._vocab_size).flops / steps
        self._phase = phase

    def step(self, result: StepResult, phase: Phase) -> None:
        """After a step."""
        recipe, tokens = self._recipe, phase.batch * self._recipe.model.seq_length
        losses = {name.removesuffix(" loss"): loss for name, loss in result.losses.items()}
        total = losses.pop(TOTAL, None)
        loss = next(iter(losses.values())) if total is None else total
        # The first step warms up caches and kernels; a running mean of the others tells the time left.
        past = self._step_seconds
        self._step_seconds = result.seconds if past is None else 0.9 * past + 0.1 * result.seconds
        self._write(
            kind="train",
            step=result.step,
            phase=phase.ordinal,
            objective=phase.name,
            loss=loss,
            **({"losses": losses} if len(phase.views) > 1 else {}),
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens_per_s=tokens / result.seconds,
            mfu=self._step_flops / (result.seconds * self._ceiling),
            peak_memory_gib=result.peak_memory / 2**30,
            samples=result.first_sample + phase.batch,
            time=time.time(),
        )
        last = recipe.last_step
        if result.step % recipe.log_interval == 0 or result.step == last:
            left = (last - result.step) * self._step_seconds
            self._say(
                f"{phase.name:>6}  step {result.step}/{last}  loss {loss:.4f}  lr {result.lr:.2e}"
                f"  {tokens / self._step_seconds:,.0f} tokens/s"
                f"  MFU {self._step_flops / (self._step_seconds * self._ceiling):.0%}  {_clock(left)} left"
            )

    def evaluation(self, step: int, phase: Phase, found: Evaluation) -> None:
        """After an evaluation. Megatron evaluates again after the last step, also when nothing was left: said once."""
        if any(line["kind"] == "valid" and line["step"] == step for line in self._lines()):
            return
        self._write(kind="valid", step=step, phase=phase.ordinal, **asdict(found), time=time.time())
        parts = [f"{name} {loss:.4f} ({found.accuracies[name]:.1%} right)" for name, loss in found.losses.items()]
        parts += [f"{name} perplexity {value:,.1f}" for name, value in found.perplexities.items()]
        self._say(f"validation after step {step}: {'  '.join(parts)}")

    def end(self) -> None:
        """After the last step."""
        self._say(f"run: {self._recipe.output}")

    def _keep_before(self, step: int) -> None:
        kept = [line for line in self._lines() if line["step"] < step]
        write_file(self._path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())

    def _lines(self) -> list[dict[str, Any]]:
        """What is recorded. A line that a killed process left unfinished is the last one, and not counted."""
        lines = []
        if self._path.is_file():
            for text in self._path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    lines.append(json.loads(text))
        return lines

    def _write(self, **values: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def _say(self, line: str) -> None:
        print(line, file=self._terminal, flush=True)


def _attention(phase: Phase) -> str:
    """Each direction once, in the order of the phase's objectives."""
    return " and ".join(dict.fromkeys(view.pattern.direction for view in phase.views))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
